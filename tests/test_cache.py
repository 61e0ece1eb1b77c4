"""What a cache holds: sizes, bytes, memories, records, reset."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import copied, filled, inputs, parts, placement_of, stepper
from tolerance import assert_same_bits

from kvjax.cache.formats import decode, encode
from kvjax.cache.state import (
    Cache,
    Extent,
    cache_bytes,
    layer_bytes,
    layer_cells,
    layer_extents,
    reset,
)
from kvjax.config import CacheConfig
from kvjax.delivery.allocate import Footprint, footprint, init_cache
from kvjax.delivery.placement import Placement, device_bytes, make_mesh
from kvjax.delivery.plan import smallest_slot


def config_of(**changes) -> CacheConfig:
    facts = dict(num_layers=3, batch_size=2, capacity=500, num_kv_heads=2, head_dim=64)
    return CacheConfig(**facts | changes)


def placement_with(mesh=None, num_heads: int = 4, **changes) -> Placement:
    config = config_of(**changes)
    return Placement(
        config=config, num_heads=num_heads, mesh=make_mesh() if mesh is None else mesh
    )


def part_bytes(cache) -> tuple[int, int]:
    """Bytes of all (device parts, tails) that were really allocated."""
    return tuple(0 if part is None else part.nbytes for part in parts(cache))


# Sizes


@pytest.mark.parametrize(
    ("capacity", "num_cells"),
    [(1, 128), (127, 128), (128, 128), (129, 256), (500, 512)],
)
def test_the_capacity_is_rounded_up_to_the_block(capacity, num_cells):
    config = config_of(capacity=capacity)
    assert (config.capacity, config.num_cells) == (capacity, num_cells)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype", "record_size"),
    [
        (64, None, "bfloat16", 128),
        (80, None, "float32", 160),
        (64, 72, "bfloat16", 136),
        (128, 64, "float32", 192),
        (8, 8, "float32", 16),
        (8, 16, "bfloat16", 24),
    ],
)
def test_a_record_is_a_key_and_a_value(head_dim, head_dim_v, dtype, record_size):
    config = config_of(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    assert config.value_dim == (head_dim if head_dim_v is None else head_dim_v)
    assert config.record_size == record_size
    assert record_size * config.itemsize % 16 == 0


@pytest.mark.parametrize(
    ("device_cells", "each"),
    [
        (None, (512, 512, 512)),
        (0, (0, 0, 0)),
        (128, (128, 128, 128)),
        (512, (512, 512, 512)),
        ((0, 512, 128), (0, 512, 128)),
    ],
)
def test_device_cells_are_one_number_or_one_a_layer(device_cells, each):
    config = config_of(device_cells=device_cells)
    assert config.layer_device_cells == each
    assert hash(config) == hash(config_of(device_cells=device_cells))  # it is static


def test_bytes_by_hand():
    """2 sequences, 2 heads, records of 128 bfloat16: 1,024 bytes a cell of all."""
    config = config_of(device_cells=(0, 512, 128))
    assert [layer_bytes(config, i, 2) for i in range(3)] == [
        (0, 512 * 1024),
        (512 * 1024, 0),
        (128 * 1024, 384 * 1024),
    ]
    assert cache_bytes(config) == (640 * 1024, 896 * 1024)
    assert cache_bytes(config, 1) == (320 * 1024, 448 * 1024)


# What is allocated


@pytest.mark.parametrize(
    "changes",
    [
        dict(device_cells=0),
        dict(device_cells=None),
        dict(device_cells=(0, 512, 128), head_dim_v=72),
        dict(device_cells=128, batch_size=1, num_kv_heads=1, dtype="float32"),
    ],
    ids=["tail", "device", "each layer its own", "odd"],
)
def test_the_bytes_told_are_the_bytes_allocated(changes):
    placement = placement_with(**changes)
    cache = init_cache(placement)
    assert part_bytes(cache) == cache_bytes(placement.config)
    assert footprint(placement) == Footprint(
        *cache_bytes(placement.config), cache_bytes(placement.config)[1]
    )


@pytest.mark.parametrize(("devices", "num_kv_heads"), [(2, 2), (4, 2), (2, 4)])
def test_the_bytes_told_for_a_device_are_those_on_it(devices, num_kv_heads):
    """With 4 devices and 2 heads each head is stored twice."""
    placement = placement_with(
        make_mesh({"tp": devices}), num_kv_heads=num_kv_heads, device_cells=128
    )
    cache = init_cache(placement)
    told = footprint(placement)
    assert (told.device_bytes, told.tail_bytes) == device_bytes(placement)
    assert told.host_bytes == devices * told.tail_bytes
    for device in placement.mesh.devices.flat:
        shards = [
            shard.data.nbytes
            for part in parts(cache)
            for shard in part.addressable_shards
            if shard.device == device
        ]
        assert sum(shards) == told.device_bytes + told.tail_bytes
    assert part_bytes(cache) == cache_bytes(placement.config, placement.stored_heads)


def test_each_part_lies_in_its_memory():
    placement = placement_with(device_cells=(0, 512, 128))
    cache = init_cache(placement)
    host, device = "pinned_host", jax.devices()[0].default_memory().kind
    assert [part.sharding.memory_kind for part in parts(cache)] == [device, host]
    rows = 2 * (512 + 128), 2 * (512 + 384)
    assert [part.shape for part in parts(cache)] == [(n, 2, 128) for n in rows]


def test_layers_lie_one_behind_another_in_each_part():
    config = config_of(device_cells=(0, 512, 128))
    assert layer_extents(config) == [
        (Extent(0, 0), Extent(0, 512)),
        (Extent(0, 512), Extent(1024, 0)),
        (Extent(1024, 128), Extent(1024, 384)),
    ]
    rows = [np.arange(256.0 * n).reshape(n, 2, 128) for n in (1280, 1792)]
    cache = Cache(*rows, None, None, config.layout)
    found = [layer_cells(config, cache, layer) for layer in range(3)]
    assert [tuple(x is not None for x in cells) for cells in found] == [
        (False, True), (True, False), (True, True)
    ]  # fmt: skip
    whole = [np.concatenate([c for c in part if c is not None], axis=None)
             for part in zip(*found, strict=True)]  # fmt: skip
    for got, want in zip(whole, rows, strict=True):
        np.testing.assert_array_equal(got, want.ravel())
    assert found[2].tail.shape == (2, 384, 2, 128)
    np.testing.assert_array_equal(found[2].tail[1, 5], rows[1][1024 + 384 + 5])


def test_a_new_cache_is_empty_and_lies_where_its_placement_says():
    placement = placement_with(make_mesh({"tp": 2}), device_cells=128)
    cache = init_cache(placement)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(cache))
    same = jax.tree.map(lambda x, sharding: x.sharding == sharding, cache,
                        placement.cache_shardings())  # fmt: skip
    assert jax.tree.all(same)
    assert (cache.lengths.shape, cache.stamp.shape) == ((2,), (2, 2))


def test_progress_is_told_after_each_part():
    placement = placement_with(device_cells=(0, 512, 128))
    told = []
    init_cache(placement, lambda made, total: told.append((made, total)))
    device, tail = cache_bytes(placement.config)
    assert told == [(device, device + tail), (device + tail, device + tail)]


def test_the_smallest_slot_is_a_block_of_one_device():
    alone = placement_with(device_cells=0)
    split = placement_with(make_mesh({"tp": 2}), device_cells=0)
    assert smallest_slot(alone) == 128 * 2 * 128 * 2
    assert smallest_slot(split) == smallest_slot(alone) // 2


# As a pytree


@pytest.mark.parametrize(
    ("device_cells", "leaves"), [(0, 3), (None, 3), ((0, 512, 128), 4)]
)
def test_a_part_that_no_layer_has_is_no_leaf(device_cells, leaves):
    cache = init_cache(placement_with(device_cells=device_cells))
    assert len(jax.tree.leaves(cache)) == leaves
    abstract = jax.eval_shape(lambda cache: cache, cache)
    assert jax.tree.structure(abstract) == jax.tree.structure(cache)


# Reset


def test_reset_changes_lengths_and_stamp_alone():
    placement = placement_of(ring_id=30, num_layers=1, batch_size=3, capacity=256)
    cache = filled(placement, [200, 5, 256])
    _, cache = stepper(placement)(cache, inputs(placement, num_new=[1, 1, 0]))
    assert cache.lengths.tolist() == [201, 6, 256]
    assert np.asarray(cache.stamp).any()
    held = copied(cache)
    for sequence, lengths in ((1, [201, 0, 256]), (0, [0, 6, 256]), (None, [0, 0, 0])):
        emptied = reset(cache, sequence)
        assert emptied.lengths.tolist() == lengths
        assert not np.asarray(emptied.stamp).any()
        assert all(a is b for a, b in zip(parts(emptied), parts(cache), strict=True))
        assert emptied.lengths.sharding == cache.lengths.sharding
    jax.tree.map(assert_same_bits, parts(cache), parts(held))


def test_reset_works_inside_a_jit_that_donates():
    placement = placement_of(ring_id=30, num_layers=1, batch_size=3, capacity=256)
    cache = filled(placement, [200, 5, 256])
    held = copied(cache)
    emptied = jax.jit(
        lambda cache: reset(cache, 2),
        donate_argnums=0,
        out_shardings=placement.cache_shardings(),
    )(cache)
    assert emptied.lengths.tolist() == [200, 5, 0]
    jax.tree.map(assert_same_bits, parts(emptied), parts(held))


# Records


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(64, None), (8, 16), (72, 64), (256, 128)]
)
def test_encode_and_decode_keep_every_bit(dtype, head_dim, head_dim_v):
    config = config_of(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
    k, v = (
        any_bits(i, (2, 3, 2, size), dtype)
        for i, size in enumerate((head_dim, config.value_dim))
    )
    records = jax.jit(encode, static_argnums=0)(config, k, v)
    assert records.shape == (2, 3, 2, config.record_size)
    assert records.dtype == dtype
    for got, want in zip(decode(config, records), (k, v), strict=True):
        assert_same_bits(got, want)


def any_bits(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Any bits of finite numbers: denormals and both zeros among them."""
    word, exponent_bit = {"bfloat16": (np.uint16, 7), "float32": (np.uint32, 23)}[dtype]
    drawn = np.random.default_rng(seed).integers(0, 1 << 32, shape, np.uint32)
    drawn &= ~np.uint32(1 << exponent_bit)  # never all ones: no infinity, no NaN
    drawn[..., :3] = [0, 1, 1 << (8 * word().itemsize - 1)]  # 0, a denormal, -0
    return jnp.asarray(drawn.astype(word).view(jnp.dtype(dtype)))


def test_encode_rounds_to_the_caches_dtype_and_pads_with_zeros():
    config = config_of(head_dim=8, head_dim_v=8)
    k = jnp.full((1, 1, 2, 8), 1 + 2**-9, jnp.float32)
    records = encode(config, k, 2 * k)
    want = np.concatenate([np.full(8, 1.0), np.full(8, 2.0)])
    np.testing.assert_array_equal(np.asarray(records, np.float32)[0, 0, 1], want)
