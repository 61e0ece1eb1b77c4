"""Steps of a run again, each waited for: what a loop pays that reads every token."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from decode_rows import Arm, TokensDiffer

from kvjax.cache.state import Cache
from kvjax.measurement import WARMUP, StepFunction, run_steps


class Waited(NamedTuple):
    """Steps that were each waited for.

    Attributes:
      seconds: Of each but those of the warm-up.
      begin: Which step of the run was the first of them.
      drawn: Their tokens [B], those of the warm-up among them.
      cache: After them.
    """

    seconds: list[float]
    begin: int
    drawn: list[jax.Array]
    cache: Cache


def wait_for_each(
    step: StepFunction,
    first: jax.Array,
    drawn: Sequence[jax.Array],
    rewound: Callable[[int], Cache],
    count: int,
) -> Waited:
    """Steps from the midst of a run: over as many cells, so that waiting alone makes
    them slower.

    Args:
      step: Of the run.
      first: What the run fed first.
      drawn: What it drew, in the warm-up too.
      rewound: The cache as it was after so many of its steps.
      count: Steps to time.
    """
    begin = max(len(drawn) - WARMUP - count, 0) // 2
    fed = first if begin == 0 else drawn[begin - 1]
    done = run_steps(step, fed, rewound(begin), WARMUP)
    again, seconds = done.drawn, []
    for _ in range(count):
        done = run_steps(step, again[-1], done.cache, 1)
        seconds.append(done.seconds)
        again = again + done.drawn
    return Waited(seconds, begin, again, done.cache)


def check_again(arm: Arm, drawn: Sequence[jax.Array], waited: Waited) -> None:
    """Raises TokensDiffer unless the steps drew what the run had drawn."""
    for before, now in zip(drawn[waited.begin :], waited.drawn, strict=False):
        if not np.array_equal(np.asarray(before), np.asarray(now)):
            raise TokensDiffer(
                f"{arm.label} drew other tokens while each was waited for"
            )
