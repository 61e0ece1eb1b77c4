"""A model's cache, one of given cells, and its ring as scripts take one."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.state import Cache
from kvjax.config import MAX_BUDGET_BYTES, MIB, CacheConfig, RingConfig
from kvjax.delivery.placement import Placement
from kvjax.model.transformer import ModelConfig


def cache_of(model: ModelConfig, **settings) -> CacheConfig:
    """The layers and heads of a model; the rest is CacheConfig's own."""
    return CacheConfig(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        **settings,
    )


def cache_with(
    placement: Placement, layers: Iterable[np.ndarray], lengths: np.ndarray
) -> Cache:
    """A cache of these cells: each layer's [B, S, K', R], S being all cells."""
    splits, parts = placement.config.layer_device_cells, ([], [])
    for cells, split in zip(layers, splits, strict=True):
        for part, held in zip(parts, (cells[:, :split], cells[:, split:]), strict=True):
            part.append(held.reshape(-1, *held.shape[2:]))
    where = placement.cache_shardings()
    device, tail = (
        to if to is None else jax.device_put(np.concatenate(part), to)
        for part, to in zip(parts, (where.device, where.tail), strict=True)
    )
    lengths = jax.device_put(np.array(lengths, np.int32), where.lengths)
    stamp = jnp.zeros((placement.mesh.size, 2), jnp.uint32, device=where.stamp)
    return Cache(device, tail, lengths, stamp, placement.config.layout)


def ring_of(depth: int, budget_mib: float, slot_mib: float | None) -> RingConfig:
    """By the flags --depth, --budget_mib and --slot_mib.

    Raises:
      ValueError: one is out of range.
    """
    slot_bytes = None if slot_mib is None else _bytes("slot_mib", slot_mib)
    budget_bytes = _bytes("budget_mib", budget_mib)
    return RingConfig(depth=depth, budget_bytes=budget_bytes, slot_bytes=slot_bytes)


def _bytes(flag: str, mib: float) -> int:
    most = MAX_BUDGET_BYTES // MIB
    if not 0 <= mib <= most:
        raise ValueError(f"--{flag} must be between 0 and {most} MiB, got {mib:g}")
    return round(mib * MIB)
