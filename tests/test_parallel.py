"""Heads over devices: bits, tokens, devices in trouble, two caches, planned bytes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from steps import (
    BLOCK_BYTES,
    Inputs,
    copied,
    filled,
    inputs,
    placement_of,
    replaced,
    run,
    stepper,
)
from tolerance import RTOL, assert_same_bits

from kvjax.cache.state import Cache
from kvjax.config import CacheConfig, RingConfig
from kvjax.delivery.allocate import footprint, init_cache
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.plan import plan_ring
from kvjax.delivery.ring import Emulation, Ring, RingStats
from kvjax.generate import Decoder
from kvjax.model.transformer import ModelConfig, random_model

CELL_BYTES = 64  # one head, float32: 2 x 8 elements
STEPS = 3
LENGTHS = [400, 130]


def placement_on(mesh_size: int | dict[str, int], *, ring_id: int = 60, **changes):
    """Two sequences of up to 512 cells in two layers; the first block on the device."""
    sizes = {"tp": mesh_size} if isinstance(mesh_size, int) else mesh_size
    facts = dict(num_layers=2, batch_size=2, capacity=512, device_cells=128)
    return placement_of(ring_id=ring_id, mesh=make_mesh(sizes), **facts | changes)


def ring_config(placement: Placement, slots: int = 5) -> RingConfig:
    """So many slots of one block of a device's heads."""
    slot_bytes = placement.local_heads * BLOCK_BYTES
    return RingConfig(depth=2, slot_bytes=slot_bytes, budget_bytes=slots * slot_bytes)


def decode(placement: Placement, cache: Cache, x: Inputs) -> list[np.ndarray]:
    """Outputs [L, B, T, N, H] of some steps."""
    outs = []
    for _ in range(STEPS):
        out, cache = stepper(placement)(cache, x)
        outs.append(np.asarray(out))
    return outs


@functools.cache
def on_one_device(num_kv_heads: int, group: int, width: int = 1) -> list[np.ndarray]:
    placement = placement_on(1, num_kv_heads=num_kv_heads, group=group)
    return decode(placement, filled(placement, LENGTHS), inputs(placement, width=width))


def assert_same_steps(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


def live_cells(lengths: list[int], device_cells: int) -> int:
    """Cells of one layer that STEPS steps of one token find in the tail."""
    return sum(
        max(0, length + i - device_cells) for length in lengths for i in range(STEPS)
    )


def each(ring: Ring) -> list[RingStats]:
    return [ring.stats(device) for device in ring.placement.mesh.devices.flat]


# Bits and tokens


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "devices"),
    [(16, 8, 2), (16, 8, 4), (16, 8, 8), (16, 2, 4), (16, 1, 8), (9, 3, 3), (3, 1, 3)],
)
def test_each_head_has_the_bits_of_one_device(num_heads, num_kv_heads, devices, width):
    group = num_heads // num_kv_heads
    placement = placement_on(devices, num_kv_heads=num_kv_heads, group=group)
    x = inputs(placement, width=width)
    with Ring.open(placement, ring_config(placement)) as ring:
        outs = decode(placement, filled(placement, LENGTHS), x)
        stats = each(ring)
    assert outs[0].shape[3] == num_heads
    assert_same_steps(outs, on_one_device(num_kv_heads, group, width))
    assert len(stats) == devices
    assert len({s.early_bytes for s in stats}) == 1
    assert stats[0].early_bytes > 0
    assert {s.ordered_bytes for s in stats} == {0}


class Text(NamedTuple):
    """What a model says to a text that it is fed token by token."""

    tokens: np.ndarray  # [steps, B], chosen after each step
    logits: np.ndarray  # [steps, B, V]


def model_config(num_heads: int, num_kv_heads: int) -> ModelConfig:
    return ModelConfig(
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        width=72,
        mlp_width=96,
        vocab_size=144,
    )


def read(config: ModelConfig, devices: int, text: np.ndarray) -> Text:
    """Feeds a random model a text [steps, B], all cells of it in the tail."""
    mesh = make_mesh({"tp": devices})
    cells = CacheConfig(
        num_layers=config.num_layers,
        batch_size=text.shape[1],
        capacity=len(text),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
        device_cells=0,
    )
    heads = config.num_heads
    placement = Placement(config=cells, num_heads=heads, mesh=mesh, ring_id=61)
    decoder = Decoder(random_model(config, 5, mesh=mesh), placement)
    cache, num_new = (
        init_cache(placement),
        decoder.place(np.ones(text.shape[1], np.int32)),
    )
    logits = decoder.place(np.zeros((text.shape[1], config.vocab_size), np.float32))
    made = []
    with Ring.open(placement):
        for fed in text:
            fed = decoder.place(fed[:, None].astype(np.int32))
            logits, cache = decoder.prefill(decoder.leaves, cache, fed, num_new, logits)
            made.append(np.asarray(logits))
    return Text(np.stack(made).argmax(-1), np.stack(made))


