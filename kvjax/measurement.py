"""What this machine does: its link, its memory, a model's steps; and how to say so.

costs = measure_costs(placement, step)      # once: all cells on the device
kvjax.advise(config, lengths, costs, budget_bytes=8 << 30)
"""

import ctypes
import functools
import hashlib
import platform
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from kvjax.advice import Costs, cell_bytes
from kvjax.cache.state import Cache, LayerCells, layer_extents
from kvjax.config import MIB, RingConfig
from kvjax.delivery import ffi, reference
from kvjax.delivery.allocate import init_cache
from kvjax.delivery.placement import Placement
from kvjax.generate import GREEDY, Decoder
from kvjax.model.transformer import Leaf
from kvjax.shapes import BLOCK

PIECE_BYTES = 64 * MIB  # of the raw copy that delivery is held against
WARMUP = 2  # steps before the clock starts
StepFunction = Callable[[Array, Cache], tuple[Array, Cache]]


class DeviceMemory(NamedTuple):
    """What the driver says of a device, for all processes, in bytes."""

    free_bytes: int
    total_bytes: int


class StepRun(NamedTuple):
    """Some steps that were run.

    Attributes:
      seconds: From the first dispatch until the last token was there.
      drawn: The tokens [B] of each step, on the device.
      cache: After them.
    """

    seconds: float
    drawn: list[Array]
    cache: Cache


def link_rate(
    device: jax.Device,
    *,
    piece_bytes: int = PIECE_BYTES,
    total_bytes: int | None = None,
    passes: int = 5,
) -> float:
    """Bytes a second of raw copies from pinned host memory to an idle device.

    Args:
      device: Of this process.
      piece_bytes: Of one copy.
      total_bytes: Of a pass, pinned for the while; None = 1 GiB, 128 MiB on a CPU.
      passes: That are timed; the median counts.

    Raises:
      ValueError: the native library is missing, or memory is short.
    """
    sizes = dict(piece_bytes=piece_bytes, total_bytes=total_bytes, passes=passes)
    return link_rates([device], **sizes)[0]


