"""What is refused: each message says what was wanted, what came, what to do."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from steps import (
    HEAD,
    filled,
    inputs,
    parts,
    placed,
    placement_of,
    replaced,
    run,
    stepper,
)
from tolerance import assert_close, assert_same_bits

from kvjax.cache.formats import encode
from kvjax.cache.state import Cache, layer_extents, reset
from kvjax.config import MAX_BUDGET_BYTES, CacheConfig, RingConfig
from kvjax.delivery import ffi
from kvjax.delivery.allocate import POOL_LIMIT, footprint, init_cache
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.ring import Ring
from kvjax.model.attention import Step

CONFIG = dict(
    num_layers=2,
    batch_size=1,
    capacity=300,
    num_kv_heads=2,
    head_dim=8,
    dtype="float32",
)


@pytest.fixture(autouse=True)
def no_type_checks():
    """Errors as a user meets them, who doesn't check types at run time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def tiny() -> Placement:
    return placement_of(ring_id=20, num_layers=1, batch_size=2, capacity=256)


@pytest.fixture
def unbuilt(monkeypatch):
    """Nothing is built, as the library's loader sees it."""
    names = {"cpu": "libkvjax_nowhere.so", "CUDA": "libkvjax_nowhere_cuda.so"}
    fresh = functools.cache(ffi.library.__wrapped__)  # it has loaded nothing yet
    monkeypatch.setattr(ffi, "LIBRARIES", names)
    monkeypatch.setattr(ffi, "library", fresh)


# Cache


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_layers=0), "num_layers must be between 1 and 4096, got 0"),
        (dict(batch_size=0), "batch_size must be between 1 and 65535, got 0"),
        (dict(batch_size=65536), "batch_size must be between 1 and 65535, got 65536"),
        (dict(capacity=0), "capacity must be between 1 and 1073741824, got 0"),
        (dict(capacity=True), "capacity must be a whole number, got True"),
        (dict(capacity=128.0), "capacity must be a whole number, got 128.0"),
        (dict(num_kv_heads=0), "num_kv_heads must be between 1 and 4096, got 0"),
        (
            dict(head_dim=12),
            "head_dim must be a multiple of 8, got 12",
        ),
        (dict(head_dim=264), "head_dim must be between 8 and 256, got 264"),
        (dict(head_dim=8.0), "head_dim must be a whole number, got 8.0"),
        (dict(head_dim_v=4), "value_dim must be between 8 and 256, got 4"),
        (
            dict(dtype="int8"),
            "dtype must be one of .*'bfloat16', 'float32'.*, got 'int8'",
        ),
        (
            dict(device_cells=200),
            "device_cells must be a multiple of the block of 128 cells, got 200; "
            "try 128 or 256",
        ),
        (
            dict(device_cells=512),
            "device_cells must not exceed the capacity of 384 cells, got 512",
        ),
        (dict(device_cells=-128), "device_cells must be between 0 and .*, got -128"),
        (dict(device_cells=True), "device_cells must be a whole number, got True"),
        (dict(device_cells=128.0), "device_cells must be .*, got 128.0"),
        (
            dict(device_cells=(0, 128, 256)),
            "device_cells must be one number or one for each of the 2 layers, got 3",
        ),
        (dict(device_cells=[0, 128]), r"must be a whole number, got \[0, 128\]"),
        (dict(device_cells=(0, None)), "device_cells must be .*, got None"),
        (dict(device_cells=(0, 100)), "multiple of the block of 128 cells, got 100"),
        (dict(device_cells=(0, 512)), "must not exceed the capacity of 384 cells"),
    ],
    ids=lambda x: (
        None if isinstance(x, str) else "{}={}".format(*next(iter(x.items())))
    ),
)
def test_a_cache_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(**CONFIG | changes)


def test_reset_refuses_a_sequence_that_is_not_there(tiny):
    cache = init_cache(tiny)
    for sequence in (2, -1):
        with pytest.raises(ValueError, match=f"between 0 and 1, got {sequence}"):
            reset(cache, sequence)


def test_encode_refuses_other_head_sizes():
    config = CacheConfig(**CONFIG)
    k, v = jnp.zeros((1, 1, 2, 8)), jnp.zeros((1, 1, 2, 16))
    with pytest.raises(ValueError, match="keys of 8 and values of 8, got 8 and 16"):
        encode(config, k, v)