@functools.cache
def read_on_one_device(num_heads: int, num_kv_heads: int) -> tuple[np.ndarray, Text]:
    """A text of which each half is random, and what the model says to it."""
    config = model_config(num_heads, num_kv_heads)
    text = np.random.default_rng(2).integers(0, config.vocab_size, (24, 2))
    return text, read(config, 1, text)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "devices"),
    [(16, 8, 2), (16, 8, 8), (16, 2, 4), (16, 1, 8), (9, 3, 3)],
)
def test_tokens_are_those_of_one_device(num_heads, num_kv_heads, devices):
    """Teacher-forced, where the two best logits differ by more than the tolerance."""
    text, one = read_on_one_device(num_heads, num_kv_heads)
    many = read(model_config(num_heads, num_kv_heads), devices, text)
    tolerance = RTOL["float32"] * np.abs(one.logits).max()
    np.testing.assert_allclose(many.logits, one.logits, rtol=0, atol=tolerance)
    best = np.sort(one.logits, axis=-1)
    apart = best[..., -1] - best[..., -2] > 2 * tolerance
    assert apart.mean() > 0.9
    np.testing.assert_array_equal(many.tokens[apart], one.tokens[apart])
    assert len(np.unique(one.tokens)) > 4


# Three devices


@pytest.mark.parametrize("device_cells", [0, 128, 384, None, (512, 0), (0, 256)])
def test_placements_and_depths_change_no_bit_on_three_devices(device_cells):
    facts = dict(num_kv_heads=3, group=3)
    placement = replaced(placement_on(3, **facts), device_cells=device_cells)
    cache, x = filled(placement, LENGTHS), inputs(placement)
    on_device = placement.config.layer_device_cells
    live = sum(live_cells(LENGTHS, cells) for cells in on_device) * CELL_BYTES
    for depth in (0, 1, 2, 7):
        config = RingConfig(
            depth=depth, slot_bytes=BLOCK_BYTES, budget_bytes=4 * BLOCK_BYTES
        )
        emulation = {
            d: Emulation(seed=depth * 3 + d.id, max_delay_us=50)
            for d in placement.mesh.devices.flat
        }
        with Ring.open(placement, config, emulation=emulation) as ring:
            outs = decode(placement, copied(cache), x)
            early = {(s.early_bytes, s.ordered_bytes) for s in each(ring)}
        assert_same_steps(outs, on_one_device(3, 3))
        assert early == {(live, 0) if depth else (0, live)}


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("how", ["late", "no budget", "allocation fails"])
def test_one_device_in_trouble_is_alone_in_it(how, which, capfd):
    placement = placement_on(3, num_kv_heads=3, group=3)
    troubled = placement.mesh.devices.flat[which]
    per_device = {troubled: RingConfig(budget_bytes=0)} if how == "no budget" else None
    like = Emulation(
        seed=which,
        max_delay_us=2000 if how == "late" else 0,
        fail_allocation=how == "allocation fails",
    )
    with Ring.open(
        placement,
        ring_config(placement),
        per_device=per_device,
        emulation={troubled: like},
    ) as ring:
        outs = decode(placement, filled(placement, LENGTHS), inputs(placement))
        stats, declines = each(ring), ring.declines()
    said = capfd.readouterr().err
    assert_same_steps(outs, on_one_device(3, 3))
    live = live_cells(LENGTHS, 128) * 2 * CELL_BYTES
    its = stats.pop(which)
    for other in stats:
        assert (other.early_bytes, other.ordered_bytes) == (live, 0)
        assert other.ring_bytes == 5 * BLOCK_BYTES
    if how == "late":
        assert (its.early_bytes, its.ordered_bytes, declines) == (live, 0, {})
        return
    assert (its.early_bytes, its.ordered_bytes, its.ring_bytes) == (0, live, 0)
    reason = f"allocating {5 * BLOCK_BYTES} bytes failed"
    asked_for = how == "no budget"
    assert declines == {troubled: "budget_bytes is 0" if asked_for else reason}
    assert said.count(reason) == (0 if asked_for else 1)


# A draft's and a target's cache on the same devices


LIVE = (  # bytes on each device: one head a device of both, in one and in two layers
    live_cells(LENGTHS, 0) * CELL_BYTES,
    live_cells([450, 300], 128) * 2 * CELL_BYTES,
)


class Pair(NamedTuple):
    """Two caches with a ring each; outputs and each device's counts of each alone."""

    placements: tuple[Placement, Placement]
    caches: tuple[Cache, Cache]
    xs: tuple[Inputs, Inputs]
    wants: list[list[np.ndarray]]
    stats: list[list[RingStats]]


