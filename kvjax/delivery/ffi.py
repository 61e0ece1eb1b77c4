"""The native ops: the libraries, and one wrapper an op. Contracts: ops/*.h.

begin, append and attend each run in a `shard_map` that is manual over all mesh axes, so
every device drives its own ring over its own heads. The ticket orders the calls.
"""

import ctypes
import functools
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt32

from kvjax.cache.state import Cache, Extent, layer_extents
from kvjax.delivery.placement import Placement
from kvjax.shapes import BLOCK

LIBRARIES = {"cpu": "libkvjax_cpu.so", "CUDA": "libkvjax_cuda.so"}
COMPILERS = {"cpu": "a C++ compiler", "CUDA": "a CUDA compiler (nvcc)"}
ABI = 3  # of all C symbols and ops; handlers.h says the same
NO_WINDOW = 0
MAX_SPLIT_ROWS = 64  # query rows of a kv head up to which a launch splits by blocks


def library_path(platform: str) -> Path | None:
    """The built library of "cpu" or "CUDA", or None: in the package, else as
    installed.
    """
    name = LIBRARIES[platform]
    places = [Path(__file__).resolve().parents[1] / "lib" / name]
    try:
        places.append(
            Path(metadata.distribution("kvjax").locate_file(f"kvjax/lib/{name}"))
        )
    except metadata.PackageNotFoundError:
        pass
    return next((place for place in places if place.exists()), None)


@functools.cache
def library(platform: str) -> ctypes.CDLL | None:
    """Loads a library once, checks it and registers its ops; None if it isn't built.

    Raises:
      ValueError: the library was built for another kvjax or a newer jaxlib.
    """
    path = library_path(platform)
    if path is None:
        return None
    lib = ctypes.CDLL(str(path))
    found = lib.kvjax_abi()
    if found != ABI:
        raise ValueError(
            f"{path} has ABI {found}, kvjax needs {ABI}: rebuild it (README)"
        )
    built, runs = lib.kvjax_ffi_minor(), _runtime_ffi_minor()
    if built > runs:
        raise ValueError(
            f"{path} was built for XLA FFI 0.{built}, jaxlib {jax.lib.__version__} has "
            f"0.{runs}: rebuild it against this jaxlib or an older one (README)"
        )
    for op, stages in OPS.items():
        if not hasattr(lib, f"kvjax_{op}"):
            continue
        target = {
            stage: jax.ffi.pycapsule(getattr(lib, f"kvjax_{op}{suffix}"))
            for stage, suffix in stages.items()
            if hasattr(lib, f"kvjax_{op}{suffix}")
        }
        jax.ffi.register_ffi_target(f"kvjax_{op}_{ABI}", target, platform=platform)
    return lib


OPS = {
    "begin": {"initialize": "_initialize", "execute": ""},
    "append_device": {"execute": ""},
    "append_ring": {"execute": ""},
    "attend_ring": {"execute": ""},
    "attend_device": {"initialize": "_initialize", "execute": ""},
}


def _runtime_ffi_minor() -> int:
    version = tuple(int(n) for n in jax.lib.__version__.split(".")[:3])
    return 4 if version >= (0, 11, 2) else 3


def require(platform: str) -> ctypes.CDLL:
    """The library of a jax platform ("cpu", "gpu", "cuda"), or a clear error.

    Raises:
      ValueError: it isn't built, or kvjax has none for this platform.
    """
    name = {"cpu": "cpu", "gpu": "CUDA", "cuda": "CUDA"}.get(platform)
    if name is None:
        raise ValueError(
            f"kvjax has no native ops for platform {platform!r}; "
            "use Placement(backend='reference')"
        )
    lib = library(name)
    if lib is None:
        raise ValueError(
            f"{LIBRARIES[name]} is not built. Install with `pip install .` on a "
            f"machine with {COMPILERS[name]}, or use "
            "Placement(backend='reference'), plain JAX"
        )
    return lib


def _call(op: str, results, aliases: dict[int, int], operands, **attrs):
    """Calls a native op. None is marked as a side effect, begin neither.

    Their results are used, so none is left out, and a program with effects is
    dispatched by jax's slow path: 2.5 ms a step with 227 weights. Two equal begins may
    then become one; the second step's attends are out of its plan's order and go
    ordered, same
    bits.
    """
    call = jax.ffi.ffi_call(f"kvjax_{op}_{ABI}", results, input_output_aliases=aliases)
    return call(*operands, **attrs)


