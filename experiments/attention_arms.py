"""The arms of bench_attention: what runs one, the check of bits, rows."""

import functools
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from caches import cache_of
from copy_then_attend import copy_then_attend
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kvjax.advice import GB, cell_bytes
from kvjax.cache.formats import encode
from kvjax.cache.state import Cache
from kvjax.config import RingConfig
from kvjax.delivery import ffi
from kvjax.delivery.placement import Placement
from kvjax.delivery.plan import plan_ring
from kvjax.delivery.ring import Ring
from kvjax.measurement import random_cache, spread
from kvjax.model.transformer import ModelConfig

ARMS = ("device", "ordered", "pipelined", "standalone")
RINGS = {"ordered": RingConfig(depth=0), "pipelined": RingConfig()}
MS = 1e3

# Runs so many passes; seconds of all of them, and what each layer gave.
Passes = Callable[[int], tuple[float, np.ndarray]]


class BitsDiffer(Exception):
    """An arm gave other bits: its times mean nothing."""


class Inputs(NamedTuple):
    """What every layer's attend gets beside its cells."""

    q: jax.Array  # [B, 1, N, H] bfloat16
    rows: jax.Array  # [B, 1, K, R]


def place(
    config: ModelConfig, num_seqs: int, length: int, arm: str, mesh: Mesh, dtype: str
) -> Placement:
    cache = cache_of(
        config,
        batch_size=num_seqs,
        capacity=length + 1,
        dtype=dtype,
        device_cells=None if arm == "device" else 0,
    )
    return Placement(config=cache, num_heads=config.num_heads, mesh=mesh)


def time_arms(
    places: dict[str, Placement],
    length: int,
    passes: int,
    repeats: int,
    on_run: Callable[[], object],
) -> dict[str, list[float]]:
    """Seconds of a pass in each run of each arm.

    Raises:
      BitsDiffer: two runs, of one arm or of two, gave other bits.
    """
    caches = {
        placement: random_cache(placement, [length] * placement.config.batch_size)
        for placement in set(places.values())
    }
    runs = {arm: ready(arm, p, caches[p]) for arm, p in places.items()}
    times: dict[str, list[float]] = {arm: [] for arm in places}
    wanted = None
    for turn in range(2 * repeats):
        for arm in [*runs] if turn % 2 == 0 else [*runs][::-1]:
            seconds, out = runs[arm](passes)
            wanted = out if wanted is None else wanted
            check_bits(arm, out, wanted)
            times[arm].append(seconds / passes)
            on_run()
    return times


def ready(arm: str, placement: Placement, cache: Cache) -> Passes:
    """Compiles if need be; what then runs an arm."""
    inputs = draw_inputs(placement)
    if arm == "standalone":
        return functools.partial(run_alone, placement, cache, inputs)
    return functools.partial(run_jit, placement, cache, inputs, RINGS.get(arm))


def run_alone(
    placement: Placement, cache: Cache, inputs: Inputs, passes: int
) -> tuple[float, np.ndarray]:
    return copy_then_attend(
        placement,
        cache,
        *map(np.asarray, inputs),
        scale=placement.config.head_dim**-0.5,
        slot_bytes=plan_ring(placement, RINGS["ordered"]).slot_bytes,
        passes=passes,
    )


def run_jit(
    placement: Placement,
    cache: Cache,
    inputs: Inputs,
    ring: RingConfig | None,
    passes: int,
) -> tuple[float, np.ndarray]:
    attend = attend_all(placement)
    with nullcontext() if ring is None else Ring.open(placement, ring):
        jax.block_until_ready(
            attend(*inputs, cache)
        )  # compiles; takes the ring's memory
        start = time.perf_counter()
        for _ in range(passes):
            outs = attend(*inputs, cache)
        jax.block_until_ready(outs)
        seconds = time.perf_counter() - start
    return seconds, np.stack([np.asarray(out) for out in outs])


