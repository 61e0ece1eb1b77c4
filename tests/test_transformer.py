"""The transformer against NumPy in float64; against itself, cut and split anyhow."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpy_forward
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from steps import parts
from tolerance import assert_close, assert_same_bits

from kvjax.cache.state import Cache
from kvjax.config import CacheConfig
from kvjax.delivery import ffi
from kvjax.delivery.allocate import init_cache
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.model import checkpoint, tokenizer
from kvjax.model.transformer import (
    LLAMA31_ROPE,
    ModelConfig,
    Transformer,
    head_rows,
    random_model,
    shardings,
    split,
)

BACKEND = "native" if ffi.library_path("cpu") else "reference"
LOGITS_RTOL = 1e-4  # float32 against float64 through 30 layers, as the design asks
TINY = replace(ModelConfig.of("tiny"), num_layers=2)  # two compile twice as fast
ODD = ModelConfig(
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    width=33,
    mlp_width=35,
    vocab_size=131,
    qkv_bias=True,
    qk_norm=True,
)
WIDE = replace(ModelConfig.of("sharded-demo"), num_layers=2)
TASKS = (
    "Name the capital of France.",
    "Count from one to ten.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
)


def placement_of(
    config: ModelConfig,
    mesh: Mesh,
    *,
    batch_size: int = 1,
    capacity: int = 256,
    device_cells: int | None = 128,
    dtype: str = "float32",
) -> Placement:
    cells = CacheConfig(
        num_layers=config.num_layers,
        batch_size=batch_size,
        capacity=capacity,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device_cells=device_cells,
    )
    return Placement(
        config=cells, num_heads=config.num_heads, mesh=mesh, backend=BACKEND
    )


def stepper(model: Transformer, placement: Placement, logits: str = "all"):
    """A jitted step (cache, tokens, num_new) -> (logits, cache) that donates."""
    skeleton, leaves = split(model)

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(leaves, cache: Cache, tokens, num_new):
        merged = skeleton.merge(leaves)
        return merged(tokens, cache, placement, num_new, logits=logits)

    def run(cache, tokens, num_new=None):
        num_new = None if num_new is None else np.array(num_new, np.int32)
        return step(leaves, cache, np.array(tokens, np.int32), num_new)

    return run


def some_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, shape)


@pytest.fixture(scope="module")
def smollm2():
    """(checkpoint, model), or a skip where the model's package is missing."""
    try:
        path = checkpoint.find_smollm2()
    except ValueError as error:
        pytest.skip(str(error))
    opened = checkpoint.open_checkpoint(path)
    return opened, checkpoint.load(opened, dtype="float32")[0]


@pytest.fixture(scope="module")
def oracle(smollm2):
    return numpy_forward.read_gguf(smollm2[0].path)


def test_the_default_model_has_the_published_geometry(smollm2):
    config = replace(smollm2[0].config, norm_eps=1e-5)  # stored as a float32
    assert config == ModelConfig.of("smollm2-135m")


def test_smollm2_prefilled_in_chunks_matches_float64(smollm2, oracle, mesh1):
    opened, model = smollm2
    num_tokens, chunk, stride = 2048, 512, 16
    tokens = np.random.default_rng(5).integers(0, opened.config.vocab_size, num_tokens)
    placement = placement_of(
        opened.config, mesh1, capacity=num_tokens, device_cells=num_tokens // 2
    )
    step, cache, got = stepper(model, placement), init_cache(placement), []
    for start in range(0, num_tokens, chunk):
        logits, cache = step(cache, tokens[None, start : start + chunk])
        got.append(np.asarray(logits[0, stride - 1 :: stride]))
    positions = list(range(stride - 1, num_tokens, stride))
    want = numpy_forward.forward(*oracle, tokens.tolist(), positions)
    assert_close(np.concatenate(got), want, rtol=LOGITS_RTOL)


