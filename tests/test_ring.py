"""The ring on XLA's cpu platform: what it delivers, counts, declines, survives."""

import ctypes
import dataclasses
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import (
    BLOCK_BYTES,
    LAYERS,
    Inputs,
    copied,
    filled,
    inputs,
    parts,
    placed,
    placement_of,
    program,
    replaced,
    run,
    stepper,
)
from tolerance import assert_close, assert_same_bits

from kvjax.cache.state import Cache, reset
from kvjax.config import MIB, RingConfig
from kvjax.delivery import ffi
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.plan import Decline, Slots, plan_ring, smallest_slot
from kvjax.delivery.ring import Emulation, Ring, RingStats
from kvjax.model.attention import Step
from kvjax.shapes import BLOCK

CELL_BYTES = 64  # one head, float32: 2 x 8 elements
STEPS = 3
IDLE_STEPS = 256  # ops/ring.h: kIdleSteps
FIVE_SLOTS = RingConfig(depth=2, slot_bytes=BLOCK_BYTES, budget_bytes=5 * BLOCK_BYTES)


class Case(NamedTuple):
    """A cache, what its steps are fed, and what they give where no ring is open."""

    placement: Placement
    cache: Cache
    x: Inputs
    outs: list[np.ndarray]  # of STEPS steps, [L, B, T, N, H] each
    last: Cache


def case_of(placement: Placement, lengths: list[int], *, width: int = 1) -> Case:
    cache, x = filled(placement, lengths), inputs(placement, width=width)
    outs, last = decode(placement, cache, x)
    return Case(placement, cache, x, outs, last)


def decode(
    placement: Placement, cache: Cache, x: Inputs, *, step=None
) -> tuple[list[np.ndarray], Cache]:
    step = stepper(placement) if step is None else step
    cache, outs = copied(cache), []
    for _ in range(STEPS):
        out, cache = step(cache, x)
        outs.append(np.asarray(out))
    return outs, cache


def check(case: Case) -> None:
    """Runs the case's steps again, on whatever ring is open: the same bits."""
    outs, last = decode(case.placement, case.cache, case.x)
    assert_same_steps(case, outs)
    jax.tree.map(assert_same_bits, parts(last), parts(case.last))
    assert_same_bits(last.lengths, case.last.lengths)


def assert_same_steps(case: Case, outs: list[np.ndarray]) -> None:
    for got, want in zip(outs, case.outs, strict=True):
        assert_same_bits(got, want)


def tail_cells(length: int, device_cells: int) -> int:
    """Live cells of one sequence and layer that begin finds in the tail."""
    return max(0, length - device_cells)


@pytest.fixture(scope="module")
def deep() -> Case:
    """One sequence, 700 of 1,024 cells, all in the tail: six blocks in 8 layers."""
    return case_of(placement_of(ring_id=1), [700])


@pytest.fixture(scope="module")
def batch() -> Case:
    """Three sequences, 128 cells of each on the device; the second holds fewer."""
    placement = placement_of(ring_id=2, batch_size=3, num_layers=2, device_cells=128)
    return case_of(placement, [700, 60, 650])


@pytest.fixture(scope="module")
def pair() -> Case:
    """Two devices with a head each."""
    mesh = make_mesh({"tp": 2})
    return case_of(
        placement_of(ring_id=3, mesh=mesh, num_layers=2, num_kv_heads=2), [700]
    )


# What is delivered


@pytest.mark.parametrize("device_cells", [0, 128, 640, 1024])
def test_outputs_do_not_depend_on_where_cells_lie(deep, device_cells):
    placement = replaced(deep.placement, device_cells=device_cells)
    with Ring.open(placement, FIVE_SLOTS):
        outs, _ = decode(placement, filled(placement, [700]), deep.x)
    assert_same_steps(deep, outs)


def test_outputs_are_those_of_the_reference(batch):
    placement = replaced(batch.placement, device_cells=128, backend="reference")
    want, _ = stepper(placement)(filled(placement, [700, 60, 650]), batch.x)
    assert_close(batch.outs[0], want)


def test_every_live_cell_of_the_tail_is_delivered_once_a_step(deep):
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        check(deep)
        stats = ring.stats()
    live = sum(tail_cells(700 + i, 0) for i in range(STEPS)) * CELL_BYTES * LAYERS
    assert stats.early_bytes == live
    assert (stats.ordered_bytes, stats.gap_bytes) == (0, 0)
    assert (stats.steps, stats.deliveries) == (STEPS, STEPS * LAYERS * 6)
    assert (stats.num_slots, stats.ring_bytes) == (5, 5 * BLOCK_BYTES)
    assert stats.slot_reuses >= stats.deliveries - 5
    assert stats.stop_slots > 0


def test_nothing_is_out_of_the_ordinary_in_undisturbed_steps(deep):
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        check(deep)
        stats = ring.stats()._asdict()
    rare = [name for name in stats if name.startswith("ordered_")]
    rare += ["skipped_attends", "dropped_plans", "moved_tails", "given_back"]
    rare += ["ahead_dropped"]
    assert {name: stats[name] for name in [*rare, "length_errors"]} == dict.fromkeys(
        [*rare, "length_errors"], 0
    )