def _result(x: Array, shape: tuple[int, ...] | None = None):
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype)


def _manual(placement: Placement, f, in_specs, out_specs):
    for platform in LIBRARIES:  # both: a program may be compiled for another platform
        library(platform)
    require(placement.mesh.devices.flat[0].platform)
    return jax.shard_map(
        f, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _workspace(
    q: Array, num_kv_heads: int, num_cells: int, value_dim: int
) -> jax.ShapeDtypeStruct:
    """Where attend_device keeps each block's result (values, m, sum) until it is
    folded.

    Many query rows fold in registers and need none; ops/attention.cu has the same rule.
    """
    num_seqs, width, num_heads, _ = q.shape
    blocks = num_seqs * num_cells // BLOCK
    few_rows = width * num_heads <= MAX_SPLIT_ROWS * num_kv_heads
    floats = blocks * width * num_heads * (value_dim + 2) if few_rows else 1
    return jax.ShapeDtypeStruct((floats,), jnp.float32)


@jax.custom_batching.custom_vmap
def _refuse_vmap(x):
    return x


@_refuse_vmap.def_vmap
def _(axis_size, in_batched, x):
    raise NotImplementedError(
        f"a step cannot be mapped by jax.vmap (of {axis_size}): its ops append to one "
        "cache in place. Batch sequences in the cache: CacheConfig(batch_size=...)"
    )


@jax.custom_jvp
def once(x: Array) -> Array:
    """A step's input as it is; jax.vmap and jax.grad are refused, within a jit too."""
    return _refuse_vmap(x)


@once.defjvp
def _(primals, tangents):
    raise NotImplementedError(
        "a step cannot be differentiated: its ops append to one cache in place. "
        "Placement(backend='reference') can, with all cells on the device"
    )


def begin(
    placement: Placement,
    tokens: Int[Array, "B T"],
    cache: Cache,
    attends: tuple[tuple[int, int | None], ...],
) -> tuple[Int[Array, "B T"], Int[Array, " devices"], UInt32[Array, "devices 2"]]:
    """Tells every device's ring that a step starts, and plans its deliveries.

    The step's only host wait: it brings the cache's lengths and stamp to the host.

    Args:
      placement: Static facts.
      tokens: The step's tokens. They pass through, so that XLA schedules begin first.
      cache: As it was before the step; begin takes its tail's address.
      attends: (layer, window) of each attend to come, in order, repeats included.

    Returns:
      The tokens, the ticket that the step's calls pass on, and the step's stamp.
    """
    config = placement.config
    on_device = np.array(config.layer_device_cells, np.int64)
    tails = np.flatnonzero(on_device < config.num_cells)
    attrs = dict(
        ring_id=np.int64(placement.ring_id),
        num_cells=np.int64(config.num_cells),
        tail_layers=tails.astype(np.int64),
        first_cells=on_device[tails],
        attend_layers=np.array([layer for layer, _ in attends], np.int64),
        attend_windows=np.array([w or NO_WINDOW for _, w in attends], np.int64),
    )

    def local(tokens, lengths, stamp, tail):
        results = (
            _result(tokens),
            jax.ShapeDtypeStruct((1,), jnp.int32),
            _result(stamp),
        )
        return _call(
            "begin", results, {0: 0, 2: 2}, (tokens, lengths, stamp, tail), **attrs
        )

    each = placement.device_spec
    call = _manual(
        placement,
        local,
        in_specs=(P(), P(), each, placement.part_spec),
        out_specs=(P(), each, each),
    )
    return call(tokens, cache.lengths, cache.stamp, cache.tail)


def append(
    placement: Placement,
    part: Float[Array, "part_rows K R"],
    extent: Extent,
    rows: Float[Array, "B T K R"],
    where: Int[Array, "B T"],
    ticket: Int[Array, " devices"],
) -> Float[Array, "part_rows K R"]:
    """Writes rows into a layer's cells of a part, in place if the outermost jit donates
    it.

    Args:
      placement: Static facts.
      part: The cache's device part or its tail. Aliased to the result.
      extent: The layer's, in that part.
      rows: The step's rows.
      where: Cell of each row within the extent; -1 drops the row.
      ticket: Orders this call behind begin and earlier attends.
    """
    _check_rows(placement, rows)
    op, attrs = "append_device", _numbers("", extent)
    if jax.typeof(part).memory_space == jax.memory.Space.Host:
        op, attrs = "append_ring", attrs | dict(ring_id=np.int64(placement.ring_id))
    return _write(placement, op, attrs, part, rows, where, ticket)


def store(
    placement: Placement,
    part: Float[Array, "part_rows K R"],
    first: Int[Array, ""],
    cells: Float[Array, "B S K R"],
) -> Float[Array, "part_rows K R"]:
    """Writes cells into a part from row `first` on, outside a step: no ring is told.

    In place if the outermost jit donates the part, in either memory. Rows beyond the
    part are dropped.
    """
    rows = cells.reshape(1, -1, *cells.shape[2:])
    where = first + jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    attrs = _numbers("", Extent(0, part.shape[0]))
    ticket = jnp.zeros(placement.mesh.size, jnp.int32)
    return _write(placement, "append_device", attrs, part, rows, where, ticket)


def _write(
    placement: Placement,
    op: str,
    attrs: dict[str, np.int64],
    part: Array,
    rows: Array,
    where: Array,
    ticket: Array,
) -> Array:
    def local(part, rows, where, ticket):
        result = jax.typeof(part)  # carries the host memory space
        return _call(op, result, {0: 0}, (part, rows, where, ticket), **attrs)

    call = _manual(
        placement,
        local,
        in_specs=(placement.part_spec, placement.head_spec, P(), placement.device_spec),
        out_specs=placement.part_spec,
    )
    return call(part, rows, where, ticket)


def _check_rows(placement: Placement, rows: Array) -> None:
    num_seqs = placement.config.batch_size
    if rows.shape[0] != num_seqs:
        raise ValueError(
            f"the cache holds {num_seqs} sequences, got rows {list(rows.shape)}"
        )


def _numbers(prefix: str, extent: Extent) -> dict[str, np.int64]:
    """An extent as attributes of an op."""
    return {prefix + name: np.int64(n) for name, n in extent._asdict().items()}


def attend(
    placement: Placement,
    layer: int,
    q: Float[Array, "B T N H"],
    rows: Float[Array, "B T K R"],
    cache: Cache,
    where: Int[Array, "B T"],
    ticket: Int[Array, " devices"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B T N Hv"], Int[Array, " devices"]]:
    """Exact attention over a layer's cells and the step's rows.

    A query sees the sequence's cells below `lengths` but those in `where`, and of the
    step's rows those at its own place or earlier that aren't dropped.

    Args:
      placement: Static facts.
      layer: Which layer; with `window`, what begin listed.
      q: Queries, RoPE applied, float32 or bfloat16. The result has their dtype.
      rows: The step's rows, as encoded.
      cache: Its parts after the layer's append, its lengths as before the step.
      where: Logical cell of each row; -1 = dropped, and the query's result is 0. At or
        beyond the capacity: NaN for that sequence.
      ticket: Of begin or the attend before. Aliased to the second result.
      scale: Of the scores, usually H ** -0.5.
      window: A query at cell p sees cells above p - window only.
      soft_cap: Scores become soft_cap * tanh(score / soft_cap).
    """
    _check_rows(placement, rows)
    value_dim = placement.config.value_dim
    extents = layer_extents(placement.config)[layer]
    attrs = _numbers("device_", extents.device) | dict(
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=np.int64(window or NO_WINDOW),
        value_dim=np.int64(value_dim),
    )
    parts = [
        part
        for part, extent in zip((cache.device, cache.tail), extents, strict=True)
        if extent.num_cells
    ]
    op = "attend_device"
    if extents.tail.num_cells:
        op = "attend_ring"
        attrs |= _numbers("tail_", extents.tail)
        attrs |= dict(ring_id=np.int64(placement.ring_id), layer=np.int64(layer))

    def local(q, rows, lengths, where, ticket, *parts):
        results = [_result(q, (*q.shape[:3], value_dim)), _result(ticket)]
        if op == "attend_device":
            sizes = rows.shape[2], extents.device.num_cells, value_dim
            results.append(_workspace(q, *sizes))
        operands = (q, rows, lengths, where, ticket, *parts)
        return tuple(_call(op, results, {4: 1}, operands, **attrs)[:2])

    heads, each = placement.head_spec, placement.device_spec
    call = _manual(
        placement,
        local,
        in_specs=(heads, heads, P(), P(), each, *[placement.part_spec] * len(parts)),
        out_specs=(heads, each),
    )
    return call(q, rows, cache.lengths, where, ticket, *parts)
