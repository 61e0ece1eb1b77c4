"""A model's cache, and its ring as scripts take one."""

from kvjax.config import MAX_BUDGET_BYTES, MIB, CacheConfig, RingConfig
from kvjax.model.transformer import ModelConfig


def cache_of(model: ModelConfig, **settings) -> CacheConfig:
    """The layers and heads of a model; the rest is CacheConfig's own."""
    return CacheConfig(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        **settings,
    )


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