def test_cells_on_the_device_are_not_delivered(batch):
    with Ring.open(batch.placement, RingConfig(slot_bytes=BLOCK_BYTES)) as ring:
        check(batch)
        stats = ring.stats()
    live = sum(
        tail_cells(length + i, 128) for length in (700, 60, 650) for i in range(STEPS)
    )
    assert stats.early_bytes == live * CELL_BYTES * 2
    assert stats.ordered_bytes == 0


def test_gaps_between_sequences_are_counted_apart():
    """Copied as one, with the shorter sequence's 50 cells behind its end:

    0  ttttttt
    1  ttttt..
    """
    placement = placement_of(ring_id=4, batch_size=2, num_layers=1)
    cache, x = filled(placement, [700, 650]), inputs(placement)
    with Ring.open(placement, RingConfig(slot_bytes=MIB)) as ring:
        stepper(placement)(copied(cache), x)
        together = ring.stats()
    with Ring.open(placement, RingConfig(slot_bytes=BLOCK_BYTES)) as ring:
        stepper(placement)(copied(cache), x)
        apart = ring.stats()
    assert together.early_bytes == apart.early_bytes == 1350 * CELL_BYTES
    assert (together.deliveries, together.gap_bytes) == (1, 50 * CELL_BYTES)
    assert (apart.deliveries, apart.gap_bytes) == (12, 0)


def test_a_window_narrows_what_is_delivered(deep):
    window = 200
    step = stepper(deep.placement, window=window)
    want, _ = step(copied(deep.cache), deep.x)
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        got, _ = step(copied(deep.cache), deep.x)
        stats = ring.stats()
    assert_same_bits(got, want)
    assert not np.array_equal(want, deep.outs[0])
    assert stats.early_bytes == (window - 1) * CELL_BYTES * LAYERS
    assert stats.ordered_bytes == 0


def test_a_chunk_of_tokens_is_delivered_to_once(deep):
    placement = replaced(deep.placement, device_cells=128)
    cache, x = filled(placement, [700]), inputs(placement, width=5, num_new=[4])
    want, _ = stepper(placement)(copied(cache), x)
    with Ring.open(placement, FIVE_SLOTS) as ring:
        got, after = stepper(placement)(copied(cache), x)
        stats = ring.stats()
    assert_same_bits(got, want)
    assert after.lengths.tolist() == [704]
    assert stats.early_bytes == tail_cells(700, 128) * CELL_BYTES * LAYERS


def test_nothing_is_delivered_while_all_cells_fit_on_the_device(batch):
    cache = filled(batch.placement, [128, 0, 100])
    with Ring.open(batch.placement) as ring:
        out, _ = stepper(batch.placement)(cache, batch.x)
        stats = ring.stats()
    assert np.isfinite(np.asarray(out)).all()
    assert (stats.steps, stats.deliveries, stats.early_bytes) == (1, 0, 0)
    assert (stats.ordered_bytes, stats.gap_bytes) == (0, 0)


def test_a_cache_on_the_device_has_no_ring():
    placement = placement_of(ring_id=5, num_layers=1, device_cells=None)
    stepper(placement)(filled(placement, [700]), inputs(placement))
    counts = (ctypes.c_int64 * len(RingStats._fields))()
    known = ffi.require("cpu").kvjax_ring_stats
    known.restype = ctypes.c_bool
    assert not known(ctypes.c_int64(5), ctypes.c_int64(0), counts)
    with Ring.open(placement) as ring:
        stepper(placement)(filled(placement, [700]), inputs(placement))
        assert set(ring.stats()) == {0}
        assert list(ring.declines().values()) == ["all cells lie on the device"]


def test_layers_may_differ_in_their_device_cells(deep):
    on_device = (0, 128, 1024, 640, 0, 256, 1024, 512)
    placement = replaced(deep.placement, device_cells=on_device)
    with Ring.open(placement, FIVE_SLOTS) as ring:
        outs, _ = decode(placement, filled(placement, [700]), deep.x)
        stats = ring.stats()
    assert_same_steps(deep, outs)
    live = sum(tail_cells(700 + i, cells) for cells in on_device for i in range(STEPS))
    assert stats.early_bytes == live * CELL_BYTES
    assert stats.ordered_bytes == 0


def test_the_next_step_is_sent_ahead_across_a_block_border(deep):
    """Each step's first layers come from the step before, whatever its length is."""
    cache, x = filled(deep.placement, [766]), deep.x
    want, last = decode(deep.placement, cache, x)  # to 769: a seventh block
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        outs, after = decode(deep.placement, cache, x)
        stats = ring.stats()
    for got, expected in zip(outs, want, strict=True):
        assert_same_bits(got, expected)
    jax.tree.map(assert_same_bits, parts(after), parts(last))
    live = sum(766 + i for i in range(STEPS)) * CELL_BYTES * LAYERS
    assert (stats.early_bytes, stats.ordered_bytes) == (live, 0)
    assert stats.ahead_used > 0