def test_greedy_tokens_are_those_of_the_oracle(smollm2, oracle, mesh1):
    opened, model = smollm2
    encode = tokenizer.from_gguf(opened.metadata).encode
    prompts = [encode(task) for task in TASKS]
    num_new = [len(prompt) for prompt in prompts]
    padded = [prompt + [0] * (max(num_new) - len(prompt)) for prompt in prompts]
    placement = placement_of(opened.config, mesh1, batch_size=len(TASKS))
    step = stepper(model, placement, "last")
    logits, cache = step(init_cache(placement), padded, num_new)
    answers = [np.asarray(logits.argmax(axis=-1))]
    for _ in range(63):
        logits, cache = step(cache, answers[-1][:, None])
        answers.append(np.asarray(logits.argmax(axis=-1)))
    for prompt, answer in zip(prompts, np.stack(answers, axis=1).tolist()):
        text = prompt + answer[:-1]
        want = numpy_forward.forward(
            *oracle, text, list(range(len(prompt) - 1, len(text)))
        )
        assert_same_choice(answer, want)


def assert_same_choice(tokens: list[int], logits: np.ndarray):
    """Each token is the best one, or the second best closer than rounding can tell."""
    tolerance = 2 * LOGITS_RTOL * np.abs(logits).max()
    chosen = logits[np.arange(len(tokens)), tokens]
    behind = logits.max(axis=1) - chosen
    assert (behind <= tolerance).all()
    assert (behind == 0).mean() > 0.95


@pytest.fixture(scope="module")
def tiny():
    """(placement, step) of one sequence, compiled once a width for all cases."""
    placement = placement_of(TINY, make_mesh())
    return placement, stepper(random_model(TINY), placement)


@pytest.mark.parametrize(
    "width, cuts", [(1, [1] * 20), (8, [8, 8, 4]), (8, [3, 0, 8, 1, 8]), (20, [13, 7])]
)
def test_a_text_in_pieces_gives_the_logits_of_one_piece(tiny, width, cuts):
    (placement, step), tokens = tiny, some_tokens(1, 20)
    whole, _ = step(init_cache(placement), tokens, [20])
    cache, got, start = init_cache(placement), [], 0
    for cut in cuts:
        piece = np.zeros((1, width), np.int32)
        piece[0, :cut] = tokens[0, start : start + cut]
        logits, cache = step(cache, piece, [cut])
        got.append(np.asarray(logits[:, :cut]))
        start += cut
    assert_close(np.concatenate(got, axis=1), whole)
    assert cache.lengths.tolist() == [20]


def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone(mesh1):
    """Four sequences, three steps; 130 crosses the border of the device's cells."""
    news = np.array([[5, 1, 0, 130], [1, 1, 4, 1], [0, 3, 2, 1]])
    model = random_model(TINY, 3)
    together, alone = (
        placement_of(TINY, mesh1, batch_size=size) for size in (len(news[0]), 1)
    )
    texts = some_tokens(news.shape[1], news.sum(axis=0).max(), seed=1)
    step, cache = stepper(model, together, "last"), init_cache(together)
    step_alone = stepper(model, alone, "last")
    caches = [init_cache(alone) for _ in texts]
    done = np.zeros(len(texts), int)
    for num_new in news:
        width = num_new.max()
        batch = np.zeros((len(texts), width), np.int32)
        for i, n in enumerate(num_new):
            batch[i, :n] = texts[i, done[i] : done[i] + n]
        logits, cache = step(cache, batch, num_new)
        for i, n in enumerate(num_new):
            if n:
                want, caches[i] = step_alone(caches[i], batch[i : i + 1], [n])
                assert_close(logits[i : i + 1], want)
        done += num_new
    assert cache.lengths.tolist() == news.sum(axis=0).tolist()


