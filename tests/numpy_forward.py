"""The oracle: a Llama-family forward pass in NumPy float64, over a whole text at once.

Imports nothing of kvjax. Slow and obvious: no cache, every token in every layer.
"""

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

QUERIES = 256  # rows of attention computed at a time


class Facts(NamedTuple):
    """What the model computes, beside its weights."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float
    eps: float
    interleaved: bool  # RoPE pairs are neighbours (GGUF's llama), or half a head apart
    divisors: np.ndarray | None = None  # of the RoPE frequencies, [H / 2]


GGUF_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


def read_gguf(path: Path) -> tuple[Facts, dict[str, np.ndarray]]:
    """Facts and float64 weights of a GGUF file of architecture llama.

    Returns:
      Weights as stored, [out, in]; "embedding", "norm", "head" if untied, "0.q" and
      so on for layer 0.
    """
    reader = gguf.GGUFReader(path)

    def get(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)

    num_heads, width = get("attention.head_count"), get("embedding_length")
    divisors = read("rope_freqs.weight") if "rope_freqs.weight" in tensors else None
    facts = Facts(
        num_layers=get("block_count"),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv"),
        head_dim=width // num_heads,
        theta=get("rope.freq_base"),
        eps=get("attention.layer_norm_rms_epsilon"),
        interleaved=True,
        divisors=divisors,
    )
    weights = {
        "embedding": read("token_embd.weight"),
        "norm": read("output_norm.weight"),
    }
    if "output.weight" in tensors:
        weights["head"] = read("output.weight")
    for layer in range(facts.num_layers):
        for role, name in GGUF_NAMES.items():
            weights[f"{layer}.{role}"] = read(f"blk.{layer}.{name}")
    return facts, weights


def forward(
    facts: Facts,
    weights: dict[str, np.ndarray],
    tokens: list[int],
    positions: list[int] | None = None,
) -> np.ndarray:
    """Logits [positions, V] in float64 at some tokens of a text, or at all."""
    x = weights["embedding"][tokens].astype(np.float64)
    for layer in range(facts.num_layers):
        w = {
            name.partition(".")[2]: value
            for name, value in weights.items()
            if name.startswith(f"{layer}.")
        }
        x = x + attention(facts, w, norm(x, w["attn_norm"], facts.eps))
        y = norm(x, w["mlp_norm"], facts.eps)
        gate = y @ w["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"].T)) @ w["down"].T
    x = norm(x if positions is None else x[positions], weights["norm"], facts.eps)
    return x @ weights.get("head", weights["embedding"]).T


def attention(facts: Facts, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Causal attention of one layer, bias and head norms where there are any."""
    num_tokens = x.shape[0]
    q, k, v = (x @ w[role].T + w.get(f"{role}_bias", 0.0) for role in "qkv")
    q = q.reshape(num_tokens, facts.num_heads, facts.head_dim)
    k = k.reshape(num_tokens, facts.num_kv_heads, facts.head_dim)
    v = v.reshape(num_tokens, facts.num_kv_heads, facts.head_dim)
    if "q_norm" in w:
        q, k = norm(q, w["q_norm"], facts.eps), norm(k, w["k_norm"], facts.eps)
    q, k = rope(facts, q) / np.sqrt(facts.head_dim), rope(facts, k)
    out = np.zeros_like(q)
    for head in range(facts.num_heads):
        kv = head // (facts.num_heads // facts.num_kv_heads)
        for start in range(0, num_tokens, QUERIES):
            end = min(start + QUERIES, num_tokens)
            scores = q[start:end, head] @ k[:end, kv].T
            later = np.triu(np.ones((end - start, end - start), bool), k=1)
            scores[:, start:][later] = -np.inf
            chances = np.exp(scores, out=scores)  # float64 holds exp up to 709
            total = chances.sum(axis=1, keepdims=True)
            out[start:end, head] = chances @ v[:end, kv] / total
    return out.reshape(num_tokens, -1) @ w["o"].T


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def rope(facts: Facts, x: np.ndarray) -> np.ndarray:
    """Turns each pair of coordinates of each head [T, heads, H] by its angle."""
    half = facts.head_dim // 2
    frequency = facts.theta ** -(np.arange(half) / half)
    if facts.divisors is not None:
        frequency = frequency / facts.divisors
    angle = (np.arange(x.shape[0])[:, None] * frequency)[:, None]  # [T, 1, H / 2]
    out = np.empty_like(x)
    if facts.interleaved:
        first, second = np.s_[..., 0::2], np.s_[..., 1::2]
    else:
        first, second = np.s_[..., :half], np.s_[..., half:]
    out[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
    out[second] = x[second] * np.cos(angle) + x[first] * np.sin(angle)
    return out