@pytest.mark.parametrize("length", [1, 129, 640, 701, 702, 1000])
def test_what_was_sent_ahead_is_right_whatever_the_next_length(deep, length):
    step = stepper(deep.placement)

    def two_steps():
        _, cache = step(copied(deep.cache), deep.x)
        lengths = placed(deep.placement, np.array([length], np.int32))
        return np.asarray(step(cache._replace(lengths=lengths), deep.x)[0])

    want = two_steps()
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        got = two_steps()
        stats = ring.stats()
    assert_same_bits(got, want)
    assert stats.early_bytes == (700 + length) * CELL_BYTES * LAYERS
    assert stats.ordered_bytes == 0


def test_a_ring_may_serve_the_last_layer_alone(deep):
    placement = replaced(deep.placement, device_cells=(1024,) * 7 + (0,))
    with Ring.open(placement, FIVE_SLOTS) as ring:
        outs, _ = decode(placement, filled(placement, [700]), deep.x)
        stats = ring.stats()
    assert_same_steps(deep, outs)
    assert stats.early_bytes == sum(700 + i for i in range(STEPS)) * CELL_BYTES


def test_the_library_counts_what_the_stats_name():
    names = ffi.require("cpu").kvjax_ring_stat_names
    names.restype = ctypes.c_char_p
    assert tuple(names().decode().rstrip(",").split(",")) == RingStats._fields


# Settings


@pytest.mark.parametrize("slots", ["smallest", "odd", "default"])
@pytest.mark.parametrize("depth", [0, 1, 2, 8, 64])
def test_depth_and_slots_change_no_bit_under_delays(deep, depth, slots):
    slot_bytes = {"smallest": BLOCK_BYTES, "odd": 3 * BLOCK_BYTES + 64}.get(slots)
    config = (
        RingConfig(depth=depth)
        if slot_bytes is None
        else RingConfig(depth=depth, slot_bytes=slot_bytes, budget_bytes=4 * slot_bytes)
    )
    emulation = Emulation(seed=depth, max_delay_us=100)
    with Ring.open(deep.placement, config, emulation=emulation) as ring:
        check(deep)
        stats = ring.stats()
    delivered = (stats.early_bytes, stats.ordered_bytes)
    live = sum(700 + i for i in range(STEPS)) * CELL_BYTES * LAYERS
    assert delivered == ((0, live) if depth == 0 else (live, 0))
    assert stats.ordered_depth == (STEPS * LAYERS if depth == 0 else 0)
    if depth > 0:
        assert stats.slot_reuses >= 3 * stats.num_slots or slots == "default"
        assert stats.stop_slots + stats.stop_depth > 0 or depth >= LAYERS


def test_cells_too_large_for_a_slot_go_ordered():
    """A block of 2,112 heads is larger than a default slot, which no ring was told."""
    placement = placement_of(
        ring_id=10, num_layers=1, capacity=256, num_kv_heads=2112, group=1
    )
    on_device = replaced(placement)
    x = inputs(placement)
    want, _ = stepper(on_device)(filled(on_device, [200]), x)
    got, _ = stepper(placement)(filled(placement, [200]), x)
    assert_same_bits(got, want)
    small = placement_of(ring_id=10, num_layers=1)
    with Ring.open(small, FIVE_SLOTS) as ring:  # of another cache, by mistake
        got, _ = stepper(placement)(filled(placement, [200]), x)
        assert_same_bits(got, want)
        assert ring.stats().early_bytes == 0


def test_a_ring_reopens_with_other_settings(deep):
    for num_slots in (3, 7):
        config = RingConfig(
            slot_bytes=BLOCK_BYTES, budget_bytes=num_slots * BLOCK_BYTES
        )
        with Ring.open(deep.placement, config) as ring:
            check(deep)
            stats = ring.stats()
        assert (stats.num_slots, stats.steps) == (num_slots, STEPS)
        assert stats.ordered_bytes == 0


def test_the_ring_is_no_part_of_the_program(deep):
    before = program(deep.placement)._cache_size()
    with Ring.open(deep.placement, FIVE_SLOTS):
        check(deep)
    check(deep)
    assert program(deep.placement)._cache_size() == before


def test_a_ring_is_open_once(deep):
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        with pytest.raises(
            ValueError, match="ring_id 1 is open already on .*another ring"
        ):
            Ring.open(deep.placement)
        check(deep)
        assert ring.stats().ordered_bytes == 0


def test_a_refused_open_leaves_no_device_half_open(deep):
    devices = jax.devices()
    both = [devices[1], devices[0]]  # the open one comes second
    config = deep.placement.config
    wide = Placement(
        config=config, num_heads=2, mesh=make_mesh({"tp": 2}, both), ring_id=1
    )
    alone = Placement(
        config=config, num_heads=2, mesh=make_mesh({"tp": 1}, both), ring_id=1
    )
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        with pytest.raises(ValueError, match=f"open already on {devices[0]}"):
            Ring.open(wide)
        Ring.open(alone).close()
        check(deep)
        assert ring.stats().ordered_bytes == 0


