"""What a cache is: a NamedTuple of arrays. Where they lie: delivery/placement.py."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, UInt32

from kvjax.config import CacheConfig


class LayerCells(NamedTuple):
    """The cells of one layer; a part that the layer doesn't have is None.

    cell   0 ............ device_cells ............ num_cells
           device                    tail (pinned host memory)
    """

    device: Float[Array, "B S_device K R"] | None
    tail: Float[Array, "B S_tail K R"] | None


class Cache(NamedTuple):
    """Keys and values of all layers. Donate it in the outermost jit.

    A sequence's tokens lie in cells 0 to lengths - 1. The stamp belongs to delivery: an
    operation on the cache that is not a step sets it to 0.
    """

    layers: tuple[LayerCells, ...]
    lengths: Int[Array, " B"]
    stamp: UInt32[Array, "devices 2"]


def layer_bytes(config: CacheConfig, layer: int, num_heads: int) -> tuple[int, int]:
    """Bytes of (device part, tail) of a layer that stores `num_heads` heads."""
    cell = config.batch_size * num_heads * config.record_size * config.itemsize
    on_device = config.layer_device_cells[layer]
    return on_device * cell, (config.num_cells - on_device) * cell


def cache_bytes(config: CacheConfig, num_heads: int | None = None) -> tuple[int, int]:
    """Bytes of (device parts, tails) of all layers; of K heads, or of `num_heads`."""
    heads = config.num_kv_heads if num_heads is None else num_heads
    layers = [layer_bytes(config, i, heads) for i in range(config.num_layers)]
    return sum(b[0] for b in layers), sum(b[1] for b in layers)


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