def test_last_logits_are_those_at_the_last_real_token(mesh1):
    placement = placement_of(TINY, mesh1, batch_size=3)
    model, tokens, num_new = random_model(TINY, 1), some_tokens(3, 6), [6, 1, 4]
    every, _ = stepper(model, placement)(init_cache(placement), tokens, num_new)
    last, _ = stepper(model, placement, "last")(init_cache(placement), tokens, num_new)
    assert_close(last, np.stack([every[i, n - 1] for i, n in enumerate(num_new)]))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "config, sizes",
    [
        (TINY, {"tp": 4}),  # two kv heads: each is held by two devices
        (WIDE, {"tp": 8}),
        (WIDE, {"replica": 2, "tp": 4}),
        (ODD, {"tp": 2}),  # vocabulary and mlp of odd size lie whole
    ],
    ids=["few-kv-heads", "eight-devices", "two-axes", "odd-sizes"],
)
def test_split_weights_give_the_logits_of_one_device(mesh1, kind, config, sizes):
    mesh = Mesh(make_mesh(sizes).devices, tuple(sizes), axis_types=(kind,) * len(sizes))
    tokens, num_new = some_tokens(2, 5) % config.vocab_size, [5, 2]
    got = []
    for m in (mesh1, mesh):
        placement = placement_of(config, m, batch_size=2)
        step = stepper(random_model(config, 7, mesh=m), placement)
        logits, cache = step(init_cache(placement), tokens, num_new)
        more, _ = step(cache, tokens[:, :1])
        got.append((np.asarray(logits[0]), np.asarray(more)))
    for one, many in zip(*got):
        assert_close(many, one)


def test_explicit_axes_also_work_in_the_mesh_context(mesh1):
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Explicit,))
    tokens = some_tokens(1, 4)
    one = placement_of(TINY, mesh1)
    want, _ = stepper(random_model(TINY), one)(init_cache(one), tokens)
    with jax.set_mesh(mesh):
        four = placement_of(TINY, mesh)
        model = random_model(TINY, mesh=mesh)
        got, _ = stepper(model, four)(init_cache(four), tokens)
    assert_close(got, want)


def test_parameters_lie_where_their_sharding_says():
    mesh = make_mesh({"tp": 4})
    model = random_model(TINY, mesh=mesh)
    layer = model.layers[1]
    specs = {
        name: tuple(getattr(layer, name).sharding.spec)
        for name in ("qkv", "o", "gate_up", "down")
    }
    assert specs == {
        "qkv": ("tp", None, None, None),
        "o": (None, "tp", None),
        "gate_up": ("tp", None, None),
        "down": (None, "tp"),
    }
    assert tuple(model.vectors.norms.sharding.spec) == (None, None)
    assert tuple(model.embedding.sharding.spec) == ("tp", None)
    # Two queries, a key and a value: with two kv heads on four devices two have each.
    assert layer.qkv.addressable_shards[0].data.shape == (1, 2 + 2, 64, 256)


def test_head_rows_are_those_drawn():
    assert head_rows(4, 2, 2).tolist() == [[0, 1, 4, 6], [2, 3, 5, 7]]
    four = [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]
    assert head_rows(4, 2, 4).tolist() == four


def heads_of(config: ModelConfig, rows: np.ndarray) -> np.ndarray:
    """The heads in qkv or its bias, each once, in the order of head_rows."""
    numbers = head_rows(config.num_heads, config.num_kv_heads, len(rows))
    heads = np.zeros((numbers.max() + 1, *rows.shape[2:]), rows.dtype)
    heads[numbers] = rows
    assert_same_bits(heads[numbers], rows)  # copies are equal
    return heads


def test_random_weights_do_not_depend_on_the_mesh():
    config = replace(TINY, qkv_bias=True, qk_norm=True)
    one, four = (
        random_model(config, 11, dtype="bfloat16", mesh=make_mesh({"tp": size}))
        for size in (1, 4)
    )
    for layer in range(config.num_layers):
        qkv = [heads_of(config, np.asarray(m.layers[layer].qkv)) for m in (one, four)]
        assert_same_bits(*qkv)
        biases = [np.asarray(m.vectors.qkv_bias)[layer] for m in (one, four)]
        assert_same_bits(*(heads_of(config, bias) for bias in biases))
    same = [a.shape == b.shape for a, b in zip(split(one)[1], split(four)[1])]
    assert same.count(False) == config.num_layers + 1  # these
    for a, b in zip(split(one)[1], split(four)[1]):
        if a.shape == b.shape:
            assert_same_bits(a, b)