def test_steps_after_a_close_go_ordered(deep):
    step, cache = stepper(deep.placement), copied(deep.cache)
    ring = Ring.open(deep.placement, FIVE_SLOTS)
    out, cache = step(cache, deep.x)
    assert_same_bits(out, deep.outs[0])
    ring.close()
    for want in deep.outs[1:]:
        out, cache = step(cache, deep.x)
        assert_same_bits(out, want)
    stats = ring.stats()
    assert stats.early_bytes == 700 * CELL_BYTES * LAYERS
    assert stats.ordered_bytes == (701 + 702) * CELL_BYTES * LAYERS
    assert (stats.ordered_depth, stats.ring_bytes) == (2 * LAYERS, 0)
    assert list(ring.declines().values()) == ["the ring is closed"]


@pytest.mark.parametrize("opened", [False, True], ids=["without", "with a ring"])
def test_a_ring_may_open_while_a_step_runs(deep, opened):
    """The step goes on: by the ordered path from there, whatever it began with."""
    reached, goes_on = threading.Event(), threading.Event()

    def host(_):
        reached.set()
        assert goes_on.wait(60)

    step = stepper(deep.placement, between=on_host(host))
    ring = Ring.open(deep.placement, FIVE_SLOTS) if opened else None
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(step, copied(deep.cache), deep.x)
        assert reached.wait(60)
        if opened:
            ring.close()
        with Ring.open(deep.placement, FIVE_SLOTS) as other:
            goes_on.set()
            assert_same_bits(running.result()[0], deep.outs[0])
            stats = other.stats()
            check(deep)
            after = other.stats()
    live = 700 * CELL_BYTES * (LAYERS - 4)
    assert (stats.steps, stats.ordered_bytes, stats.early_bytes) == (0, live, 0)
    assert (after.ordered_bytes, after.dropped_plans) == (live, 0)


def test_closing_twice_closes_no_later_ring(deep):
    first = Ring.open(deep.placement, FIVE_SLOTS)
    first.close()
    first.close()
    with Ring.open(deep.placement, FIVE_SLOTS) as second:
        first.close()
        check(deep)
        assert second.stats().ordered_bytes == 0


def test_a_ring_that_nobody_holds_is_closed(deep):
    Ring.open(deep.placement, FIVE_SLOTS)
    gc.collect()
    Ring.open(deep.placement, FIVE_SLOTS).close()


# Declines


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (RingConfig(depth=0), "depth is 0"),
        (RingConfig(budget_bytes=0), "budget_bytes is 0"),
        (
            RingConfig(slot_bytes=BLOCK_BYTES, budget_bytes=2 * BLOCK_BYTES - 1),
            "a ring needs 2 slots of 8192 bytes, 16384 in all, "
            "budget_bytes allows 16383",
        ),
    ],
    ids=["depth 0", "no budget", "below two slots"],
)
def test_a_declined_ring_costs_nothing_and_changes_no_bit(deep, config, reason):
    with Ring.open(deep.placement, config) as ring:
        check(deep)
        stats = ring.stats()
        assert list(ring.declines().values()) == [reason]
    assert (stats.ring_bytes, stats.num_slots, stats.deliveries) == (0, 0, 0)
    assert stats.ordered_depth == STEPS * LAYERS


@pytest.mark.parametrize("budget", [7 * BLOCK_BYTES, 7 * BLOCK_BYTES + 77])
def test_a_budget_below_a_layer_makes_two_slots(deep, budget):
    """Of whole blocks each."""
    config = RingConfig(budget_bytes=budget)
    plan = plan_ring(deep.placement, config)
    assert plan == Slots(2, 3 * BLOCK_BYTES)
    with Ring.open(deep.placement, config) as ring:
        check(deep)
        stats = ring.stats()
    assert (stats.ring_bytes, stats.ordered_bytes) == (plan.ring_bytes, 0)
    few = plan_ring(deep.placement, RingConfig(budget_bytes=2 * BLOCK_BYTES - 1))
    assert few.reason.startswith(f"a ring needs 2 slots of {BLOCK_BYTES} bytes")


@pytest.mark.parametrize(
    "budget, num_slots, slot",
    [(8, 4, 2), (9, 3, 3), (16, 4, 4), (23, 5, 4), (24, 3, 8)],
)
def test_a_layer_that_fits_the_budget_makes_even_slots(deep, budget, num_slots, slot):
    """Of eight blocks: a third of the budget would leave the last slot nearly empty."""
    plan = plan_ring(deep.placement, RingConfig(budget_bytes=budget * BLOCK_BYTES))
    assert plan == Slots(num_slots, slot * BLOCK_BYTES)
    asked = RingConfig(budget_bytes=budget * BLOCK_BYTES, slot_bytes=3 * BLOCK_BYTES)
    assert plan_ring(deep.placement, asked).slot_bytes == 3 * BLOCK_BYTES


def test_every_planned_slot_begins_where_kernels_can_load():
    """And holds a block, within the budget; two slots at least."""
    draw = np.random.default_rng(0)
    for _ in range(2000):
        blocks = int(draw.integers(1, 40))
        placement = placement_of(
            ring_id=10, num_layers=2, capacity=128 * blocks, num_kv_heads=3, group=1
        )
        block = smallest_slot(placement)
        config = RingConfig(
            budget_bytes=int(draw.integers(0, 50 * block)),
            slot_bytes=[None, int(draw.integers(block, 9 * block))][draw.integers(2)],
        )
        plan = plan_ring(placement, config)
        assert plan.slot_bytes % 256 == 0
        assert block <= plan.slot_bytes <= blocks * block
        if isinstance(plan, Slots):
            assert plan.num_slots >= 2
            assert plan.ring_bytes <= config.budget
        else:
            assert config.budget < 2 * min(config.slot_bytes or block, blocks * block)