# Placement


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(backend="jax"),
            r"backend must be one of \('native', 'reference'\), got 'jax'",
        ),
        (dict(axis="dp"), r"axis must be one of the mesh's axes \('tp',\), got 'dp'"),
        (dict(ring_id=-1), "ring_id must be between 0 and .*, got -1"),
        (dict(ring_id=1 << 31), "ring_id must be between 0 and .*, got 2147483648"),
        (dict(ring_id=True), "ring_id must be a whole number, got True"),
        (dict(num_heads=5), "query heads must be a multiple of kv heads, got 5 and 2"),
        (dict(num_heads=0), "num_heads must be between 1 and .*, got 0"),
    ],
    ids=lambda x: (
        None if isinstance(x, str) else "{}={}".format(*next(iter(x.items())))
    ),
)
def test_a_placement_refuses(changes, message):
    facts = dict(config=CacheConfig(**CONFIG), num_heads=4, mesh=make_mesh())
    with pytest.raises(ValueError, match=message):
        Placement(**facts | changes)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "axis_size", "works"),
    [(6, 2, 4, [1, 2, 6]), (9, 3, 2, [1, 3, 9]), (4, 4, 8, [1, 2, 4])],
)
def test_heads_that_do_not_divide_name_sizes_that_do(
    num_heads, num_kv_heads, axis_size, works
):
    config = CacheConfig(**CONFIG | dict(num_kv_heads=num_kv_heads))
    message = (
        f"{num_heads} query and {num_kv_heads} kv heads cannot be split over "
        rf"{axis_size} devices; axis sizes that work: \[{', '.join(map(str, works))}\]"
    )
    with pytest.raises(ValueError, match=message):
        Placement(config=config, num_heads=num_heads, mesh=make_mesh({"tp": axis_size}))
    for size in filter(lambda size: size <= 8, works):
        Placement(config=config, num_heads=num_heads, mesh=make_mesh({"tp": size}))


def test_a_mesh_refuses_more_devices_than_there_are():
    with pytest.raises(ValueError, match="needs 16 devices, got 8"):
        make_mesh({"dp": 2, "tp": 8})


# Memory


def huge(capacity: int) -> Placement:
    return placement_of(
        ring_id=21, num_layers=64, batch_size=16, capacity=capacity, num_kv_heads=8
    )


@pytest.mark.parametrize("limit", [None, "3"])
def test_a_tail_beyond_the_pinned_pool_names_its_variable(monkeypatch, limit):
    monkeypatch.delenv(POOL_LIMIT, raising=False)
    if limit is not None:
        monkeypatch.setenv(POOL_LIMIT, limit)
    gib = int(limit or 64)
    placement = huge(gib * 2048 + 128)  # 512 KiB a cell
    assert footprint(placement).tail_bytes == (gib << 30) + (64 << 20)
    progress = []
    with pytest.raises(
        ValueError, match=f"allows {gib << 30}: set {POOL_LIMIT} "
    ) as told:
        init_cache(placement, lambda *made: progress.append(made))
    assert f"above {gib} before jax starts" in str(told.value)
    assert progress == []


def test_a_tail_beyond_the_hosts_memory_is_refused(monkeypatch):
    monkeypatch.setenv(POOL_LIMIT, str(1 << 30))
    placement = huge(1 << 30)
    need = footprint(placement).host_bytes
    assert need == 512 << 40
    with pytest.raises(
        ValueError, match=f"need {need} bytes of host memory .* available"
    ):
        init_cache(placement)


def test_a_limit_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv(POOL_LIMIT, "many")
    with pytest.raises(ValueError, match=f"{POOL_LIMIT} must be .*, got 'many'"):
        init_cache(huge(128))


