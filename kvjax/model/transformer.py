r"""A decoder of the Llama family in Flax NNX that reads its cache through a `Step`.

    x --- norm --- qkv --- rope --- attend --- o ---(+)--- norm --- mlp ---(+)--- x
      \________________________________________/  \_______________________/

Weights are few and large, since every array costs a little in every dispatch: four a
layer, and what is short in one array for all layers. They lie [out, in], so that a
decode step reads them along memory. Matrix products take operands in the weights' dtype
and return float32; all else, x too, is float32.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from kvjax.cache.state import Cache
from kvjax.config import check_range
from kvjax.delivery.placement import Placement, make_mesh, stored_heads
from kvjax.model.attention import Step

WEIGHT_DTYPES = ("bfloat16", "float32")
SPLIT = "tp"  # what a parameter's spec calls the axis that splits it
Leaf = Array | jax.ShapeDtypeStruct  # the latter in a model of shapes only
Rotation = tuple[Float[Array, "B T 1 half"], Float[Array, "B T 1 half"]]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of RoPE: long waves are stretched, short ones kept.

    Attributes:
      factor: By which frequencies are divided where they are low.
      low_freq_factor: original_max_position / this = the wave length where low begins.
      high_freq_factor: original_max_position / this = the wave length where high ends.
      original_max_position: Context length before the scaling, tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self):
        if not self.factor >= 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be above 0 and below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        check_range("original_max_position", self.original_max_position, 1, 1 << 30)

    def divisors(self, frequencies: np.ndarray) -> np.ndarray:
        """What each frequency (radians a token) is divided by, between 1 and factor.

        The formula is that of Hugging Face transformers, modeling_rope_utils.py,
        `_compute_llama3_parameters`.
        """
        waves = self.original_max_position * frequencies / (2 * np.pi)
        smooth = (waves - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smooth = np.clip(smooth, 0, 1)
        return 1 / ((1 - smooth) / self.factor + smooth)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a model computes.

    Attributes:
      num_layers: L.
      num_heads: N, query heads.
      num_kv_heads: K; divides N.
      head_dim: H, even.
      width: D.
      mlp_width: F.
      vocab_size: V.
      rope_theta: Base of the RoPE frequencies.
      rope_scaling: Llama 3's parameters, or a divisor for each of the H / 2 frequencies
        (as GGUF files hold them), or None.
      norm_eps: Added to the mean square in every norm.
      tied: The head is the embedding.
      qkv_bias: q, k and v have a bias (Qwen2).
      qk_norm: q and k are normed by head before RoPE (Qwen3).
      max_position: Tokens that the model was trained for.
      end_tokens: Ids that end a text.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    mlp_width: int
    vocab_size: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | tuple[float, ...] | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_position: int = 8192
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self):
        check_range("num_layers", self.num_layers, 1, 4096)
        check_range("num_heads", self.num_heads, 1, 65536)
        check_range("num_kv_heads", self.num_kv_heads, 1, self.num_heads)
        check_range("head_dim", self.head_dim, 2, 256)
        check_range("width", self.width, 1, 1 << 20)
        check_range("mlp_width", self.mlp_width, 1, 1 << 24)
        check_range("vocab_size", self.vocab_size, 1, 1 << 24)
        check_range("max_position", self.max_position, 1, 1 << 30)
        for token in self.end_tokens:
            check_range("end_tokens", token, 0, self.vocab_size - 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} "
                f"and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if not self.rope_theta > 0 or not self.norm_eps >= 0:
            raise ValueError(
                f"rope_theta must be above 0 and norm_eps not below 0, got "
                f"{self.rope_theta} and {self.norm_eps}"
            )
        if isinstance(self.rope_scaling, tuple):
            self._check_divisors(self.rope_scaling)

    def _check_divisors(self, divisors: tuple[float, ...]) -> None:
        if len(divisors) != self.head_dim // 2 or min(divisors) <= 0:
            raise ValueError(
                f"rope_scaling must hold {self.head_dim // 2} divisors above 0, got "
                f"{len(divisors)}, the least {min(divisors, default=0)}"
            )

    @classmethod
    def of(cls, name: str) -> "ModelConfig":
        """A published or test geometry by its name in `GEOMETRIES`."""
        if name not in GEOMETRIES:
            raise ValueError(
                f"geometry must be one of {list(GEOMETRIES)}, got {name!r}"
            )
        return GEOMETRIES[name]

    @property
    def frequencies(self) -> np.ndarray:
        """RoPE frequencies [H / 2], float32, radians a token."""
        plain = self.rope_theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        if self.rope_scaling is None:
            divisors = np.ones_like(plain)
        elif isinstance(self.rope_scaling, RopeScaling):
            divisors = self.rope_scaling.divisors(plain)
        else:
            divisors = np.array(self.rope_scaling)
        return (plain / divisors).astype(np.float32)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(Transformer(self))))


LLAMA31_ROPE = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
)

GEOMETRIES = {
    "tiny": ModelConfig(
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        width=256,
        mlp_width=512,
        vocab_size=512,
        tied=True,
    ),
    "sharded-demo": ModelConfig(
        num_layers=4,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        width=512,
        mlp_width=1024,
        vocab_size=1024,
    ),
    "smollm2-135m": ModelConfig(
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        width=576,
        mlp_width=1536,
        vocab_size=49152,
        rope_theta=100_000.0,
        tied=True,
        end_tokens=(2,),
    ),
    "llama-3.1-8b": ModelConfig(
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        width=4096,
        mlp_width=14336,
        vocab_size=128256,
        rope_theta=500_000.0,
        rope_scaling=LLAMA31_ROPE,
        max_position=131072,
        end_tokens=(128001, 128008, 128009),
    ),
    "llama-3.1-70b": ModelConfig(
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        width=8192,
        mlp_width=28672,
        vocab_size=128256,
        rope_theta=500_000.0,
        rope_scaling=LLAMA31_ROPE,
        max_position=131072,
        end_tokens=(128001, 128008, 128009),
    ),
}


def weight(
    dtype: str,
    *shape: int,
    split: int | None = None,
    heads: int | None = None,
    mean: float = 0.0,
    std: float,
) -> nnx.Param:
    """A parameter that holds its shape only; `fill` gives it an array.

    Args:
      dtype: Of the array.
      *shape: Of the array.
      split: The axis that tensor parallelism splits, where its size allows.
      heads: The axis from which two hold heads as in `head_rows`.
      mean: Of random values.
      std: Of random values.
    """
    spec = P(*(SPLIT if axis == split else None for axis in range(len(shape))))
    return nnx.Param(
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),
        out_sharding=spec,
        eager_sharding=False,
        heads=heads,
        mean=mean,
        std=std,
    )


def head_rows(num_heads: int, num_kv_heads: int, stored: int) -> np.ndarray:
    """Which heads lie together in qkv: a kv head's queries, its key, its value.

    Heads are numbered query by query, then key by key, then value by value. With four
    query and two kv heads (q 0-3, k 4-5, v 6-7), stored for two and for four devices:

        0 1 4 6      0 4 6
        2 3 5 7      1 4 6
                     2 5 7
                     3 5 7

    Args:
      num_heads: N.
      num_kv_heads: K.
      stored: K', kv heads that are stored: K, or a multiple of it.

    Returns:
      Numbers [K', N / K' + 2].
    """
    queries = np.arange(num_heads).reshape(stored, -1)
    keys = np.repeat(num_heads + np.arange(num_kv_heads), stored // num_kv_heads)
    return np.column_stack([queries, keys, keys + num_kv_heads])


class Vectors(nnx.Module):
    """What is short, all layers in one array of a kind.

    Attributes:
      norms: [2 L + 1, D]: before attention and before the mlp of each layer; the last.
      head_norms: [L, 2, H], of q and of k (Qwen3), or None.
      qkv_bias: [L, K', G + 2, H], a number for each output of qkv (Qwen2), or None.
    """

    def __init__(self, config: ModelConfig, dtype: str, stored: int):
        L, H, group = config.num_layers, config.head_dim, config.num_heads // stored
        norm = dict(mean=1.0, std=0.1)
        self.norms = weight(dtype, 2 * L + 1, config.width, **norm)
        self.head_norms = weight(dtype, L, 2, H, **norm) if config.qk_norm else None
        bias = weight(dtype, L, stored, group + 2, H, split=1, heads=1, std=0.1)
        self.qkv_bias = bias if config.qkv_bias else None


class Layer(nnx.Module):
    """One block: attention, then the gated mlp, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig, dtype: str, stored: int):
        D, F, H, N = config.width, config.mlp_width, config.head_dim, config.num_heads
        self.eps, self.scale = config.norm_eps, H**-0.5
        shape = (stored, N // stored + 2, H, D)  # rows as in head_rows
        self.qkv = weight(dtype, *shape, split=0, heads=0, std=D**-0.5)
        self.o = weight(dtype, D, N, H, split=1, std=(N * H) ** -0.5)
        self.gate_up = weight(dtype, F, 2, D, split=0, std=D**-0.5)
        self.down = weight(dtype, D, F, split=1, std=F**-0.5)

    def __call__(
        self,
        index: int,
        x: Float[Array, "B T D"],
        vectors: Vectors,
        rotation: Rotation,
        step: Step,
    ) -> Float[Array, "B T D"]:
        y = rms_norm(x, vectors.norms[2 * index], self.eps)
        q, k, v = self.project(index, y, vectors)
        q, k = rotate(q, rotation), rotate(k, rotation)
        y = step.attend(index, q.astype(self.qkv.dtype), k, v, scale=self.scale)
        x = x + summed(y, self.o, step.placement, num_in=2)

        y = rms_norm(x, vectors.norms[2 * index + 1], self.eps)
        gate_up = product(y, self.gate_up)  # [B, T, F, 2]
        y = jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1]
        return x + summed(y, self.down, step.placement)

    def project(
        self, index: int, x: Float[Array, "B T D"], vectors: Vectors
    ) -> tuple[
        Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]
    ]:
        """Queries, keys and values before RoPE; of the kv heads as they are stored."""
        y = product(x, self.qkv)  # [B, T, K', G + 2, H]
        if vectors.qkv_bias is not None:
            y = y + vectors.qkv_bias[index].astype(jnp.float32)
        q, k, v = y[..., :-2, :], y[..., -2, :], y[..., -1, :]
        q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        if vectors.head_norms is not None:
            of_q, of_k = vectors.head_norms[index]
            q, k = rms_norm(q, of_q, self.eps), rms_norm(k, of_k, self.eps)
        return q, k, v


