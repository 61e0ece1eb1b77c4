"""A script in several processes: starts them on this machine, or joins their job."""

import socket
import subprocess
import sys
import time

import jax
from absl import flags

COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "In all.", lower_bound=1)
PROCESS_ID = flags.DEFINE_integer("process_id", 0, "Of this one.", lower_bound=0)
LOCAL_PROCESSES = flags.DEFINE_integer(
    "local_processes",
    0,
    "Starts so many here, each with GPUs of its own, and waits for them.",
    lower_bound=0,
)
HEARTBEAT_S = flags.DEFINE_integer(
    "heartbeat_s", 20, "A process silent for so long counts as dead.", lower_bound=5
)

GRACE_S = 5  # past the heartbeat, for a process to end by itself


def starts_others() -> bool:
    """Whether this process is to launch those of the job, and be none of them."""
    return LOCAL_PROCESSES.value > 0 and COORDINATOR.value is None


def launch() -> int:
    """Starts this script once a process and waits; names those that failed."""
    num_processes = LOCAL_PROCESSES.value
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *sys.argv]
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
        tell(f"failed: exit codes by process {failed}")
    return max(map(abs, codes))


def typed() -> list[str]:
    """The command line without what launch added to it."""
    added = ("--coordinator=127.0.0.1:", "--num_processes=", "--process_id=")
    if LOCAL_PROCESSES.value == 0:
        return sys.argv
    return [argument for argument in sys.argv if not argument.startswith(added)]


def wait(processes: list[subprocess.Popen], patience_s: float) -> list[int]:
    """Exit codes of all. Names the first that fails; ends those that outlive it."""
    deadline = None
    while waiting := [i for i, p in enumerate(processes) if p.poll() is None]:
        failed = {i: p.returncode for i, p in enumerate(processes) if p.returncode}
        if failed and deadline is None:
            tell(f"the first to fail: exit codes by process {failed}")
            deadline = time.monotonic() + patience_s
        if deadline is not None and time.monotonic() > deadline:
            tell(f"still running after {patience_s} s, ended now: processes {waiting}")
            break
        time.sleep(0.1)
    for i in waiting:
        processes[i].kill()
    return [process.wait() for process in processes]


def join(devices: int) -> None:
    """Joins the job of the flags; before anything that asks jax for its devices.

    Args:
      devices: Of this process, emulated where there is no GPU. Processes that were
        launched here take so many GPUs each, others all that they see.

    Raises:
      ValueError: the flags name no job.
    """
    number, count = PROCESS_ID.value, NUM_PROCESSES.value
    if number >= count:
        raise ValueError(
            f"process_id must be below num_processes {count}, got {number}"
        )
    jax.config.update("jax_num_cpu_devices", devices)
    if count == 1:
        return
    if COORDINATOR.value is None:
        raise ValueError("several processes need --coordinator=host:port of process 0")
    mine = [*range(number * devices, (number + 1) * devices)]
    jax.distributed.initialize(
        COORDINATOR.value,
        count,
        number,
        local_device_ids=mine if LOCAL_PROCESSES.value else None,
        heartbeat_timeout_seconds=HEARTBEAT_S.value,
        shutdown_timeout_seconds=HEARTBEAT_S.value + GRACE_S,
        initialization_timeout=60,
    )


def complain(text: str) -> None:
    tell(f"process {PROCESS_ID.value}: {text}")


def tell(text: str) -> None:
    """A line in one write: the processes of a machine may share a log."""
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A line in one write, as `tell`'s."""
    print(f"process {jax.process_index()}: {text}\n", end="", flush=True)