# Ring


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(depth=-1), "depth must be between 0 and 64, got -1"),
        (dict(depth=65), "depth must be between 0 and 64, got 65"),
        (dict(depth=True), "depth must be a whole number, got True"),
        (dict(depth=1.0), "depth must be a whole number, got 1.0"),
        (
            dict(budget_bytes=-1),
            "budget_bytes must be between 0 and 68719476736, got -1",
        ),
        (dict(budget_bytes=MAX_BUDGET_BYTES + 1), "budget_bytes must be between 0 and"),
        (dict(budget_bytes=False), "budget_bytes must be a whole number, got False"),
        (
            dict(budget_bytes=6.4e7),
            "budget_bytes must be a whole number, got 64000000.0",
        ),
        (dict(slot_bytes=0), "slot_bytes must be between 1024 and .*, got 0"),
        (dict(slot_bytes=MAX_BUDGET_BYTES + 1), "slot_bytes must be between 1024 and"),
        (dict(slot_bytes=8192.0), "slot_bytes must be a whole number, got 8192.0"),
        (dict(headroom_bytes=-1), "headroom_bytes must be between 0 and .*, got -1"),
        (dict(depth=None), "depth must be a whole number, got None"),
        (dict(headroom_bytes=None), "headroom_bytes must be a whole number, got None"),
    ],
    ids=lambda x: (
        None if isinstance(x, str) else "{}={}".format(*next(iter(x.items())))
    ),
)
def test_a_ring_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        RingConfig(**changes)


def test_the_widest_ring_config_is_taken():
    assert (
        RingConfig(depth=64, budget_bytes=MAX_BUDGET_BYTES).budget == MAX_BUDGET_BYTES
    )
    assert RingConfig(depth=0, budget_bytes=0).budget == 0
    assert RingConfig().budget == 64 << 20


@pytest.mark.parametrize("depth", [0, 1])
def test_a_slot_must_hold_a_block(tiny, depth):
    message = (
        "slot_bytes must hold one block of 128 cells, 8192 bytes of this cache, got"
    )
    with pytest.raises(ValueError, match=f"{message} 8191"):
        Ring.open(tiny, RingConfig(slot_bytes=8191, depth=depth))
    Ring.open(tiny, RingConfig(slot_bytes=8192, depth=depth)).close()  # nothing is open


@pytest.mark.parametrize("given", [3, dict(depth=1), RingConfig])
def test_a_rings_settings_are_a_ring_config(tiny, given):
    with pytest.raises(ValueError, match="a ring's settings are a RingConfig, got"):
        Ring.open(tiny, given)
    with pytest.raises(ValueError, match="a ring's settings are a RingConfig, got"):
        Ring.open(tiny, per_device={jax.devices()[0]: given})


# Steps


def fed(placement: Placement, **changes):
    """A function that traces a step of other inputs than the cache's."""
    cache, x = init_cache(placement), inputs(placement)
    return lambda: jax.eval_shape(
        lambda: run(placement, cache, x._replace(**changes))[0]
    )


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_step_refuses_other_batches_and_heads(tiny, backend):
    placement = replaced(tiny, device_cells=0, backend=backend)
    draw = functools.partial(jnp.zeros, dtype=jnp.float32)
    cases = {
        r"holds 2 sequences, got tokens \[3, 1\] and num_new \[2\]: give each": (
            dict(tokens=jnp.zeros((3, 1), jnp.int32))
        ),
        r"holds 2 sequences, got tokens \[2, 1\] and num_new \[1\]": (
            dict(num_new=jnp.zeros(1, jnp.int32))
        ),
        r"has 2 query heads of 8 and 1 kv heads, got q \[2, 1, 4, 8\] and": (
            dict(q=draw((1, 2, 1, 4, HEAD)))
        ),
        r"2 query heads of 8 and 1 kv heads, got q .* and k \[2, 1, 2, 8\]": (
            dict(k=draw((1, 2, 1, 2, HEAD)), v=draw((1, 2, 1, 2, HEAD)))
        ),
        "keys of 8 and values of 8, got 8 and 16": dict(v=draw((1, 2, 1, 1, 16))),
    }
    for message, changes in cases.items():
        with pytest.raises(ValueError, match=message):
            fed(placement, **changes)()


