"""The GPU's attention kernels without a GPU: their threads as fibers on a host.

tests/simt plays CUDA for ops/attention.cu: random cells and steps give the bits of the
cpu platform's attention, and a kernel with one barrier less gives others.
"""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from driver_build import OPS, ROOT, compiler

SIMT = ROOT / "tests" / "simt"
KERNELS = ("attention.cu", "attention_fold.cuh", "attention_spans.cuh")
KERNELS += ("attention_tile.cuh",)
SETTINGS = ("-std=c++17", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")
WAITS = r"__syncthreads(_or|_and)?\(|__pipeline_wait_prior\("
SEEDS = 60


class Barrier(NamedTuple):
    """A wait in a kernel's text: where it stands and what is left without it."""

    file: str
    start: int
    end: int
    without: str

    @property
    def name(self) -> str:
        line = (OPS / self.file).read_text().count("\n", 0, self.start) + 1
        return f"{self.file}:{line}"


def barriers() -> list[Barrier]:
    """All of them: each __syncthreads, and each wait for asynchronous copies."""
    found = []
    for file in KERNELS:
        text = (OPS / file).read_text()
        for m in re.finditer(
            r"__syncthreads(_or|_and)?\(|__pipeline_wait_prior\(", text
        ):
            without = "(" if m[1] else "(void)("
            if m[0].endswith("threads("):
                without = "(void)(0"
            found.append(Barrier(file, m.start(), m.end(), without))
    return found


def native_flags() -> tuple[str, ...]:
    """Hardware multiply-adds where there are some: without, each is a slow call."""
    done = subprocess.run(
        [compiler(), "-march=native", "-E", "-x", "c++", os.devnull],
        capture_output=True,
    )
    return ("-march=native",) if done.returncode == 0 else ()


class Builder:
    """Compiles the program of a kernel text; what texts don't change only once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.settings = (*SETTINGS, *native_flags())
        jobs = [
            (SIMT / "cta.cc", ("-O2",)),
            (OPS / "ranges.cc", ("-O1",)),
            (OPS / "attention.cc", ("-O1",)),
            (OPS / "attention_cpu.cc", ("-O1", "-DKVJAX_TARGET=baseline")),
            (OPS / "attention_cpu.cc", ("-O1", "-DKVJAX_TARGET=avx2")),
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = pool.map(
                lambda i: self.compile(jobs[i][0], folder / f"{i}.o", OPS, *jobs[i][1]),
                range(len(jobs)),
            )
            self.objects = list(made)

    def compile(self, source: Path, target: Path, ops: Path, *more: str) -> Path:
        run(
            [compiler(), *self.settings, *more, f"-I{SIMT}", f"-I{ops}", "-c"]
            + [str(source), "-o", str(target)]
        )
        return target

    def program(self, name: str, ops: Path = OPS, level: str = "-O1") -> Path:
        """The program that plays the kernels of folder `ops`."""
        main = self.compile(SIMT / "main.cc", self.folder / f"{name}.o", ops, level)
        program = self.folder / name
        run([compiler(), str(main), *map(str, self.objects), "-o", str(program)])
        return program

    def without(self, barrier: Barrier) -> Path:
        """The same with one barrier less."""
        name = barrier.name.replace(":", "_")
        ops = self.folder / f"ops_{name}"
        ops.mkdir()
        for path in OPS.glob("*"):
            if path.suffix in (".h", ".cu", ".cuh"):
                (ops / path.name).write_text(path.read_text())
        text = (OPS / barrier.file).read_text()
        text = text[: barrier.start] + barrier.without + text[barrier.end :]
        (ops / barrier.file).write_text(text)
        return self.program(name, ops, level="-O0")  # built sooner, and few seeds run


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def play(program: Path, first: int, seeds: int) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(program), f"--first={first}", f"--seeds={seeds}"],
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def builder(tmp_path_factory) -> Builder:
    return Builder(tmp_path_factory.mktemp("simt"))


def test_kernels_give_the_bits_of_the_cpu(builder: Builder):
    program = builder.program("simt")
    workers = os.cpu_count()
    share = -(-SEEDS // workers)
    with ThreadPoolExecutor(workers) as pool:
        for done in pool.map(lambda i: play(program, i * share, share), range(workers)):
            assert done.returncode == 0 and ": ok" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def mutants(builder: Builder) -> dict[str, Path]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = pool.map(builder.without, barriers())
        return {b.name: p for b, p in zip(barriers(), programs, strict=True)}


@pytest.mark.parametrize("barrier", barriers(), ids=lambda b: b.name)
def test_each_barrier_is_needed(mutants: dict[str, Path], barrier: Barrier):
    done = play(mutants[barrier.name], 0, 4 * SEEDS)
    assert done.returncode != 0, "no seed misses it"
