"""How keys and values become records, and back: encode and decode."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.config import CacheConfig


def encode(
    config: CacheConfig, k: Float[Array, "B T K H"], v: Float[Array, "B T K Hv"]
) -> Float[Array, "B T K R"]:
    """Makes a step's rows: the key, the value, zeros up to 16 bytes, in the cache's
    dtype.

    Made once a step, so a token attends to the same bits now as later.

    Args:
      k: New keys, RoPE already applied, rounded to the cache's dtype.
      v: New values, likewise.

    Raises:
      ValueError: k or v has other head sizes than the cache.
    """
    got = (k.shape[-1], v.shape[-1])
    if got != (config.head_dim, config.value_dim):
        raise ValueError(
            f"the cache holds keys of {config.head_dim} and values of "
            f"{config.value_dim}, got {got[0]} and {got[1]}"
        )
    rows = jnp.concatenate([k.astype(config.dtype), v.astype(config.dtype)], axis=-1)
    padding = config.record_size - rows.shape[-1]
    return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, padding)))


def decode(
    config: CacheConfig, records: Float[Array, "B S K R"]
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K Hv"]]:
    """Splits records into keys and values, in the cache's dtype."""
    end = config.head_dim + config.value_dim
    return records[..., : config.head_dim], records[..., config.head_dim : end]
