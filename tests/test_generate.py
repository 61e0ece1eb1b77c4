"""Sampling, prefill in chunks, the decode loop, and chats on a cache that exists."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_same_bits

from kvjax.cache.state import Cache, reset
from kvjax.config import CacheConfig
from kvjax.delivery.allocate import init_cache
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.generate import Decoder, Sampling, chunks, generate, sample
from kvjax.model.transformer import ModelConfig, Transformer, random_model

# Untied: a random tied model repeats its input, and then nothing is tested.
MODEL = ModelConfig(
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=64,
    width=96,
    mlp_width=160,
    vocab_size=211,
)
PROMPTS = [list(range(7, 90)), [3, 1, 4], list(range(100, 133))]


@functools.cache
def model(num_devices: int = 1) -> Transformer:
    return random_model(MODEL, 1, mesh=make_mesh({"tp": num_devices}))


def place(
    batch_size: int,
    *,
    device_cells: int = 0,
    num_devices: int = 1,
    backend: str = "native",
) -> Placement:
    config = CacheConfig(
        num_layers=MODEL.num_layers,
        batch_size=batch_size,
        capacity=250,
        num_kv_heads=MODEL.num_kv_heads,
        head_dim=MODEL.head_dim,
        dtype="float32",
        device_cells=device_cells,
    )
    mesh = make_mesh({"tp": num_devices})
    return Placement(
        config=config, num_heads=MODEL.num_heads, mesh=mesh, backend=backend
    )


@functools.cache
def decoder(batch_size: int = 3, *, chunk: int = 32, **where) -> Decoder:
    placement = place(batch_size, **where)
    return Decoder(model(placement.mesh.size), placement, chunk=chunk)


def run(prompts=PROMPTS, *, max_new_tokens=12, cache=None, where={}, **options):
    runner = decoder(len(prompts), **where)
    cache = init_cache(runner.placement) if cache is None else cache
    return generate(runner, cache, prompts, max_new_tokens=max_new_tokens, **options)


@functools.cache
def undisturbed() -> tuple[tuple[int, ...], ...]:
    """The tokens that PROMPTS get without stop tokens."""
    return tuple(map(tuple, run().output_ids))


@functools.cache
def whole_forward():
    """A jitted forward pass over a whole sequence on an empty cache."""
    placement = place(1, device_cells=256, backend="reference")
    reader = model()

    @jax.jit
    def forward(cache: Cache, tokens, length):
        return reader(tokens, cache, placement, length, logits="last")[0]

    return functools.partial(forward, init_cache(placement))


def greedy_by_whole_passes(prompt: list[int], count: int) -> list[int]:
    """Each token by a pass over all tokens before it: no step, no chunk, no reuse."""
    ids = list(prompt)
    for _ in range(count):
        tokens = np.zeros((1, 128), np.int32)
        tokens[0, : len(ids)] = ids
        logits = whole_forward()(jnp.array(tokens), jnp.array([len(ids)]))
        ids.append(int(np.argmax(logits)))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "where",
    [
        {"device_cells": 0},
        {"device_cells": 128},
        {"device_cells": 256},
        {"num_devices": 3},
        {"backend": "reference"},
        {"chunk": 1},
        {"chunk": 5},
        {"chunk": 256},
    ],
    ids=str,
)
def test_tokens_are_those_of_passes_over_the_whole_text(where):
    expected = [greedy_by_whole_passes(prompt, 12) for prompt in PROMPTS]
    assert len({*expected[0]}) > 4  # else a wrong cache would go unnoticed
    assert run(where=where).output_ids == expected


def test_batch_mates_change_nothing():
    alone = [run([prompt]).output_ids[0] for prompt in PROMPTS]
    assert run().output_ids == alone


@pytest.mark.parametrize("one_jit", [False, True])
def test_a_stop_token_ends_its_sequence_alone(one_jit):
    whole = undisturbed()
    stop = whole[0][4]
    cut = [list(ids[: ids.index(stop)] if stop in ids else ids) for ids in whole]
    result = run(stop_tokens=[stop], one_jit=one_jit)
    assert result.output_ids == cut
    assert result.stopped == [stop in ids for ids in whole]
    assert not all(result.stopped)


@pytest.mark.parametrize("one_jit", [False, True])
def test_the_cache_holds_prompts_and_outputs_and_no_more(one_jit):
    stop = undisturbed()[1][3]
    result = run(stop_tokens=[stop], one_jit=one_jit)
    expected = [len(p) + len(ids) for p, ids in zip(PROMPTS, result.output_ids)]
    assert result.cache.lengths.tolist() == expected


@pytest.mark.parametrize("one_jit", [False, True])
def test_all_stopped_ends_the_loop(one_jit):
    stops = {ids[2] for ids in undisturbed()}
    result = run(stop_tokens=sorted(stops), one_jit=one_jit, max_new_tokens=100)
    assert all(result.stopped)
    longest = max(map(len, result.output_ids))
    assert result.timings.decode_steps <= longest + 1  # one was already on its way


@pytest.mark.parametrize("one_jit", [False, True])
def test_a_stop_as_the_first_token_gives_an_empty_output(one_jit):
    stop = undisturbed()[1][0]
    seen = []
    result = run(
        [PROMPTS[1]],
        stop_tokens=[stop],
        one_jit=one_jit,
        on_token=lambda *token: seen.append(token),
    )
    assert (result.output_ids, result.stopped, seen) == ([[]], [True], [])
    assert result.cache.lengths.tolist() == [3]
    assert result.timings.decode_steps == 0


def test_one_new_token_is_made_and_kept():
    result = run(max_new_tokens=1)
    assert result.output_ids == [[ids[0]] for ids in undisturbed()]
    assert result.cache.lengths.tolist() == [84, 4, 34]


def test_many_tokens_in_one_jit_are_the_same():
    result = run(one_jit=True)
    assert result.output_ids == list(map(list, undisturbed()))
    assert result.timings.decode_steps == 12


@pytest.mark.parametrize("where", [{}, {"device_cells": 128}, {"num_devices": 3}])
@pytest.mark.parametrize("one_jit", [False, True])
def test_a_chat_goes_on_as_if_all_had_been_one_prompt(where, one_jit):
    stop = undisturbed()[0][4]
    turns = [[5, 6, 7], list(range(40, 70)), [9]]
    first = run(stop_tokens=[stop], where=where, one_jit=one_jit)
    assert len({*map(len, first.output_ids)}) > 1  # one stopped before the others
    second = run(turns, cache=first.cache, where=where, one_jit=one_jit)

    joined = [a + b + c for a, b, c in zip(PROMPTS, first.output_ids, turns)]
    fresh = run(joined, where=where)
    assert second.output_ids == fresh.output_ids
    assert second.cache.lengths.tolist() == fresh.cache.lengths.tolist()


def test_a_reset_sequence_starts_afresh():
    first = run()
    cache = reset(first.cache, 1)
    result = run([[5], PROMPTS[1], [6]], cache=cache)
    assert result.output_ids[1] == list(undisturbed()[1])


def test_tokens_arrive_in_order_as_they_are_made():
    seen = []
    result = run(on_token=lambda sequence, token: seen.append((sequence, token)))
    by_time = [(row, ids[t]) for t in range(12) for row, ids in enumerate(result[0])]
    assert seen == by_time


def test_each_step_is_dispatched_before_the_token_it_is_fed_is_read():
    runner = Decoder(model(), place(1), chunk=32)
    events, step = [], runner.step

    def counted(*args, **static):
        events.append("step")
        return step(*args, **static)

    counted.lower = step.lower
    runner.step = counted
    generate(
        runner,
        init_cache(runner.placement),
        [[1, 2]],
        max_new_tokens=4,
        on_token=lambda *_: events.append("read"),
    )
    #         token 0                 1               2               3
    assert events == ["read", "step", "step", "read", "step", "read", "step", "read"]


def test_prefill_reports_every_prompt_token_once():
    counts = []
    run(on_prefill=counts.append)
    assert counts == [32 + 3 + 32, 32 + 1, 19]


def test_nothing_compiles_again_for_other_lengths_seeds_or_turns():
    runner = Decoder(model(), place(2), chunk=16)
    hot = Sampling(temperature=1.0)

    def turn(cache, prompts, seed):
        sampling = dataclasses.replace(hot, seed=seed)
        return generate(
            runner, cache, prompts, max_new_tokens=3, sampling=sampling
        ).cache

    cache = turn(init_cache(runner.placement), [[1] * 30, [2] * 9], 1)
    cache = turn(cache, [[1] * 16, [2] * 40], 2)
    turn(reset(cache), [[1] * 17, [2]], 3)
    functions = (runner.prefill, runner.first, runner.step)
    assert [function._cache_size() for function in functions] == [1, 1, 1]


@pytest.mark.parametrize("one_jit", [False, True])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_cells_stay_where_they_lie(one_jit, num_devices):
    where = {"device_cells": 128, "num_devices": num_devices}
    cache = run(where=where).cache

    def addresses(cache):
        parts = cache.device, cache.tail
        shards = [shard for part in parts for shard in part.addressable_shards]
        return [shard.data.unsafe_buffer_pointer() for shard in shards]

    before = addresses(cache)
    after = run(cache=cache, where=where, one_jit=one_jit, max_new_tokens=5).cache
    assert addresses(after) == before


def test_functions_lower_without_any_array():
    placement = place(2, device_cells=128)
    runner = Decoder(Transformer(MODEL), placement)
    kinds = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        init_cache(placement),
        placement.cache_shardings(),
    )

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    i32, f32 = jnp.int32, jnp.float32
    many = (array(i32, 2), array(bool, 2), array(i32, 1), array(jnp.uint32))
    chunk = (array(i32, 2, 16), array(i32, 2), array(f32, 2, MODEL.vocab_size))
    greedy = Sampling()
    for lowered in (
        runner.prefill.lower(runner.leaves, kinds, *chunk),
        runner.step.lower(runner.leaves, kinds, *many, sampling=greedy),
        runner.steps.lower(runner.leaves, kinds, *many, sampling=greedy, limit=5),
    ):
        assert len(jax.tree.leaves(lowered.out_info)) < 12  # weights don't come out


def fresh_cache() -> Cache:
    return init_cache(decoder(3).placement)


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        (PROMPTS[:2], {}, "holds 3 sequences, got 2 prompts"),
        ([[1], [], [2]], {}, "prompt 1 is empty"),
        ([[1], [2], [211]], {}, "token of prompt 2 must be between 0 and 210, got 211"),
        ([[1], [-1], [2]], {}, "token of prompt 1 must be between 0 and 210, got -1"),
        (PROMPTS, {"max_new_tokens": 0}, "max_new_tokens must be between 1"),
        (PROMPTS, {"max_new_tokens": 174}, "needs 257 cells .* the cache has 256"),
        (PROMPTS, {"stop_tokens": [211]}, "stop token must be between 0 and 210"),
    ],
)
def test_what_cannot_be_done_is_refused_and_the_cache_kept(prompts, options, message):
    cache = fresh_cache()
    with pytest.raises(ValueError, match=message):
        generate(decoder(3), cache, prompts, **({"max_new_tokens": 2} | options))
    assert cache.lengths.tolist() == [0, 0, 0]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_the_last_cell_can_be_used():
    result = run([PROMPTS[0]], max_new_tokens=173)
    assert result.cache.lengths.tolist() == [256]
    assert len(result.output_ids[0]) == 173
    with pytest.raises(ValueError, match="258 cells .256 held, a prompt of 1"):
        run([[1]], cache=result.cache, max_new_tokens=1)


def test_cells_that_were_moved_are_refused():
    cache = fresh_cache()
    on_device = cache.tail.sharding.with_memory_kind("device")
    moved = cache._replace(tail=jax.device_put(cache.tail, on_device))
    with pytest.raises(ValueError, match="init_cache"):
        generate(decoder(3), moved, PROMPTS, max_new_tokens=1)
    other = cache._replace(layout=(2 * cache.layout[0], *cache.layout[1:]))
    with pytest.raises(ValueError, match="layout .* its placement .*init_cache"):
        generate(decoder(3), other, PROMPTS, max_new_tokens=1)


HOT = Sampling(temperature=1.5, top_k=50, top_p=0.95, seed=5)


def test_a_seed_fixes_the_draws():
    first = run(sampling=HOT).output_ids
    assert run(sampling=HOT).output_ids == first
    assert run(sampling=HOT, one_jit=True).output_ids == first
    assert run(sampling=dataclasses.replace(HOT, seed=6)).output_ids != first


def test_equal_prompts_draw_different_tokens():
    outputs = run([PROMPTS[1]] * 3, sampling=HOT).output_ids
    assert len({*map(tuple, outputs)}) == 3


def test_each_step_and_turn_draws_anew():
    flat = Sampling(temperature=1e6)  # all tokens alike: the draws alone decide
    first = run(sampling=flat)
    second = run(cache=first.cache, sampling=flat)
    drawn = [ids for turn in (first, second) for ids in turn.output_ids]
    assert len({*map(tuple, drawn)}) == 6
    assert all(len({*ids}) > 8 for ids in drawn)


def keys(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def shares(logits: list[float], sampling: Sampling, count: int = 4000) -> np.ndarray:
    """How often each token is drawn."""
    rows = jnp.tile(jnp.array(logits, jnp.float32), (count, 1))
    drawn = jax.jit(sample, static_argnames="sampling")(
        rows, keys(count), sampling=sampling
    )
    return np.bincount(np.asarray(drawn), minlength=len(logits)) / count


CHANCES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
LOGITS = (np.log(CHANCES) + 30).tolist()


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (Sampling(temperature=1.0), CHANCES),
        (Sampling(temperature=0.5), CHANCES**2 / (CHANCES**2).sum()),
        (Sampling(temperature=1.0, top_k=2), np.array([0, 0.4, 0, 0.25, 0]) / 0.65),
        (Sampling(temperature=1.0, top_k=99), CHANCES),
        (Sampling(temperature=1.0, top_p=0.39), np.array([0, 1.0, 0, 0, 0])),
        (Sampling(temperature=1.0, top_p=0.41), np.array([0, 0.4, 0, 0.25, 0]) / 0.65),
        (Sampling(temperature=1.0, top_p=0.9), np.array([2, 8, 0, 5, 4]) / 19),
        # of the two best, 0.4 / 0.65 = 0.62 reaches p by itself
        (Sampling(temperature=1.0, top_k=2, top_p=0.6), np.array([0, 1.0, 0, 0, 0])),
        (Sampling(temperature=1e-6), np.array([0, 1.0, 0, 0, 0])),
        (Sampling(), np.array([0, 1.0, 0, 0, 0])),
    ],
    ids=str,
)
def test_draws_have_the_wanted_shares(sampling, expected):
    got = shares(LOGITS, sampling)
    assert (got[expected == 0] == 0).all()
    error = 4 * np.sqrt(expected * (1 - expected) / 4000)  # four sigma
    assert (np.abs(got - expected) <= error).all()


def test_ties_with_the_last_of_top_k_are_kept():
    got = shares([1.0, 3.0, 1.0, 1.0, 0.0], Sampling(temperature=1.0, top_k=2))
    assert (got > 0).tolist() == [True, True, True, True, False]


def test_a_draw_does_not_depend_on_batch_mates():
    draw = jax.jit(sample, static_argnames="sampling")
    logits, one_each = jax.random.normal(jax.random.key(0), (4, 50)), keys(4)
    rows = [slice(i, i + 1) for i in range(4)]
    alone = [draw(logits[row], one_each[row], sampling=HOT)[0] for row in rows]
    assert_same_bits(draw(logits, one_each, sampling=HOT), jnp.stack(alone))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -0.1}, "temperature must be 0 .* got -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k must be between 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1"),
        ({"seed": -1}, "seed must be between 0"),
    ],
)
def test_sampling_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_chunks_take_the_next_tokens_of_each_prompt():
    cut = list(chunks([[1, 2, 3, 4, 5, 6], [7, 8]], 4))
    assert [tokens.tolist() for tokens, _ in cut] == [
        [[1, 2, 3, 4], [7, 8, 0, 0]],
        [[5, 6, 0, 0], [0, 0, 0, 0]],
    ]
    assert [num_new.tolist() for _, num_new in cut] == [[4, 2], [2, 0]]


@pytest.mark.parametrize("longest, width", [(1, 1), (5, 8), (8, 8), (100, 96)])
def test_chunks_of_short_prompts_are_a_power_of_two_wide(longest, width):
    assert {tokens.shape[1] for tokens, _ in chunks([[1] * longest], 96)} == {width}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1),
    st.integers(1, 12),
)
def test_chunks_join_to_the_prompts(prompts, chunk):
    joined = collections.defaultdict(list)
    for tokens, num_new in chunks(prompts, chunk):
        assert tokens.shape[1] <= chunk
        for row, count in enumerate(num_new):
            joined[row] += tokens[row, :count].tolist()
            assert not tokens[row, count:].any()
    assert [joined[row] for row in range(len(prompts))] == prompts
