"""All that is measured on several GPUs of one machine, in one command.

    python experiments/devices.py --devices=8

    decode      one sequence of 32,768 cells, all in the tail, on 1 and on n GPUs of a
                process: device-resident, ordered, pipelined
    batch8      eight sequences of 8,192 cells on n GPUs
    processes   decode with a process for each GPU, held against decode's tokens
    large       decode on n GPUs in the geometry of Llama 3.1 70B, if they hold it
    heads       each head's bits against those of one GPU
    soak        2,000 steps, every ring active, without a hang

Each is a script of its own, whose command is printed and whose results go to
docs/results/gpusN_NAME.json as soon as they are there. What fails stops no other.
Predicted, 55 GB/s a link and no other limit: 4.3 GB / n cost 78 / n ms a token.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from commit import COMMIT

DEVICES = flags.DEFINE_integer(
    "devices", None, "GPUs of this machine to use; emulated on a CPU.", lower_bound=2
)
ONLY = flags.DEFINE_list("only", None, "Of the names above; default: all.")
GEOMETRY = flags.DEFINE_string("geometry", "llama-3.1-8b", "Of all but large.")
LARGE = flags.DEFINE_string("large", "llama-3.1-70b", "Geometry of large.")
CELLS = flags.DEFINE_integer("cells", 32768, "Of all but batch8, soak.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 2000, "Of the soak.", lower_bound=1)
RESULTS = flags.DEFINE_string("results", "docs/results", "Folder of the JSON files.")
LIMIT_S = flags.DEFINE_integer("limit_s", 1200, "For each script.", lower_bound=1)

HERE = os.path.relpath(Path(__file__).parent)  # results name no machine's folders


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1 or DEVICES.value is None:
        raise app.UsageError(f"give --devices, and no argument, got {argv[1:]}")
    every = commands(DEVICES.value)
    names = [*every] if ONLY.value is None else ONLY.value
    if unknown := set(names) - set(every):
        tell(f"error: --only must be of {', '.join(every)}, got {sorted(unknown)}")
        return 2
    if not Path(RESULTS.value).is_dir():
        tell(f"error: --results must be a folder that exists, got {RESULTS.value!r}")
        return 2
    codes = {}
    for name in names:
        codes[name] = call(every[name])
        tell(f"{name}: exit code {codes[name]}")
    failed = {name: code for name, code in codes.items() if code}
    tell(f"{len(codes)} scripts, failed: {failed or 'none'}")
    return 1 if failed else 0


def commands(devices: int) -> dict[str, list[str]]:
    """Script and flags by name, in the order of what matters most."""
    both, all_of_them = f"--mesh=1,{devices}", f"--mesh={devices}"
    geometry, cells = f"--geometry={GEOMETRY.value}", f"--cells={CELLS.value}"
    apart = f"--local_processes={devices}", f"--against={path('decode', devices)}"
    flags_of = {
        "decode": ("bench_decode", geometry, both, cells),
        "batch8": ("bench_decode", geometry, all_of_them, "--cells=8192", "--batch=8"),
        "processes": ("bench_decode", geometry, all_of_them, cells, *apart),
        "large": ("bench_decode", f"--geometry={LARGE.value}", all_of_them, cells),
        "heads": ("heads", geometry, both, cells),
        "soak": ("soak", geometry, all_of_them, f"--steps={STEPS.value}"),
    }
    commit = [] if COMMIT.value is None else [f"--commit={COMMIT.value}"]
    return {
        name: [f"{HERE}/{script}.py", *given, *commit, f"--json={path(name, devices)}"]
        for name, (script, *given) in flags_of.items()
    }


def path(name: str, devices: int) -> Path:
    return Path(RESULTS.value) / f"gpus{devices}_{name}.json"


def call(command: list[str]) -> int:
    """The script's exit code; it and what it started are ended at the limit."""
    tell(f"python {shlex.join(command)}")
    running = subprocess.Popen([sys.executable, *command], start_new_session=True)
    try:
        return running.wait(LIMIT_S.value)
    except subprocess.TimeoutExpired:
        tell(f"ended after {LIMIT_S.value} s")
        return -signal.SIGKILL
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def tell(text: str) -> None:
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    app.run(main)
