"""Several processes, one program: what they must agree on, said before anything starts.

Each call is made by every process. One that finds a difference raises on all of them, so
none is left waiting for another in a collective.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils

from kvjax.delivery.placement import Placement

MESSAGE_BYTES = 4096  # of one process's words, padded: all must send the same shape


def check_equal(facts: dict[str, object]) -> None:
    """Raises on every process unless all bring the same facts.

    Args:
      facts: Name and value of each; values are compared as text.

    Raises:
      ValueError: names each fact that differs, and who has what.
    """
    lines = [f"{name} = {value}" for name, value in sorted(facts.items())]
    said = [text.split("\n") for text in gather("\n".join(lines))]
    apart = [
        "; ".join(f"process {i} has {line}" for i, line in enumerate(versions))
        for versions in zip(*said, strict=True)
        if len(set(versions)) > 1
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
    """Every process's text, by process; cut to MESSAGE_BYTES."""
    if jax.process_count() == 1:
        return [text]
    raw = text.encode()[:MESSAGE_BYTES]
    padded = np.frombuffer(raw.ljust(MESSAGE_BYTES, b"\0"), np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