class Transformer(nnx.Module):
    """Embedding, layers, norm, head.

    As constructed its parameters hold shapes only: `random_model` and `checkpoint.load`
    return one with arrays.

    Args:
      config: What it computes.
      dtype: Of the weights: "float32" or "bfloat16".
      axis_size: Devices that split the heads; where there are more than kv heads, qkv
        holds each kv head once for every device that reads it.

    Attributes:
      step_type: What begins a step over the cache; a subclass may name its own.
    """

    step_type = Step

    def __init__(
        self, config: ModelConfig, *, dtype: str = "float32", axis_size: int = 1
    ):
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(f"dtype must be one of {WEIGHT_DTYPES}, got {dtype!r}")
        V, D = config.vocab_size, config.width
        stored = stored_heads(config.num_heads, config.num_kv_heads, axis_size)
        self.config = config
        self.embedding = weight(dtype, V, D, split=0, std=D**-0.5)
        self.layers = nnx.List(
            [Layer(config, dtype, stored) for _ in range(config.num_layers)]
        )
        self.vectors = Vectors(config, dtype, stored)
        self.head = None if config.tied else weight(dtype, V, D, split=0, std=D**-0.5)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        placement: Placement,
        num_new: Int[Array, " B"] | Bool[Array, " B"] | None = None,
        *,
        logits: str = "last",
    ) -> tuple[Float[Array, "B *T V"], Cache]:
        """One step: appends the tokens to the cache and returns the logits.

        Args:
          tokens: New tokens, each sequence's own from the left.
          cache: Donate it in the outermost jit.
          placement: Of the cache, on the mesh that the weights lie on.
          num_new: How many of the T tokens each sequence really has; None = all. Or
            whether it has its first.
          logits: "last" = at each sequence's last real token (at its first, meaningless
            one where it has none); "all" = at every token.

        Returns:
          Logits in float32, [B, V] or [B, T, V], on every device; and the cache.

        Raises:
          ValueError: the placement is not of this model, or `logits` is something else.
        """
        self._check(placement, logits)
        tokens, step = self.step_type.begin(placement, cache, tokens, num_new)
        x = look_up(self.embedding, tokens, placement)
        rotation = rotations(self.config, step.positions)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, self.vectors, rotation, step)
        if logits == "last":
            x = last(x, num_new)
        x = rms_norm(x, self.vectors.norms[-1], self.config.norm_eps)
        head = self.embedding if self.head is None else self.head
        return placement.constrain(product(x, head), P()), step.end()

    def _check(self, placement: Placement, logits: str) -> None:
        if logits not in ("last", "all"):
            raise ValueError(f'logits must be "last" or "all", got {logits!r}')
        cfg, held = self.config, placement.config
        wanted = (cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)
        got = (held.num_layers, placement.num_heads, held.num_kv_heads, held.head_dim)
        if wanted != got or held.value_dim != cfg.head_dim:
            raise ValueError(
                f"the model has (layers, heads, kv heads, head size) {wanted}, the "
                f"placement is of {got} with values of {held.value_dim}"
            )
        size, stored = placement.axis_size, self.layers[0].qkv.shape[0]
        if stored != placement.stored_heads:
            raise ValueError(
                f"the model stores {stored} kv heads, on {size} devices it must store "
                f"{placement.stored_heads}: give random_model or load the mesh, or "
                f"Transformer axis_size={size}"
            )


