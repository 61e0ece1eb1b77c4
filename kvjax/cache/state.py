"""What a cache is: a NamedTuple of arrays. Where they lie: delivery/placement.py."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from kvjax.config import CacheConfig


class Cache(NamedTuple):
    """Keys and values of all layers. Donate it in the outermost jit.

    A sequence's first cells of a layer lie in the device part, the others in the tail,
    in pinned host memory. A part is one array, since a step pays for each that it is
    given and gives back; None where no layer has such cells:

        part   layer 0: sequence 0, sequence 1, ... | layer 1: sequence 0, ...

    A sequence's tokens lie in cells 0 to lengths - 1. The stamp belongs to delivery: an
    operation on the cache that is not a step sets it to 0. The layout is its config's,
    static: part of a program, no leaf of the tree.
    """

    device: Float[Array, "device_rows K R"] | None
    tail: Float[Array, "tail_rows K R"] | None
    lengths: Int[Array, " B"]
    stamp: UInt32[Array, "devices 2"]
    layout: tuple[int, ...]


jax.tree_util.register_dataclass(
    Cache,
    data_fields=["device", "tail", "lengths", "stamp"],
    meta_fields=["layout"],
)


class Extent(NamedTuple):
    """Where a layer lies in a part: cell s of sequence b is row first + b * num_cells +
    s.

    Attributes:
      first: The row of the layer's first cell.
      num_cells: Of each sequence; 0 = none.
    """

    first: int
    num_cells: int


class LayerExtents(NamedTuple):
    """Where a layer lies in both parts."""

    device: Extent
    tail: Extent


class LayerCells(NamedTuple):
    """The cells of one layer; a part that the layer doesn't have is None.

    cell   0 ............ device_cells ............ num_cells
           device                    tail (pinned host memory)
    """

    device: Float[Array, "B S_device K R"] | None
    tail: Float[Array, "B S_tail K R"] | None


def layer_extents(config: CacheConfig) -> list[LayerExtents]:
    """Where each layer lies in the cache's parts."""
    extents, device, tail = [], 0, 0
    for on_device in config.layer_device_cells:
        in_tail = config.num_cells - on_device
        extents.append(LayerExtents(Extent(device, on_device), Extent(tail, in_tail)))
        device += config.batch_size * on_device
        tail += config.batch_size * in_tail
    return extents


def layer_cells(config: CacheConfig, cache: Cache, layer: int) -> LayerCells:
    """One layer's cells, to look at: slices of the cache's arrays.

    Of a cache in numpy, `jax.tree.map(np.asarray, cache)`, views. XLA's GPU compiler
    slices host memory inside a jit only, and only onto the device.
    """
    device, tail = layer_extents(config)[layer]
    return LayerCells(
        cells_of(cache.device, device, config.batch_size),
        cells_of(cache.tail, tail, config.batch_size),
    )


def cells_of(
    part: Float[Array | np.ndarray, "rows K R"] | None, extent: Extent, num_seqs: int
) -> Float[Array | np.ndarray, "B S K R"] | None:
    """A layer's cells of one part; None if it has none there."""
    if extent.num_cells == 0:
        return None
    rows = part[extent.first : extent.first + num_seqs * extent.num_cells]
    return rows.reshape(num_seqs, extent.num_cells, *part.shape[1:])


def part_rows(config: CacheConfig) -> tuple[int, int]:
    """Rows of (the device part, the tail)."""
    each = [config.batch_size * cells for cells in config.layer_device_cells]
    return sum(each), config.batch_size * config.num_cells * len(each) - sum(each)


def layer_bytes(config: CacheConfig, layer: int, num_heads: int) -> tuple[int, int]:
    """Bytes of (device part, tail) of a layer that stores `num_heads` heads."""
    cell = config.batch_size * num_heads * config.record_size * config.itemsize
    on_device = config.layer_device_cells[layer]
    return on_device * cell, (config.num_cells - on_device) * cell


def cache_bytes(config: CacheConfig, num_heads: int | None = None) -> tuple[int, int]:
    """Bytes of (device parts, tails) of all layers; of K heads, or of `num_heads`."""
    heads = config.num_kv_heads if num_heads is None else num_heads
    device, tail = part_rows(config)
    row = heads * config.record_size * config.itemsize
    return device * row, tail * row


def reset(cache: Cache, sequence: int | None = None) -> Cache:
    """Empties one sequence, or all. Only lengths change: cells keep their bytes.

    Raises:
      ValueError: there is no such sequence.
    """
    if sequence is None:
        lengths = cache.lengths * 0
    else:
        num_seqs = cache.lengths.shape[0]
        if not 0 <= sequence < num_seqs:
            raise ValueError(
                f"sequence must be between 0 and {num_seqs - 1}, got {sequence}"
            )
        lengths = cache.lengths.at[sequence].set(0)
    return cache._replace(lengths=lengths, stamp=cache.stamp * 0)
