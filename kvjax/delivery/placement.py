"""Where a cache's cells lie: which devices hold which heads, in which memory."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from kvjax.cache.state import Cache, cache_bytes, part_rows
from kvjax.config import CacheConfig, check_range

BACKENDS = ("native", "reference")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A cache split by key/value head over one axis of a mesh. Static: part of a
    program.

    With fewer heads than devices on the axis each head is stored once for every device
    whose queries read it. Other axes of the mesh hold replicas.

    Attributes:
      config: What the cache holds.
      num_heads: N, query heads of the model.
      mesh: The devices.
      axis: The mesh axis that splits the heads.
      ring_id: Names the cache's ring on every device; caches in use together differ.
      backend: "native" (the ring and its kernels) or "reference" (plain JAX).
    """

    config: CacheConfig
    num_heads: int
    mesh: Mesh
    axis: str = "tp"
    ring_id: int = 0
    backend: str = "native"

    def __post_init__(self):
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {self.backend!r}")
        if self.axis not in self.mesh.axis_names:
            raise ValueError(
                f"axis must be one of the mesh's axes {self.mesh.axis_names}, got "
                f"{self.axis!r}"
            )
        check_range("ring_id", self.ring_id, 0, (1 << 31) - 1)
        check_range("num_heads", self.num_heads, 1, 1 << 16)
        check_heads(self.num_heads, self.config.num_kv_heads, self.axis_size)

    @property
    def axis_size(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def stored_heads(self) -> int:
        """Heads on the stored K axis: K, or the axis size if that is larger."""
        return stored_heads(self.num_heads, self.config.num_kv_heads, self.axis_size)

    @property
    def local_heads(self) -> int:
        """Stored heads on each device."""
        return self.stored_heads // self.axis_size

    def sharding(self, spec: P, memory_kind: str | None = None) -> NamedSharding:
        """On the mesh; for the same arguments the same object. A jitted call compares
        each array's sharding with the one that it knows, and objects fastest.
        """
        return _sharding(self.mesh, spec, memory_kind)

    @property
    def head_spec(self) -> P:
        """Of q, k, v and rows: all have their heads on axis 2."""
        return P(None, None, self.axis, None)

    @property
    def part_spec(self) -> P:
        """Of the cache's parts, whose heads are on axis 1."""
        return P(None, self.axis, None)

    @property
    def device_spec(self) -> P:
        """Of what each device has one of (ticket, stamp): split over all mesh axes."""
        return P(self.mesh.axis_names)

    def cache_shardings(self) -> Cache:
        """The cache's shardings: `out_shardings` for a jit that returns one."""
        each, all_cells = self.config.layer_device_cells, self.config.num_cells
        device = self.sharding(self.part_spec)
        tail = self.sharding(self.part_spec, "pinned_host")
        return Cache(
            device=device if max(each) > 0 else None,
            tail=tail if min(each) < all_cells else None,
            lengths=self.sharding(P()),
            stamp=self.sharding(self.device_spec),
            layout=self.config.layout,
        )

    def constrain(self, x: Array, spec: P) -> Array:
        """Moves a traced array to `spec` on the mesh; Auto and Explicit axes both."""
        if AxisType.Explicit in self.mesh.axis_types:
            return jax.sharding.reshard(x, self.sharding(spec))
        return jax.lax.with_sharding_constraint(x, self.sharding(spec))

    def expand_heads(self, x: Array) -> Array:
        """Repeats new keys or values [B, T, K, H] to the stored heads [B, T, K', H].

        Those that come as they are stored are returned.
        """
        repeats = self.stored_heads // self.config.num_kv_heads
        stored = repeats == 1 or x.shape[2] == self.stored_heads
        return x if stored else jnp.repeat(x, repeats, axis=2)


@functools.cache
def _sharding(mesh: Mesh, spec: P, memory_kind: str | None) -> NamedSharding:
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def check_heads(num_heads: int, num_kv_heads: int, axis_size: int) -> None:
    """Raises ValueError, with the sizes that work, if heads cannot be split so."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"query heads must be a multiple of kv heads, got {num_heads} and "
            f"{num_kv_heads}"
        )

    def works(size: int) -> bool:
        return num_heads % size == 0 and (
            num_kv_heads % size == 0 or size % num_kv_heads == 0
        )

    if not works(axis_size):
        sizes = [size for size in range(1, num_heads + 1) if works(size)]
        raise ValueError(
            f"{num_heads} query and {num_kv_heads} kv heads cannot be split over "
            f"{axis_size} devices; axis sizes that work: {sizes}"
        )


def stored_heads(num_heads: int, num_kv_heads: int, axis_size: int) -> int:
    """K': kv heads that an axis of so many devices stores, at least one for each.

    Raises:
      ValueError: the axis cannot split the heads.
    """
    check_heads(num_heads, num_kv_heads, axis_size)
    return max(num_kv_heads, axis_size)


def check_cache(placement: Placement, cache: Cache) -> None:
    """Raises ValueError unless a cache is of this placement. Where its arrays lie is
    not looked at: they may be traced.

    A part's shape doesn't tell whose its rows are: the layout must match, too.
    """
    config = placement.config
    row = placement.stored_heads, config.record_size
    fits = cache.layout == config.layout and cache.lengths.shape == (config.batch_size,)
    parts = cache.device, cache.tail
    for part, num_rows in zip(parts, part_rows(config), strict=True):
        wanted = ((num_rows, *row), config.dtype) if num_rows else None
        fits &= wanted == (None if part is None else (part.shape, part.dtype.name))
    if not fits:
        got = ", ".join(
            f"{name} {'none' if x is None else f'{x.dtype.name}{list(x.shape)}'}"
            for name, x in zip(("device", "tail", "lengths"), cache, strict=False)
        )
        raise ValueError(
            f"the cache is of another placement: got {got}, layout {cache.layout} "
            "(cells of a sequence, then those on the device in each layer); its "
            f"placement has {config.layout}: make caches with init_cache, reset them "
            "with reset"
        )


def device_bytes(placement: Placement) -> tuple[int, int]:
    """Bytes that one device's share of the cache takes: (device memory, pinned
    host).
    """
    return cache_bytes(placement.config, placement.local_heads)


def make_mesh(sizes: dict[str, int] | None = None, devices=None) -> Mesh:
    """A mesh with Auto axes over the first devices; by default one device, axis
    "tp".
    """
    sizes = {"tp": 1} if sizes is None else sizes
    devices = jax.devices() if devices is None else devices
    needed = int(np.prod(list(sizes.values())))
    if needed > len(devices):
        raise ValueError(f"the mesh {sizes} needs {needed} devices, got {len(devices)}")
    grid = np.array(devices[:needed]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
