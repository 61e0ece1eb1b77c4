"""What measures and what it is measured with, on the emulated device."""

import dataclasses
import hashlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import inputs, parts, placement_of

from kvjax.cache.state import layer_cells
from kvjax.config import MIB
from kvjax.delivery import ffi
from kvjax.delivery.placement import make_mesh
from kvjax.delivery.ring import Ring
from kvjax.measurement import (
    device_memory,
    link_rate,
    link_rates,
    measure_costs,
    provenance,
    random_cache,
    read_rate,
    rewind,
    run_steps,
)
from kvjax.model.attention import Step


def step_of(placement):
    """A step of attention alone: the token is what comes out, folded."""
    given = inputs(placement)
    config = placement.config

    def step(tokens, cache):
        _, begun = Step.begin(placement, cache, tokens[:, None])
        drawn = jnp.zeros(config.batch_size, jnp.int32)
        for layer in range(config.num_layers):
            q, k, v = (x[layer] for x in (given.q, given.k, given.v))
            out = begun.attend(layer, q, k, v, scale=1.0)
            folded = jnp.abs(out).sum(axis=(1, 2, 3)) * 1000.0
            drawn = drawn + folded.astype(jnp.int32)
        return drawn, begun.end()

    where = placement.cache_shardings()
    return jax.jit(step, donate_argnums=1, out_shardings=(where.lengths, where))


def first_of(placement) -> jax.Array:
    lengths = placement.cache_shardings().lengths
    return jnp.zeros(placement.config.batch_size, jnp.int32, device=lengths)


def test_rates_are_bytes_over_seconds():
    device = jax.devices()[0]
    # Some GB/s on any machine; a slip of 1,000 in a unit would show.
    for rate in (link_rate(device, passes=2), read_rate(device, passes=2)):
        assert 1e8 < rate < 1e12


def test_small_pieces_are_not_a_larger_copy():
    rate = link_rate(jax.devices()[0], piece_bytes=4096, total_bytes=MIB, passes=2)
    assert 1e7 < rate < 1e13


def test_devices_copy_once_all_have_their_memory():
    """What others are waited for is no part of a pass: 3 MB/s if it were."""
    called = []

    def start():
        called.append(time.sleep(0.3))

    sizes = dict(piece_bytes=MIB, total_bytes=3 * MIB, passes=2)
    rates = link_rates(jax.devices()[:3], **sizes, start=start)
    assert len(rates) == 3 and called == [None]
    assert min(rates) > 2e7
    with pytest.raises(ValueError, match="cannot measure cpu:0, cpu:1: no .* bytes"):
        link_rates(jax.devices()[:2], piece_bytes=1 << 50, start=start)
    assert called == [None, None]  # who waits for the others' start isn't left waiting


def test_memory_that_cannot_be_had_is_told():
    with pytest.raises(ValueError, match="cannot measure .* bytes to measure with"):
        read_rate(jax.devices()[0], total_bytes=1 << 60)


def test_free_memory_is_a_part_of_all():
    free, total = device_memory(jax.devices()[0])
    assert 0 < free < total


@pytest.mark.parametrize(
    ("device_cells", "capacity"), [(0, 384), (128, 384), (384, 384), (128, 640)]
)
def test_random_cells_are_the_same_bits_wherever_they_lie(device_cells, capacity):
    shape = dict(ring_id=701, batch_size=2)
    whole = placement_of(**shape, capacity=384, device_cells=None)
    other = placement_of(**shape, capacity=capacity, device_cells=device_cells)
    wanted, got = random_cache(whole, [7, 300]), random_cache(other, [7, 300])
    assert got.lengths.tolist() == [7, 300]
    drawn = []
    for layer in range(whole.config.num_layers):
        held = [x for x in layer_cells(other.config, got, layer) if x is not None]
        joined = np.concatenate(held, axis=1)[:, :384]
        drawn.append(np.asarray(layer_cells(whole.config, wanted, layer).device))
        np.testing.assert_array_equal(drawn[-1], joined)
    first, second = drawn[:2]
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize("device_cells", [0, 128])
def test_random_cells_need_no_native_library(device_cells, monkeypatch):
    native = placement_of(ring_id=706, batch_size=2, device_cells=device_cells)
    plain = dataclasses.replace(native, backend="reference")
    wanted = random_cache(native, [7, 300])
    monkeypatch.setattr(ffi, "library", lambda platform: None)
    got = random_cache(plain, [7, 300])
    for one, other in zip(parts(wanted), parts(got), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("devices", [2, 8])
def test_random_cells_are_the_same_bits_on_every_mesh(devices):
    facts = dict(num_layers=1, num_kv_heads=2, device_cells=128, capacity=256)
    alone = random_cache(placement_of(ring_id=705, **facts), [200])
    mesh = make_mesh({"tp": devices})
    split = random_cache(placement_of(ring_id=705, mesh=mesh, group=4, **facts), [200])
    copies = max(1, devices // 2)  # 0 0 0 0 1 1 1 1 on eight devices
    for one, many in zip(parts(alone), parts(split), strict=True):
        wanted = np.repeat(np.asarray(one), copies, axis=1)
        np.testing.assert_array_equal(np.asarray(many), wanted)


def test_a_rewound_cache_repeats_its_steps():
    placement = placement_of(ring_id=702, batch_size=2, device_cells=0)
    step = step_of(placement)
    with Ring.open(placement):
        cache = random_cache(placement, [200, 5])
        once = run_steps(step, first_of(placement), cache, 4)
        assert once.cache.lengths.tolist() == [204, 9]
        assert np.asarray(once.cache.stamp).any()
        cache = rewind(placement, once.cache, [200, 5])
        assert cache.lengths.tolist() == [200, 5]
        assert not np.asarray(cache.stamp).any()
        again = run_steps(step, first_of(placement), cache, 4)
    drawn = [[tokens.tolist() for tokens in run.drawn] for run in (once, again)]
    assert drawn[0] == drawn[1]
    assert len({str(tokens) for tokens in drawn[0]}) > 1
    assert once.seconds > 0


def test_costs_are_measured_on_the_device():
    placement = placement_of(ring_id=703, num_layers=2, device_cells=None)
    costs = measure_costs(placement, step_of(placement), steps=2, repeats=1)
    assert 1e8 < costs.link_bytes_s < 1e12
    assert 0 < costs.attend_bytes_s < 1e12
    assert 0 < costs.step_s < 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device_cells": 0}, "all cells on the device"),
        ({"device_cells": None, "capacity": 256}, "capacity must be above 262 cells"),
    ],
)
def test_costs_need_a_cache_on_the_device_with_room(changes, said):
    placement = placement_of(ring_id=704, num_layers=2, **changes)
    with pytest.raises(ValueError, match=said):
        measure_costs(placement, step_of(placement), steps=4)


def test_provenance_says_what_was_run_on_what():
    found = provenance(
        jax.devices()[0],
        ("jax", "no-such-package"),
        ["bench.py", "--a=1", "--json=/x/y.json", "--b=two words"],
    )
    assert found["command"] == "python bench.py --a=1 '--b=two words'"
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["no-such-package"] is None
    assert found["gpu"] is None and found["driver"] is None
    library = ffi.library_path("cpu").read_bytes()
    assert found["library_sha256"] == hashlib.sha256(library).hexdigest()
    given = provenance(jax.devices()[0], (), [], commit="1234")
    assert given["commit"] == "1234"