def test_bfloat16_stays_near_float32(mesh1):
    placement = placement_of(TINY, mesh1)
    tokens, logits = some_tokens(1, 40), []
    for dtype in ("float32", "bfloat16"):
        model = random_model(TINY, dtype=dtype)
        step = stepper(model, placement)
        logits.append(step(init_cache(placement), tokens)[0])
    assert logits[1].dtype == jnp.float32
    # Measured 2.0e-2 of the largest: four layers, each rounding its input to 8 bits.
    assert_close(logits[1], logits[0], rtol=4e-2)


def test_a_step_gives_equal_bits_twice(mesh1):
    placement, tokens = placement_of(TINY, mesh1, batch_size=2), some_tokens(2, 9)
    step = stepper(random_model(TINY), placement)
    first, second = (step(init_cache(placement), tokens, [9, 4]) for _ in range(2))
    jax.tree.map(assert_same_bits, first[0], second[0])
    jax.tree.map(assert_same_bits, parts(first[1]), parts(second[1]))


def test_a_step_returns_no_weight_and_copies_none(mesh1):
    config = replace(TINY, mlp_width=8192)  # a copy of gate_up would stand out
    placement = placement_of(config, mesh1, capacity=128)
    skeleton, leaves = split(random_model(config))

    def step(leaves, cache, tokens):
        return skeleton.merge(leaves)(tokens, cache, placement)

    cache, token = init_cache(placement), np.zeros((1, 1), np.int32)
    lowered = jax.jit(step, donate_argnames="cache").lower(leaves, cache, token)
    memory = lowered.compile().memory_analysis()
    cells = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert memory.output_size_in_bytes - cells < 2 * 4 * config.vocab_size
    assert memory.temp_size_in_bytes < max(leaf.nbytes for leaf in leaves) / 2


def test_angles_are_computed_behind_begin(mesh1):
    """Before it no graph of XLA's takes them: each would be a launch of its own."""
    placement = placement_of(TINY, mesh1)
    if placement.backend != "native":
        pytest.skip("the reference has no begin")
    skeleton, leaves = split(random_model(TINY))

    def step(cache, tokens):
        return skeleton.merge(leaves)(tokens, cache, placement)

    traced = jax.make_jaxpr(step)(init_cache(placement), np.zeros((1, 1), np.int32))
    behind, angles = set(), 0
    for eqn in traced.eqns:
        read = {x for x in eqn.invars if not isinstance(x, jax.extend.core.Literal)}
        if "kvjax_begin" in str(eqn) or read & behind:
            behind.update(eqn.outvars)
        elif eqn.primitive.name in ("cos", "sin"):
            raise AssertionError(f"before begin: {eqn}")
        angles += eqn.primitive.name in ("cos", "sin")
    assert angles == 2


@pytest.mark.parametrize("sizes", [{"tp": 1}, {"tp": 4}])
def test_a_token_outside_the_vocabulary_gives_nan_in_its_sequence_alone(sizes):
    mesh = make_mesh(sizes)
    placement = placement_of(TINY, mesh, batch_size=3)
    step = stepper(random_model(TINY, mesh=mesh), placement)
    tokens = [[1, TINY.vocab_size], [-1, 3], [0, TINY.vocab_size - 1]]
    logits = np.asarray(step(init_cache(placement), tokens)[0])
    assert np.isnan(logits[0, 1]).all()
    assert np.isnan(logits[1]).all()
    assert not np.isnan(logits[2]).any()


def test_a_step_compiles_once_while_lengths_grow(mesh1):
    placement = placement_of(TINY, mesh1)
    skeleton, leaves = split(random_model(TINY))
    traces = []

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(leaves, cache, tokens):
        traces.append(tokens.shape)
        return skeleton.merge(leaves)(tokens, cache, placement)

    cache = init_cache(placement)
    for token in range(4):
        _, cache = step(leaves, cache, np.full((1, 1), token, np.int32))
    assert traces == [(1, 1)]