@functools.cache  # a ring is no part of the program
def attend_all(placement: Placement) -> Callable[..., list[jax.Array]]:
    """A jitted (q, rows, cache) -> what each layer gave: one pass.

    Nothing is appended, so every pass finds the same cells where they lay.
    """
    num_layers = placement.config.num_layers

    def attend(q, rows, cache):
        where, ticket = cache.lengths[:, None], cache.stamp[:, 0].astype(jnp.int32)
        if cache.tail is not None:
            tokens = jnp.zeros((q.shape[0], 1), jnp.int32)
            plan = tuple((layer, None) for layer in range(num_layers))
            _, ticket, _ = ffi.begin(placement, tokens, cache, plan)
        scale, outs = placement.config.head_dim**-0.5, []
        for layer in range(num_layers):
            given = q, rows, cache, where, ticket
            out, ticket = ffi.attend(placement, layer, *given, scale=scale)
            outs.append(out)
        return outs

    return jax.jit(attend)


def attend_once(placement: Placement, cache: Cache) -> np.ndarray:
    """What each layer gives [L, B, 1, N, H] for inputs that don't depend on places."""
    outs = attend_all(placement)(*draw_inputs(placement), cache)
    return np.stack([np.asarray(out) for out in outs])


def draw_inputs(placement: Placement) -> Inputs:
    config, draw = placement.config, np.random.default_rng(0)

    def normal(num_heads: int) -> jax.Array:
        shape = (config.batch_size, 1, num_heads, config.head_dim)
        drawn = jnp.asarray(draw.standard_normal(shape, np.float32), jnp.bfloat16)
        return jax.device_put(drawn, placement.sharding(P()))

    q, k, v = map(normal, (placement.num_heads, *[config.num_kv_heads] * 2))
    return Inputs(
        q, encode(config, placement.expand_heads(k), placement.expand_heads(v))
    )


def check_bits(arm: str, out: np.ndarray, wanted: np.ndarray) -> None:
    """Raises BitsDiffer unless all of [L, B, 1, N, Hv] is the same to the bit."""
    same = (out.view(np.uint16) == wanted.view(np.uint16)).all(axis=(1, 2, 3, 4))
    if not same.all():
        layers = np.flatnonzero(~same)
        raise BitsDiffer(
            f"{arm} gave other bits than the first arm's first run in "
            f"{len(layers)} layers, the first of them {layers[0]}"
        )


def make_rows(
    places: dict[str, Placement],
    length: int,
    times: dict[str, list[float]],
    link: float,
    read: float,
) -> list[dict]:
    """A row for each arm; that of the ordered one holds its ratio to the loop alone."""
    seconds = {arm: statistics.median(taken) for arm, taken in times.items()}
    rows = []
    for arm, placement in places.items():
        config = placement.config
        live = length * config.batch_size * cell_bytes(config, placement.local_heads)
        rate = read if arm == "device" else link
        row = {
            "arm": arm,
            "cells": length,
            "batch": config.batch_size,
            "layers": config.num_layers,
            "ms": MS * seconds[arm],
            "spread": spread(times[arm]),
            "runs_ms": [MS * taken for taken in times[arm]],
            "live_bytes": live,
            "bytes_s": live / seconds[arm],
            "bound_ms": MS * live / rate,
            "share": live / seconds[arm] / rate,
            "over_standalone": None,
        }
        if arm == "ordered" and "standalone" in seconds:
            row["over_standalone"] = seconds[arm] / seconds["standalone"]
        rows.append(row)
    return rows


def line(row: dict) -> str:
    of = "the memory's read rate" if row["arm"] == "device" else "the link"
    said = (
        f"{row['arm']:10}{row['cells']:>8,} cells x {row['batch']:<3}"
        f"{row['ms']:9.3f} ms, spread {row['spread']:.1%}: "
        f"{row['bytes_s'] / GB:,.1f} GB/s, {row['share']:.1%} of {of}"
    )
    if row["over_standalone"] is None:
        return said
    return said + f", {row['over_standalone']:.3f} x the stand-alone loop"