def test_two_even_slots_are_sent_ahead_whole(deep):
    """Of a layer of four blocks, cut in two of two; the step to come is cut alike."""
    placement = replaced(deep.placement, device_cells=0)
    step, cache = stepper(placement), filled(placement, [500])
    with Ring.open(placement, RingConfig(budget_bytes=6 * BLOCK_BYTES)) as ring:
        for i in range(4):
            _, cache = step(cache, inputs(placement, seed=i))
        stats = ring.stats()
    assert (stats.num_slots, stats.ahead_dropped) == (2, 0)
    assert stats.ahead_used == 3 * 2


def test_a_declined_ring_copies_no_more_at_once_than_a_layer(deep):
    """Nor less than a ring of the default budget would."""
    layer, default = 8 * BLOCK_BYTES, plan_ring(deep.placement, RingConfig())
    for config in (
        RingConfig(depth=0),
        RingConfig(budget_bytes=0),
        RingConfig(budget_bytes=BLOCK_BYTES),
        RingConfig(depth=0, slot_bytes=50 << 30),
        RingConfig(slot_bytes=50 << 30, budget_bytes=BLOCK_BYTES),
    ):
        plan = plan_ring(deep.placement, config)
        assert isinstance(plan, Decline)
        assert plan.slot_bytes == default.slot_bytes == layer


def test_a_slot_of_an_odd_size_begins_where_kernels_can_load(deep):
    plan = plan_ring(deep.placement, RingConfig(slot_bytes=2 * BLOCK_BYTES + 77))
    assert plan.slot_bytes == 2 * BLOCK_BYTES


def test_a_budget_too_small_is_said_once_for_all_devices(pair, capfd):
    config = RingConfig(slot_bytes=BLOCK_BYTES, budget_bytes=BLOCK_BYTES)
    with Ring.open(pair.placement, config):
        check(pair)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert "budget_bytes allows 8192" in said[0]


@pytest.mark.parametrize(
    "config", [RingConfig(depth=0), RingConfig(budget_bytes=0)], ids=["depth", "budget"]
)
def test_a_decline_that_was_asked_for_is_not_said(deep, capfd, config):
    with Ring.open(deep.placement, config):
        check(deep)
    assert capfd.readouterr().err == ""


def test_the_reference_backend_takes_a_ring_that_does_nothing(deep):
    placement = replaced(deep.placement, device_cells=0, backend="reference")
    with Ring.open(placement, FIVE_SLOTS) as ring, Ring.open(placement):
        assert ring.stats() == ring.stats(jax.devices()[0]) == RingStats()
        assert list(ring.declines().values()) == ["the reference backend has no ring"]


@pytest.mark.parametrize(
    ("headroom", "emulation", "reason"),
    [
        (
            0,
            Emulation(free_bytes=5 * BLOCK_BYTES - 1),
            "the ring needs 40960 bytes and 0 must stay free, the device has 40959",
        ),
        (
            1000,
            Emulation(free_bytes=5 * BLOCK_BYTES + 999),
            "the ring needs 40960 bytes and 1000 must stay free, the device has 41959",
        ),
        (0, Emulation(fail_allocation=True), "allocating 40960 bytes failed"),
    ],
    ids=["too little free", "headroom", "allocation fails"],
)
def test_a_device_without_room_declines_once(deep, capfd, headroom, emulation, reason):
    config = RingConfig(
        slot_bytes=BLOCK_BYTES, budget_bytes=5 * BLOCK_BYTES, headroom_bytes=headroom
    )
    with Ring.open(deep.placement, config, emulation=emulation) as ring:
        assert ring.declines() == {}
        check(deep)
        check(deep)
        stats = ring.stats()
        assert list(ring.declines().values()) == [reason]
    assert (stats.ring_bytes, stats.num_slots, stats.deliveries) == (0, 0, 0)
    assert stats.ordered_depth == 2 * STEPS * LAYERS
    said = capfd.readouterr().err.splitlines()
    assert said == [f"kvjax: no ring, going on with the ordered path: {reason}"]


def test_room_to_the_byte_is_enough(deep):
    config = RingConfig(
        slot_bytes=BLOCK_BYTES, budget_bytes=5 * BLOCK_BYTES, headroom_bytes=1000
    )
    emulation = Emulation(free_bytes=5 * BLOCK_BYTES + 1000)
    with Ring.open(deep.placement, config, emulation=emulation) as ring:
        check(deep)
        assert ring.declines() == {}
        assert ring.stats().ordered_bytes == 0


