"""The arm without kvjax: what a JAX user would write today over the same cells.

Each layer's host array is put on the device inside the jit, the new row goes into both
copies, attention is two einsums. XLA moves every cell of the capacity, live or not.
"""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.formats import decode, encode
from kvjax.cache.state import Cache, layer_cells
from kvjax.delivery.placement import Placement
from kvjax.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class PlainPlacement(Placement):
    """All cells in the tail, which is an array [B, S, K, R] a layer.

    Of a slice of one array XLA would make kernels that read the host, of a whole array
    it makes a copy.
    """

    @property
    def whole(self) -> Placement:
        """Of the same cells in one array."""
        return Placement(**{f.name: getattr(self, f.name) for f in fields(self)})

    def cache_shardings(self) -> Cache:
        each = self.sharding(self.head_spec, "pinned_host")
        tails = (each,) * self.config.num_layers
        return super().cache_shardings()._replace(tail=tails)

    def split(self, cache: Cache) -> Cache:
        """The cells of a cache of the placement `whole`, copied."""
        held = cache._replace(tail=np.asarray(cache.tail))
        tails = tuple(
            jax.device_put(layer_cells(self.config, held, layer).tail, where)
            for layer, where in enumerate(self.cache_shardings().tail)
        )
        return cache._replace(tail=tails)


class PlainStep:
    """One token of each sequence, with the calls of kvjax's Step that a layer makes."""

    def __init__(self, placement: Placement, cache: Cache):
        self.placement = placement
        self.positions = cache.lengths[:, None]
        self._cache = cache
        self._tails = list(cache.tail)

    @classmethod
    def begin(
        cls,
        placement: Placement,
        cache: Cache,
        tokens: Int[Array, "B 1"],
        num_new: Int[Array, " B"],
    ) -> tuple[Int[Array, "B 1"], "PlainStep"]:
        """Every sequence has a new token: num_new isn't looked at."""
        return tokens, cls(placement, cache)

    def attend(
        self,
        index: int,
        q: Float[Array, "B 1 N H"],
        k: Float[Array, "B 1 K H"],
        v: Float[Array, "B 1 K H"],
        *,
        scale: float,
    ) -> Float[Array, "B 1 N H"]:
        rows, lengths = encode(self.placement.config, k, v), self._cache.lengths
        tail = self._tails[index]
        cells = jax.device_put(tail, jax.memory.Space.Device)
        # The host is written after that copy, else XLA copies the tail to be safe.
        rows, cells = jax.lax.optimization_barrier((rows, cells))
        self._tails[index] = write(tail, rows, lengths)
        cells = write(cells, rows, lengths)
        return attend(q, *decode(self.placement.config, cells), lengths, scale)

    def end(self) -> Cache:
        lengths = self._cache.lengths + 1
        return self._cache._replace(tail=tuple(self._tails), lengths=lengths)


class PlainTransformer(Transformer):
    """The same model, each step a PlainStep."""

    step_type = PlainStep


def write(
    cells: Float[Array, "B S K R"],
    rows: Float[Array, "B 1 K R"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B S K R"]:
    """Writes each sequence's row behind its last cell; the host can't scatter."""
    space = jax.typeof(cells).memory_space
    for sequence in range(cells.shape[0]):
        row = jax.device_put(rows[sequence : sequence + 1], space)
        start = (sequence, lengths[sequence], 0, 0)
        cells = jax.lax.dynamic_update_slice(cells, row, start)
    return cells


def attend(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    lengths: Int[Array, " B"],
    scale: float,
) -> Float[Array, "B 1 N H"]:
    """Attention over cells 0 to lengths; sums are float32, weights are as cells."""
    num_seqs, _, num_heads, head_dim = q.shape
    num_cells, num_kv_heads = k.shape[1:3]
    grouped = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum(
        "BKGH,BSKH->BKGS",
        grouped.astype(k.dtype),
        k,
        preferred_element_type=jnp.float32,
    )
    seen = jnp.arange(num_cells) <= lengths[:, None]
    scores = jnp.where(seen[:, None, None], scores * scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("BKGS,BSKH->BKGH", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(num_seqs, 1, num_heads, head_dim).astype(q.dtype)