def look_up(
    embedding: nnx.Param, tokens: Int[Array, "B T"], placement: Placement
) -> Float[Array, "B T D"]:
    """Each token's row, on every device; NaN for a token outside the vocabulary.

    By hand, each device its own rows: left to itself XLA gathers the whole embedding.
    """
    axis = placement.axis
    spec = split_spec(embedding, axis, placement.axis_size)

    def local(table, tokens):
        shared = spec[0] is not None
        row = tokens - jax.lax.axis_index(axis) * table.shape[0] if shared else tokens
        mine = (row >= 0) & (row < table.shape[0])
        rows = table[jnp.where(mine, row, 0)].astype(jnp.float32)
        rows = jnp.where(mine[:, :, None], rows, 0)
        return jax.lax.psum(rows, axis) if shared else rows

    rows = jax.shard_map(
        local, mesh=placement.mesh, in_specs=(spec, P()), out_specs=P()
    )(embedding[...], tokens)
    known = (tokens >= 0) & (tokens < embedding.shape[0])
    return jnp.where(known[:, :, None], rows, jnp.nan)


def product(
    x: Float[Array, "..."],
    w: nnx.Param,
    *,
    num_in: int = 1,
    sharding: NamedSharding | None = None,
) -> Float[Array, "..."]:
    """x [..., in] times w [out, in]: x in w's dtype, the result in float32.

    As one product of two matrices: given more dimensions, XLA's CPU compiler copies w.

    Args:
      x: Its last dimensions are w's last ones.
      w: If float32, the product is true float32, no TF32.
      num_in: How many dimensions are multiplied away.
      sharding: Of the product before its dimensions are restored.
    """
    out, within = w.shape[:-num_in], math.prod(w.shape[-num_in:])
    y = jnp.einsum(
        "...I,OI->...O",
        x.astype(w.dtype).reshape(*x.shape[:-num_in], within),
        w[...].reshape(-1, within),
        precision="highest" if w.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
        out_sharding=sharding,
    )
    return y.reshape(*y.shape[:-1], *out)