def test_a_step_refuses_layers_and_windows_that_are_not_there(tiny):
    cache, x = init_cache(tiny), inputs(tiny)

    def begin(attends):
        return jax.eval_shape(
            lambda: Step.begin(tiny, cache, x.tokens, attends=attends)[0]
        )

    with pytest.raises(ValueError, match="layer must be between 0 and 0, got 1"):
        begin(((0, None), (1, None)))
    with pytest.raises(ValueError, match="window must be between 1 and .*, got 0"):
        begin(((0, 0),))
    for layer, window in ((-1, None), (1, None), (0, 0), (0, -5)):
        with pytest.raises(ValueError, match="(layer|window) must be between"):
            jax.eval_shape(
                lambda: run(
                    tiny, cache, x, order=(layer,), listed=((0, None),), window=window
                )[0]
            )


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_cache_of_another_placement_is_refused(backend):
    """Also where all its arrays have the right shapes."""
    facts = dict(num_layers=2, batch_size=2, capacity=512)
    own = placement_of(ring_id=23, device_cells=(128, 256), **facts)
    own = dataclasses.replace(own, backend=backend)
    cache, x = init_cache(own), inputs(own)
    swapped = placement_of(ring_id=23, device_cells=(256, 128), **facts)
    others = [
        dataclasses.replace(swapped, backend=backend),
        replaced(own, device_cells=0),
        dataclasses.replace(own, config=dataclasses.replace(own.config, capacity=256)),
    ]
    for other in others:
        told = re.escape(str(other.config.layout))
        with pytest.raises(ValueError, match=rf"got dev.*\(512, 128, 256\).*{told}"):
            jax.eval_shape(lambda other=other: Step.begin(other, cache, x.tokens)[0])
    for change in (dict(tail=None), dict(lengths=cache.lengths[:1])):
        odd = cache._replace(**change)
        with pytest.raises(ValueError, match="the cache is of another placement"):
            jax.eval_shape(lambda odd=odd: Step.begin(own, odd, x.tokens)[0])
    jax.eval_shape(lambda: Step.begin(own, cache, x.tokens)[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: dict(lengths=c.lengths[:1]), "1 lengths and 2 words"),
        (lambda c: dict(stamp=c.stamp[:, :1]), "2 lengths and 1 words"),
        (lambda c: dict(tail=c.tail[:128]), "should have 512 rows"),
    ],
    ids=["lengths", "stamp", "tail"],
)
def test_begin_refuses_operands_of_another_batch(tiny, change, text):
    placement = replaced(tiny, device_cells=0)
    cache, x = init_cache(placement), inputs(placement)

    def begin(cache, tokens):
        return ffi.begin(placement, tokens, cache, ((0, None),))[1]

    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(jax.jit(begin)(cache._replace(**change(cache)), x.tokens))


def test_rows_of_another_batch_are_refused(tiny):
    cache, x = init_cache(tiny), inputs(tiny)
    rows = encode(tiny.config, x.k[0], x.v[0])
    where, ticket = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    extent = layer_extents(tiny.config)[0].device
    with pytest.raises(ValueError, match="holds 2 sequences, got rows .1, 1, 1,"):
        ffi.append(tiny, cache.device, extent, rows[:1], where, ticket)
    with pytest.raises(ValueError, match="holds 2 sequences, got rows .1, 1, 1,"):
        ffi.attend(tiny, 0, x.q[0][:1], rows[:1], cache, where, ticket, scale=1.0)


def test_an_attend_without_begin_is_refused(tiny):
    cache, x = init_cache(tiny), inputs(tiny)
    step = Step(tiny, cache, x.num_new, 1)
    with pytest.raises(ValueError, match="attend of layer 0 comes before Step.begin"):
        step.attend(0, x.q[0], x.k[0], x.v[0], scale=1.0)


def test_an_attend_that_no_begin_planned_is_refused_by_its_ring(tiny):
    never_used = replaced(tiny, device_cells=0, ring_id=22)
    cache, x = init_cache(never_used), inputs(never_used)
    rows = encode(never_used.config, x.k[0], x.v[0])
    where = placed(never_used, np.zeros((2, 1), np.int32))
    ticket = placed(never_used, np.zeros(1, np.int32))

    @jax.jit
    def attend():
        given = x.q[0], rows, cache, where, ticket
        return ffi.attend(never_used, 0, *given, scale=1.0)[0]

    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match="kvjax: attend of layer 0 without a begin that lists its tail",
    ):
        jax.block_until_ready(attend())


