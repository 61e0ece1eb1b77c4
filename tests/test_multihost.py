"""Several processes over loopback: one job's tokens, shares, refusals, deaths."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvjax.delivery.allocate import POOL_LIMIT

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "experiments" / "multihost.py")
# Two kv heads on four devices are stored twice; 130 + 5 tokens take two blocks.
SMALL = ("--geometry=tiny", "--batch=2", "--prompt_tokens=130", "--max_new_tokens=5")
FLOAT32 = ("--dtype=float32",)  # what rounds to bfloat16 could differ between runs
ALL_CELL_BYTES = 4 * 2 * 256 * 4 * 128 * 4  # layers, B, S, stored heads, R, float32
LONG = ("--geometry=tiny", "--batch=1", "--prompt_tokens=20", "--max_new_tokens=20000")
HEARTBEAT = "--heartbeat_s=10"
REFUSED = 2
END_S = 60  # from a death to the end of the job


class Job:
    """Processes, each with a log, which those that it starts itself write too.

    What is counted of those comes from their JSON; the log only names and says.
    """

    def __init__(self, folder: Path):
        self.processes: list[subprocess.Popen] = []
        self._folder = folder

    def start(self, *arguments: str, **environment: str) -> None:
        """Starts one, in its own session, so that its children can be ended too."""
        log = self._folder / f"{len(self.processes)}.log"
        paths = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        with log.open("ab") as file:  # so that no write lands on another's
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | paths | environment,
                start_new_session=True,
            )
        self.processes.append(process)

    def codes(self, limit_s: float = 150) -> list[int]:
        """Exit codes of all, in time."""
        end = time.monotonic() + limit_s
        return [p.wait(max(0.1, end - time.monotonic())) for p in self.processes]

    def log(self, i: int) -> str:
        return (self._folder / f"{i}.log").read_text(errors="replace")

    def pid_that_decodes(self, i: int, number: int, limit_s: float = 120) -> int:
        """Waits until log i says that process `number` decodes."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            found = re.search(rf"process {number}: decodes, pid (\d+)", self.log(i))
            if found:
                return int(found[1])
            assert self.processes[i].poll() is None, self.log(i)
            time.sleep(0.1)
        raise AssertionError(f"process {number} never decoded: {self.log(i)}")

    def end(self) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


@pytest.fixture
def job(tmp_path):
    with ended(Job(tmp_path)) as job:
        yield job


@contextmanager
def ended(job: Job):
    try:
        yield job
    finally:
        job.end()


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start_pair(job: Job, *own: str, **environment: str) -> None:
    """Two processes, two devices each; flags and environment of the second alone."""
    both = (SCRIPT, *SMALL, HEARTBEAT, "--num_processes=2", "--devices_per_process=2")
    both += (f"--coordinator={free_address()}",)
    job.start(*both, "--process_id=0")
    job.start(*both, "--process_id=1", *own, **environment)


def start_local(job: Job, processes: int, devices: int, *flags: str) -> None:
    """The launcher: it passes the flags on to each process that it starts."""
    sizes = f"--local_processes={processes}", f"--devices_per_process={devices}"
    job.start(SCRIPT, *sizes, HEARTBEAT, *flags)


# Equal to one process


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """What one process with four devices writes."""
    folder = tmp_path_factory.mktemp("alone")
    with ended(Job(folder)) as job:
        written = folder / "out.json"
        flags = (*SMALL, *FLOAT32, f"--json={written}")
        job.start(SCRIPT, "--devices_per_process=4", *flags)
        assert job.codes() == [0], job.log(0)
        return json.loads(written.read_text())["processes"][0]


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_processes_make_the_tokens_of_one_and_hold_their_shares(
    job, tmp_path, alone, processes, devices
):
    written = tmp_path / "out.json"
    start_local(job, processes, devices, *SMALL, *FLOAT32, f"--json={written}")
    assert job.codes() == [0], job.log(0)
    each = json.loads(written.read_text())["processes"]
    assert [p["output_ids"] for p in each] == [alone["output_ids"]] * processes
    assert len(set(alone["output_ids"][0])) > 1
    assert alone["cell_bytes"] == ALL_CELL_BYTES
    share = ALL_CELL_BYTES // processes
    assert [p["cell_bytes"] for p in each] == [share] * processes
    assert [p["pinned_bytes"] for p in each] == [share] * processes
    assert alone["early_bytes"] > 0
    early = alone["early_bytes"] // processes
    assert [p["early_bytes"] for p in each] == [early] * processes
    assert [p["declines"] for p in each] == [[]] * processes


