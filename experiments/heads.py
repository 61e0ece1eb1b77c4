"""Has each head the bits of one device, however many devices share the heads?

    python experiments/heads.py --geometry=llama-3.1-8b --cells=32768 --mesh=1,2

Attention alone, of all layers, without a model: the same random cells and queries on
each mesh, with all cells on the device, half of them and none; the ring is active. A
model's tokens may differ between meshes, as sums over devices are rounded elsewhere; a
head lies whole on one device. Predicted: no head differs from the first mesh's, and
each device is sent its share of the tail early, to the byte.

The exit code is 1 if a head differs, or is delivered otherwise than it should.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import processes
from absl import app, flags, logging
from caches import cache_of
from commit import COMMIT
from decode_cases import mesh_sizes
from decode_meshes import open_meshes
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from paths import check_paths

from kvjax.advice import cell_bytes
from kvjax.config import CACHE_DTYPES
from kvjax.delivery.placement import Placement
from kvjax.delivery.ring import Ring, RingStats
from kvjax.measurement import provenance, random_cache
from kvjax.model.attention import Step
from kvjax.model.transformer import GEOMETRIES, ModelConfig
from kvjax.shapes import BLOCK

GEOMETRY = flags.DEFINE_enum(
    "geometry", "sharded-demo", list(GEOMETRIES), "Layers and heads."
)
CELLS = flags.DEFINE_integer("cells", 1024, "That each sequence holds.", lower_bound=1)
BATCH = flags.DEFINE_integer("batch", 1, "Sequences.", lower_bound=1)
MESH = flags.DEFINE_list(
    "mesh",
    ["1", "2"],
    "Numbers of devices; the first is the control. Emulated on CPUs.",
)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", CACHE_DTYPES, "Of the cache's cells.")
JSON = flags.DEFINE_string("json", None, "Writes the rows to this file.")

STEPS = 3


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    try:
        return run(
            geometry=GEOMETRY.value,
            cells=CELLS.value,
            batch=BATCH.value,
            sizes=mesh_sizes(MESH.value),
            dtype=DTYPE.value,
            commit=COMMIT.value,
            json_path=JSON.value,
        )
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        processes.tell(f"error: {error}")
        return 2


def run(
    *,
    geometry: str,
    cells: int,
    batch: int,
    sizes: list[int],
    dtype: str,
    commit: str | None,
    json_path: str | None,
) -> int:
    check_paths(json_path, None)
    meshes = open_meshes(sizes)
    half = cells // 2 // BLOCK * BLOCK
    placements = [
        place(ModelConfig.of(geometry), batch, cells, mesh, dtype, on_device)
        for mesh in meshes.values()
        for on_device in (None, half, 0)
    ]
    rows, control = [], None
    for placement in placements:
        heads, stats = attend(placement, cells)
        control = heads if control is None else control
        rows.append(make_row(placement, cells, heads, control, stats))
        print(line(rows[-1]), flush=True)
    found = {
        "experiment": "heads",
        **provenance(
            jax.devices()[0], ("jax", "jaxlib", "numpy"), processes.typed(), commit
        ),
        "model": geometry,
        "dtype": dtype,
        "rows": rows,
    }
    if json_path is not None:
        Path(json_path).write_text(json.dumps(found, indent=1) + "\n")
    failed = [row for row in rows if row["differ"] or row["problem"]]
    print(f"{len(rows)} placements, {len(failed)} failed")
    return 1 if failed else 0


def place(
    config: ModelConfig,
    batch: int,
    cells: int,
    mesh: Mesh,
    dtype: str,
    device_cells: int | None,
) -> Placement:
    cache = cache_of(
        config,
        batch_size=batch,
        capacity=cells + STEPS,
        dtype=dtype,
        device_cells=device_cells,
    )
    return Placement(config=cache, num_heads=config.num_heads, mesh=mesh)


def attend(placement: Placement, cells: int) -> tuple[np.ndarray, list[RingStats]]:
    """What some steps give, [STEPS, L, B, 1, N, H] float32; each device's counts."""
    step, given = program(placement), inputs(placement)
    outs = []
    with Ring.open(placement) as ring:
        cache = random_cache(placement, [cells] * placement.config.batch_size)
        for _ in range(STEPS):
            out, cache = step(cache, *given)
            outs.append(np.asarray(out))
        jax.block_until_ready(cache)
        stats = [ring.stats(device) for device in placement.mesh.devices.flat]
    return np.stack(outs), stats


def program(placement: Placement):
    """A jitted step that attends once in each layer; donates the cache."""

    def step(cache, tokens, q, k, v):
        _, begun = Step.begin(placement, cache, tokens)
        scale = placement.config.head_dim**-0.5
        each = enumerate(zip(q, k, v, strict=True))
        outs = [begun.attend(layer, *x, scale=scale) for layer, x in each]
        return jax.numpy.stack(outs), begun.end()

    where = placement.sharding(P()), placement.cache_shardings()
    return jax.jit(step, donate_argnames="cache", out_shardings=where)


def inputs(placement: Placement) -> tuple[jax.Array, ...]:
    """tokens [B, 1], then q [L, B, 1, N, H], k and v; the same for each placement."""
    config = placement.config
    draw = np.random.default_rng(0).standard_normal
    shape = config.num_layers, config.batch_size, 1
    counts = placement.num_heads, config.num_kv_heads, config.num_kv_heads
    heads = [draw((*shape, count, config.head_dim), np.float32) for count in counts]
    made = np.zeros((config.batch_size, 1), np.int32), *heads
    return jax.device_put(made, placement.sharding(P()))


def make_row(
    placement: Placement,
    cells: int,
    heads: np.ndarray,
    control: np.ndarray,
    stats: list[RingStats],
) -> dict:
    by_head = (heads.view(np.uint32) != control.view(np.uint32)).any((0, 1, 2, 3, 5))
    return {
        "devices": placement.mesh.size,
        "device_cells": placement.config.layer_device_cells[0],
        "cells": cells,
        "batch": placement.config.batch_size,
        "heads": placement.num_heads,
        "differ": np.flatnonzero(by_head).tolist(),
        "sha256": hashlib.sha256(heads.tobytes()).hexdigest(),
        "early_bytes": [s.early_bytes for s in stats],
        "problem": delivery_problem(placement, cells, stats),
    }


def delivery_problem(placement: Placement, cells: int, stats: list[RingStats]) -> str:
    """What a ring did otherwise than send each device its live cells; "" if nothing."""
    config = placement.config
    tails = [max(0, cells + i - config.layer_device_cells[0]) for i in range(STEPS)]
    bytes_of_cell = cell_bytes(config, placement.local_heads)
    live = sum(tails) * config.batch_size * bytes_of_cell
    sent = [(s.early_bytes, s.ordered_bytes) for s in stats]
    if sent == [(live, 0)] * len(sent):
        return ""
    return f"(early, ordered) bytes are {sent}, not {(live, 0)} of each device"


def line(row: dict) -> str:
    differ = f"heads {row['differ']} DIFFER" if row["differ"] else "no head differs"
    return (
        f"{row['devices']} devices, {row['device_cells']:,} of {row['cells']:,} cells "
        f"on the device: {differ}; {sum(row['early_bytes']):,} bytes early "
        f"{row['problem']}"
    )


if __name__ == "__main__":
    app.run(main)