@pytest.mark.parametrize("how", ["budget", "memory"])
def test_one_device_declines_alone(pair, how):
    first, second = pair.placement.mesh.devices.flat
    per_device = {second: RingConfig(budget_bytes=0)} if how == "budget" else None
    emulation = {second: Emulation(free_bytes=0)} if how == "memory" else None
    with Ring.open(
        pair.placement, FIVE_SLOTS, per_device=per_device, emulation=emulation
    ) as ring:
        check(pair)
        one, other = ring.stats(first), ring.stats(second)
        assert list(ring.declines()) == [second]
    live = sum(700 + i for i in range(STEPS)) * CELL_BYTES * 2
    assert (one.early_bytes, one.ordered_bytes) == (live, 0)
    assert (other.early_bytes, other.ordered_bytes, other.ring_bytes) == (0, live, 0)


# Disturbed steps


def on_host(f):
    """A `between` that calls f on the host behind layer 3; layer 4 waits for it."""

    def call(out, q):
        f(out)
        return q

    def between(out, q):
        return jax.pure_callback(call, jax.ShapeDtypeStruct(q.shape, q.dtype), out, q)

    return between


def test_an_aborted_step_harms_no_other(deep):
    fails = [False]

    def host(_):
        if fails[0]:
            raise RuntimeError("behind layer 3")

    step = stepper(deep.placement, between=on_host(host))
    want, _ = decode(deep.placement, deep.cache, deep.x, step=step)
    emulation = Emulation(max_delay_us=200)
    with Ring.open(deep.placement, FIVE_SLOTS, emulation=emulation) as ring:
        out, cache = step(copied(deep.cache), deep.x)
        assert_same_bits(out, want[0])
        held = copied(cache)
        fails[0] = True
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="layer 3"):
            step(cache, deep.x)
        fails[0] = False
        before = ring.stats()
        check(deep)  # another cache on the same ring
        for i in (1, 2):
            out, held = step(held, deep.x)
            assert_same_bits(out, want[i])
        stats = ring.stats()
    assert (before.steps, before.dropped_plans) == (2, 0)
    assert (stats.dropped_plans, stats.skipped_attends) == (1, LAYERS - 4)
    assert stats.ordered_bytes == 0


@pytest.mark.parametrize(
    ("order", "counts"),
    [
        ((0, 1, 2, 3, 4, 5, 6), dict(ordered_sequence=0, skipped_attends=0)),
        ((0, 3, 4, 5, 6, 7), dict(ordered_sequence=0, skipped_attends=2)),
        ((0, 1, 1, 2, 3, 4, 5, 6, 7), dict(ordered_sequence=1, skipped_attends=0)),
        ((0, 2, 1, 3, 4, 5, 6, 7), dict(ordered_sequence=1, skipped_attends=1)),
        ((7, 6, 5, 4, 3, 2, 1, 0), dict(ordered_sequence=7, skipped_attends=7)),
    ],
    ids=["last skipped", "two skipped", "one repeated", "two swapped", "backwards"],
)
def test_attends_out_of_the_list_give_the_same_bits(deep, order, counts):
    listed = tuple((layer, None) for layer in range(LAYERS))
    step = stepper(deep.placement, order=order, listed=listed)
    emulation = Emulation(max_delay_us=100)
    with Ring.open(deep.placement, FIVE_SLOTS, emulation=emulation) as ring:
        out, _ = step(copied(deep.cache), deep.x)
        assert_same_bits(out, deep.outs[0][list(order)])
        stats = ring.stats()
        check(deep)
        after = ring.stats()
    assert {name: getattr(stats, name) for name in counts} == counts
    live = 700 * CELL_BYTES
    assert stats.ordered_bytes == stats.ordered_sequence * live
    assert after.ordered_bytes == stats.ordered_bytes
    assert after.dropped_plans == (7 not in order)


def test_a_listed_repeat_is_delivered_twice(deep):
    order = (0, 1, 1, 2, 3, 4, 5, 6, 7)
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        out, _ = stepper(deep.placement, order=order)(copied(deep.cache), deep.x)
        stats = ring.stats()
    assert_same_bits(out, deep.outs[0][list(order)])
    assert stats.early_bytes == 9 * 700 * CELL_BYTES
    assert stats.ordered_bytes == 0


def two_caches(first: Placement, second: Placement):
    """A step of two caches in one program; their attends alternate."""

    def after(x, out):
        return x + (out.sum() > 1e30).astype(x.dtype)  # a dependency, not a change

    def step(caches, x):
        tokens, one = Step.begin(first, caches[0], x.tokens)
        outs, other = [], None
        for layer in range(first.config.num_layers):
            q = x.q[layer] + tokens[:, :, None, None].astype(x.q.dtype)
            q = after(q, outs[-1]) if outs else q
            outs.append(one.attend(layer, q, x.k[layer], x.v[layer], scale=0.5))
            if other is None:
                _, other = Step.begin(second, caches[1], after(tokens, outs[-1]))
            q = after(x.q[layer], outs[-1])
            outs.append(other.attend(layer, q, x.k[layer], x.v[layer], scale=0.5))
        return jnp.stack(outs[::2]), jnp.stack(outs[1::2]), (one.end(), other.end())

    shardings = first.cache_shardings(), second.cache_shardings()
    every = first.sharding(jax.sharding.PartitionSpec())
    step = jax.jit(step, donate_argnums=0, out_shardings=(every, every, shardings))
    return lambda caches, x: jax.block_until_ready(step(caches, x))