@pytest.mark.parametrize(
    "name, millions",
    [("smollm2-135m", 134.5), ("llama-3.1-8b", 8030.3), ("llama-3.1-70b", 70553.7)],
)
def test_published_geometries_have_the_published_number_of_weights(name, millions):
    assert ModelConfig.of(name).num_parameters / 1e6 == pytest.approx(millions, abs=0.1)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    config = ModelConfig.of("llama-3.1-8b")
    plain = 500_000.0 ** (-np.arange(64) / 64)
    divisors = config.rope_scaling.divisors(plain)
    waves = 2 * np.pi / plain
    np.testing.assert_array_equal(divisors[waves < 8192 / 4], 1)
    np.testing.assert_allclose(divisors[waves > 8192 / 1], 8, rtol=1e-12)
    between = divisors[(waves > 8192 / 4) & (waves < 8192 / 1)]
    assert ((between > 1) & (between < 8)).all() and len(between) > 2
    assert_close(config.frequencies, (plain / divisors).astype(np.float32))


def test_a_model_is_cut_into_arrays_and_put_together_again():
    model = random_model(TINY)
    skeleton, leaves = split(model)
    assert len(leaves) == 4 * TINY.num_layers + 2
    assert hash(skeleton) == hash(split(model)[0])
    again = skeleton.merge(leaves)
    assert again.config == TINY
    assert_same_bits(again.layers[1].down[...], model.layers[1].down[...])


def test_shardings_take_a_model_or_its_state():
    mesh, model = make_mesh({"tp": 2}), Transformer(TINY)
    of_model = jax.tree.leaves(shardings(model, mesh))
    assert of_model == jax.tree.leaves(shardings(nnx.state(model), mesh))
    assert len(of_model) == len(split(model)[1])


@pytest.mark.parametrize(
    "change, text",
    [
        (
            dict(num_kv_heads=3),
            "num_heads must be a multiple of num_kv_heads, got 8 and 3",
        ),
        (dict(head_dim=33), "head_dim must be even, got 33"),
        (dict(num_layers=0), "num_layers must be between 1 and 4096, got 0"),
        (dict(rope_theta=0.0), "rope_theta must be above 0"),
        (dict(rope_scaling=(1.0, 2.0)), "must hold 32 divisors above 0, got 2"),
        (dict(end_tokens=(512,)), "end_tokens must be between 0 and 511, got 512"),
    ],
)
def test_a_config_rejects_what_cannot_be(change, text):
    with pytest.raises(ValueError, match=text):
        replace(TINY, **change)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(factor=0.5), "factor must be at least 1, got 0.5"),
        (dict(low_freq_factor=4.0), "below high_freq_factor, got 4.0 and 4.0"),
        (dict(original_max_position=0), "original_max_position must be between"),
    ],
)
def test_a_rope_scaling_rejects_what_cannot_be(change, text):
    with pytest.raises(ValueError, match=text):
        replace(LLAMA31_ROPE, **change)


def test_a_model_rejects_another_models_placement_and_unknown_words(mesh1):
    placement = placement_of(WIDE, mesh1)
    cache, tokens = init_cache(placement), jnp.zeros((1, 1), jnp.int32)
    model = random_model(TINY)
    with pytest.raises(
        ValueError, match=r"\(2, 8, 2, 64\), the placement is of \(2, 16"
    ):
        model(tokens, cache, placement)
    four = placement_of(TINY, make_mesh({"tp": 4}))
    with pytest.raises(ValueError, match="stores 2 kv heads, on 4 .* axis_size=4"):
        model(tokens, init_cache(four), four)
    with pytest.raises(ValueError, match='"last" or "all", got \'first\''):
        model(tokens, cache, placement_of(TINY, mesh1), logits="first")
    with pytest.raises(ValueError, match="dtype must be one of .* got 'float16'"):
        Transformer(TINY, dtype="float16")
    with pytest.raises(ValueError, match="geometry must be one of .* got 'huge'"):
        ModelConfig.of("huge")
    with pytest.raises(ValueError, match="axis must be one of"):
        shardings(model, make_mesh(), "heads")
