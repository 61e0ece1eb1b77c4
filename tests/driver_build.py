"""Builds of the stand-alone driver: plain, under a sanitizer, or of a mutated ring."""

import functools
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
OPS = ROOT / "ops"
SOURCES = ROOT / "tests" / "driver"
PLAIN = ("-O1",)
UNITS = ("ranges", "ring", "attend", "registry", "timeline", "transport_emulated")

_scratch = tempfile.TemporaryDirectory(
    prefix="kvjax_driver"
)  # until the interpreter ends


class Mutation(NamedTuple):
    """One change of a file in ops/: `old` occurs once, whatever its line breaks."""

    file: str
    old: str
    new: str

    def apply(self, directory: Path) -> None:
        pattern = r"\s+".join(map(re.escape, self.old.split()))
        path = directory / self.file
        text, count = re.subn(pattern, lambda _: self.new, path.read_text())
        assert count == 1, f"{self.file} holds {count} times: {self.old}"
        path.write_text(text)


def compiler() -> str:
    """The C++ compiler; the test is skipped if there is none."""
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def build_driver(flags: tuple[str, ...] = PLAIN) -> Path:
    """The driver of the ring as it is; compiled once, on all cores."""
    return _build(flags)


@functools.cache
def _build(flags: tuple[str, ...]) -> Path:
    directory = Path(_scratch.name) / "".join(flags)
    directory.mkdir()
    everything = directory / "everything.cc"  # headers are parsed once
    sources = [p for p in sorted(SOURCES.glob("*.cc")) if p.name != "main.cc"]
    everything.write_text("".join(f'#include "{p.name}"\n' for p in sources))
    jobs = [everything, SOURCES / "main.cc", *(OPS / f"{unit}.cc" for unit in UNITS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda job: _compile(job, directory, OPS, flags), jobs))
    return _link(directory, objects, flags)


def build_mutant(name: str, mutation: Mutation, flags: tuple[str, ...] = PLAIN) -> Path:
    """The driver with one change in ops/; compiles only what that makes different."""
    unchanged = build_driver(flags).parent
    directory = Path(_scratch.name) / "".join((name, *flags))
    shutil.copytree(OPS, directory / "ops")
    mutation.apply(directory / "ops")
    changed = [directory / "ops" / mutation.file]
    if mutation.file == "ring.h":
        changed = [directory / "ops" / "ring.cc", SOURCES / "main.cc"]
    objects = {path.name: path for path in unchanged.glob("*.o")}
    for source in changed:
        made = _compile(source, directory, directory / "ops", flags)
        objects[made.name] = made
    return _link(directory, list(objects.values()), flags)


def _compile(source: Path, directory: Path, ops: Path, flags: tuple[str, ...]) -> Path:
    target = directory / f"{source.stem}.o"
    includes = [f"-I{ops}", f"-I{SOURCES}"]
    command = [compiler(), "-std=c++17", "-g1", *flags, *includes]
    _run([*command, "-c", str(source), "-o", str(target)])
    return target


def _link(directory: Path, objects: list[Path], flags: tuple[str, ...]) -> Path:
    program = directory / "driver"
    _run([compiler(), *flags, *map(str, objects), "-o", str(program), "-pthread"])
    return program


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