def test_two_rings_interleave_in_one_program(deep):
    second = replaced(deep.placement, device_cells=0, ring_id=6)
    other = filled(second, [300], seed=9)
    want, _ = stepper(second)(copied(other), deep.x)
    emulation = Emulation(max_delay_us=100)
    with (
        Ring.open(deep.placement, FIVE_SLOTS, emulation=emulation) as ring,
        Ring.open(second, FIVE_SLOTS, emulation=emulation) as other_ring,
    ):
        caches = copied(deep.cache), copied(other)
        outs = two_caches(deep.placement, second)(caches, deep.x)
        assert_same_bits(outs[0], deep.outs[0])
        assert_same_bits(outs[1], want)
        stats = ring.stats(), other_ring.stats()
    for each in stats:
        assert (each.ordered_bytes, each.dropped_plans, each.skipped_attends) == (
            0,
            0,
            0,
        )
    assert stats[0].early_bytes == 700 * CELL_BYTES * LAYERS
    assert stats[1].early_bytes == 300 * CELL_BYTES * LAYERS


def test_two_caches_take_turns_on_one_ring(deep):
    other = filled(deep.placement, [300], seed=9)
    step = stepper(deep.placement)
    want, _ = decode(deep.placement, other, deep.x)
    first, second = copied(deep.cache), copied(other)
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        for i in range(STEPS):
            out, first = step(first, deep.x)
            assert_same_bits(out, deep.outs[i])
            out, second = step(second, deep.x)
            assert_same_bits(out, want[i])
        stats = ring.stats()
    assert (stats.ordered_bytes, stats.dropped_plans, stats.moved_tails) == (0, 0, 0)
    assert stats.ahead_used == 0
    assert stats.ahead_dropped > 0


@pytest.mark.parametrize("lengths", [700, 300])
def test_two_caches_interleaved_on_one_ring_are_right_or_nan(deep, capfd, lengths):
    """Attends of the first go ordered by the second's lengths; others give NaN."""
    other = filled(deep.placement, [lengths], seed=9)
    want, _ = stepper(deep.placement)(copied(other), deep.x)
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        caches = copied(deep.cache), copied(other)
        outs = two_caches(deep.placement, deep.placement)(caches, deep.x)
        stats = ring.stats()
        assert_same_bits(outs[0][0], deep.outs[0][0])
        assert_same_bits(outs[1], want)
        if lengths == 700:
            assert_same_bits(outs[0], deep.outs[0])
        else:
            assert np.isnan(np.asarray(outs[0][1:])).all()
        check(deep)
    assert (stats.dropped_plans, stats.ordered_moved) == (1, LAYERS - 1)
    assert stats.ordered_sequence == LAYERS - 1
    assert stats.length_errors == (0 if lengths == 700 else LAYERS - 1)
    capfd.readouterr()


def test_two_caches_of_other_capacities_on_one_ring_are_refused(deep):
    """The first's attends find the second's plan: the cells would lie elsewhere."""
    config = deep.placement.config
    roomy = dataclasses.replace(config, capacity=config.capacity + BLOCK)
    second = dataclasses.replace(deep.placement, config=roomy)
    caches = copied(deep.cache), filled(second, [700], seed=9)
    with Ring.open(deep.placement, FIVE_SLOTS):
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError), match="need a ring_id each"
        ):
            two_caches(deep.placement, second)(caches, deep.x)


def test_without_donation_results_are_right_and_a_warning_comes_once(deep, capfd):
    step = jax.jit(lambda cache, x: run(deep.placement, cache, x))
    with Ring.open(deep.placement, FIVE_SLOTS) as ring:
        cache = deep.cache
        for want in deep.outs:
            out, cache = step(cache, deep.x)
            assert_same_bits(out, want)
        stats = ring.stats()
    assert stats.moved_tails == (STEPS - 1) * LAYERS  # the first has nothing to compare
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert "Donate the cache in the outermost jit" in said[0]


def test_a_reset_sequence_leaves_the_deep_ones_alone(batch):
    cache = reset(copied(batch.cache), 0)
    want = stepper(batch.placement)(filled(batch.placement, [0, 60, 650]), batch.x)[0]
    with Ring.open(batch.placement, RingConfig(slot_bytes=BLOCK_BYTES)) as ring:
        out, cache = stepper(batch.placement)(cache, batch.x)
        stats = ring.stats()
    assert_same_bits(out, want)
    assert_same_bits(out[:, 1:], batch.outs[0][:, 1:])
    assert cache.lengths.tolist() == [1, 61, 651]
    assert stats.early_bytes == tail_cells(650, 128) * CELL_BYTES * 2


def test_a_full_sequence_gives_nan_alone_and_is_counted(batch):
    cache = filled(batch.placement, [1024, 60, 650])
    with Ring.open(batch.placement, FIVE_SLOTS) as ring:
        out, cache = stepper(batch.placement)(cache, batch.x)
        out = np.asarray(out)
        stats = ring.stats()
    assert np.isnan(out[:, 0]).all()
    assert_same_bits(out[:, 1:], batch.outs[0][:, 1:])
    assert cache.lengths.tolist() == [1024, 61, 651]
    assert stats.length_errors == batch.placement.config.num_layers


