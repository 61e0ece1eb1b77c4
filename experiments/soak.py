"""Does decoding over several devices ever hang?

    python experiments/soak.py --geometry=llama-3.1-8b --mesh=8
    python experiments/soak.py --mesh=4 --local_processes=4     # emulated on a CPU

Thousands of steps with all-reduces in every layer while every device's ring delivers,
the first call included: the ring is open and nothing is compiled before it. The loop
waits now and then only, so that launches run ahead as they do in decoding. Predicted:
no step takes long, every live byte goes early, lengths grow by one a step.

On a CPU don't ask for much more than the default --wait_every: XLA's emulated devices
block each other once hundreds of steps with collectives were launched ahead, also those
of a program of plain JAX (backend="reference").

If nothing comes for --patience_s, the first call's compilation included, every thread's
traceback is printed and the process ends with exit code 1: it fails, it doesn't hang.
"""

import faulthandler
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import processes
from absl import app, flags, logging
from caches import cache_of
from commit import COMMIT
from decode_cases import mesh_sizes
from decode_meshes import gathered, open_meshes
from jax.sharding import Mesh
from paths import check_paths

from kvjax.advice import cell_bytes
from kvjax.cache.state import Cache
from kvjax.config import CACHE_DTYPES, RingConfig
from kvjax.delivery.placement import Placement
from kvjax.delivery.plan import Decline, plan_ring
from kvjax.delivery.ring import Ring, RingStats
from kvjax.generate import Decoder
from kvjax.measurement import DecodeStep, provenance, random_cache
from kvjax.model.transformer import GEOMETRIES, ModelConfig, random_model

