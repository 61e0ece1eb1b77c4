"""One step over a cache, as a model's author sees it: begin, attend in each layer, end.

    tokens, step = Step.begin(placement, cache, tokens, num_new)
    for i, layer in enumerate(layers):
        ... step.attend(i, q, k, v, scale=scale) ...
    cache = step.end()

All of it is traced inside the caller's jit, which donates the cache.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.formats import encode
from kvjax.cache.state import Cache, Extent, layer_extents
from kvjax.config import check_range
from kvjax.delivery import ffi, reference
from kvjax.delivery.placement import Placement, check_cache


class Step:
    """The books of one step while it is traced; holds no state between traces.

    Attributes:
      positions: Place of each new token in its sequence [B, T], int32, also of dropped
      ones.
    """

    def __init__(
        self, placement: Placement, cache: Cache, num_new: Int[Array, " B"], width: int
    ):
        offset = jnp.arange(width, dtype=jnp.int32)[None]
        self.placement = placement
        self.positions = cache.lengths[:, None] + offset
        self._where = jnp.where(offset < num_new[:, None], self.positions, -1)
        self._cache = cache
        self._num_new = num_new
        self._ticket = None
        self._trace = get_opaque_trace_state()

    @classmethod
    def begin(
        cls,
        placement: Placement,
        cache: Cache,
        tokens: Int[Array, "B T"],
        num_new: Int[Array, " B"] | Bool[Array, " B"] | None = None,
        attends: tuple[tuple[int, int | None], ...] | None = None,
    ) -> tuple[Int[Array, "B T"], "Step"]:
        """Starts a step.

        Args:
          placement: Of this cache.
          cache: The cache as it was before the step.
          tokens: The step's tokens, each sequence's own from the left.
          num_new: How many of the T tokens each sequence really has; None = all. Or
            whether it has its first.
          attends: (layer, window) of each attend to come; None = each layer once, no
          window.

        Returns:
          The tokens to embed (use these: they order begin before everything) and the
          step.

        Raises:
          ValueError: the cache is not of this placement, tokens or num_new aren't of
            its batch, or `attends` names what it hasn't.
        """
        num_seqs, width = tokens.shape
        check_cache(placement, cache)
        _check_batch(placement, tokens, num_new)
        if num_new is None:
            num_new = jnp.full(num_seqs, width, jnp.int32)
        if attends is None:
            attends = tuple((i, None) for i in range(placement.config.num_layers))
        for layer, window in attends:
            _check_attend(placement, layer, window)
        ticket = None
        if placement.backend == "native":
            tokens, num_new = ffi.once(tokens), ffi.once(num_new)
            cache = cache._replace(lengths=ffi.once(cache.lengths))
            tokens, num_new, cache, ticket = _begin(
                placement, tokens, num_new, cache, attends
            )
        step = cls(placement, cache, num_new.astype(jnp.int32), width)
        step._ticket = ticket
        return tokens, step

    def attend(
        self,
        layer: int,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K Hv"],
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Float[Array, "B T N Hv"]:
        """Encodes and appends the step's keys and values, then attends
        (delivery/ffi.py).

        With fewer kv heads than devices k and v may also come as they are stored:
        each head once for every device that reads it.

        Raises:
          ValueError: the cache has no such layer or window, its heads or head sizes are
            others, or a transformation was entered since begin.
        """
        place = self.placement
        _check_attend(place, layer, window)
        _check_heads(place, q, k)
        if get_opaque_trace_state() != self._trace:
            raise ValueError(
                f"attend of layer {layer} is inside a transformation (lax.scan over "
                "layers, lax.cond, jax.vmap, jax.checkpoint, jit) that began after the "
                "step: loop over layers in Python, and transform whole steps"
            )
        if place.backend == "native":
            if self._ticket is None:
                raise ValueError(f"attend of layer {layer} comes before Step.begin")
            q, k, v = ffi.once(q), ffi.once(k), ffi.once(v)
        rows = encode(place.config, place.expand_heads(k), place.expand_heads(v))
        q, rows = (place.constrain(x, place.head_spec) for x in (q, rows))
        # All that attend needs comes before append: then XLA has nothing to launch
        # between.
        q, rows = jax.lax.optimization_barrier((q, rows))
        cache = self._append(layer, rows)
        if place.backend == "reference":
            self._cache = cache
            return reference.attend(
                place.config, q, rows, cache, layer, self._where,
                scale=scale, window=window, soft_cap=soft_cap,
            )  # fmt: skip
        out, self._ticket = ffi.attend(
            place, layer, q, rows, cache, self._where, self._ticket,
            scale=scale, window=window, soft_cap=soft_cap,
        )  # fmt: skip
        # The last attend reads the lengths before `end` writes them: else XLA copies.
        out, lengths = jax.lax.optimization_barrier((out, cache.lengths))
        self._cache = cache._replace(lengths=lengths)
        return out

    def _append(self, layer: int, rows: Float[Array, "B T K R"]) -> Cache:
        """Writes the rows to the part that holds their cell: one call a part."""
        device, tail = layer_extents(self.placement.config)[layer]
        cache, where, on_device = self._cache, self._where, device.num_cells
        in_device = jnp.where(where < on_device, where, -1)
        in_tail = jnp.where(where >= on_device, where - on_device, -1)
        return cache._replace(
            device=self._append_part(cache.device, device, rows, in_device),
            tail=self._append_part(cache.tail, tail, rows, in_tail),
        )

    def _append_part(
        self, part: Array | None, extent: Extent, rows: Array, where: Array
    ) -> Array | None:
        if extent.num_cells == 0:
            return part
        if self.placement.backend == "reference":
            return reference.append(part, extent, rows, where)
        return ffi.append(self.placement, part, extent, rows, where, self._ticket)

    def end(self) -> Cache:
        """The cache after the step: lengths advanced, never past the capacity."""
        capacity = self.placement.config.num_cells
        lengths = jnp.minimum(self._cache.lengths + self._num_new, capacity)
        return self._cache._replace(lengths=lengths)


def _begin(
    placement: Placement,
    tokens: Int[Array, "B T"],
    num_new: Int[Array, " B"] | Bool[Array, " B"],
    cache: Cache,
    attends: tuple[tuple[int, int | None], ...],
) -> tuple[Array, Array, Cache, Int[Array, " devices"]]:
    """Calls begin if there is a tail: what comes in, with its stamp, and the ticket.

    tokens, num_new and lengths pass a barrier either way. What is computed of them then
    lies behind begin, in XLA's first graph: before begin, which no graph takes, each
    small kernel is a launch of its own. And without a begin XLA fuses nothing into what
    comes behind that it doesn't with one: the same kernels, so the same bits.
    """
    if cache.tail is None:
        ticket = cache.stamp[:, 0].astype(jnp.int32)
    else:
        tokens, ticket, stamp = ffi.begin(placement, tokens, cache, attends)
        cache = cache._replace(stamp=stamp)
    passed = tokens, num_new, cache.lengths
    tokens, num_new, lengths = jax.lax.optimization_barrier(passed)
    return tokens, num_new, cache._replace(lengths=lengths), ticket


def _check_batch(placement: Placement, tokens: Array, num_new: Array | None) -> None:
    num_seqs = placement.config.batch_size
    if tokens.shape[0] != num_seqs or (
        num_new is not None and num_new.shape != (num_seqs,)
    ):
        counts = "" if num_new is None else f" and num_new {list(num_new.shape)}"
        raise ValueError(
            f"the cache holds {num_seqs} sequences, got tokens {list(tokens.shape)}"
            f"{counts}: give each sequence a row, and num_new 0 if it has none"
        )


def _check_attend(placement: Placement, layer: int, window: int | None) -> None:
    check_range("layer", layer, 0, placement.config.num_layers - 1)
    if window is not None:
        check_range("window", window, 1, 1 << 30)


def _check_heads(placement: Placement, q: Array, k: Array) -> None:
    config = placement.config
    want = (placement.num_heads, config.head_dim, config.num_kv_heads)
    got = (*q.shape[2:], k.shape[2])
    if got not in (want, (*want[:2], placement.stored_heads)):
        raise ValueError(
            f"the placement has {want[0]} query heads of {want[1]} and {want[2]} kv "
            f"heads, got q {list(q.shape)} and k {list(k.shape)}"
        )