def summed(
    x: Float[Array, "B T *in"], w: nnx.Param, placement: Placement, *, num_in: int = 1
) -> Float[Array, "B T D"]:
    """`product` over dimensions that devices share: summed, on every device."""
    y = product(x, w, num_in=num_in, sharding=placement.sharding(P()))
    return placement.constrain(y, P())


def rms_norm(
    x: Float[Array, "*rows size"], w: Float[Array, " size"], eps: float
) -> Float[Array, "*rows size"]:
    """x over the root of its mean square, times w (arXiv:1910.07467)."""
    square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + eps) * w.astype(jnp.float32)


def rotations(config: ModelConfig, positions: Int[Array, "B T"]) -> Rotation:
    """Cosine and sine of each position's angles, float32."""
    angle = positions[:, :, None, None].astype(jnp.float32) * config.frequencies
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B T heads H"], rotation: Rotation
) -> Float[Array, "B T heads H"]:
    """RoPE: the first and the second half of a head are the two coordinates."""
    cos, sin = rotation
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def last(
    x: Float[Array, "B T D"], num_new: Int[Array, " B"] | Bool[Array, " B"] | None
) -> Float[Array, "B D"]:
    """Each sequence's last real token."""
    if num_new is None or x.shape[1] == 1:
        return x[:, -1]
    index = jnp.maximum(num_new.astype(jnp.int32) - 1, 0)[:, None, None]
    return jnp.take_along_axis(x, index, axis=1)[:, 0]