@pytest.mark.parametrize("in_jit", [False, True], ids=["outside", "around a jit"])
def test_a_step_refuses_vmap_and_grad(tiny, in_jit):
    cache, x = filled(tiny, [200, 3]), inputs(tiny)
    wrap = jax.jit if in_jit else lambda f: f

    def total(**changes):
        return run(tiny, cache, x._replace(**changes))[0].sum()

    for name in ("q", "k", "v"):
        f = wrap(lambda value, name=name: total(**{name: value}))
        with pytest.raises(NotImplementedError, match="step cannot be differentiated"):
            jax.eval_shape(jax.grad(f), getattr(x, name))
    for name in ("q", "k", "v", "tokens", "num_new"):
        f = wrap(lambda value, name=name: total(**{name: value}))
        with pytest.raises(NotImplementedError, match="mapped by jax.vmap .of 3."):
            jax.eval_shape(jax.vmap(f), jnp.stack([getattr(x, name)] * 3))
    f = wrap(lambda lengths: run(tiny, cache._replace(lengths=lengths), x)[0])
    with pytest.raises(NotImplementedError, match="Batch sequences in the cache"):
        jax.eval_shape(jax.vmap(f), jnp.stack([cache.lengths] * 3))


def test_the_reference_backend_can_be_differentiated(tiny):
    placement = replaced(tiny, backend="reference")
    cache, x = filled(placement, [200, 3]), inputs(placement)

    def total(v):
        return run(placement, cache, x._replace(v=v))[0].sum()

    assert (np.asarray(jax.jit(jax.grad(total))(x.v)) > 0).all()


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("around", ["scan", "cond", "checkpoint", "jit"])
def test_attends_inside_a_transformation_are_refused(tiny, around, backend):
    placement = replaced(tiny, device_cells=0, backend=backend)
    cache, x = init_cache(placement), inputs(placement)
    wrap = {
        "scan": lambda f: lambda q: jax.lax.scan(lambda _, q: (0, f(q)), 0, q[None]),
        "cond": lambda f: lambda q: jax.lax.cond(q.sum() > 0, f, lambda q: q, q),
        "checkpoint": jax.checkpoint,
        "jit": jax.jit,
    }[around]

    def step(cache, x):
        _, step = Step.begin(placement, cache, x.tokens)
        out = wrap(lambda q: step.attend(0, q, x.k[0], x.v[0], scale=1.0))(x.q[0])
        return out, step.end()

    with pytest.raises(
        ValueError, match="attend of layer 0 is inside a transformation"
    ):
        jax.eval_shape(step, cache, x)


def test_a_whole_step_may_be_one_branch_of_a_cond(tiny):
    def maybe(cache: Cache, x, runs):
        def skip(cache):
            return jnp.zeros_like(x.q), cache

        return jax.lax.cond(runs, lambda cache: run(tiny, cache, x), skip, cache)

    out_shardings = (tiny.sharding(P()), tiny.cache_shardings())
    program = jax.jit(maybe, donate_argnums=0, out_shardings=out_shardings)
    x = inputs(tiny)
    want, after = stepper(tiny)(filled(tiny, [200, 3]), x)
    got, cache = program(filled(tiny, [200, 3]), x, True)
    assert_same_bits(got, want)
    jax.tree.map(assert_same_bits, parts(cache), parts(after))
    got, cache = program(cache, x, False)
    assert not np.asarray(got).any()
    assert cache.lengths.tolist() == [201, 4]


# Libraries


def test_without_a_library_the_message_says_how_to_build_it(unbuilt, tiny):
    message = (
        "libkvjax_nowhere.so is not built. Install with `pip install .` on a machine "
        r"with a C\+\+ compiler, or use Placement\(backend='reference'\), plain JAX"
    )
    for use in (
        lambda: init_cache(tiny),
        lambda: Ring.open(tiny),
        lambda: ffi.require("cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    with pytest.raises(ValueError, match=r"a CUDA compiler \(nvcc\)"):
        ffi.require("gpu")


def test_without_a_library_the_reference_backend_works(unbuilt, tiny):
    placement = replaced(tiny, device_cells=128, backend="reference")
    on_device = replaced(tiny, backend="reference")
    x = inputs(placement)
    with Ring.open(placement) as ring:
        got, _ = stepper(placement)(filled(placement, [200, 3]), x)
    want, _ = stepper(on_device)(filled(on_device, [200, 3]), x)
    assert_close(got, want)
    assert list(ring.declines().values()) == ["the reference backend has no ring"]


def test_another_platform_is_refused():
    with pytest.raises(ValueError, match="no native ops for platform 'tpu'; use"):
        ffi.require("tpu")