@pytest.fixture(scope="module")
def draft_and_target() -> Pair:
    draft = placement_on(2, ring_id=62, num_layers=1, num_kv_heads=1, device_cells=0)
    target = placement_on(2, ring_id=63, num_kv_heads=2, group=3)
    placements = draft, target
    caches = filled(draft, LENGTHS), filled(target, [450, 300], seed=4)
    xs = tuple(inputs(placement) for placement in placements)
    wants, stats = [], []
    for placement, cache, x in zip(placements, caches, xs, strict=True):
        with Ring.open(placement, ring_config(placement)) as ring:
            wants.append(decode(placement, copied(cache), x))
            stats.append(each(ring))
    for of_each, live in zip(stats, LIVE, strict=True):
        assert {(s.early_bytes, s.ordered_bytes) for s in of_each} == {(live, 0)}
        assert min(s.ahead_used for s in of_each) > 0
    return Pair(placements, caches, xs, wants, stats)


def test_draft_and_target_take_turns(draft_and_target):
    pair = draft_and_target
    caches = [copied(cache) for cache in pair.caches]
    outs = [], []
    delay = Emulation(max_delay_us=100)
    with (
        Ring.open(
            pair.placements[0], ring_config(pair.placements[0]), emulation=delay
        ) as draft,
        Ring.open(
            pair.placements[1], ring_config(pair.placements[1]), emulation=delay
        ) as target,
    ):
        for _ in range(STEPS):
            for i, placement in enumerate(pair.placements):
                out, caches[i] = stepper(placement)(caches[i], pair.xs[i])
                outs[i].append(np.asarray(out))
        for got, want in zip(outs, pair.wants, strict=True):
            assert_same_steps(got, want)
        assert [each(draft), each(target)] == pair.stats


def test_draft_and_target_share_a_program(draft_and_target):
    """Each of its steps runs the target on what the draft gave."""
    pair = draft_and_target
    every = pair.placements[0].sharding(P())

    def both(caches, xs):
        first, draft = run(pair.placements[0], caches[0], xs[0])
        given = jnp.zeros_like(xs[1].tokens) * first[0, :, :, 0, 0].astype(jnp.int32)
        x = xs[1]._replace(tokens=xs[1].tokens + given)
        second, target = run(pair.placements[1], caches[1], x)
        return (first, second), (draft, target)

    shardings = tuple(placement.cache_shardings() for placement in pair.placements)
    program = jax.jit(both, donate_argnums=0, out_shardings=((every, every), shardings))
    caches = tuple(copied(cache) for cache in pair.caches)
    delay = Emulation(max_delay_us=100)
    with (
        Ring.open(
            pair.placements[0], ring_config(pair.placements[0]), emulation=delay
        ) as draft,
        Ring.open(
            pair.placements[1], ring_config(pair.placements[1]), emulation=delay
        ) as target,
    ):
        for i in range(STEPS):
            outs, caches = jax.block_until_ready(program(caches, pair.xs))
            for got, want in zip(outs, pair.wants, strict=True):
                assert_same_bits(got, want[i])
        assert [each(draft), each(target)] == pair.stats


# Bytes


@pytest.mark.parametrize(
    ("mesh_size", "num_kv_heads"),
    [(8, 8), (4, 8), (4, 2), (8, 1), (3, 3), ({"replica": 2, "tp": 2}, 2)],
)
def test_what_is_held_is_what_was_planned(mesh_size, num_kv_heads):
    group = 2 if num_kv_heads in (3, 8) else 8 // num_kv_heads
    placement = placement_on(
        mesh_size, ring_id=64, num_kv_heads=num_kv_heads, group=group
    )
    plan = footprint(placement)
    cache = filled(placement, LENGTHS)
    for part, want in (("device", plan.device_bytes), ("tail", plan.tail_bytes)):
        held = dict.fromkeys(placement.mesh.devices.flat, 0)
        for shard in getattr(cache, part).addressable_shards:
            held[shard.device] += shard.data.nbytes
        assert set(held.values()) == {want}, part
    assert plan.host_bytes == placement.mesh.size * plan.tail_bytes
    for slots, want in ((5, 5), (99, 12)):  # 3 tail blocks of 2 sequences, 2 layers
        config = ring_config(placement, slots)
        ring_bytes = plan_ring(placement, config).ring_bytes
        assert ring_bytes == want * config.slot_bytes
        with Ring.open(placement, config) as ring:
            stepper(placement)(copied(cache), inputs(placement))
            assert {s.ring_bytes for s in each(ring)} == {ring_bytes}
            assert not ring.declines()
