"""Where cells lie on a mesh: stored heads, shardings, steps on each kind of mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from steps import BLOCK_BYTES, filled, inputs, placement_of, stepper
from tolerance import assert_same_bits

from kvjax.config import RingConfig
from kvjax.delivery.allocate import init_cache
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.ring import Ring

FOUR_SLOTS = RingConfig(slot_bytes=2 * BLOCK_BYTES, budget_bytes=8 * BLOCK_BYTES)


def mesh_of(sizes: dict[str, int], kind: AxisType = AxisType.Auto) -> Mesh:
    mesh = make_mesh(sizes)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(sizes))


# Heads


@pytest.mark.parametrize(
    ("num_kv_heads", "axis_size", "stored", "local"),
    [(8, 1, 8, 8), (8, 2, 8, 4), (8, 8, 8, 1), (2, 4, 4, 1), (1, 8, 8, 1)],
)
def test_a_device_stores_at_least_one_head(num_kv_heads, axis_size, stored, local):
    mesh = make_mesh({"tp": axis_size})
    placement = placement_of(
        ring_id=40, mesh=mesh, num_kv_heads=num_kv_heads, group=8 // num_kv_heads
    )
    assert placement.stored_heads == stored
    assert placement.local_heads == local


@pytest.mark.parametrize("device_cells", [0, 512, None])
def test_a_caches_arrays_keep_one_sharding_object(device_cells):
    """A call then need not compare shardings by value, some thirty of them."""
    placement = placement_of(ring_id=40, device_cells=device_cells)
    wanted = [id(sharding) for sharding in jax.tree.leaves(placement.cache_shardings())]
    cache = init_cache(placement)
    for _ in range(2):
        assert [id(leaf.sharding) for leaf in jax.tree.leaves(cache)] == wanted
        cache = stepper(placement)(cache, inputs(placement))[1]


def test_heads_are_repeated_next_to_themselves():
    """Two heads on four devices, so that each query head finds its own: 0 0 1 1."""
    mesh = make_mesh({"tp": 4})
    placement = placement_of(ring_id=40, mesh=mesh, num_kv_heads=2, group=4)
    heads = np.arange(2, dtype=np.float32)[None, None, :, None] * np.ones((1, 3, 1, 8))
    expanded = placement.expand_heads(jax.numpy.asarray(heads, "float32"))
    assert expanded[0, 0, :, 0].tolist() == [0, 0, 1, 1]
    assert placement.expand_heads(expanded) is expanded
    single = dataclasses.replace(placement, mesh=make_mesh())
    assert single.expand_heads(expanded) is expanded


# Shardings


def test_cells_are_split_by_head_and_the_stamp_by_device():
    mesh = make_mesh({"dp": 2, "tp": 4})
    placement = placement_of(
        ring_id=40,
        mesh=mesh,
        num_layers=3,
        num_kv_heads=4,
        device_cells=(0, 1024, 128),
    )
    shardings = placement.cache_shardings()
    assert shardings.device.spec == shardings.tail.spec == P(None, "tp", None)
    assert shardings.tail.memory_kind == "pinned_host"
    assert shardings.lengths.spec == P()
    assert shardings.stamp.shard_shape((8, 2)) == (1, 2)


def test_a_placement_is_static():
    mesh = make_mesh({"tp": 2})
    one, same = (placement_of(ring_id=40, mesh=mesh, num_kv_heads=2) for _ in "12")
    assert one == same
    assert hash(one) == hash(same)
    assert one != dataclasses.replace(one, ring_id=41)


def test_a_mesh_is_one_device_unless_told():
    mesh = make_mesh()
    assert dict(mesh.shape) == {"tp": 1}
    last = make_mesh({"dp": 1, "tp": 2}, jax.devices()[6:])
    assert [d.id for d in last.devices.flat] == [6, 7]
    assert set(last.axis_types) == {AxisType.Auto}


# Steps


@pytest.fixture(scope="module")
def want() -> np.ndarray:
    """A step on one device."""
    placement = placement_on(make_mesh())
    out, _ = stepper(placement)(filled(placement, [400, 130]), inputs(placement))
    return np.asarray(out)


def placement_on(mesh: Mesh, **changes) -> Placement:
    facts = dict(num_layers=2, batch_size=2, capacity=512, num_kv_heads=2, group=2)
    return placement_of(ring_id=42, mesh=mesh, device_cells=128, **facts | changes)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ({"tp": 2}, AxisType.Auto),
        ({"tp": 2}, AxisType.Explicit),
        ({"tp": 4}, AxisType.Auto),
        ({"dp": 2, "tp": 2}, AxisType.Auto),
        ({"tp": 2, "dp": 2}, AxisType.Auto),
        ({"dp": 2, "tp": 2}, AxisType.Explicit),
        ({"dp": 2, "tp": 1}, AxisType.Auto),
    ],
    ids=lambda x: "x".join(map(str, x.items())) if isinstance(x, dict) else x.name,
)
def test_a_mesh_changes_no_bit_and_moves_no_tail(want, sizes, kind):
    placement = placement_on(mesh_of(sizes, kind))
    cache, x = filled(placement, [400, 130]), inputs(placement)
    with Ring.open(placement, FOUR_SLOTS) as ring:
        out, cache = stepper(placement)(cache, x)
        assert_same_bits(out, want)
        wheres = pointers(cache)
        _, cache = stepper(placement)(cache, x)
        assert pointers(cache) == wheres
        each = [ring.stats(device) for device in placement.mesh.devices.flat]
    live = (400 - 128) + (130 - 128) + (401 - 128) + (131 - 128)
    cell = 64 * placement.local_heads
    assert {stats.early_bytes for stats in each} == {2 * live * cell}
    assert {stats.ordered_bytes + stats.moved_tails for stats in each} == {0}
    shardings = placement.cache_shardings()
    jax.tree.map(lambda x, s: x.sharding == s or pytest.fail(str(s)), cache, shardings)


def pointers(cache) -> list[int]:
    """Where each shard of each tail lies."""
    return [
        shard.data.unsafe_buffer_pointer() for shard in cache.tail.addressable_shards
    ]
