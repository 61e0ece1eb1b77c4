"""begin, append and attend as a model calls them: a loop in float64, then bits.

Cells that no query may see hold NaN in every problem here, and so do dropped rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import cache_with
from jax.sharding import PartitionSpec as P
from tolerance import assert_close, assert_same_bits

from kvjax.cache.formats import encode
from kvjax.cache.state import Cache, layer_cells, layer_extents, reset
from kvjax.config import CacheConfig, RingConfig
from kvjax.delivery import ffi
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.plan import smallest_slot
from kvjax.delivery.ring import Emulation, Ring, RingStats
from kvjax.model.attention import Step
from kvjax.shapes import BLOCK, GROUP

CAPACITY = 1280
BORDERS = [0, 1, 126, 127, 128, 129, 1022, 1023, 1024, 1025]
RAGGED = [300, 0, 1023, 129]  # one reset sequence among deep ones
assert BLOCK == 128 and BLOCK * GROUP == 1024


class Case(NamedTuple):
    """The static side of a problem."""

    head_dim: int = 64
    value_dim: int = 64
    group: int = 3
    num_kv_heads: int = 2
    num_layers: int = 1
    dtype: str = "bfloat16"
    query_dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class NewRows(NamedTuple):
    """One step's operands, all layers."""

    num_new: np.ndarray  # [B]
    q: np.ndarray  # [L, B, T, N, H]
    k: np.ndarray  # [L, B, T, K, H] float32, to be rounded by encode
    v: np.ndarray  # [L, B, T, K, Hv]


class Problem(NamedTuple):
    """What the cache holds, and the steps to come."""

    cells: np.ndarray  # [L, B, S, K, R]
    lengths: np.ndarray  # [B]
    steps: list[NewRows]

    def of(self, sequences: list[int]) -> "Problem":
        """The same sequences without the others."""
        steps = [
            NewRows(s.num_new[sequences], *(x[:, sequences] for x in s[1:]))
            for s in self.steps
        ]
        return Problem(self.cells[:, sequences], self.lengths[sequences], steps)


class Played(NamedTuple):
    outs: list[np.ndarray]  # of each step [L, B, T, N, Hv]
    cache: Cache
    cells: np.ndarray  # its own, after the steps: [L, B, S, K, R]
    stats: RingStats | None


def make_problem(
    case: Case, lengths: list[int], widths: list[int], *, num_new=None, seed: int = 0
) -> Problem:
    """Random numbers where something may be seen, NaN elsewhere.

    Args:
      case: Shapes and dtypes.
      lengths: Cells that each sequence holds.
      widths: T of each step.
      num_new: [B] of each step; None = T.
      seed: Of the numbers.
    """
    rng = np.random.default_rng(seed)
    config = place(case, len(lengths)).config
    shape = (case.num_layers, len(lengths), config.num_cells, case.num_kv_heads)
    cells = rng.standard_normal((*shape, config.record_size), np.float32)
    for sequence, length in enumerate(lengths):
        cells[:, sequence, length:] = np.nan
    news = [np.full(len(lengths), width) for width in widths]
    news = news if num_new is None else [np.array(n) for n in num_new]
    steps = [make_rows(case, w, n, rng) for w, n in zip(widths, news, strict=True)]
    return Problem(cells.astype(case.dtype), np.array(lengths, np.int32), steps)


def make_rows(
    case: Case, width: int, num_new: np.ndarray, rng: np.random.Generator
) -> NewRows:
    lead = (case.num_layers, len(num_new), width)
    q = rng.standard_normal((*lead, case.num_heads, case.head_dim), np.float32)
    k = rng.standard_normal((*lead, case.num_kv_heads, case.head_dim), np.float32)
    v = rng.standard_normal((*lead, case.num_kv_heads, case.value_dim), np.float32)
    dropped = np.arange(width) >= num_new[:, None]
    for x in (q, k, v):
        x[:, dropped] = np.nan
    return NewRows(num_new.astype(np.int32), q.astype(case.query_dtype), k, v)