# Refused on all


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            "--device_cells=128",
            "process 0 has device_cells = 0; process 1 has device_cells = 128",
        ),
        (
            "--dtype=float32",
            "process 0 has dtype = bfloat16; process 1 has dtype = float32",
        ),
        (
            "--max_new_tokens=6",
            "process 0 has max_new_tokens = 5; process 1 has max_new_tokens = 6",
        ),
        (
            "--devices_per_process=1",
            r"unequal numbers of devices, by process \{0: 2, 1: 1\}",
        ),
        ("--device_cells=100", "process 1: device_cells must be a multiple of the"),
    ],
)
def test_a_process_unlike_the_other_is_named_by_both(job, own, message):
    start_pair(job, own)
    assert job.codes() == [REFUSED, REFUSED], job.log(0) + job.log(1)
    for i in (0, 1):
        errors = [line for line in job.log(i).splitlines() if "error: " in line]
        assert len(errors) == 1, job.log(i)
        assert errors[0].startswith(f"process {i}: error: ")
        assert re.search(message, errors[0])


def test_a_host_without_room_is_named_by_both(job):
    start_pair(job, **{POOL_LIMIT: "0"})
    assert job.codes() == [REFUSED, REFUSED], job.log(0) + job.log(1)
    message = "error: process 1: the tails need 524288 bytes of pinned memory for each"
    for i in (0, 1):
        assert message in job.log(i)
        assert "decodes" not in job.log(i)


AGREEMENT = """
import sys

import jax

from kvjax.delivery import agreement

me = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], 2, me)
long = "\\u00e9" * 5000
assert agreement.gather(long * me) == ["", long]
assert agreement.together(lambda: me) == me
agreement.check_none("")
agreement.check_equal({"same": 1, "long": long})


def fail():
    raise ValueError("alone")


for call in (
    lambda: agreement.check_equal({"long": long + str(me), "same": 1}),
    lambda: agreement.check_equal({"same": 1, "more": 2} if me else {"same": 1}),
    lambda: agreement.together(fail if me else list),
    lambda: agreement.check_none("full" if me == 0 else ""),
):
    try:
        call()
    except ValueError as error:
        print("said:", str(error).replace(long, "long"))
"""


def test_agreement_gathers_any_length_and_names_who_differs(job):
    """Ten thousand bytes each, and a fact that one process alone has."""
    address = free_address()
    for number in "01":
        job.start("-c", AGREEMENT, address, number)
    assert job.codes() == [0, 0], job.log(0) + job.log(1)
    alike = "the processes differ, start all alike: "
    for i in (0, 1):
        said = [x for x in job.log(i).splitlines() if x.startswith("said: ")]
        assert said == [
            f"said: {alike}process 0 has long = long0; process 1 has long = long1",
            f"said: {alike}process 0 has more = None; process 1 has more = 2",
            "said: process 1: alone",
            "said: process 0: full",
        ]


# Dead or stuck


def names_dead(log: str, task: int) -> bool:
    """jax says it in one of two ways, whichever of its threads sees it first."""
    return f"Task {task} heartbeat timeout" in log or f"heartbeats):\n{task}\n" in log


def test_a_killed_process_ends_the_job_by_name(job):
    start_local(job, 2, 2, *LONG)
    other = job.pid_that_decodes(0, 0)
    os.kill(job.pid_that_decodes(0, 1), signal.SIGKILL)
    assert job.codes(END_S) != [0]
    log = job.log(0)
    assert "the first to fail: exit codes by process {1: -9}" in log
    assert names_dead(log, 1), log
    assert "still running" not in log  # process 0 ended by itself
    assert not Path(f"/proc/{other}").exists()


def test_a_killed_coordinator_ends_the_job_by_name(job):
    start_local(job, 2, 2, *LONG)
    other = job.pid_that_decodes(0, 1)
    os.kill(job.pid_that_decodes(0, 0), signal.SIGKILL)
    assert job.codes(END_S) != [0]
    log = job.log(0)
    assert "the first to fail: exit codes by process {0: -9}" in log
    assert "still running" not in log
    assert not Path(f"/proc/{other}").exists()


def test_a_stuck_process_ends_the_job_by_name(job):
    start_local(job, 2, 2, *LONG)
    stuck = job.pid_that_decodes(0, 1)
    job.pid_that_decodes(0, 0)
    os.kill(stuck, signal.SIGSTOP)
    assert job.codes(END_S) != [0]
    log = job.log(0)
    assert names_dead(log, 1), log
    assert re.search(r"still running after \d+ s, ended now: processes \[1\]", log)
    assert not Path(f"/proc/{stuck}").exists()
