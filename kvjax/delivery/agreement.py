"""Several processes, one program: what they must agree on, said before anything starts.

Each call is made by every process. One that finds a difference raises on all of them,
so
none is left waiting for another in a collective.
"""

import json
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from kvjax.delivery.placement import Placement

T = TypeVar("T")


def check_equal(facts: dict[str, object]) -> None:
    """Raises on every process unless all bring the same facts.

    Args:
      facts: Name and value of each; values are compared as text.

    Raises:
      ValueError: names each fact that differs, and who has what.
    """
    mine = json.dumps({name: str(value) for name, value in facts.items()})
    said = [json.loads(text) for text in gather(mine)]
    apart = [
        "; ".join(
            f"process {i} has {name} = {its.get(name)}" for i, its in enumerate(said)
        )
        for name in sorted(set().union(*said))
        if len({its.get(name) for its in said}) > 1
    ]
    if apart:
        raise ValueError("the processes differ, start all alike: " + ". ".join(apart))


def check_none(problem: str) -> None:
    """Raises on every process if one of them has a problem; "" is none.

    Raises:
      ValueError: names the processes and their problems.
    """
    problems = [(i, text) for i, text in enumerate(gather(problem)) if text]
    if problems:
        alone = jax.process_count() == 1
        raise ValueError(
            ". ".join(text if alone else f"process {i}: {text}" for i, text in problems)
        )


def together(make: Callable[[], T]) -> T:
    """What `make` gives; a ValueError that it raises on one process is raised on
    all.
    """
    try:
        made, problem = make(), ""
    except ValueError as error:
        made, problem = None, str(error) or "a ValueError"
    check_none(problem)
    return made


def check_placement(placement: Placement) -> None:
    """Raises on every process unless all shape the program alike."""
    config = placement.config
    facts = {name: getattr(config, name) for name in config.__dataclass_fields__}
    facts |= {
        "num_heads": placement.num_heads,
        "mesh": dict(placement.mesh.shape),
        "axis": placement.axis,
        "ring_id": placement.ring_id,
        "backend": placement.backend,
    }
    check_equal(facts)


def gather(text: str) -> list[str]:
    """Every process's text, by process.

    Raises:
      ValueError: on every process, if they have unequal numbers of devices.
    """
    if jax.process_count() == 1:
        return [text]
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ValueError(
            "the processes have unequal numbers of devices, by process "
            f"{dict(sorted(counts.items()))}: give each as many"
        )
    raw = text.encode()
    sizes = multihost_utils.process_allgather(np.int32(len(raw)))
    padded = np.zeros(max(1, sizes.max()), np.uint8)  # all must send the same shape
    padded[: len(raw)] = np.frombuffer(raw, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]
