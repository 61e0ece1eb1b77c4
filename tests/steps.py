"""Steps of attention alone, without a model: small programs for tests of delivery."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from caches import cache_with
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kvjax.cache.state import Cache
from kvjax.config import CacheConfig
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.model.attention import Step

LAYERS = 8
HEAD = 8  # float32 records of 64 bytes, so a block of one head is 8 KiB
BLOCK_BYTES = 8192


class Inputs(NamedTuple):
    """What a model would feed a step."""

    tokens: jax.Array  # [B, T]
    num_new: jax.Array  # [B]
    q: jax.Array  # [L, B, T, N, H]
    k: jax.Array  # [L, B, T, K, H]
    v: jax.Array  # [L, B, T, K, H]


def placement_of(
    *,
    ring_id: int,
    mesh: Mesh | None = None,
    num_layers: int = LAYERS,
    batch_size: int = 1,
    capacity: int = 1024,
    num_kv_heads: int = 1,
    group: int = 2,
    device_cells: int | tuple[int, ...] | None = 0,
    backend: str = "native",
) -> Placement:
    config = CacheConfig(
        num_layers=num_layers,
        batch_size=batch_size,
        capacity=capacity,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD,
        dtype="float32",
        device_cells=device_cells,
    )
    return Placement(
        config=config,
        num_heads=num_kv_heads * group,
        mesh=make_mesh() if mesh is None else mesh,
        ring_id=ring_id,
        backend=backend,
    )


def replaced(placement: Placement, **changes) -> Placement:
    """The same cells elsewhere: `device_cells`, or another placement's ring id."""
    config = dataclasses.replace(
        placement.config, device_cells=changes.pop("device_cells", None)
    )
    return dataclasses.replace(placement, config=config, **changes)


def inputs(
    placement: Placement,
    *,
    width: int = 1,
    num_new: list[int] | None = None,
    seed: int = 0,
) -> Inputs:
    """Random inputs; the same for each placement of one cache.

    Args:
      placement: Of the cache.
      width: T.
      num_new: Of each sequence; all T if None.
      seed: Of the draws.
    """
    config = placement.config
    draw = np.random.default_rng(seed).standard_normal

    def heads(count: int) -> jax.Array:
        shape = (config.num_layers, config.batch_size, width, count, config.head_dim)
        return placed(placement, draw(shape, np.float32))

    new = [width] * config.batch_size if num_new is None else num_new
    return Inputs(
        placed(placement, np.zeros((config.batch_size, width), np.int32)),
        placed(placement, np.array(new, np.int32)),
        heads(placement.num_heads),
        heads(config.num_kv_heads),
        heads(config.num_kv_heads),
    )


def placed(placement: Placement, x: np.ndarray) -> jax.Array:
    return jax.device_put(x, placement.sharding(P()))


def filled(placement: Placement, lengths: list[int], *, seed: int = 1) -> Cache:
    """A cache of random cells; the same logical cells wherever they lie."""
    config = placement.config
    draw = np.random.default_rng(seed).standard_normal
    stored = (config.batch_size, config.num_cells, config.num_kv_heads)
    heads = placement.stored_heads // config.num_kv_heads
    layers = [
        np.repeat(draw((*stored, config.record_size), np.float32), heads, axis=2)
        for _ in range(config.num_layers)
    ]
    dtype = jnp.dtype(config.dtype)
    return cache_with(placement, [x.astype(dtype) for x in layers], lengths)


def parts(cache: Cache) -> tuple[jax.Array | None, jax.Array | None]:
    """The arrays that hold its cells."""
    return cache.device, cache.tail


def copied(cache: Cache) -> Cache:
    """Another cache of the same cells, which a step may then donate."""
    cache = cache._replace(stamp=cache.stamp * 0)
    return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), cache)


def run(
    placement: Placement,
    cache: Cache,
    x: Inputs,
    *,
    order: tuple[int, ...] | None = None,
    listed: tuple[tuple[int, int | None], ...] | None = None,
    window: int | None = None,
    between: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, Cache]:
    """A step: outputs of its attends [len(order), B, T, N, H], and the cache.

    Args:
      order: Layers to attend in; each once, in order, if None.
      listed: What begin is told; what is run if None.
      between: Called with the output of the fourth attend and the queries of the
        next; gives those queries, made to depend on that output.
    """
    order = tuple(range(placement.config.num_layers)) if order is None else order
    listed = tuple((layer, window) for layer in order) if listed is None else listed
    tokens, step = Step.begin(placement, cache, x.tokens, x.num_new, attends=listed)
    outs = []
    for layer in order:
        q = x.q[layer] + tokens[:, :, None, None].astype(x.q.dtype)
        q = between(outs[-1], q) if between is not None and len(outs) == 4 else q
        outs.append(
            step.attend(layer, q, x.k[layer], x.v[layer], scale=0.5, window=window)
        )
    return jnp.stack(outs), step.end()


def stepper(placement: Placement, **options):
    """A step (cache, inputs) -> (outputs, cache) that is done when it returns."""
    step = program(placement, **options)
    return lambda cache, x: jax.block_until_ready(step(cache, x))


@functools.cache
def program(placement: Placement, **options):
    """The jitted step, which donates the cache."""
    return jax.jit(
        functools.partial(run, placement, **options),
        donate_argnums=0,
        out_shardings=(placement.sharding(P()), placement.cache_shardings()),
    )