GEOMETRY = flags.DEFINE_enum(
    "geometry", "sharded-demo", list(GEOMETRIES), "Random weights of this geometry."
)
MESH = flags.DEFINE_list("mesh", ["2"], "Devices that share the heads. CPUs emulate.")
STEPS = flags.DEFINE_integer("steps", 2000, "Of decoding.", lower_bound=1)
CELLS = flags.DEFINE_integer("cells", 1024, "Held at the start.", lower_bound=0)
BATCH = flags.DEFINE_integer("batch", 1, "Sequences.", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", CACHE_DTYPES, "Of the cache's cells.")
WAIT_EVERY = flags.DEFINE_integer(
    "wait_every", 16, "Steps between two waits for a token.", lower_bound=1
)
PATIENCE_S = flags.DEFINE_float(
    "patience_s",
    120,
    "Without a token for so long, it counts as hung.",
    lower_bound=0.1,
)
JSON = flags.DEFINE_string("json", None, "Writes what was found to this file.")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if processes.starts_others():
        return processes.launch()
    try:
        return run(
            geometry=GEOMETRY.value,
            sizes=mesh_sizes(MESH.value),
            steps=STEPS.value,
            cells=CELLS.value,
            batch=BATCH.value,
            dtype=DTYPE.value,
            wait_every=WAIT_EVERY.value,
            patience_s=PATIENCE_S.value,
            commit=COMMIT.value,
            json_path=JSON.value,
        )
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        processes.tell(f"error: {error}")
        return 2
    finally:
        faulthandler.cancel_dump_traceback_later()


def run(
    *,
    geometry: str,
    sizes: list[int],
    steps: int,
    cells: int,
    batch: int,
    dtype: str,
    wait_every: int,
    patience_s: float,
    commit: str | None,
    json_path: str | None,
) -> int:
    check_paths(json_path, None)
    if len(sizes) > 1 or sizes[0] == 1:
        raise ValueError(
            "a soak is of collectives: --mesh must be one number from 2 on, got "
            f"{','.join(map(str, sizes))}"
        )
    watch(patience_s)
    (mesh,) = open_meshes(sizes).values()
    model_config = ModelConfig.of(geometry)
    placement = place(model_config, mesh, batch, cells + steps, dtype)
    weights = "float32" if mesh.local_devices[0].platform == "cpu" else "bfloat16"
    model = random_model(model_config, dtype=weights, mesh=mesh)
    decoder = Decoder(model, placement)
    with Ring.open(placement) as ring:
        cache = random_cache(placement, [cells] * batch)
        start = time.perf_counter()
        first_s, lengths = soak(decoder, cache, steps, wait_every, patience_s)
        seconds = time.perf_counter() - start
        stats = [ring.stats(device) for device in mesh.local_devices]
    row = {
        "devices": mesh.size,
        "processes": jax.process_count(),
        "steps": steps,
        "cells": cells,
        "batch": batch,
        "first_s": first_s,
        "seconds": seconds,
        "early_bytes": gathered([s.early_bytes for s in stats]),
        "problems": gathered([*problems(placement, cells, steps, lengths, stats)]),
    }
    if jax.process_index() == 0:
        report(row, geometry, dtype, commit, json_path)
    return 1 if row["problems"] else 0


def watch(patience_s: float) -> None:
    """Ends the process with every thread's traceback unless called again in time.

    Another thread's clock, in C: it runs while Python is stuck in a native call.
    """
    faulthandler.dump_traceback_later(patience_s, exit=True, file=sys.__stderr__)


def place(
    config: ModelConfig, mesh: Mesh, batch: int, capacity: int, dtype: str
) -> Placement:
    """All cells in the tail.

    Raises:
      ValueError: there would be no ring to soak.
    """
    cache = cache_of(
        config,
        batch_size=batch,
        capacity=capacity,
        dtype=dtype,
        device_cells=0,
    )
    placement = Placement(config=cache, num_heads=config.num_heads, mesh=mesh)
    plan = plan_ring(placement, RingConfig())
    if isinstance(plan, Decline):
        raise ValueError(f"no ring to soak: {plan.reason}")
    return placement


def soak(
    decoder: Decoder, cache: Cache, steps: int, wait_every: int, patience_s: float
) -> tuple[float, np.ndarray]:
    """Takes the steps; seconds of the first call, and the lengths [B] at the end."""
    step = DecodeStep(decoder)
    tokens = decoder.place(np.zeros(decoder.placement.config.batch_size, np.int32))
    start = time.perf_counter()
    first_s = 0.0
    for done in range(1, steps + 1):
        tokens, cache = step(tokens, cache)
        if done == 1 or done % wait_every == 0 or done == steps:
            tokens.block_until_ready()
            first_s = first_s or time.perf_counter() - start
            watch(patience_s)
            processes.say(f"{done} of {steps} steps")
    jax.block_until_ready(cache)
    return first_s, np.asarray(cache.lengths)


def problems(
    placement: Placement,
    cells: int,
    steps: int,
    lengths: np.ndarray,
    stats: list[RingStats],
) -> Iterator[str]:
    """What this process's rings did otherwise than they should."""
    config = placement.config
    if (lengths != cells + steps).any():
        yield f"lengths are {lengths.tolist()}, not {cells + steps}"
    bytes_of_cell = cell_bytes(config, placement.local_heads)
    held = sum(range(cells, cells + steps)) * config.batch_size
    for i, counts in enumerate(stats):
        got = counts.steps, counts.early_bytes, counts.ordered_bytes
        if got != (steps, held * bytes_of_cell, 0):
            yield (
                f"device {i}: (steps, early, ordered bytes) are {got}, not "
                f"{(steps, held * bytes_of_cell, 0)}"
            )


def report(
    row: dict, geometry: str, dtype: str, commit: str | None, json_path: str | None
) -> None:
    device = jax.local_devices()[0]
    packages = ("jax", "jaxlib", "flax", "numpy")
    found = {
        "experiment": "soak",
        **provenance(device, packages, processes.typed(), commit),
        "model": geometry,
        "dtype": dtype,
        "rows": [row],
    }
    print(
        f"{row['steps']} steps on {row['devices']} devices in {row['processes']} "
        f"processes: {row['seconds']:.1f} s, the first {row['first_s']:.1f} s; "
        + ("; ".join(row["problems"]) or "ok"),
        flush=True,
    )
    if json_path is not None:
        Path(json_path).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
