"""How fast are the attention kernels alone, and does the ordered path add anything?

    python experiments/bench_attention.py --geometry=llama-3.1-8b \\
        --cells=32768 --batch=8

A pass attends once over each of the model's layers, one new token of each sequence, no
weights. Device-resident it must read all live cells once: predicted, live bytes over
the memory's read rate. Llama 3.1 8B's 32 layers at 32,768 cells x 8 in bf16 are 34 GB,
7.4 ms at 4,633 GB/s. From the tail the cells must be copied first: the ordered path
should cost that copy and that attention, nothing else. --standalone names a JSON of a
program that does just the two without JAX: rows of cells, batch, ms.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from kvjax.advice import GB, cell_bytes
from kvjax.cache.state import Cache
from kvjax.config import CACHE_DTYPES, CacheConfig, RingConfig
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.ring import Ring
from kvjax.measurement import link_rate, provenance, random_cache, read_rate
from kvjax.model.attention import Step
from kvjax.model.transformer import GEOMETRIES, ModelConfig

ARMS = {"device": None, "ordered": RingConfig(depth=0), "pipelined": RingConfig()}
MS = 1e3

GEOMETRY = flags.DEFINE_enum("geometry", "tiny", list(GEOMETRIES), "Heads and layers.")
CELLS = flags.DEFINE_list("cells", ["4096"], "Cells that each sequence holds.")
BATCH = flags.DEFINE_list("batch", ["1"], "Sequences.")
ARM = flags.DEFINE_list("arms", ["device"], f"Of {', '.join(ARMS)}.")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", CACHE_DTYPES, "Of the cells.")
PASSES = flags.DEFINE_integer("passes", 8, "In a timed run.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each arm.", lower_bound=1)
STANDALONE = flags.DEFINE_string("standalone", None, "JSON to compare ordered with.")
COMMIT = flags.DEFINE_string("commit", None, "Of this code, where git can't tell.")
JSON = flags.DEFINE_string("json", None, "Writes the rows to this file.")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    try:
        run(
            geometry=GEOMETRY.value,
            cells=[int(cells) for cells in CELLS.value],
            batch=[int(batch) for batch in BATCH.value],
            arms=ARM.value,
            dtype=DTYPE.value,
            passes=PASSES.value,
            repeats=REPEATS.value,
            standalone=STANDALONE.value,
            commit=COMMIT.value,
            json_path=JSON.value,
        )
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(
    *,
    geometry: str,
    cells: list[int],
    batch: list[int],
    arms: list[str],
    dtype: str,
    passes: int,
    repeats: int,
    standalone: str | None,
    commit: str | None,
    json_path: str | None,
) -> None:
    if not set(arms) <= set(ARMS):
        raise ValueError(f"--arms must be of {', '.join(ARMS)}, got {arms}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    config, mesh = ModelConfig.of(geometry), make_mesh()
    device = mesh.devices.flat[0]
    others = {} if standalone is None else read_standalone(standalone)
    link, read = link_rate(device), read_rate(device)
    found = {
        "experiment": "bench_attention",
        **provenance(device, ("jax", "jaxlib", "numpy"), sys.argv, commit),
        "model": geometry,
        "dtype": dtype,
        "passes": passes,
        "runs": repeats,
        "link_bytes_s": link,
        "read_bytes_s": read,
        "rows": [],
    }
    print(f"link {link / GB:.1f} GB/s, memory {read / GB:,.0f} GB/s")
    todo = [(b, n, arm) for b in batch for n in cells for arm in arms]
    with tqdm(todo, leave=False, disable=None) as bar:
        for num_seqs, length, arm in bar:
            bar.set_description(f"{length:,} x {num_seqs}: {arm}")
            placement = place(config, num_seqs, length, arm, mesh, dtype)
            times = time_arm(placement, length, ARMS[arm], passes, repeats)
            row = make_row(placement, arm, length, times, link, read)
            row["standalone_ms"] = others.get((length, num_seqs))
            found["rows"].append(row)
            bar.write(line(row))
            if json_path is not None:
                Path(json_path).write_text(json.dumps(found, indent=1) + "\n")


def read_standalone(path: str) -> dict[tuple[int, int], float]:
    """ms by (cells, batch)."""
    try:
        rows = json.loads(Path(path).read_text())["rows"]
        return {(row["cells"], row["batch"]): row["ms"] for row in rows}
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--standalone must be a JSON whose rows have cells, batch and ms: {error}"
        ) from error


def place(
    config: ModelConfig, num_seqs: int, length: int, arm: str, mesh: Mesh, dtype: str
) -> Placement:
    cache = CacheConfig(
        num_layers=config.num_layers,
        batch_size=num_seqs,
        capacity=length + 1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device_cells=None if arm == "device" else 0,
    )
    return Placement(config=cache, num_heads=config.num_heads, mesh=mesh)


def attend_all(placement: Placement) -> Callable[[jax.Array, Cache], tuple]:
    """A jitted (q [B, 1, N, H], cache) -> (q, cache): one pass, the cache donated.

    A layer's result is the next one's query, so that none can be left out. Lengths are
    set back, so that every pass finds the same cells.
    """
    config = placement.config
    every, cells = placement.sharding(P()), placement.cache_shardings()

    def attend(q, cache):
        tokens = jnp.zeros((config.batch_size, 1), jnp.int32)
        _, step = Step.begin(placement, cache, tokens)
        k, v = q[:, :, : config.num_kv_heads], q[:, :, : config.num_kv_heads]
        for layer in range(config.num_layers):
            q = step.attend(layer, q, k, v, scale=config.head_dim**-0.5)
        ended = step.end()
        return q, ended._replace(lengths=cache.lengths, stamp=ended.stamp * 0)

    return jax.jit(attend, donate_argnums=1, out_shardings=(every, cells))


def time_arm(
    placement: Placement,
    length: int,
    ring: RingConfig | None,
    passes: int,
    repeats: int,
) -> list[float]:
    """Seconds of a pass in each run; a first one, not timed, compiles."""
    config, found = placement.config, []
    shape = (config.batch_size, 1, placement.num_heads, config.head_dim)
    draw = np.random.default_rng(0).standard_normal(shape, np.float32)
    q = jax.device_put(jnp.asarray(draw, jnp.bfloat16), placement.sharding(P()))
    attend = attend_all(placement)
    cache = random_cache(placement, [length] * config.batch_size)
    with nullcontext() if ring is None else Ring.open(placement, ring):
        for turn in range(repeats + 1):
            start = time.perf_counter()
            for _ in range(passes):
                q, cache = attend(q, cache)
            q.block_until_ready()
            if turn > 0:
                found.append((time.perf_counter() - start) / passes)
    return found


def make_row(
    placement: Placement,
    arm: str,
    length: int,
    times: list[float],
    link: float,
    read: float,
) -> dict:
    num_seqs = placement.config.batch_size
    live = length * num_seqs * cell_bytes(placement.config, placement.local_heads)
    seconds = statistics.median(times)
    rate = read if arm == "device" else link
    return {
        "arm": arm,
        "cells": length,
        "batch": num_seqs,
        "layers": placement.config.num_layers,
        "ms": MS * seconds,
        "spread": (max(times) - min(times)) / seconds,
        "live_bytes": live,
        "bytes_s": live / seconds,
        "bound_ms": MS * live / rate,
        "share": live / seconds / rate,
    }


def line(row: dict) -> str:
    of = "the memory's read rate" if row["arm"] == "device" else "the link"
    said = (
        f"{row['arm']:10}{row['cells']:>8,} cells x {row['batch']:<3}"
        f"{row['ms']:9.3f} ms, spread {row['spread']:.1%}: "
        f"{row['bytes_s'] / GB:,.1f} GB/s, {row['share']:.1%} of {of}"
    )
    if row["arm"] != "ordered" or row["standalone_ms"] is None:
        return said
    return said + f", {row['ms'] / row['standalone_ms']:.3f} x the stand-alone program"


if __name__ == "__main__":
    app.run(main)