def link_rates(
    devices: Sequence[jax.Device],
    *,
    piece_bytes: int = PIECE_BYTES,
    total_bytes: int | None = None,
    passes: int = 5,
    start: Callable[[], None] | None = None,
) -> list[float]:
    """Bytes a second that each device gets of raw copies while all of them copy.

    None is timed while another rests: those that are through go on, off the clock.

    Args:
      devices: Of this process, idle.
      piece_bytes: Of one copy.
      total_bytes: Of a pass of all devices together, at least a piece each, pinned for
        the while; None = 1 GiB, 128 MiB on a CPU.
      passes: That are timed for one device, n times as many for n; the median counts.
      start: Called once all have their memory, before the first copy that counts: where
        processes that measure at once wait for each other.

    Raises:
      ValueError: the native library is missing, or memory is short.
    """
    count = len(devices)
    total = _default(devices[0], total_bytes, 1 << 30)
    pieces, passes = max(1, total // (piece_bytes * count)), passes * count
    seconds = np.zeros((count, passes))
    _native(
        devices,
        "kvjax_measure_copies",
        (ctypes.c_int64 * count)(*map(_ordinal, devices)),
        count,
        piece_bytes,
        pieces,
        passes,
        ctypes.CFUNCTYPE(None)(start) if start else None,
        seconds.ctypes.data_as(ctypes.c_void_p),
    )
    return [pieces * piece_bytes / s for s in np.median(seconds, axis=1).tolist()]


def read_rate(
    device: jax.Device, *, total_bytes: int | None = None, passes: int = 5
) -> float:
    """Bytes a second that an idle device reads of its memory.

    Args:
      device: Of this process.
      total_bytes: Of a pass; None = 2 GiB, 256 MiB on a CPU.
      passes: That are timed; the median counts.

    Raises:
      ValueError: the native library is missing, or memory is short.
    """
    total = _default(device, total_bytes, 2 << 30) // 16 * 16
    seconds = np.zeros(passes)
    into = seconds.ctypes.data_as(ctypes.c_void_p)
    _native([device], "kvjax_measure_read", _ordinal(device), total, passes, into)
    return total / float(np.median(seconds))


def device_memory(device: jax.Device) -> DeviceMemory:
    """Asks the driver; on the cpu platform the operating system."""
    free, total = ctypes.c_int64(), ctypes.c_int64()
    sizes = ctypes.byref(free), ctypes.byref(total)
    _native([device], "kvjax_device_memory", _ordinal(device), *sizes)
    return DeviceMemory(free.value, total.value)


def _default(device: jax.Device, total_bytes: int | None, on_gpu: int) -> int:
    if total_bytes is not None:
        return total_bytes
    return on_gpu // 8 if device.platform == "cpu" else on_gpu


def _ordinal(device: jax.Device) -> int:
    return device.id if device.platform == "cpu" else device.local_hardware_id


def _native(devices: Sequence[jax.Device], symbol: str, *args) -> None:
    """Calls a C symbol of ops/measure.cc."""
    numbers = [ctypes.c_int64(a) if isinstance(a, int) else a for a in args]
    reason = ctypes.create_string_buffer(512)
    call = getattr(ffi.require(devices[0].platform), symbol)
    call.restype = ctypes.c_bool
    if not call(*numbers, reason, ctypes.c_int64(len(reason))):
        named = ", ".join(map(str, devices))
        raise ValueError(f"cannot measure {named}: {reason.value.decode()}")


def random_cache(placement: Placement, lengths: Sequence[int], seed: int = 0) -> Cache:
    """A cache of random cells that holds `lengths` tokens, to measure with.

    A cell's bits depend on its layer, its sequence and its place in that alone: neither
    on device_cells nor on the capacity or the mesh; a head that is stored several times
    is the same each time.

    Raises:
      ValueError: as init_cache does.
    """
    cache = init_cache(placement)
    parts = [cache.device, cache.tail]
    for i, extents in enumerate(layer_extents(placement.config)):
        drawn = _draw(placement, extents.device.num_cells)(jax.random.key(seed), i)
        for p, (extent, cells) in enumerate(zip(extents, drawn, strict=True)):
            if cells is not None:
                parts[p] = _store(placement)(parts[p], extent.first, cells)
        jax.block_until_ready(parts)  # a layer at a time: drawing takes memory
    device, tail = parts
    held = _lengths(placement, lengths)
    return cache._replace(device=device, tail=tail, lengths=held)


@functools.cache  # one compilation for all layers
def _draw(placement: Placement, on_device: int):
    config = placement.config
    shape = (config.num_cells, config.num_kv_heads, config.record_size)

    def draw(key, layer):
        keys = jax.random.split(jax.random.fold_in(key, layer), config.batch_size)
        # Partitionable threefry: an element's bits follow from its place in `shape`.
        cells = jax.vmap(lambda key: jax.random.normal(key, shape, config.dtype))(keys)
        cells = placement.expand_heads(cells)
        parts = cells[:, :on_device], cells[:, on_device:]
        return LayerCells(*(part if part.shape[1] else None for part in parts))

    return jax.jit(draw, out_shardings=placement.sharding(placement.head_spec))


@functools.cache
def _store(placement: Placement):
    """A jitted (part, first, cells [B, S, K, R]) -> the part, those at row `first`."""
    native = placement.backend == "native"
    store = functools.partial(ffi.store, placement) if native else reference.store
    return jax.jit(store, donate_argnums=0)


def _lengths(placement: Placement, lengths: Sequence[int]) -> Int[Array, " B"]:
    return jax.device_put(np.array(lengths, np.int32), placement.sharding(P()))


def rewind(placement: Placement, cache: Cache, lengths: Sequence[int]) -> Cache:
    """Sets lengths; cells keep their bytes, so steps repeat what they did before."""
    stamp = jnp.zeros_like(cache.stamp, device=placement.cache_shardings().stamp)
    return cache._replace(lengths=_lengths(placement, lengths), stamp=stamp)


class DecodeStep:
    """The greedy step of a decoder, as `run_steps` takes it; no sequence stops.

    Args:
      decoder: Over the placement of the cache.
      leaves: Arrays to run it with, if the decoder's own are abstract.
    """

    def __init__(self, decoder: Decoder, leaves: list[Leaf] | None = None):
        num_seqs = decoder.placement.config.batch_size
        self._step = decoder.step
        self._leaves = decoder.leaves if leaves is None else leaves
        self._running = decoder.place(np.ones(num_seqs, bool))
        self._stops = decoder.place(np.zeros(0, np.int32))
        self._seed = decoder.place(np.uint32(0))

    def __call__(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        args = self._arguments(tokens, cache)
        cache, tokens, _ = self._step(*args, sampling=GREEDY)
        return tokens, cache

    def compile(self, tokens: Array, cache: Cache) -> jax.stages.Compiled:
        """Compiles, and runs nothing; calls with the same shapes then don't."""
        args = self._arguments(tokens, cache)
        return self._step.lower(*args, sampling=GREEDY).compile()

    def _arguments(self, tokens: Array, cache: Cache) -> tuple:
        return self._leaves, cache, tokens, self._running, self._stops, self._seed


def run_steps(
    step: StepFunction, tokens: Int[Array, " B"], cache: Cache, count: int
) -> StepRun:
    """Runs `count` steps and waits at their end only. The first call compiles.

    Args:
      step: (tokens, cache) -> (tokens, cache); donates the cache.
      tokens: The first to feed; later steps are fed what the step before drew.
      cache: Must have room for `count` more cells.
      count: At least 1.
    """
    drawn = []
    start = time.perf_counter()
    for _ in range(count):
        tokens, cache = step(tokens, cache)
        drawn.append(tokens)
    tokens.block_until_ready()
    return StepRun(time.perf_counter() - start, drawn, cache)


def measure_costs(
    placement: Placement,
    step: StepFunction,
    *,
    steps: int = 16,
    repeats: int = 3,
    seed: int = 0,
) -> Costs:
    """Measures link and step once: what `kvjax.advise` needs to know of this machine.

    Times the step over a nearly empty and a nearly full cache. The difference tells how
    fast attention reads; it is taken as no faster than the memory.

    Args:
      placement: With all cells on the device, of the batch size to be advised on; some
        thousand cells will do.
      step: The model's, on that placement.
      steps: In a timed run.
      repeats: Runs of each; the median counts.
      seed: Of the cells.

    Raises:
      ValueError: the placement has a tail, or its capacity is too small.
    """
    config = placement.config
    full = config.num_cells - steps - WARMUP
    if config.layer_device_cells != (config.num_cells,) * config.num_layers:
        raise ValueError("measure with device_cells=None: all cells on the device")
    if full <= 2 * BLOCK:
        raise ValueError(
            f"capacity must be above {2 * BLOCK + steps + WARMUP} cells for {steps} "
            f"steps, got {config.num_cells}"
        )
    device = placement.mesh.local_devices[0]
    tokens = jax.device_put(
        np.zeros(config.batch_size, np.int32), placement.sharding(P())
    )
    cache = random_cache(placement, [0] * config.batch_size, seed)
    seconds = {0: [], full: []}
    for length in [0, full] * repeats:
        cache = rewind(placement, cache, [length] * config.batch_size)
        warm = run_steps(step, tokens, cache, WARMUP)
        timed = run_steps(step, warm.drawn[-1], warm.cache, steps)
        cache = timed.cache
        seconds[length].append(timed.seconds / steps)
    short, long = (statistics.median(s) for s in seconds.values())
    num_bytes = full * config.batch_size * cell_bytes(config, placement.local_heads)
    least = num_bytes / read_rate(device)
    return Costs(
        link_bytes_s=link_rate(device, piece_bytes=RingConfig().slot),
        attend_bytes_s=num_bytes / max(long - short, least),
        step_s=short,
    )


def spread(values: Sequence[float]) -> float:
    """From the least to the most, as a share of the median."""
    return (max(values) - min(values)) / statistics.median(values)


def provenance(
    device: jax.Device | None,
    packages: Sequence[str],
    command: Sequence[str],
    commit: str | None = None,
) -> dict:
    """What every JSON of results begins with.

    Args:
      device: That was measured; None = the first GPU that the driver names, if any.
      packages: Whose versions matter.
      command: Script and arguments; where it writes to is left out.
      commit: Of the code; None = ask git.

    Returns:
      commit, gpu, driver, cpu, versions, command, and library_sha256 of the device's
      native library. None where there is no such thing.
    """
    on_gpu = device is None or device.platform != "cpu"
    gpu, driver = (_gpu() if on_gpu else None) or (None, None)
    written = ("--json=", "--plot=", "--summary=")
    typed = [arg for arg in command if not arg.startswith(written)]
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "commit": _commit() if commit is None else commit,
        "gpu": gpu,
        "driver": driver,
        "cpu": _cpu(),
        "versions": versions,
        "library_sha256": None if device is None else _library_hash(device.platform),
        "command": shlex.join(["python", *typed]),
    }


def _library_hash(platform: str) -> str | None:
    path = ffi.library_path("cpu" if platform == "cpu" else "CUDA")
    return path and hashlib.sha256(path.read_bytes()).hexdigest()


def _said(*command: str, folder: Path | None = None) -> str | None:
    """A program's output, or None if it isn't there or fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _gpu() -> list[str] | None:
    """Name and driver of the first GPU."""
    said = _said(
        "nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"
    )
    return said.splitlines()[0].split(", ") if said else None


def _commit() -> str | None:
    """The commit that this file lies in; with + if tracked files differ from it."""
    here = Path(__file__).parent
    commit = _said("git", "rev-parse", "HEAD", folder=here)
    if commit is None:
        return None
    changed = _said("git", "status", "--porcelain", "-uno", folder=here)
    return commit + ("+" if changed else "")


def _cpu() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    names = [
        x.split(":", 1)[1] for x in text.splitlines() if x.startswith("model name")
    ]
    return names[0].strip() if names else None
