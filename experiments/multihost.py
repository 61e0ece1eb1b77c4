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
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from kvjax.config import CACHE_DTYPES, MIB, CacheConfig, RingConfig
from kvjax.delivery import agreement
from kvjax.delivery.allocate import footprint, init_cache
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.plan import Slots, plan_ring
from kvjax.delivery.ring import Ring
from kvjax.generate import Decoder, generate
from kvjax.model.transformer import GEOMETRIES, ModelConfig, random_model

COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "In all.", lower_bound=1)
PROCESS_ID = flags.DEFINE_integer("process_id", 0, "Of this one.", lower_bound=0)
LOCAL_PROCESSES = flags.DEFINE_integer(
    "local_processes", 0, "Starts so many here and waits for them.", lower_bound=0
)
DEVICES_PER_PROCESS = flags.DEFINE_integer(
    "devices_per_process", 1, "Emulated, where there is no GPU.", lower_bound=1
)
HEARTBEAT_S = flags.DEFINE_integer(
    "heartbeat_s", 20, "A process silent for so long counts as dead.", lower_bound=5
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
DEPTH = flags.DEFINE_integer("depth", 1, "Of the ring; 0 = ordered.")
BUDGET_MIB = flags.DEFINE_float(
    "budget_mib", 64, "Of each device's ring.", lower_bound=0
)
JSON = flags.DEFINE_string("json", None, "Process 0 writes tokens and figures here.")

GRACE_S = 5  # past the heartbeat, for a process to end by itself


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if LOCAL_PROCESSES.value:
        return launch(LOCAL_PROCESSES.value)
    try:
        join(
            coordinator=COORDINATOR.value,
            num_processes=NUM_PROCESSES.value,
            process_id=PROCESS_ID.value,
            devices=DEVICES_PER_PROCESS.value,
            heartbeat_s=HEARTBEAT_S.value,
        )
        decode(
            model_config=ModelConfig.of(GEOMETRY.value),
            batch_size=BATCH.value,
            prompt_tokens=PROMPT_TOKENS.value,
            max_new_tokens=MAX_NEW_TOKENS.value,
            device_cells=DEVICE_CELLS.value,
            dtype=DTYPE.value,
            depth=DEPTH.value,
            budget_bytes=round(BUDGET_MIB.value * MIB),
            json_path=JSON.value,
        )
    except ValueError as error:
        complain(f"process {PROCESS_ID.value}: error: {error}")
        return 2
    return 0


def launch(num_processes: int) -> int:
    """Starts this script once a process and waits; names those that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags_given = [a for a in sys.argv[1:] if not a.startswith("--local_processes")]
    command = [sys.executable, __file__, *flags_given]
    command += [f"--coordinator=127.0.0.1:{port}", f"--num_processes={num_processes}"]
    running = [
        subprocess.Popen([*command, f"--process_id={i}"]) for i in range(num_processes)
    ]
    try:
        codes = wait(running, HEARTBEAT_S.value + GRACE_S)
    finally:
        for process in running:
            process.kill()
    failed = {i: code for i, code in enumerate(codes) if code != 0}
    if failed:
        complain(f"failed: exit codes by process {failed}")
    return max(map(abs, codes))


def wait(processes: list[subprocess.Popen], patience_s: float) -> list[int]:
    """Exit codes of all. Names the first that fails; ends those that outlive it."""
    deadline = None
    while waiting := [i for i, p in enumerate(processes) if p.poll() is None]:
        failed = {i: p.returncode for i, p in enumerate(processes) if p.returncode}
        if failed and deadline is None:
            complain(f"the first to fail: exit codes by process {failed}")
            deadline = time.monotonic() + patience_s
        if deadline is not None and time.monotonic() > deadline:
            complain(
                f"still running after {patience_s} s, ended now: processes {waiting}"
            )
            break
        time.sleep(0.1)
    for i in waiting:
        processes[i].kill()
    return [process.wait() for process in processes]


def complain(text: str) -> None:
    """A line in one write: the processes of a machine may share a log."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def join(
    *,
    coordinator: str | None,
    num_processes: int,
    process_id: int,
    devices: int,
    heartbeat_s: int,
) -> None:
    """Joins the job; before anything that asks jax for its devices."""
    if process_id >= num_processes:
        raise ValueError(
            f"process_id must be below num_processes {num_processes}, got {process_id}"
        )
    jax.config.update("jax_num_cpu_devices", devices)
    if num_processes == 1:
        return
    if coordinator is None:
        raise ValueError("several processes need --coordinator=host:port of process 0")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=heartbeat_s,
        shutdown_timeout_seconds=heartbeat_s + GRACE_S,
        initialization_timeout=60,
    )


def decode(
    *,
    model_config: ModelConfig,
    batch_size: int,
    prompt_tokens: int,
    max_new_tokens: int,
    device_cells: int,
    dtype: str,
    depth: int,
    budget_bytes: int,
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
        config = CacheConfig(
            num_layers=model_config.num_layers,
            batch_size=batch_size,
            capacity=prompt_tokens + max_new_tokens,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            dtype=dtype,
            device_cells=device_cells,
        )
        placement = Placement(
            config=config, num_heads=model_config.num_heads, mesh=mesh
        )
        return placement, RingConfig(depth=depth, budget_bytes=budget_bytes)

    placement, ring_config = agreement.together(plan)
    say(describe(placement, ring_config))
    with agreement.together(lambda: Ring.open(placement, ring_config)) as ring:
        cache = init_cache(placement)
        held = [held_bytes(part) for cells in cache.layers for part in cells]
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


def report(processes: list[dict], step_s: float, json_path: str | None) -> None:
    """Prints the figures of all processes, checked to have made the same tokens."""
    if any(p["output_ids"] != processes[0]["output_ids"] for p in processes):
        raise ValueError("the processes made different tokens")
    for i, figures in enumerate(processes):
        shown = {name: x for name, x in figures.items() if name != "output_ids"}
        print(f"process {i}: {shown}")
    print(
        f"{step_s * 1e3:.1f} ms a token; tokens {processes[0]['output_ids']}",
        flush=True,
    )
    if json_path is not None:
        Path(json_path).write_text(
            json.dumps({"processes": processes, "step_s": step_s})
        )


def say(text: str) -> None:
    """A line in one write, as `complain`'s."""
    print(f"process {jax.process_index()}: {text}\n", end="", flush=True)


if __name__ == "__main__":
    app.run(main)
