"""Frozen facts: what a cache holds and how a ring delivers it. Checked once, here."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from kvjax.shapes import BLOCK, RECORD_ALIGN

CACHE_DTYPES = ("bfloat16", "float32")
MIB = 1 << 20
MAX_DEPTH = 64
MIN_SLOTS = 2  # the one being read and the one being filled
MAX_BUDGET_BYTES = 64 << 30


def check_range(name: str, value: object, low: int, high: int) -> None:
    """Raises ValueError unless `value` is an int between low and high, both allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What a cache holds, and how many of its cells stay on the device.

    Attributes:
      num_layers: L.
      batch_size: B.
      capacity: Cells a sequence may need; `num_cells` is this, rounded up to the block.
      num_kv_heads: K of the model (not of one device).
      head_dim: Elements of a key vector; a multiple of 8, up to 256.
      head_dim_v: Elements of a value vector; None = head_dim.
      dtype: "bfloat16" or "float32", of the stored cells.
      device_cells: Cells of each sequence that stay in device memory, the first ones:
        one number, or one a layer. A multiple of the block (128), or None = all.
    """

    num_layers: int
    batch_size: int
    capacity: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    device_cells: int | tuple[int, ...] | None = None

    def __post_init__(self):
        check_range("num_layers", self.num_layers, 1, 4096)
        check_range("batch_size", self.batch_size, 1, 65535)  # CUDA's grid.z
        check_range("capacity", self.capacity, 1, 1 << 30)
        check_range("num_kv_heads", self.num_kv_heads, 1, 4096)
        for name in ("head_dim", "value_dim"):
            size = getattr(self, name)
            check_range(name, size, 8, 256)
            if size % 8:
                raise ValueError(f"{name} must be a multiple of 8, got {size}")
        if self.dtype not in CACHE_DTYPES:
            raise ValueError(f"dtype must be one of {CACHE_DTYPES}, got {self.dtype!r}")
        self._check_each_layer()

    def _check_each_layer(self) -> None:
        if self.device_cells is None:
            return
        each = self.device_cells
        each = each if isinstance(each, tuple) else (each,) * self.num_layers
        if len(each) != self.num_layers:
            raise ValueError(
                f"device_cells must be one number or one for each of the "
                f"{self.num_layers} layers, got {len(each)} numbers"
            )
        for cells in each:
            self._check_device_cells(cells)

    def _check_device_cells(self, cells: object) -> None:
        check_range("device_cells", cells, 0, 1 << 30)
        if cells % BLOCK:
            raise ValueError(
                f"device_cells must be a multiple of the block of {BLOCK} cells, got "
                f"{cells}; try {cells // BLOCK * BLOCK} or {-(-cells // BLOCK) * BLOCK}"
            )
        if cells > self.num_cells:
            raise ValueError(
                f"device_cells must not exceed the capacity of {self.num_cells} cells, "
                f"got {cells}"
            )

    @property
    def num_cells(self) -> int:
        """Cells of a sequence: the capacity, rounded up to the block."""
        return -(-self.capacity // BLOCK) * BLOCK

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def record_size(self) -> int:
        """R: elements of a record, padded to 16 bytes."""
        align = RECORD_ALIGN // self.itemsize
        return -(-(self.head_dim + self.value_dim) // align) * align

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def layer_device_cells(self) -> tuple[int, ...]:
        """Cells a sequence keeps on the device, for each layer."""
        if self.device_cells is None:
            return (self.num_cells,) * self.num_layers
        if isinstance(self.device_cells, (int, np.integer)):
            return (int(self.device_cells),) * self.num_layers
        return self.device_cells

    @property
    def layout(self) -> tuple[int, ...]:
        """What a cache's parts can't tell by their shapes: cells of a sequence, then
        those on the device in each layer.
        """
        return (self.num_cells, *self.layer_device_cells)


@dataclass(frozen=True, kw_only=True)
class RingConfig:
    """How a ring delivers. None of it is part of a program: no value recompiles one.

    Attributes:
      depth: How many attends ahead of the one running a delivery may be, if the ring
        has room for it; 0 = the ordered path, without a ring.
      budget_bytes: The most the ring may take of each device; None = 64 MiB, 0 = no
        ring.
      slot_bytes: Size of a slot, the unit of delivery; None = 16 MiB, or what makes two
        or three slots of a smaller budget, or less where a layer's tail fits the
        budget (delivery/plan.py).
      headroom_bytes: Device memory that must stay free beside the ring.
    """

    depth: int = 8
    budget_bytes: int | None = None
    slot_bytes: int | None = None
    headroom_bytes: int = 64 * MIB

    def __post_init__(self):
        check_range("depth", self.depth, 0, MAX_DEPTH)
        if self.budget_bytes is not None:
            check_range("budget_bytes", self.budget_bytes, 0, MAX_BUDGET_BYTES)
        if self.slot_bytes is not None:
            check_range("slot_bytes", self.slot_bytes, 1024, MAX_BUDGET_BYTES)
        check_range("headroom_bytes", self.headroom_bytes, 0, MAX_BUDGET_BYTES)

    @property
    def budget(self) -> int:
        """The budget in bytes, the default filled in."""
        return 64 * MIB if self.budget_bytes is None else self.budget_bytes

    @property
    def slot(self) -> int:
        """The slot's size in bytes, the default filled in: before it is cut to a cache
        (delivery/plan.py). Two slots at least: of a small budget a third would be a
        small copy, which doesn't reach the link's rate.
        """
        if self.slot_bytes is not None:
            return self.slot_bytes
        if self.budget == 0:
            return 16 * MIB
        return min(16 * MIB, self.budget // (2 if self.budget < 32 * MIB else 3))
