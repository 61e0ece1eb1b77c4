"""A model's cache."""

from kvjax.config import CacheConfig
from kvjax.model.transformer import ModelConfig


def cache_of(model: ModelConfig, **settings) -> CacheConfig:
    """The layers and heads of a model; the rest is CacheConfig's own."""
    return CacheConfig(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        **settings,
    )
