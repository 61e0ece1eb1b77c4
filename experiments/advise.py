"""Where should this model's cells lie on this machine, and what will a token cost?

    python experiments/advise.py --geometry=llama-3.1-8b --cells=32768 --budget_gib=2

Measures the link, and a decode step over few and over --sample_cells cells on the
device; the rest is arithmetic (kvjax/advice.py). With --link_gbs, --attend_gbs and
--step_ms nothing is measured, so any machine can be asked about another. --check runs
the advised placement and prints what was predicted beside what came.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging
from caches import cache_of
from commit import COMMIT
from jax.sharding import Mesh

from kvjax.advice import GB, Advice, Costs, Forecast, advise, forecast
from kvjax.config import CACHE_DTYPES, CacheConfig, RingConfig
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.ring import Ring
from kvjax.generate import Decoder
from kvjax.measurement import (
    WARMUP,
    DecodeStep,
    measure_costs,
    provenance,
    random_cache,
    run_steps,
)
from kvjax.model.checkpoint import load, open_checkpoint
from kvjax.model.transformer import GEOMETRIES, ModelConfig, Transformer, random_model
from kvjax.shapes import BLOCK

STEPS = 16  # in a timed run
MS = 1e3

GEOMETRY = flags.DEFINE_enum(
    "geometry", "tiny", list(GEOMETRIES), "Random weights of this geometry."
)
MODEL = flags.DEFINE_string(
    "model", None, "GGUF file or Hugging Face directory, instead of --geometry."
)
CELLS = flags.DEFINE_integer(
    "cells", 32768, "Context: cells that each sequence will hold.", lower_bound=1
)
BATCH = flags.DEFINE_integer("batch", 1, "Sequences.", lower_bound=1)
BUDGET = flags.DEFINE_float(
    "budget_gib", 1.0, "Device memory for cells and ring, beside the weights."
)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", CACHE_DTYPES, "Of the cells.")
SAMPLE = flags.DEFINE_integer(
    "sample_cells", 4096, "Cells to time a step over.", lower_bound=512
)
LINK = flags.DEFINE_float("link_gbs", None, "Given: GB/s from host to device.")
ATTEND = flags.DEFINE_float("attend_gbs", None, "Given: GB/s of cells attended.")
STEP = flags.DEFINE_float("step_ms", None, "Given: ms of a step over no cells.")
CHECK = flags.DEFINE_bool("check", False, "Run the advised placement.")
JSON = flags.DEFINE_string("json", None, "Writes the advice to this file.")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    try:
        run(
            geometry=GEOMETRY.value,
            model_path=MODEL.value,
            cells=CELLS.value,
            batch=BATCH.value,
            budget_bytes=round(BUDGET.value * (1 << 30)),
            dtype=DTYPE.value,
            sample_cells=SAMPLE.value,
            given=given_costs(LINK.value, ATTEND.value, STEP.value),
            check=CHECK.value,
            commit=COMMIT.value,
            json_path=JSON.value,
        )
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def given_costs(
    link: float | None, attend: float | None, step: float | None
) -> Costs | None:
    """Costs out of the flags; None if they are to be measured."""
    if link is None and attend is None and step is None:
        return None
    if link is None or attend is None or step is None:
        raise ValueError("give all of --link_gbs, --attend_gbs and --step_ms, or none")
    return Costs(link_bytes_s=link * GB, attend_bytes_s=attend * GB, step_s=step / MS)


def run(
    *,
    geometry: str,
    model_path: str | None,
    cells: int,
    batch: int,
    budget_bytes: int,
    dtype: str,
    sample_cells: int,
    given: Costs | None,
    check: bool,
    commit: str | None,
    json_path: str | None,
) -> None:
    checkpoint = None if model_path is None else open_checkpoint(model_path)
    config = ModelConfig.of(geometry) if checkpoint is None else checkpoint.config
    name = geometry if checkpoint is None else checkpoint.path.name
    model, mesh, costs = None, None, given
    if given is None or check:
        mesh = make_mesh()
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        weights = "float32" if on_cpu else "bfloat16"
        if checkpoint is None:
            model = random_model(config, dtype=weights, mesh=mesh)
        else:
            model, config = load(checkpoint, dtype=weights, mesh=mesh)
    if given is None:
        sample = cache_config(config, batch, sample_cells, dtype, None)
        print(f"measuring link and step over {sample.num_cells:,} cells", flush=True)
        placement = Placement(config=sample, num_heads=config.num_heads, mesh=mesh)
        costs = measure_costs(placement, DecodeStep(Decoder(model, placement)))
    whole = cache_config(config, batch, cells + WARMUP + STEPS, dtype, None)
    advice = advise(whole, [cells] * batch, costs, budget_bytes=budget_bytes)
    print(f"{name}, {cells:,} cells x {batch} in {dtype}")
    print(*describe(whole, [cells] * batch, costs, advice), sep="\n")
    measured_ms = None
    if check:
        measured_ms = measure(model, config, whole, advice, cells, mesh)
        predicted_ms = advice.best.token_s * MS
        print(
            f"measured {measured_ms:.2f} ms a token, predicted {predicted_ms:.2f}: "
            f"{measured_ms / predicted_ms - 1:+.1%}"
        )
    if json_path is not None:
        device = None if mesh is None else mesh.devices.flat[0]
        written = {
            "experiment": "advise",
            **provenance(device, ("jax", "jaxlib", "flax", "numpy"), sys.argv, commit),
            "model": name,
            "dtype": dtype,
            "measured_here": given is None,
            "costs": costs._asdict(),
            "rows": [make_row(cells, batch, budget_bytes, advice, measured_ms)],
        }
        Path(json_path).write_text(json.dumps(written, indent=1) + "\n")


def cache_config(
    config: ModelConfig, batch: int, cells: int, dtype: str, device_cells: int | None
) -> CacheConfig:
    return cache_of(
        config,
        batch_size=batch,
        capacity=cells,
        dtype=dtype,
        device_cells=device_cells,
    )


def describe(config: CacheConfig, lengths: list[int], costs: Costs, advice: Advice):
    """Lines: the costs, a token at some placements, the advice and its reason."""
    yield (
        f"link {costs.link_bytes_s / GB:.1f} GB/s, attention "
        f"{costs.attend_bytes_s / GB:,.0f} GB/s, a step without cells "
        f"{costs.step_s * MS:.2f} ms"
    )
    yield "cells on the device    copy ms   compute ms   token ms"
    half = config.num_cells // 2 // BLOCK * BLOCK
    shown = {half, advice.balance_cells}
    table = [forecast(config, lengths, costs, cells) for cells in shown]
    table += [advice.all_in_tail, advice.best, advice.all_on_device]
    for row in sorted(set(table)):
        mark = "  <- advised" if row == advice.best else ""
        yield (
            f"{row.device_cells:>19,}{row.copy_s * MS:>11.2f}"
            f"{row.compute_s * MS:>13.2f}{row.token_s * MS:>11.2f}{mark}"
        )
    yield advice.reason
    yield (
        f"device_cells={advice.best.device_cells}: {advice.device_bytes / GB:.2f} GB "
        f"of device memory with the ring, {advice.tail_bytes / GB:.2f} GB pinned"
    )


def measure(
    model: Transformer,
    config: ModelConfig,
    whole: CacheConfig,
    advice: Advice,
    cells: int,
    mesh: Mesh,
) -> float:
    """ms a token in the advised placement, the median of three runs."""
    advised = cache_config(
        config, whole.batch_size, whole.capacity, whole.dtype, advice.best.device_cells
    )
    placement = Placement(config=advised, num_heads=config.num_heads, mesh=mesh)
    decoder = Decoder(model, placement)
    step, seconds = DecodeStep(decoder), []
    tokens = decoder.place(np.zeros(whole.batch_size, np.int32))
    with Ring.open(placement, RingConfig()):
        for _ in range(3):
            cache = random_cache(placement, [cells] * whole.batch_size)
            warm = run_steps(step, tokens, cache, WARMUP)
            timed = run_steps(step, warm.drawn[-1], warm.cache, STEPS)
            seconds.append(timed.seconds / STEPS)
            jax.block_until_ready(timed.cache)
    return MS * statistics.median(seconds)


def make_row(
    cells: int,
    batch: int,
    budget_bytes: int,
    advice: Advice,
    measured_ms: float | None,
) -> dict:
    def in_ms(found: Forecast) -> dict:
        return {
            "device_cells": found.device_cells,
            "copy_ms": found.copy_s * MS,
            "compute_ms": found.compute_s * MS,
            "token_ms": found.token_s * MS,
        }

    return {
        "cells": cells,
        "batch": batch,
        "budget_bytes": budget_bytes,
        **in_ms(advice.best),
        "all_in_tail": in_ms(advice.all_in_tail),
        "all_on_device": in_ms(advice.all_on_device),
        "balance_cells": advice.balance_cells,
        "reason": advice.reason,
        "ms": measured_ms,
    }


if __name__ == "__main__":
    app.run(main)
