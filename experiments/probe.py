"""A decoder's step that shows its inside: logits, and what every attend got and gave.

For bench_decode: equal logits over placements (--logits), and what to blame when two
arms draw other tokens. The step runs the model's own layers, but as a program of its
own: XLA may choose other matrix kernels for it than for the step that is timed.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from kvjax.cache.state import Cache
from kvjax.delivery.placement import Placement
from kvjax.model.attention import Step
from kvjax.model.transformer import Leaf, ModelConfig, Transformer, split


class Attended(NamedTuple):
    """One layer's attend."""

    q: np.ndarray  # [B, 1, N, H]
    k: np.ndarray  # [B, 1, K, H]
    v: np.ndarray
    out: np.ndarray  # [B, 1, N, H]


class Shown(NamedTuple):
    """One step."""

    logits: np.ndarray  # [B, V] float32
    layers: list[Attended]


class Probe:
    """The step over one placement; compiles once.

    Args:
      config: The model.
      dtype: Of its weights.
      placement: Of the cache.
    """

    def __init__(self, config: ModelConfig, dtype: str, placement: Placement):
        every, cells = placement.sharding(P()), placement.cache_shardings()
        self._placement = placement
        self._step = jax.jit(
            show_steps_of(config, dtype, placement),
            donate_argnums=1,
            out_shardings=(every, every, cells),
        )

    def __call__(
        self, leaves: list[Leaf], cache: Cache, tokens: np.ndarray
    ) -> tuple[Shown, Cache]:
        """Feeds a token [B] to each sequence; the cache is donated."""
        fed = jax.device_put(tokens[:, None], self._placement.sharding(P()))
        logits, layers, cache = self._step(leaves, cache, fed)
        layers = [Attended(*map(np.asarray, layer)) for layer in layers]
        return Shown(np.asarray(logits), layers), cache


def show_steps_of(config: ModelConfig, dtype: str, placement: Placement):
    """(leaves, cache, tokens [B, 1]) -> (logits, an Attended a layer, cache)."""
    seen: list[Attended] = []

    class Watched(Step):
        """Notes each attend while it is traced."""

        def attend(self, layer, q, k, v, **rest):
            out = super().attend(layer, q, k, v, **rest)
            seen.append(Attended(q, k, v, out))
            return out

    class Model(Transformer):
        step_type = Watched

    model = Model(config, dtype=dtype, axis_size=placement.axis_size)
    skeleton, _ = split(model)

    def show(leaves, cache, tokens):
        seen.clear()
        model = skeleton.merge(leaves)
        num_new = jnp.ones(tokens.shape[0], jnp.int32)
        logits, cache = model(tokens, cache, placement, num_new, logits="last")
        return logits, tuple(seen), cache

    return show


class Difference(NamedTuple):
    """Where two placements part: everything before was the same to the bit."""

    step: int
    layer: int | None  # None = the logits
    what: str  # of Attended's fields, or "logits"

    @property
    def attention(self) -> bool:
        """Whether attention gave other bits for the same cells, queries and rows."""
        return self.what == "out"

    def __str__(self) -> str:
        if self.layer is None:
            return (
                f"first in step {self.step}, the logits: every attend is the same to "
                "the bit, the matrix kernels behind the last differ"
            )
        where = f"first in step {self.step}, layer {self.layer}, {self.what}: "
        if self.attention:
            return where + "ATTENTION differs, from equal queries, rows and cells"
        return where + (
            "the matrix kernels before that attend differ; every attend until then is "
            "the same to the bit"
        )


def first_difference(
    ours: Sequence[Shown], theirs: Sequence[Shown]
) -> Difference | None:
    """Compares steps in the order in which they were computed; None = all equal."""
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for layer, (mine, other) in enumerate(zip(a.layers, b.layers, strict=True)):
            for what in Attended._fields:
                if not same_bits(getattr(mine, what), getattr(other, what)):
                    return Difference(step, layer, what)
        if not same_bits(a.logits, b.logits):
            return Difference(step, None, "logits")
    return None


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def explain(
    labels: tuple[str, str],
    shown: tuple[Sequence[Shown], Sequence[Shown]],
    sequence: int,
    tokens: tuple[int, int],
) -> str:
    """What to blame when two arms drew other tokens in the last of these steps.

    Args:
      labels: Of both arms.
      shown: Their steps, fed the same tokens.
      sequence: In which they differ.
      tokens: That each drew.
    """
    said = []
    for label, steps in zip(labels, shown, strict=True):
        first, second = (float(steps[-1].logits[sequence, token]) for token in tokens)
        gap = first - second
        said.append(f"{label} has logits {first:.9g} and {second:.9g}, {gap:.3g} apart")
    ours, theirs = shown
    zero = same_bits(ours[0].layers[0].out, theirs[0].layers[0].out)
    found = first_difference(ours, theirs)
    where = "no step differs here: watched, both arms give the same bits"
    return (
        f"Step by step: for tokens {tokens[0]} and {tokens[1]} {'; '.join(said)}. The "
        f"first step's layer 0 attention is {'' if zero else 'NOT '}equal to the bit. "
        f"Differences: {where if found is None else found}"
    )


def hash_of(steps: Sequence[Shown]) -> str:
    """SHA-256 of the logits' bytes."""
    logits = np.stack([step.logits for step in steps])
    return hashlib.sha256(logits.tobytes()).hexdigest()


def compare_logits(ours: Sequence[Shown], theirs: Sequence[Shown]) -> dict:
    """Of a row: whether logits are equal to the bit, and by how much they differ."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "logits_steps": len(ours),
        "logits_sha256": hash_of(ours),
        "logits_equal": all(same_bits(a.logits, b.logits) for a, b in pairs),
        "logits_difference": float(
            max(np.abs(a.logits - b.logits).max() for a, b in pairs)
        ),
    }
