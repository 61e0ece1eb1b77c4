"""What do link and kernels do when, and why is the link idle when it is?

    python experiments/trace.py --geometry=llama-3.1-8b --cells=32768 \
        --json=trace.json --plot=trace.png

Decodes a few steps over random cells in a loop that waits at its end only (--wait: for
every token), with marks of time on both streams (Ring.trace), and says how they spent
it. If delivery is as it should be, the transfer stream copies nearly all of the time
and pauses only where a step begins. --json is for ui.perfetto.dev or chrome://tracing:
a track for each stream and each slot; --plot draws one step of the first device
(--plot_ms=4: so much around its begin), --summary writes a result. docs/delivery.md
says how to read them. Marks cost some time of their own, so figures of speed are
bench_decode's.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging
from caches import cache_of, ring_of
from commit import COMMIT
from decode_meshes import emulate
from jax.sharding import Mesh
from paths import check_paths
from trace_marks import MS, events, summary, table, whole_steps

from kvjax.config import CACHE_DTYPES, MIB, RingConfig, check_range
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.plan import Decline, plan_ring
from kvjax.delivery.ring import Ring
from kvjax.delivery.timeline import MAX_MARKS, MOST_MARKS, Trace
from kvjax.generate import Decoder
from kvjax.measurement import (
    WARMUP,
    DecodeStep,
    provenance,
    random_cache,
    run_steps,
)
from kvjax.model.transformer import GEOMETRIES, ModelConfig, random_model

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
LONGEST_MS = 1e6

GEOMETRY = flags.DEFINE_enum(
    "geometry", "tiny", list(GEOMETRIES), "Random weights of this geometry."
)
CELLS = flags.DEFINE_integer(
    "cells", 4096, "Cells that each sequence holds.", lower_bound=0
)
BATCH = flags.DEFINE_integer("batch", 1, "Sequences.", lower_bound=1)
CAPACITY = flags.DEFINE_integer(
    "capacity", None, "Cells of each sequence's cache. Default: what the run needs."
)
DEVICE_CELLS = flags.DEFINE_integer(
    "device_cells", 0, "Cells that stay on the device, a multiple of 128."
)
MESH = flags.DEFINE_integer(
    "mesh", 1, "Devices that split the heads; emulated on a CPU.", lower_bound=1
)
DEPTH = flags.DEFINE_integer(
    "depth", RingConfig().depth, "Of the ring; 0 traces the ordered path."
)
SLOT_MIB = flags.DEFINE_float("slot_mib", None, "Of the ring. Default: RingConfig's.")
BUDGET_MIB = flags.DEFINE_float("budget_mib", RingConfig().budget / MIB, "Of the ring.")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", CACHE_DTYPES, "Of the cache's cells.")
STEPS = flags.DEFINE_integer("steps", 3, "Whole steps to trace.", lower_bound=1)
WAIT = flags.DEFINE_bool("wait", False, "Wait for every token before the next step.")
MARKS = flags.DEFINE_integer("marks", MAX_MARKS, "Kept at most; the trace ends there.")
JSON = flags.DEFINE_string("json", None, "Writes the trace to this file.")
SUMMARY = flags.DEFINE_string(
    "summary", None, "Writes ms a step of each kind to this file, as a result."
)
PLOT = flags.DEFINE_string("plot", None, "Draws a step in this file.")
PLOT_MS = flags.DEFINE_float(
    "plot_ms", None, "Draws so many ms around the step's begin instead of all of it."
)


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    try:
        run(
            geometry=GEOMETRY.value,
            cells=CELLS.value,
            batch=BATCH.value,
            capacity=CAPACITY.value,
            device_cells=DEVICE_CELLS.value,
            devices=MESH.value,
            ring_config=ring_of(DEPTH.value, BUDGET_MIB.value, SLOT_MIB.value),
            dtype=DTYPE.value,
            steps=STEPS.value,
            wait=WAIT.value,
            max_marks=MARKS.value,
            commit=COMMIT.value,
            json_path=JSON.value,
            summary_path=SUMMARY.value,
            plot_path=PLOT.value,
            plot_ms=PLOT_MS.value,
        )
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(
    *,
    geometry: str,
    cells: int,
    batch: int,
    capacity: int | None,
    device_cells: int,
    devices: int,
    ring_config: RingConfig,
    dtype: str,
    steps: int,
    wait: bool,
    max_marks: int,
    commit: str | None,
    json_path: str | None,
    summary_path: str | None,
    plot_path: str | None,
    plot_ms: float | None,
) -> None:
    check_paths(json_path, plot_path, summary_path)
    if plot_ms is not None and not (plot_path and 0 < plot_ms <= LONGEST_MS):
        raise ValueError(
            f"--plot_ms must be above 0 and at most {LONGEST_MS}, and go with --plot; "
            f"got {plot_ms:g} and {plot_path}"
        )
    check_range("--marks", max_marks, 1, MOST_MARKS)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    emulate(devices)
    mesh = make_mesh({"tp": devices})
    config = ModelConfig.of(geometry)
    placement = place_cells(
        config, cells, batch, capacity, device_cells, mesh, dtype, steps
    )
    check_ring(placement, ring_config)
    trace = trace_steps(config, placement, ring_config, cells, steps, wait, max_marks)
    title = f"{geometry}, {cells:,} cells x {batch}, depth {ring_config.depth}"
    print(f"{title}, on {mesh.devices.flat[0].device_kind}")
    for device, marks in trace.marks.items():
        print(*([] if devices == 1 else [f"{device}:"]), *table(marks), sep="\n")
    found = {
        "experiment": "trace",
        **provenance(mesh.devices.flat[0], PACKAGES, sys.argv, commit),
        "model": geometry,
        "dtype": dtype,
        "rows": [row for device in trace.marks for row in rows_of(trace, device)],
    }
    if json_path is not None:
        write_trace(json_path, trace, found)
    if summary_path is not None:
        Path(summary_path).write_text(json.dumps(found, indent=1) + "\n")
    if plot_path is not None:
        from figures import draw_timeline

        marks = trace.marks[mesh.devices.flat[0]]
        whole = whole_steps(marks)
        step = whole[len(whole) // 2]
        window = step if plot_ms is None else step.around(plot_ms / MS)
        draw_timeline(marks, window, step.begin_s, title, plot_path)


def rows_of(trace: Trace, device: jax.Device) -> list[dict]:
    """Of one device: what its steps were, then ms a step of each kind of work."""
    found = summary(trace.marks[device])
    ms = found.pop("ms")
    about = {"device": device.id, "missed": trace.missed[device], **found}
    kinds = [(kind, value) for kind, value in ms.items() if value > 0]
    return [about, *({"device": device.id, "kind": k, "ms": v} for k, v in kinds)]


def place_cells(
    config: ModelConfig,
    cells: int,
    batch: int,
    capacity: int | None,
    device_cells: int,
    mesh: Mesh,
    dtype: str,
    steps: int,
) -> Placement:
    """Where the cells lie; the cache has room for all steps and the warm-up."""
    added = WARMUP + steps + 1
    needed = cells + added
    if capacity is not None and capacity < needed:
        raise ValueError(
            f"--capacity must be at least {needed} ({cells} cells and {added} tokens), "
            f"got {capacity}"
        )
    cache = cache_of(
        config,
        batch_size=batch,
        capacity=capacity or needed,
        dtype=dtype,
        device_cells=device_cells,
    )
    return Placement(config=cache, num_heads=config.num_heads, mesh=mesh)


def check_ring(placement: Placement, config: RingConfig) -> None:
    """Raises ValueError if no cell would be delivered; depth 0 was asked for."""
    plan = plan_ring(placement, replace(config, depth=config.depth or 1))
    if isinstance(plan, Decline):
        raise ValueError(f"there is no delivery to trace: {plan.reason}")


def trace_steps(
    config: ModelConfig,
    placement: Placement,
    ring_config: RingConfig,
    cells: int,
    steps: int,
    wait: bool,
    max_marks: int,
) -> Trace:
    """Warms up, then traces: one step more, whose begin ends the last whole one."""
    runs = [1] * (steps + 1) if wait else [steps + 1]  # each ends with a wait
    device = placement.mesh.devices.flat[0]
    weights = "float32" if device.platform == "cpu" else "bfloat16"
    model = random_model(config, dtype=weights, mesh=placement.mesh)
    decoder = Decoder(model, placement)
    step, batch = DecodeStep(decoder), placement.config.batch_size
    cache = random_cache(placement, [cells] * batch)
    first = decoder.place(np.full(batch, 7, np.int32))
    with Ring.open(placement, ring_config) as ring:
        warm = run_steps(step, first, cache, WARMUP)
        if ring_config.depth > 0 and ring.declines():
            raise ValueError(f"there is no ring: {set(ring.declines().values())}")
        jax.block_until_ready(warm.cache)
        with ring.trace(max_marks) as trace:
            done = warm
            for count in runs:
                done = run_steps(step, done.drawn[-1], done.cache, count)
            jax.block_until_ready(done.cache)
    return trace


def write_trace(path: str, trace: Trace, found: dict) -> None:
    """Writes events for a viewer, and beside them what was found."""
    written = {
        "traceEvents": [
            event
            for device, marks in trace.marks.items()
            for event in events(marks, device.id, str(device))
        ],
        "displayTimeUnit": "ms",
        "otherData": found,
    }
    Path(path).write_text(json.dumps(written) + "\n")


if __name__ == "__main__":
    app.run(main)