def place(
    case: Case,
    batch_size: int,
    *,
    device_cells: int | None = None,
    capacity: int = CAPACITY,
    backend: str = "native",
) -> Placement:
    config = CacheConfig(
        num_layers=case.num_layers,
        batch_size=batch_size,
        capacity=capacity,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.value_dim,
        dtype=case.dtype,
        device_cells=device_cells,
    )
    return Placement(
        config=config, num_heads=case.num_heads, mesh=make_mesh(), backend=backend
    )


def make_cache(placement: Placement, problem: Problem) -> Cache:
    """The problem's cells in their places; a larger capacity is filled with NaN."""
    spare = placement.config.num_cells - problem.cells.shape[2]
    padding = [(0, 0), (0, 0), (0, spare), (0, 0), (0, 0)]
    cells = np.pad(problem.cells, padding, constant_values=np.nan)
    return cache_with(placement, cells, problem.lengths)


@functools.cache
def program(placement: Placement, case: Case):
    """One jitted step: begin, then append and attend in each layer."""
    attends = tuple((layer, case.window) for layer in range(case.num_layers))
    options = dict(scale=case.scale, window=case.window, soft_cap=case.soft_cap)

    def step(cache, tokens, num_new, q, k, v):
        _, step = Step.begin(placement, cache, tokens, num_new, attends)
        outs = [
            step.attend(i, q[i], k[i], v[i], **options) for i in range(len(attends))
        ]
        return jnp.stack(outs), step.end()

    return jit(placement, step)


