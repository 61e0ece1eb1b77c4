"""Decodes with a model and its cache split over devices of several processes.

On each host of a job, with the same flags but for the number:

    python experiments/multihost.py --coordinator=host0:9733 --num_processes=2 \\
        --process_id=0 --device_cells=0

To try it on one machine, with emulated devices on a CPU:

    python experiments/multihost.py --local_processes=2 --devices_per_process=2 \\
        --max_new_tokens=8

Predicted: each process holds 1 / num_processes of the cells' bytes; the tokens are
those of one process with as many devices.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import processes
from absl import app, flags
from caches import cache_of, ring_of
from processes import say

from kvjax.config import CACHE_DTYPES, RingConfig
from kvjax.delivery import agreement
from kvjax.delivery.allocate import footprint, init_cache
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.plan import Slots, plan_ring
from kvjax.delivery.ring import Ring
from kvjax.generate import Decoder, generate
from kvjax.model.transformer import GEOMETRIES, ModelConfig, random_model

DEVICES_PER_PROCESS = flags.DEFINE_integer(
    "devices_per_process",
    1,
    "Emulated, where there is no GPU; with --local_processes, GPUs of each.",
    lower_bound=1,
)
GEOMETRY = flags.DEFINE_enum(
    "geometry", "sharded-demo", sorted(GEOMETRIES), "Of a model of random weights."
)
BATCH = flags.DEFINE_integer("batch", 2, "Sequences.", lower_bound=1)
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 200, "Of each.", lower_bound=1)
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 8, "Of each.", lower_bound=1)
DEVICE_CELLS = flags.DEFINE_integer(
    "device_cells", 0, "Cells of each sequence that stay on the device.", lower_bound=0
)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", CACHE_DTYPES, "Of the cells.")
DEPTH = flags.DEFINE_integer("depth", RingConfig().depth, "Of the ring; 0 = ordered.")
BUDGET_MIB = flags.DEFINE_float(
    "budget_mib", 64, "Of each device's ring.", lower_bound=0
)
JSON = flags.DEFINE_string("json", None, "Process 0 writes tokens and figures here.")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if processes.starts_others():
        return processes.launch()
    try:
        processes.join(DEVICES_PER_PROCESS.value)
        decode(
            model_config=ModelConfig.of(GEOMETRY.value),
            batch_size=BATCH.value,
            prompt_tokens=PROMPT_TOKENS.value,
            max_new_tokens=MAX_NEW_TOKENS.value,
            device_cells=DEVICE_CELLS.value,
            dtype=DTYPE.value,
            depth=DEPTH.value,
            budget_mib=BUDGET_MIB.value,
            json_path=JSON.value,
        )
    except ValueError as error:
        processes.complain(f"error: {error}")
        return 2
    return 0


def decode(
    *,
    model_config: ModelConfig,
    batch_size: int,
    prompt_tokens: int,
    max_new_tokens: int,
    device_cells: int,
    dtype: str,
    depth: int,
    budget_mib: float,
    json_path: str | None,
) -> None:
    agreement.check_equal(
        {
            "devices of a process": jax.local_device_count(),
            "model": model_config,
            "prompt_tokens": prompt_tokens,
            "max_new_tokens": max_new_tokens,
        }
    )
    mesh = make_mesh({"tp": jax.device_count()})

    def plan() -> tuple[Placement, RingConfig]:
        config = cache_of(
            model_config,
            batch_size=batch_size,
            capacity=prompt_tokens + max_new_tokens,
            dtype=dtype,
            device_cells=device_cells,
        )
        placement = Placement(
            config=config, num_heads=model_config.num_heads, mesh=mesh
        )
        return placement, ring_of(depth, budget_mib, None)

    placement, ring_config = agreement.together(plan)
    say(describe(placement, ring_config))
    with agreement.together(lambda: Ring.open(placement, ring_config)) as ring:
        cache = init_cache(placement)
        held = [held_bytes(part) for part in (cache.device, cache.tail)]
        platform = mesh.devices.flat[0].platform
        model = random_model(
            model_config,
            dtype="float32" if platform == "cpu" else "bfloat16",
            mesh=mesh,
        )
        draw = np.random.default_rng(0)
        prompts = draw.integers(0, model_config.vocab_size, (batch_size, prompt_tokens))
        made = generate(
            Decoder(model, placement),
            cache,
            prompts.tolist(),
            max_new_tokens=max_new_tokens,
            on_token=Progress(),
        )
        stats, declines = ring.stats(), sorted(set(ring.declines().values()))
    mine = {
        "output_ids": made.output_ids,
        "cell_bytes": sum(held),
        "pinned_bytes": footprint(placement).host_bytes,
        "early_bytes": stats.early_bytes,
        "ordered_bytes": stats.ordered_bytes,
        "declines": declines,
    }
    all_of_them = [json.loads(text) for text in agreement.gather(json.dumps(mine))]
    if jax.process_index() == 0:
        report(
            all_of_them, made.timings.decode_s / made.timings.decode_steps, json_path
        )


class Progress:
    """Says once that decoding is under way: when a second token has come."""

    def __init__(self):
        self._tokens = 0

    def __call__(self, sequence: int, token: int) -> None:
        self._tokens += sequence == 0
        if sequence == 0 and self._tokens == 2:
            say(f"decodes, pid {os.getpid()}")


def describe(placement: Placement, ring_config: RingConfig) -> str:
    """Bytes on each device and host, before anything is allocated."""
    need = footprint(placement)
    plan = plan_ring(placement, ring_config)
    ring_bytes = plan.ring_bytes if isinstance(plan, Slots) else 0
    return (
        f"{placement.mesh.size} devices in {jax.process_count()} processes; each "
        f"device holds {placement.local_heads} kv heads: {need.device_bytes} bytes of "
        f"cells, {need.tail_bytes} pinned on its host, ring {ring_bytes}; "
        f"this host pins {need.host_bytes}"
    )


def held_bytes(part: jax.Array | None) -> int:
    """Bytes of an array that lie in this process."""
    return 0 if part is None else sum(s.data.nbytes for s in part.addressable_shards)


def report(each: list[dict], step_s: float, json_path: str | None) -> None:
    """Prints the figures of all processes, checked to have made the same tokens."""
    if any(p["output_ids"] != each[0]["output_ids"] for p in each):
        raise ValueError("the processes made different tokens")
    for i, figures in enumerate(each):
        shown = {name: x for name, x in figures.items() if name != "output_ids"}
        print(f"process {i}: {shown}")
    print(
        f"{step_s * 1e3:.1f} ms a token; tokens {each[0]['output_ids']}",
        flush=True,
    )
    if json_path is not None:
        Path(json_path).write_text(json.dumps({"processes": each, "step_s": step_s}))


if __name__ == "__main__":
    app.run(main)
