"""Where bench_decode runs: meshes, their links, and what another layout drew."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import processes
from decode_cases import Meshes
from decode_rows import Case, Links
from jax.sharding import Mesh

from kvjax.delivery import agreement
from kvjax.delivery.placement import make_mesh
from kvjax.measurement import PIECE_BYTES, link_rate, link_rates

Theirs = dict[tuple, np.ndarray]  # tokens [steps, B] by what `key` says of a row


def open_meshes(sizes: Sequence[int]) -> Meshes:
    """A mesh of each size; on a CPU its devices are emulated, as many as are asked for.

    Comes before any use of a device. Several processes have one mesh, of all devices.

    Raises:
      ValueError: there are not so many devices, or processes cannot share them evenly.
    """
    count = processes.NUM_PROCESSES.value
    if count == 1:
        emulate(max(sizes))
    elif len(sizes) > 1 or sizes[0] % count:
        raise ValueError(
            f"{count} processes take one mesh, of as many devices each: --mesh must be "
            f"one multiple of {count}, got {','.join(map(str, sizes))}"
        )
    else:
        processes.join(sizes[0] // count)
    return {size: make_mesh({"tp": size}) for size in sizes}


def emulate(devices: int) -> None:
    """So many devices on a CPU; if jax has begun, those that it began with."""
    if jax.config.jax_num_cpu_devices < devices:
        with suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)


def measure_links(meshes: Meshes) -> Links:
    """The raw rates of all devices of each mesh at once, and of the first one alone."""
    alone = [rate_alone(next(iter(meshes.values())))]
    together = {}
    for size, mesh in meshes.items():
        if size == 1:
            together[size] = alone
            continue

        def measure(local=mesh.local_devices):
            return link_rates(local, start=lambda: agreement.gather(""))

        together[size] = gathered(agreement.together(measure))
    return Links(alone[0], together)


def rate_alone(mesh: Mesh, piece_bytes: int = PIECE_BYTES) -> float:
    """The raw rate of a mesh's first device alone; every process gets it."""
    first = mesh.devices.flat[0]
    here = first.process_index == jax.process_index()

    def measure():
        return [link_rate(first, piece_bytes=piece_bytes)] if here else []

    return gathered(agreement.together(measure))[0]


def gathered(mine: list) -> list:
    """The lists of all processes, one behind the other, as their devices are."""
    texts = agreement.gather(json.dumps(mine))
    return [item for text in texts for item in json.loads(text)]


def key(row: dict) -> tuple:
    names = ("devices", "cells", "batch", "shortest", "longest")
    return tuple(row[name] for name in names)


def key_of(case: Case, devices: int) -> tuple:
    lengths = case.lengths
    return devices, case.cells, len(lengths), min(lengths), max(lengths)


def shown(tokens: np.ndarray) -> list[str]:
    """Tokens [steps, B] as a row holds them: a text for each sequence."""
    return [" ".join(map(str, sequence)) for sequence in tokens.T.tolist()]


def read_theirs(path: str, facts: dict, cases: list[Case], sizes, steps: int) -> Theirs:
    """The tokens of another run of these cases.

    Args:
      path: Of its JSON.
      facts: That must be equal: model, dtype, weights.
      cases: That it must hold.
      sizes: Numbers of devices that it must hold each on.
      steps: That it must have run.

    Raises:
      ValueError: it is no such run.
    """
    try:
        found = json.loads(Path(path).read_text())
        theirs = {
            key(row): np.array([text.split() for text in row["tokens"]], np.int32).T
            for row in found["rows"]
        }
        other = {name: found[name] for name in facts}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--against must be a JSON of this script: {error}") from error
    if other != facts:
        raise ValueError(f"--against must be a run of {facts}, got one of {other}")
    wanted = [key_of(case, size) for size in sizes for case in cases]
    for one in wanted:
        if one not in theirs or len(theirs[one]) != steps:
            ran = {where: len(tokens) for where, tokens in theirs.items()}
            raise ValueError(
                f"--against must hold {steps} steps of (devices, cells, batch, "
                f"shortest, longest) = {one}, {path} has {ran}"
            )
    return {one: theirs[one] for one in wanted}