class Skeleton(NamedTuple):
    """A model without its arrays: hashable, static in a jit.

    skeleton, leaves = split(model)
    step = jax.jit(lambda leaves, ...: skeleton.merge(leaves)(...))
    """

    graphdef: nnx.GraphDef
    tree: jax.tree_util.PyTreeDef

    def merge(self, leaves: list[Leaf]) -> Transformer:
        """The model with these arrays; call it inside the trace."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.tree, leaves))


def split(model: Transformer) -> tuple[Skeleton, list[Leaf]]:
    """Takes a model apart, once: a jit over plain arrays is dispatched fastest."""
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return Skeleton(graphdef, tree), leaves


def shardings(
    model: Transformer | PyTree, mesh: Mesh, axis: str = "tp"
) -> PyTree[NamedSharding]:
    """Where each parameter lies: the model's state with a NamedSharding for each array.

    qkv and gate_up are split by output, o and down by input, embedding and head by
    vocabulary. An array whose size doesn't divide lies whole on every device.

    Args:
      model: A model or its state.
      mesh: The devices.
      axis: The mesh axis to split over.

    Raises:
      ValueError: the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"axis must be one of {mesh.axis_names}, got {axis!r}")
    state = nnx.state(model) if isinstance(model, nnx.Module) else model

    def place(param: nnx.Param) -> nnx.Param:
        spec = split_spec(param, axis, mesh.shape[axis])
        return param.replace(NamedSharding(mesh, spec))

    return jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, nnx.Param))


def split_spec(param: nnx.Param, axis: str, axis_size: int) -> P:
    """A parameter's own spec on a mesh axis; an odd size is not split."""
    return P(
        *(
            axis if declared and size % axis_size == 0 else None
            for declared, size in zip(param.out_sharding, param.shape, strict=True)
        )
    )


def fill(
    model: Transformer,
    mesh: Mesh,
    axis: str,
    make: Callable[[str, nnx.Param, NamedSharding], Array],
) -> Transformer:
    """A model of the arrays that `make(name, param, sharding)` returns, one by one."""
    graphdef, state = nnx.split(model)
    places = dict(nnx.to_flat_state(shardings(state, mesh, axis)))
    filled = [
        (path, p.replace(make(".".join(map(str, path)), p, places[path].get_value())))
        for path, p in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def random_model(
    config: ModelConfig,
    seed: int = 0,
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    axis: str = "tp",
) -> Transformer:
    """A model of random weights, made on the devices, the same on every mesh.

    Args:
      config: Its geometry.
      seed: Of the weights.
      dtype: "float32" or "bfloat16".
      mesh: The cache's mesh; None = one device.
      axis: The mesh axis to split over.
    """
    check_range("seed", seed, 0, (1 << 32) - 1)
    count = itertools.count()

    def make(name: str, param: nnx.Param, sharding: NamedSharding) -> Array:
        drawn = param.dtype, param.mean, param.std
        draw = _draw(config, param.shape, param.heads, *drawn, sharding)
        return draw(np.uint32(seed), np.uint32(next(count)))

    mesh = make_mesh() if mesh is None else mesh
    model = Transformer(config, dtype=dtype, axis_size=mesh.shape[axis])
    return fill(model, mesh, axis, make)


@functools.cache  # few compilations: layers share their shapes
def _draw(
    config: ModelConfig,
    shape: tuple[int, ...],
    heads: int | None,
    dtype: np.dtype,
    mean: float,
    std: float,
    sharding: NamedSharding,
) -> Callable[[UInt32[Array, ""], UInt32[Array, ""]], Array]:
    """A jitted (seed, index) -> even spread, each element by its place alone."""

    def draw(seed, index):
        bits = mix(_places(config, shape, heads) ^ mix(index ^ mix(seed)))
        unit = (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1  # -1 to 1
        return (mean + std * 3**0.5 * unit).astype(dtype)

    return jax.jit(draw, out_shardings=sharding)


def _places(
    config: ModelConfig, shape: tuple[int, ...], heads: int | None
) -> UInt32[Array, "*shape"]:
    """Numbers the elements; copies of a head have the numbers of that head."""
    along = [
        (size, jax.lax.broadcasted_iota(jnp.uint32, shape, axis))
        for axis, size in enumerate(shape)
    ]
    if heads is not None:
        rows = head_rows(config.num_heads, config.num_kv_heads, shape[heads])
        numbers = jnp.asarray(rows, jnp.uint32)
        numbers = jax.lax.broadcast_in_dim(numbers, shape, (heads, heads + 1))
        along[heads : heads + 2] = [(rows.max() + 1, numbers)]
    place = jnp.zeros((), jnp.uint32)
    for size, numbers in along:
        place = place * np.uint32(size) + numbers
    return place


def mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Scatters the bits of 32-bit numbers: the finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
