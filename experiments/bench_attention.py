"""How fast are the attention kernels alone, and does the ordered path add anything?

    python experiments/bench_attention.py --geometry=llama-3.1-8b \\
        --cells=32768 --batch=8 --arms=device,ordered,standalone

A pass attends once over each of the model's layers, one new token of each sequence, no
weights. Arms, in A/B/B/A order within one process, all over the same cells:

    device      attend over cells in device memory
    ordered     begin and attends of one jit, without a ring: copy, attend, copy, ...
    pipelined   the same with the default ring
    standalone  the loop of ops/copy_then_attend.h over the ordered arm's own tails:
                the same copies and launches without JAX, timed by the device's events

Device-resident it must read all live cells once: predicted, live bytes over the
memory's read rate. Llama 3.1 8B's 32 layers at 32,768 cells x 8 in bf16 are 34 GB,
7.4 ms at 4,633 GB/s. From the tail the cells must be copied first: the ordered path
should cost that copy and that attention, nothing else: 1.03 times the stand-alone loop
at most. No time is shown unless every arm gave the same bits in every run.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from attention_arms import ARMS, BitsDiffer, line, make_rows, place, time_arms
from commit import COMMIT
from paths import check_paths
from tqdm import tqdm

from kvjax.advice import GB
from kvjax.config import CACHE_DTYPES
from kvjax.delivery.placement import make_mesh
from kvjax.measurement import link_rate, provenance, read_rate
from kvjax.model.transformer import GEOMETRIES, ModelConfig

GEOMETRY = flags.DEFINE_enum("geometry", "tiny", list(GEOMETRIES), "Heads and layers.")
CELLS = flags.DEFINE_list("cells", ["4096"], "Cells that each sequence holds.")
BATCH = flags.DEFINE_list("batch", ["1"], "Sequences.")
ARM = flags.DEFINE_list("arms", ["device"], f"Of {', '.join(ARMS)}.")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", CACHE_DTYPES, "Of the cells.")
PASSES = flags.DEFINE_integer("passes", 8, "In a timed run.", lower_bound=1)
REPEATS = flags.DEFINE_integer(
    "repeats", 2, "A/B/B/A rounds: each arm runs twice in one.", lower_bound=1
)
JSON = flags.DEFINE_string("json", None, "Writes the rows to this file.")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    try:
        return run(
            geometry=GEOMETRY.value,
            cells=[int(cells) for cells in CELLS.value],
            batch=[int(batch) for batch in BATCH.value],
            arms=ARM.value,
            dtype=DTYPE.value,
            passes=PASSES.value,
            repeats=REPEATS.value,
            commit=COMMIT.value,
            json_path=JSON.value,
        )
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(
    *,
    geometry: str,
    cells: list[int],
    batch: list[int],
    arms: list[str],
    dtype: str,
    passes: int,
    repeats: int,
    commit: str | None,
    json_path: str | None,
) -> int:
    check_paths(json_path, None)
    if not arms or not set(arms) <= set(ARMS):
        raise ValueError(f"--arms must be of {', '.join(ARMS)}, got {arms}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    config, mesh = ModelConfig.of(geometry), make_mesh()
    device = mesh.devices.flat[0]
    link, read = link_rate(device), read_rate(device)
    found = {
        "experiment": "bench_attention",
        **provenance(device, ("jax", "jaxlib", "numpy"), sys.argv, commit),
        "model": geometry,
        "dtype": dtype,
        "passes": passes,
        "runs": 2 * repeats,
        "link_bytes_s": link,
        "read_bytes_s": read,
        "rows": [],
        "errors": [],
    }
    print(f"link {link / GB:.1f} GB/s, memory {read / GB:,.0f} GB/s")
    cases = [(b, n) for b in batch for n in cells]
    turns = len(cases) * len(arms) * 2 * repeats
    with tqdm(total=turns, leave=False, disable=None) as bar:
        for num_seqs, length in cases:
            bar.set_description(f"{length:,} cells x {num_seqs}")
            places = {
                arm: place(config, num_seqs, length, arm, mesh, dtype) for arm in arms
            }
            try:
                times = time_arms(places, length, passes, repeats, bar.update)
            except BitsDiffer as error:
                found["errors"].append(f"{length:,} cells x {num_seqs}: {error}")
                bar.write(f"error: {found['errors'][-1]}; its times are not shown")
            else:
                rows = make_rows(places, length, times, link, read)
                found["rows"] += rows
                bar.write("\n".join(map(line, rows)))
            if json_path is not None:
                Path(json_path).write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    app.run(main)