def jit(placement: Placement, step):
    """Jits step(cache, ...) -> out, cache. Fast to compile: the work is in the ops."""
    return jax.jit(
        step,
        donate_argnames="cache",
        out_shardings=(placement.sharding(P()), placement.cache_shardings()),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def arguments(placement: Placement, rows: NewRows) -> list[jax.Array]:
    """tokens, num_new, q, k, v on the mesh; attention doesn't look at tokens."""
    tokens = np.zeros(rows.q.shape[1:3], np.int32)
    return jax.device_put([tokens, *rows], placement.sharding(P()))


def play(
    case: Case,
    problem: Problem,
    *,
    device_cells: int | None = None,
    capacity: int = CAPACITY,
    depth: int = 1,
    slot_blocks: int = 1,
    num_slots: int = 5,
    max_delay_us: int = 0,
    backend: str = "native",
) -> Played:
    """Runs the problem's steps at one placement through one ring."""
    placement = place(
        case,
        len(problem.lengths),
        device_cells=device_cells,
        capacity=capacity,
        backend=backend,
    )
    cache = make_cache(placement, problem)
    if backend == "reference":
        outs, cache = run_steps(placement, case, problem, cache)
        return Played(outs, cache, stored(placement.config, cache), None)
    slot_bytes = slot_blocks * smallest_slot(placement)
    config = RingConfig(
        depth=depth, slot_bytes=slot_bytes, budget_bytes=num_slots * slot_bytes
    )
    emulation = Emulation(seed=1, max_delay_us=max_delay_us) if max_delay_us else None
    with Ring.open(placement, config, emulation=emulation) as ring:
        outs, cache = run_steps(placement, case, problem, cache)
        stats = ring.stats()
    assert stats.moved_tails == stats.dropped_plans == stats.skipped_attends == 0
    return Played(outs, cache, stored(placement.config, cache), stats)


def run_steps(placement, case, problem, cache):
    step = program(placement, case)
    outs = []
    for rows in problem.steps:
        out, cache = step(cache, *arguments(placement, rows))
        outs.append(np.asarray(out))
    return outs, cache


def by_loops(case: Case, problem: Problem) -> list[np.ndarray]:
    """What each step's attends must return: softmax over a list of records, float64."""
    lengths = problem.lengths.copy()
    cells = problem.cells.astype(np.float64)
    outs = []
    for rows in problem.steps:
        offset = np.arange(rows.q.shape[2])
        where = lengths[:, None] + offset
        where = np.where(offset < rows.num_new[:, None], where, -1)
        records = np.concatenate([rows.k, rows.v], -1).astype(case.dtype)
        layers = zip(rows.q, records.astype(np.float64), cells, strict=True)
        outs.append(np.stack([attend(case, *x, lengths, where) for x in layers]))
        for layer, sequence, t in np.ndindex(records.shape[:3]):
            cell = where[sequence, t]
            if 0 <= cell < cells.shape[2]:
                cells[layer, sequence, cell] = records[layer, sequence, t]
        lengths = np.minimum(lengths + rows.num_new, cells.shape[2])
    return outs


def attend(case: Case, q, rows, cells, lengths, where) -> np.ndarray:
    """One layer's attend. rows [B, T, K, R], cells [B, S, K, R], where [B, T]."""
    out = np.zeros((*q.shape[:3], case.value_dim))
    for b, t in np.ndindex(where.shape):
        place = where[b, t]
        if where[b].max() >= cells.shape[1]:
            out[b] = np.nan
        elif place >= 0:
            seen = {cell: cells[b, cell] for cell in range(lengths[b])}
            for row, cell in enumerate(where[b]):
                seen.pop(cell, None)
                if 0 <= cell <= place:
                    seen[cell] = rows[b, row]
            if case.window is not None:
                seen = {c: x for c, x in seen.items() if c > place - case.window}
            records = np.array([*seen.values()])  # [cells, K, R]
            for n in range(case.num_heads):
                query = q[b, t, n].astype(np.float64)
                out[b, t, n] = weigh(case, query, records[:, n // case.group])
    return out


def weigh(case: Case, q: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Softmax of one query's scores over the records of one head [cells, R]."""
    keys, values = records[:, : case.head_dim], records[:, case.head_dim :]
    scores = keys @ q * case.scale
    if case.soft_cap is not None:
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
    weights = np.exp(scores - scores.max())
    return weights @ values[:, : case.value_dim] / weights.sum()


def check(case: Case, problem: Problem, **where):
    """Asserts that a placement's outputs are those of the loops."""
    played = play(case, problem, **where)
    for got, want in zip(played.outs, by_loops(case, problem), strict=True):
        assert got.dtype == case.query_dtype
        assert_close(got, want)


def check_same(got: Played, want: Played):
    for a, b in zip(got.outs, want.outs, strict=True):
        assert_same_bits(a, b)


SHAPES = [
    Case(head_dim=64, group=1, num_kv_heads=3),
    Case(head_dim=64, group=3, num_kv_heads=3, dtype="float32"),
    Case(head_dim=72, value_dim=72, group=4),
    Case(head_dim=80, value_dim=80, group=8, dtype="float32"),
    Case(head_dim=96, value_dim=96, group=3, query_dtype="bfloat16"),
    Case(head_dim=128, value_dim=128, group=4, num_kv_heads=1, query_dtype="bfloat16"),
    Case(head_dim=128, value_dim=128, group=8, num_kv_heads=1, dtype="float32"),
    Case(head_dim=256, value_dim=256, group=1),
    Case(head_dim=256, value_dim=256, group=4, num_kv_heads=1, dtype="float32"),
    Case(head_dim=128, value_dim=64, group=3),
    Case(head_dim=64, value_dim=136, group=4, dtype="float32"),
    Case(head_dim=8, value_dim=8, group=5, num_kv_heads=1),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_attention_is_that_of_a_loop_for_every_shape(case):
    problem = make_problem(case, RAGGED, [5, 1], num_new=[[5, 5, 2, 1], [1] * 4])
    check(case, problem, device_cells=128)


@pytest.mark.parametrize("device_cells", [None, 0, 1024])
@pytest.mark.parametrize("width", [1, 2, 130])
def test_attention_is_right_at_borders_of_blocks_and_groups(width, device_cells):
    case = Case(group=1, num_kv_heads=1)
    check(case, make_problem(case, BORDERS, [width]), device_cells=device_cells)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    "case",
    [
        Case(window=1),
        Case(window=128),
        Case(window=129),
        Case(window=1000),
        Case(soft_cap=2.0),
        Case(soft_cap=30.0, dtype="float32"),
        Case(window=200, soft_cap=5.0, query_dtype="bfloat16"),
    ],
    ids=str,
)
def test_windows_and_soft_caps_are_those_of_a_loop(case, backend):
    problem = make_problem(case, RAGGED, [1, 3, 1])
    check(case, problem, device_cells=128, backend=backend)


@pytest.mark.parametrize("device_cells", [None, 0, 128])
@pytest.mark.parametrize(
    "case", [Case(), Case(value_dim=128, dtype="float32")], ids=str
)
def test_the_reference_backend_is_that_of_a_loop(case, device_cells):
    problem = make_problem(case, RAGGED, [3, 1], num_new=[[3, 0, 3, 2], [1] * 4])
    check(case, problem, device_cells=device_cells, backend="reference")


@pytest.mark.parametrize("device_cells", [None, 0])
def test_one_sequence_grows_from_nothing(device_cells):
    case = Case(num_layers=2)
    problem = make_problem(case, [0], [126] + [1] * 4)
    check(case, problem, device_cells=device_cells)


@pytest.mark.parametrize("device_cells", [None, 0, 256])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_dropped_row_gives_zero_and_leaves_no_trace(device_cells, backend):
    case = Case()
    problem = make_problem(case, RAGGED, [4], num_new=[[4, 1, 0, 0]])
    played = play(case, problem, device_cells=device_cells, backend=backend)
    out = played.outs[0][0]
    assert not out[1, 1:].any() and not out[2:].any()
    assert np.isfinite(out).all() and out[0].any() and out[1, :1].any()
    assert played.cache.lengths.tolist() == [304, 1, 1023, 129]
    assert_same_bits(played.cells[0, 2:], problem.cells[0, 2:])


@pytest.mark.parametrize("device_cells", [None, 0, 128])
@pytest.mark.parametrize("case", [Case(num_layers=2), Case(window=150)], ids=str)
def test_garbage_that_nothing_may_see_changes_no_bit(case, device_cells):
    problem = make_problem(case, RAGGED, [4, 1], num_new=[[4, 0, 2, 1], [1, 0, 1, 1]])
    clean = Problem(
        np.nan_to_num(problem.cells),
        problem.lengths,
        [NewRows(s.num_new, *map(np.nan_to_num, s[1:])) for s in problem.steps],
    )
    check_same(
        play(case, problem, device_cells=device_cells),
        play(case, clean, device_cells=device_cells),
    )


@pytest.mark.parametrize("device_cells", [None, 0, 128])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_length_past_the_capacity_is_nan_for_that_sequence_alone(
    device_cells, backend
):
    case = Case()
    problem = make_problem(case, [CAPACITY - 1, 300, CAPACITY, 0], [2, 1])
    played = play(case, problem, device_cells=device_cells, backend=backend)
    two, one = played.outs
    assert np.isnan(two[0, [0, 2]]).all() and np.isnan(one[0, [0, 2]]).all()
    for got, want in zip(played.outs, by_loops(case, problem), strict=True):
        assert_close(got, want)
    assert played.cache.lengths.tolist() == [CAPACITY, 303, CAPACITY, 3]


def test_lengths_past_the_capacity_are_counted_and_reset_mends_them():
    case = Case()
    problem = make_problem(case, [CAPACITY, 300], [1, 1, 1])
    placement = place(case, 2, device_cells=128)
    step, cache = program(placement, case), make_cache(placement, problem)
    first, *later = [arguments(placement, rows) for rows in problem.steps]
    with Ring.open(placement) as ring:
        out, cache = step(cache, *first)
        assert np.isnan(out[0, 0]).all()
        cache = reset(cache, 0)
        for args in later:
            out, cache = step(cache, *args)
            assert np.isfinite(out).all()
        assert ring.stats().length_errors == 1


ARMS = [
    dict(device_cells=0, depth=0),
    dict(device_cells=0, depth=1),
    dict(device_cells=0, depth=2, slot_blocks=3, num_slots=3, max_delay_us=300),
    dict(device_cells=0, depth=8, slot_blocks=2, num_slots=9, max_delay_us=300),
    dict(device_cells=0, depth=8, slot_blocks=99),
    dict(device_cells=128, depth=1, slot_blocks=5),
    dict(device_cells=128, depth=2, max_delay_us=300),
    dict(device_cells=640, depth=1),
    dict(device_cells=1024, depth=1, slot_blocks=2),
]
GROWING = [1021, 0, 126, 400]  # steps of 1, 5 and 1 rows carry them over borders


@functools.cache
def on_the_device(case: Case) -> tuple[Problem, Played]:
    """A problem with many steps, and what a cache in device memory makes of it."""
    problem = make_problem(case, GROWING, [1, 5, 1, 1, 1])
    return problem, play(case, problem)


@pytest.mark.parametrize("arm", ARMS, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(num_layers=4),
        Case(num_layers=4, group=4, num_kv_heads=1, dtype="float32", soft_cap=8.0),
        Case(num_layers=4, window=300, query_dtype="bfloat16"),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_where_cells_lie_nor_on_the_ring(case, arm):
    problem, want = on_the_device(case)
    got = play(case, problem, **arm)
    check_same(got, want)
    assert_same_bits(got.cells, want.cells)
    moved = (got.stats.early_bytes, got.stats.ordered_bytes)
    assert (moved[0] == 0, moved[1] == 0) == (arm["depth"] == 0, arm["depth"] > 0)


@pytest.mark.parametrize("window", [None, 300])
def test_delivered_bytes_are_those_of_the_cells_that_queries_see(window):
    case = Case(num_layers=4, window=window)
    problem, _ = on_the_device(case)
    stats = play(case, problem, device_cells=128).stats
    cells = sum(
        max(0, length - max(128, length + 1 - (window or length + 1)))
        for rows, start in zip(problem.steps, [0, 1, 6, 7, 8], strict=True)
        for length in problem.lengths + start
    )
    record = (case.head_dim + case.value_dim) * 2
    assert stats.early_bytes == cells * case.num_layers * case.num_kv_heads * record


@pytest.mark.parametrize("device_cells", [None, 0, 128])
def test_batch_mates_change_no_bit(device_cells):
    case = Case(num_layers=2)
    problem = make_problem(case, RAGGED, [3, 1], num_new=[[3, 2, 0, 1], [1] * 4])
    whole = play(case, problem, device_cells=device_cells)
    for sequence in range(len(RAGGED)):
        alone = play(case, problem.of([sequence]), device_cells=device_cells)
        for got, want in zip(alone.outs, whole.outs, strict=True):
            assert_same_bits(got[:, 0], want[:, sequence])


@pytest.mark.parametrize("device_cells", [0, 128, 1280])
def test_the_capacity_changes_no_bit(device_cells):
    case = Case(num_layers=2)
    problem = make_problem(case, RAGGED, [3, 1])
    check_same(
        play(case, problem, device_cells=device_cells, capacity=1700),
        play(case, problem, device_cells=device_cells),
    )


@pytest.mark.parametrize("device_cells", [None, 0])
def test_a_chunk_is_close_to_its_tokens_one_by_one(device_cells):
    case = Case(num_layers=2, group=4)
    problem = make_problem(case, GROWING, [20])
    (rows,) = problem.steps
    singly = [
        NewRows(np.ones(4, np.int32), *(x[:, :, t : t + 1] for x in rows[1:]))
        for t in range(20)
    ]
    chunk = play(case, problem, device_cells=device_cells)
    tokens = play(case, problem._replace(steps=singly), device_cells=device_cells)
    assert_close(np.concatenate(tokens.outs, axis=2), chunk.outs[0])
    assert_same_bits(tokens.cells, chunk.cells)


@pytest.mark.parametrize("device_cells", [None, 0])
def test_the_same_step_twice_gives_the_same_bits(device_cells):
    case = Case(num_layers=2)
    problem = make_problem(case, RAGGED, [3, 1])
    first, second = (play(case, problem, device_cells=device_cells) for _ in range(2))
    check_same(first, second)


def test_one_executable_serves_growing_lengths_and_any_ring():
    case = Case(num_layers=2)
    problem = make_problem(case, [126, 1022, 0], [1] * 6)
    placement = place(case, 3, device_cells=128)
    calls = [arguments(placement, rows) for rows in problem.steps]
    compiled = program(placement, case).lower(make_cache(placement, problem), *calls[0])
    compiled = compiled.compile()
    for config in (
        RingConfig(depth=0),
        RingConfig(),
        RingConfig(depth=8, slot_bytes=smallest_slot(placement)),
    ):
        cache = make_cache(placement, problem)
        with Ring.open(placement, config):
            for args, want in zip(calls, by_loops(case, problem), strict=True):
                out, cache = compiled(cache, *args)
                assert_close(out, want)


def test_a_row_takes_the_place_of_the_cell_that_where_names():
    case = Case(group=2)
    problem = make_problem(case, [300, 140, 0], [3])
    (rows,) = problem.steps
    where = np.array([[20, 299, 130], [-1, 5, 139], [0, -1, -1]], np.int32)
    placement = place(case, 3, device_cells=128)
    config = placement.config

    def step(cache, tokens, q, k, v, where):
        _, ticket, stamp = ffi.begin(placement, tokens, cache, ((0, None),))
        new = encode(config, k[0], v[0])
        on_device = where < 128
        in_device, in_tail = (
            jnp.where(on_device, where, -1),
            jnp.where(on_device, -1, where - 128),
        )
        ((device, tail),) = layer_extents(config)
        cache = Cache(
            ffi.append(placement, cache.device, device, new, in_device, ticket),
            ffi.append(placement, cache.tail, tail, new, in_tail, ticket),
            cache.lengths,
            stamp,
            cache.layout,
        )
        out, ticket = ffi.attend(
            placement, 0, q[0], new, cache, where, ticket, scale=case.scale
        )
        return out, cache

    tokens, _, *qkv = arguments(placement, rows)
    where_there = jax.device_put(where, placement.sharding(P()))
    with Ring.open(placement):
        cache = make_cache(placement, problem)
        out, cache = jit(placement, step)(cache, tokens, *qkv, where_there)
    records = np.concatenate([rows.k, rows.v], -1).astype(case.dtype)[0]
    cells = problem.cells[0]
    want = attend(
        case,
        rows.q[0],
        records.astype(np.float64),
        cells.astype(np.float64),
        problem.lengths,
        where,
    )
    assert_close(out, want)
    for sequence, t in np.argwhere(where >= 0):
        cells[sequence, where[sequence, t]] = records[sequence, t]
    assert_same_bits(stored(config, cache)[0], cells)


@pytest.mark.parametrize("device_cells", [None, 0, 128, 1152])
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(
    "case", [Case(num_layers=2), Case(value_dim=72, dtype="float32")], ids=str
)
def test_append_writes_behind_each_length_and_nowhere_else(case, backend, device_cells):
    lengths, num_new = [126, 0, 1277, 300], [4, 5, 5, 0]
    problem = make_problem(case, lengths, [5], num_new=[num_new])
    played = play(case, problem, device_cells=device_cells, backend=backend)
    (rows,) = problem.steps
    records = np.concatenate([rows.k, rows.v], -1).astype(case.dtype)
    want = problem.cells.copy()
    for sequence, (length, count) in enumerate(zip(lengths, num_new, strict=True)):
        for t in range(count):
            if length + t < CAPACITY:
                want[:, sequence, length + t] = records[:, sequence, t]
    assert_same_bits(played.cells, want)


def test_a_record_is_the_key_then_the_value():
    config = place(Case(head_dim=8, value_dim=16), 1).config
    k, v = jnp.arange(16.0).reshape(1, 1, 2, 8), -jnp.arange(32.0).reshape(1, 1, 2, 16)
    rows = encode(config, k, v)
    assert rows.dtype == "bfloat16" and rows.shape == (1, 1, 2, 24)
    assert rows[0, 0, 1].tolist() == [*range(8, 16), *range(-16, -32, -1)]


def call(
    case: Case = Case(),
    *,
    q_size: int = 64,
    q_dtype="float32",
    row_dtype="bfloat16",
    extent_of=lambda extent: extent,
):
    """Lowers and runs attend and append with operands that may not fit the cells."""
    placement = place(case, 1, device_cells=0)
    cache = make_cache(placement, make_problem(case, [5], [1]))
    q = jnp.zeros((1, 1, case.num_heads, q_size), q_dtype)
    rows = jnp.zeros((1, 1, 2, 128), row_dtype)
    where = jnp.full((1, 1), 5, jnp.int32)

    def step(cache, q, rows):
        tokens = jnp.zeros((1, 1), jnp.int32)
        _, ticket, stamp = ffi.begin(placement, tokens, cache, ((0, None),))
        extent = extent_of(layer_extents(placement.config)[0].tail)
        tail = ffi.append(placement, cache.tail, extent, rows, where, ticket)
        cache = cache._replace(tail=tail, stamp=stamp)
        out, _ = ffi.attend(placement, 0, q, rows, cache, where, ticket, scale=1.0)
        return out, cache

    jax.block_until_ready(jit(placement, step)(cache, q, rows))


@pytest.mark.parametrize(
    "wrong, text",
    [
        (dict(q_size=72), r"q \[1,1,6,72\] doesn't fit rows \[1,1,2,128\]"),
        (dict(q_size=60), r"q \[1,1,6,60\] doesn't fit rows"),
        (dict(q_dtype="float16"), "q must be float32 or bfloat16"),
        (
            dict(row_dtype="float32"),
            r"rows \[1,1,2,128\] don't fit 1280 cells .* from 0 .* \[1280,2,128\]",
        ),
        (
            dict(extent_of=lambda extent: extent._replace(first=128)),
            r"don't fit 1280 cells a sequence from 128 on in a part \[1280,2,128\]",
        ),
        (
            dict(extent_of=lambda extent: extent._replace(num_cells=2**62)),
            r"don't fit 4611686018427387904 cells a sequence from 0 on",
        ),
    ],
    ids=str,
)
def test_operands_that_do_not_fit_are_refused(wrong, text):
    with Ring.open(place(Case(), 1, device_cells=0)) as ring:
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            call(**wrong)
        # What was sent for the step that died is joined: XLA frees the tail.
        assert ring.stats().dropped_plans == 1
        call()
        assert ring.stats().dropped_plans == 1


def test_values_of_another_size_are_refused_while_tracing():
    case = Case()
    placement = place(case, 1)
    problem = make_problem(case._replace(value_dim=72), [5], [1])
    cache = make_cache(placement, make_problem(case, [5], [1]))
    with pytest.raises(ValueError, match="keys of 64 and values of 64, got 64 and 72"):
        program(placement, case).lower(cache, *arguments(placement, problem.steps[0]))


def stored(config: CacheConfig, cache: Cache) -> np.ndarray:
    """All cells [L, B, S, K, R], wherever they lie."""
    cache = jax.tree.map(np.asarray, cache)
    layers = [layer_cells(config, cache, i) for i in range(config.num_layers)]
    return np.stack(
        [
            np.concatenate([x for x in cells if x is not None], axis=1)
            for cells in layers
        ]
    )
