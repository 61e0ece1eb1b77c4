"""The ring's races and overlap, without XLA: the stand-alone driver and broken rings.

`recording` and `fuzz` play the same random steps, one on a log of what orders what, one
on threads with random delays; `virtual` measures overlap on a simulated clock.
"""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from driver_build import Mutation, build_driver, build_mutant, compiler

THREADS = ("-O1", "-fsanitize=thread")
ADDRESSES = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def play(program: Path, mode: str, *flags: str) -> subprocess.CompletedProcess:
    """Runs one mode of the driver."""
    return subprocess.run(
        [str(program), mode, *flags], capture_output=True, text=True, timeout=300
    )


def verdict(done: subprocess.CompletedProcess) -> str:
    """The last line that the driver printed, or what a sanitizer said instead."""
    lines = done.stdout.splitlines()
    return lines[-1] if lines else done.stderr


def assert_ok(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0 and ": ok" in verdict(done), done.stdout + done.stderr


def counts(done: subprocess.CompletedProcess) -> dict[str, int]:
    """What all seeds together went through, by the names of RingStats."""
    pairs = (pair.split("=") for pair in done.stdout.splitlines()[0].split())
    return {name: int(value) for name, value in pairs}


@pytest.fixture(scope="module")
def driver() -> Path:
    return build_driver()


def sanitized(flags: tuple[str, ...], directory: Path) -> Path:
    """The driver under a sanitizer; skips where a program under it doesn't run."""
    source, program = directory / "empty.cc", directory / "empty"
    source.write_text("int main() { return 0; }\n")
    made = subprocess.run([compiler(), *flags, str(source), "-o", str(program)])
    if made.returncode or subprocess.run([str(program)]).returncode:
        pytest.skip(f"{compiler()} can't build or run programs with {' '.join(flags)}")
    return build_driver(flags)


@pytest.mark.parametrize("mode", ["recording", "fuzz"])
def test_steps_deliver_the_right_bytes_in_order(driver: Path, mode: str):
    done = play(driver, mode, "--seeds=2000", "--workers=8")
    assert_ok(done)
    seen = counts(done)
    gone = ("ring_bytes", "num_slots")  # closed
    elsewhere = ("length_errors",)  # kernels find those
    missing = [n for n in seen if not seen[n] and n not in gone + elsewhere]
    assert not missing, f"no seed came to {missing}"
    assert not any(seen[name] for name in gone)


def test_copies_hide_behind_kernels(driver: Path):
    done = play(driver, "virtual")
    assert_ok(done)
    assert "ordered: 28802 us" in done.stdout  # copy + compute: what hiding saves


def test_marks_last_as_long_as_the_work_that_they_are_of(driver: Path):
    done = play(driver, "virtual")
    for said in (
        "copy: 99 marks of 150.0 to 150.0 us",  # 3 of them for a step to come
        "launch: 96 marks of 60.0 to 60.0 us",
        "ordered copy: 96 marks of 150.0 to 150.0 us",
        "ordered launch: 96 marks of 60.0 to 60.0 us",
    ):
        assert f"\n{said}\n" in done.stdout


@pytest.mark.parametrize("flags", [THREADS, ADDRESSES], ids=["thread", "address"])
def test_a_sanitizer_finds_nothing(flags: tuple[str, ...], tmp_path: Path):
    program = sanitized(flags, tmp_path)
    for mode, seeds in ("fuzz", 400), ("recording", 40):
        done = play(program, mode, f"--seeds={seeds}", "--workers=4")
        assert_ok(done)
        assert "Sanitizer" not in done.stderr, done.stderr
    assert_ok(play(program, "virtual"))


class Mutant(NamedTuple):
    """A change that breaks the ring, and what each mode must say about it."""

    change: Mutation
    says: dict[str, str]


def without(file: str, text: str) -> Mutation:
    """Takes a statement out."""
    return Mutation(file, text, "")


LOST = "overlap is lost"
MUTANTS = {
    "launch_does_not_wait_for_ready": Mutant(
        Mutation(
            "ring.cc",
            "transport_->Wait(compute, slot_of(base_ + head_).ready)",
            "Status::Ok()",
        ),
        {
            "recording": "a launch may read before its copy is done",
            "fuzz": "a launch read",
        },
    ),
    "copy_does_not_wait_for_release": Mutant(
        without(
            "ring.cc",
            "KVJAX_RETURN_IF_ERROR(transport_->Wait(transfer_, slot.release));",
        ),
        {
            "recording": "a copy may overwrite a slot under a launch",
            "fuzz": "a launch read",
        },
    ),
    "copy_does_not_wait_for_the_step_before": Mutant(
        without(
            "ring.cc", "KVJAX_RETURN_IF_ERROR(transport_->Wait(transfer_, begun_));"
        ),
        {
            "recording": "a copy may read a cell before it is written",
            "fuzz": "a launch read",
        },
    ),
    "look_ahead_does_not_wait_for_append": Mutant(
        without(
            "ring.cc",
            """KVJAX_RETURN_IF_ERROR(
            transport_->Wait(transfer_, appended_[issuing_ - num_attends_]));""",
        ),
        {
            "recording": "a copy may read a cell before it is written",
            "fuzz": "a launch read",
        },
    ),
    "skipped_copy_is_not_joined": Mutant(
        without(
            "ring.cc", "KVJAX_RETURN_IF_ERROR(transport_->Wait(compute, slot.ready));"
        ),
        {
            "recording": "a tail is freed while a copy may read it",
            "fuzz": "a copy read a tail after it was freed",
        },
    ),
    "dropped_look_ahead_is_not_joined": Mutant(
        Mutation(
            "ring.cc",
            """return transport_->Wait(compute,
            slot_of(base_ + ahead.num_segments - 1).ready);""",
            "return Status::Ok();",
        ),
        {
            "recording": "a tail is freed while a copy may read it",
            "fuzz": "a copy read a tail after it was freed",
        },
    ),
    "step_ends_under_a_copy_of_unmapped_memory": Mutant(
        Mutation(
            "ring.cc",
            "return transport_->Synchronize(slot_of(base_ + issued_ - 1).ready);",
            "return Status::Ok();",
        ),
        {
            "recording": "a tail is freed while a copy may read it",
            "fuzz": "a copy read a tail after it was freed",
        },
    ),
    "close_does_not_wait_for_launches": Mutant(
        without("ring.cc", "(void)transport_->Synchronize(slot.release);"),
        {
            "recording": "freed while",
            "fuzz": "a launch read",
        },
    ),
    "close_does_not_wait_for_copies": Mutant(
        without("ring.cc", "(void)transport_->Synchronize(slot.ready);"),
        {"recording": "freed while"},
    ),
    "idle_ring_is_given_back_under_launches": Mutant(
        Mutation(
            "ring.cc",
            """Drain();
            GiveBack();
            head_ = issued_;
            stats_""",
            "GiveBack(); head_ = issued_; stats_",
        ),
        {"recording": "freed while"},
    ),
    "issue_before_the_launch_is_enqueued": Mutant(
        Mutation(
            "ring.cc",
            """*slot = memory_of(base_ + head_);
            return Status::Ok();
            }

            Status Ring::Release(Stream compute) {
            NoteHead(compute, MarkKind::kLaunch);
            Slot& slot = slot_of(base_ + head_);
            KVJAX_RETURN_IF_ERROR(transport_->Record(slot.release, compute));
            slot.released = true;
            head_ += 1;
            return Pump();""",
            """*slot = memory_of(base_ + head_);
            head_ += 1;
            return Pump();
            }

            Status Ring::Release(Stream compute) {
            Slot& slot = slot_of(base_ + head_ - 1);
            KVJAX_RETURN_IF_ERROR(transport_->Record(slot.release, compute));
            slot.released = true;
            return Status::Ok();""",
        ),
        {"recording": "a launch reads", "fuzz": "a launch read"},
    ),
    "wait_before_record": Mutant(
        Mutation("ring.cc", "if (slot.released) {", "{"),
        {
            "recording": "a wait on an event that was never recorded",
            "fuzz": "a wait on an event that was never recorded",
        },
    ),
    "look_ahead_ignores_the_stamp": Mutant(
        Mutation(
            "ring.cc",
            "ahead.stamp != 0 && plan_.stamp_before == ahead.stamp",
            "ahead.stamp != 0",
        ),
        {
            "recording": "a copy may read a cell before it is written",
            "fuzz": "a launch read",
        },
    ),
    "look_ahead_ignores_a_second_append": Mutant(
        Mutation("ring.cc", "rewritten_ ? 0 : plan_.stamp", "plan_.stamp"),
        {"recording": "a copy may read a cell before it is written"},
    ),
    "look_ahead_ignores_the_tail": Mutant(
        without("ring.cc", "sent.tail != wanted.tail ||"),
        {"recording": "a tail is freed while a copy may read it"},
    ),
    "look_ahead_ignores_the_extents": Mutant(
        Mutation("ring.cc", "a.end_cell < b.end_cell", "false"),
        {"recording": "a launch reads"},
    ),
    "copies_of_another_cell": Mutant(
        Mutation(
            "ranges.cc",
            "(group_.first_cell - shape_.device_cells) * shape_.row_bytes",
            "group_.first_cell % shape_.tail_cells * shape_.row_bytes",
        ),
        {"recording": "a launch reads another cell", "fuzz": "a launch read"},
    ),
    "a_sequence_twice_in_a_launch": Mutant(
        without("ranges.cc", "if (!last) Close();"),
        {"recording": "a launch takes a sequence twice"},
    ),
    "entries_overlap": Mutant(
        Mutation(
            "ranges.cc",
            "closed_bytes_ += group_.bytes();",
            "closed_bytes_ += group_.width;",
        ),
        {"recording": "entries of a slot overlap"},
    ),
    "margin_of_one": Mutant(
        Mutation(
            "ring.h",
            "constexpr int64_t kMarginSlots = 3;",
            "constexpr int64_t kMarginSlots = 2;",
        ),
        {"virtual": LOST},
    ),
    "two_slots_of_uneven_segments": Mutant(
        Mutation("ring.h", "num_slots > 0 && num_slots < kMarginSlots;", "false;"),
        {"virtual": LOST},
    ),
    "issue_only_between_attends": Mutant(
        Mutation(
            "ring.cc",
            """head_ += 1;
            return Pump();
            }

            Status Ring::Finish""",
            """head_ += 1;
            return Status::Ok();
            }

            Status Ring::Finish""",
        ),
        {"virtual": LOST},
    ),
    "slots_are_recycled_through_the_host": Mutant(
        Mutation(
            "ring.cc",
            "transport_->Wait(transfer_, slot.release)",
            "transport_->Synchronize(slot.release)",
        ),
        {"virtual": LOST},
    ),
    "no_look_ahead_over_the_steps_end": Mutant(
        Mutation("ring.cc", "issued_ = used;", "issued_ = 0;"),
        {"virtual": LOST},
    ),
}


@pytest.fixture(scope="module")
def mutants(driver: Path) -> dict[str, Path]:
    """All mutants, built on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        changes = [mutant.change for mutant in MUTANTS.values()]
        return dict(zip(MUTANTS, pool.map(build_mutant, MUTANTS, changes), strict=True))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_ring_is_found(mutants: dict[str, Path], name: str):
    for mode, says in MUTANTS[name].says.items():
        workers = 8 if mode == "fuzz" else 1  # one: always the same seed fails first
        done = play(mutants[name], mode, "--seeds=2000", f"--workers={workers}")
        assert done.returncode == 1, f"{mode}: {verdict(done)}"
        assert says in verdict(done), f"{mode}: {verdict(done)}"


def test_thread_sanitizer_finds_a_missing_wait(tmp_path: Path):
    sanitized(THREADS, tmp_path)
    change = MUTANTS["launch_does_not_wait_for_ready"].change
    done = play(
        build_mutant("race", change, THREADS), "fuzz", "--seeds=60", "--go_on=1"
    )
    assert "ThreadSanitizer: data race" in done.stderr
