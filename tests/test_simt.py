"""The GPU's attention kernels without a GPU: their threads as fibers on a host.

tests/simt plays CUDA for ops/attention*.cu: random cells and steps give the bits of the
cpu platform's attention, and a kernel with one barrier less gives others.
"""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from driver_build import OPS, ROOT, compiler

SIMT = ROOT / "tests" / "simt"
KERNELS = ("attention_fold.cuh", "attention_kernels.cuh", "attention_spans.cuh")
KERNELS += ("attention_tile.cuh",)
SETTINGS = ("-std=c++17", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")
SEEDS = 60


def waits() -> list[str]:
    """FILE:LINE of each barrier and of each wait for asynchronous copies."""
    return [
        f"{file}:{number}"
        for file in KERNELS
        for number, line in enumerate((OPS / file).read_text().splitlines(), start=1)
        if re.search(
            r"__sync(threads|threads_and|warp)\(|__pipeline_wait_prior\(|Synchronize\(",
            line,
        )
    ]


def native_flags() -> tuple[str, ...]:
    """Hardware multiply-adds where there are some: without, each is a slow call."""
    done = subprocess.run(
        [compiler(), "-march=native", "-E", "-x", "c++", os.devnull],
        capture_output=True,
    )
    return ("-march=native",) if done.returncode == 0 else ()


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """Plays the kernels; everything is compiled on all cores."""
    folder = tmp_path_factory.mktemp("simt")
    native = native_flags()
    jobs = [
        (SIMT / "main.cc", "-O1"),
        (SIMT / "cta.cc", "-O2"),
        (OPS / "ranges.cc", "-O1"),
        (OPS / "attention.cc", "-O1"),
        (OPS / "attention_cpu.cc", "-O1", "-DKVJAX_TARGET=baseline"),
        (OPS / "attention_cpu.cc", "-O1", "-DKVJAX_TARGET=avx2"),
    ]

    def compile_one(i: int) -> str:
        source, *own = jobs[i]
        target = str(folder / f"{i}.o")
        includes = [f"-I{SIMT}", f"-I{OPS}"]
        run(
            [compiler(), *SETTINGS, *native, *own, *includes]
            + ["-c", str(source), "-o", target]
        )
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, range(len(jobs))))
    run([compiler(), *objects, "-o", str(folder / "simt")])
    return folder / "simt"


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def play(program: Path, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(program), *flags], capture_output=True, text=True, timeout=600
    )


def test_kernels_give_the_bits_of_the_cpu(program: Path):
    workers = os.cpu_count()
    share = -(-SEEDS // workers)

    def work(i: int) -> subprocess.CompletedProcess:
        return play(program, f"--first={i * share}", f"--seeds={share}")

    with ThreadPoolExecutor(workers) as pool:
        for done in pool.map(work, range(workers)):
            assert done.returncode == 0 and ": ok" in done.stdout, done.stdout


@pytest.mark.parametrize("wait", waits())
def test_each_wait_is_needed(program: Path, wait: str):
    done = play(program, f"--seeds={4 * SEEDS}", f"--without={wait}")
    assert done.returncode != 0, "no seed misses it"


def test_every_wait_is_in_the_list():
    """Each stands on a line of its own, where the program finds it."""
    texts = [(OPS / file).read_text() for file in KERNELS]
    waits_of = re.compile(r"__sync\w*|__pipeline_wait\w*|Synchronize\(")
    found = sum(len(waits_of.findall(text)) for text in texts)
    assert found == len(waits()) > 15
