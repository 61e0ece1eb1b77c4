"""Append and attend in plain JAX: the oracle, and a backend for platforms without ours.

Moves each layer's whole tail to the device in every step, as XLA alone would. Same
results as the native backend within rounding, not to the bit.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.formats import decode
from kvjax.cache.state import Cache, Extent, cells_of, layer_cells
from kvjax.config import CacheConfig


def append(
    part: Float[Array, "part_rows K R"],
    extent: Extent,
    rows: Float[Array, "B T K R"],
    where: Int[Array, "B T"],
) -> Float[Array, "part_rows K R"]:
    """Writes each row to the cell that `where` names; -1 and beyond the extent drop
    it.
    """
    num_seqs = rows.shape[0]
    cells = _on_device(cells_of(part, extent, num_seqs))
    cell = jnp.where(where < 0, extent.num_cells, where)
    sequence = jnp.arange(num_seqs)[:, None]
    cells = cells.at[sequence, cell].set(rows, mode="drop").reshape(-1, *part.shape[1:])
    if _is_host(part):  # which takes slices, but no scatter
        cells = jax.device_put(cells, jax.memory.Space.Host)
    return jax.lax.dynamic_update_slice(part, cells, (extent.first, 0, 0))


def store(
    part: Float[Array, "part_rows K R"],
    first: Int[Array, ""],
    cells: Float[Array, "B S K R"],
) -> Float[Array, "part_rows K R"]:
    """Writes cells into a part from row `first` on, all of which must fit."""
    rows = cells.reshape(-1, *cells.shape[2:])
    if _is_host(part):
        rows = jax.device_put(rows, jax.memory.Space.Host)
    return jax.lax.dynamic_update_slice(part, rows, (first, 0, 0))


def attend(
    config: CacheConfig,
    q: Float[Array, "B T N H"],
    rows: Float[Array, "B T K R"],
    cache: Cache,
    layer: int,
    where: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention as the native attend defines it (delivery/ffi.py), softmax in
    float32.
    """
    k_new, v_new = decode(config, rows)
    held = [x for x in layer_cells(config, cache, layer) if x is not None]
    k_old, v_old = decode(
        config, jnp.concatenate([_on_device(x) for x in held], axis=1)
    )
    k = jnp.concatenate([k_old, k_new], axis=1).astype(jnp.float32)
    v = jnp.concatenate([v_old, v_new], axis=1).astype(jnp.float32)
    num_cells = k_old.shape[1]
    seen = visible(cache.lengths, where, num_cells, window)  # [B, T, S + T]
    v = jnp.where(seen.any(axis=1)[:, :, None, None], v, 0)
    k = jnp.where(seen.any(axis=1)[:, :, None, None], k, 0)

    num_seqs, num_new, num_heads, head_dim = q.shape
    group = num_heads // k.shape[2]
    qg = q.astype(jnp.float32).reshape(num_seqs, num_new, k.shape[2], group, head_dim)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", qg, k, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask = seen[:, None, None]
    scores = jnp.where(mask, scores, -jnp.inf)
    best = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(best), best, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v, precision="highest")
    out = out.reshape(num_seqs, num_new, num_heads, v.shape[-1])
    overflow = (where >= num_cells).any(axis=1)[:, None, None, None]
    return jnp.where(overflow, jnp.nan, out).astype(q.dtype)


def visible(
    lengths: Int[Array, " B"],
    where: Int[Array, "B T"],
    num_cells: int,
    window: int | None,
) -> Array:
    """Which stored cells (S of them), then which new rows (T), each query sees [B, T,
    S+T].

    With lengths [3], S = 6, where [[3, 4]] and no window:

        query 0:  111000 10
        query 1:  111000 11
    """
    cell = jnp.arange(num_cells)
    stored = cell[None, :] < lengths[:, None]  # [B, S]
    replaced = (where[:, :, None] == cell).any(axis=1)  # [B, S]
    stored = jnp.broadcast_to((stored & ~replaced)[:, None], (*where.shape, num_cells))
    new = (where[:, None, :] <= where[:, :, None]) & (where[:, None, :] >= 0)
    place = jnp.concatenate(
        [
            jnp.broadcast_to(cell, stored.shape),
            jnp.broadcast_to(where[:, None], new.shape),
        ],
        axis=-1,
    )
    seen = jnp.concatenate([stored, new], axis=-1) & (where >= 0)[:, :, None]
    return seen if window is None else seen & (place > where[:, :, None] - window)


def _on_device(x: Array) -> Array:
    return jax.device_put(x, jax.memory.Space.Device) if _is_host(x) else x


def _is_host(x: Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host