# Many steps


@pytest.mark.parametrize("loop", ["scan", "while_loop"])
def test_steps_in_one_program_use_the_ring(deep, loop):
    def scan(cache, x):
        def body(cache, _):
            out, cache = run(deep.placement, cache, x)
            return cache, out

        cache, outs = jax.lax.scan(body, cache, length=STEPS)
        return outs, cache

    def while_loop(cache, x):
        def body(state):
            i, outs, cache = state
            out, cache = run(deep.placement, cache, x)
            return i + 1, outs.at[i].set(out), cache

        outs = jnp.zeros((STEPS, *x.q.shape), x.q.dtype)
        state = jax.lax.while_loop(lambda s: s[0] < STEPS, body, (0, outs, cache))
        return state[1:]

    shardings = (deep.x.q.sharding, deep.placement.cache_shardings())
    steps = {"scan": scan, "while_loop": while_loop}[loop]
    steps = jax.jit(steps, donate_argnums=0, out_shardings=shardings)
    emulation = Emulation(max_delay_us=100)
    with Ring.open(deep.placement, FIVE_SLOTS, emulation=emulation) as ring:
        outs, cache = jax.block_until_ready(steps(copied(deep.cache), deep.x))
        assert_same_steps(deep, list(np.asarray(outs)))
        stats = ring.stats()
    jax.tree.map(assert_same_bits, parts(cache), parts(deep.last))
    live = sum(700 + i for i in range(STEPS)) * CELL_BYTES * LAYERS
    assert (stats.steps, stats.early_bytes) == (STEPS, live)
    assert (stats.ordered_bytes, stats.dropped_plans, stats.moved_tails) == (0, 0, 0)


def test_every_step_draws_a_new_stamp(deep):
    step, cache = stepper(deep.placement), copied(deep.cache)
    stamps = {tuple(np.asarray(cache.stamp)[0])}
    for _ in range(STEPS):
        _, cache = step(cache, deep.x)
        stamps.add(tuple(np.asarray(cache.stamp)[0]))
    assert len(stamps) == STEPS + 1
    assert not reset(cache).stamp.any()


def test_an_idle_ring_is_given_back_and_taken_again():
    placement = placement_of(ring_id=7, num_layers=1, capacity=256, device_cells=128)
    step = stepper(placement)
    idle = inputs(placement, num_new=[0])
    with Ring.open(placement, FIVE_SLOTS) as ring:
        cache = filled(placement, [128])
        for _ in range(IDLE_STEPS):
            _, cache = step(cache, idle)
        held = ring.stats()
        _, cache = step(cache, idle)
        given_back = ring.stats()
        x = inputs(placement)
        outs, cache = decode(placement, filled(placement, [200]), x)
        taken = ring.stats()
    want, _ = decode(placement, filled(placement, [200]), x)
    for got, expected in zip(outs, want, strict=True):
        assert_same_bits(got, expected)
    assert (held.given_back, held.ring_bytes) == (0, 2 * BLOCK_BYTES)
    assert (given_back.given_back, given_back.ring_bytes) == (1, 0)
    assert (taken.given_back, taken.ring_bytes) == (1, 2 * BLOCK_BYTES)
    first = (200 - 128) * CELL_BYTES  # the step that found the ring gone
    assert taken.ordered_bytes == first
    assert taken.early_bytes == (201 + 202 - 2 * 128) * CELL_BYTES


def resident_bytes() -> int:
    with open("/proc/self/statm") as fields:
        return int(fields.read().split()[1]) * 4096


def test_a_thousand_steps_and_rings_leak_nothing():
    placement = placement_of(ring_id=8, num_layers=1, capacity=256)
    step, x = stepper(placement), inputs(placement, num_new=[0])
    cache = filled(placement, [200])
    sizes = []
    for _ in range(4):
        for _ in range(25):
            with Ring.open(placement, FIVE_SLOTS):
                for _ in range(10):
                    _, cache = step(cache, x)
        gc.collect()
        sizes.append(resident_bytes())
    assert sizes[-1] - sizes[0] < 4 * MIB, sizes


# Several devices


def test_each_device_has_its_own_ring():
    mesh = make_mesh({"tp": 8})
    placement = placement_of(ring_id=9, mesh=mesh, num_layers=2, num_kv_heads=8)
    cache, x = filled(placement, [700]), inputs(placement)
    want, _ = stepper(placement)(copied(cache), x)
    emulation = {d: Emulation(seed=d.id, max_delay_us=100) for d in mesh.devices.flat}
    with Ring.open(placement, FIVE_SLOTS, emulation=emulation) as ring:
        out, after = stepper(placement)(copied(cache), x)
        assert_same_bits(out, want)
        each = [ring.stats(device) for device in mesh.devices.flat]
        total = ring.stats()
    assert {s.early_bytes for s in each} == {700 * CELL_BYTES * 2}
    assert {s.ring_bytes for s in each} == {5 * BLOCK_BYTES}
    assert total.early_bytes == 8 * each[0].early_bytes
    assert total.ordered_bytes == 0
    assert len({tuple(stamp) for stamp in np.asarray(after.stamp)}) == 8
