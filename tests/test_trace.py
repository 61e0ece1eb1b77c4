"""The trace of a ring: marks that fit what ran, and what trace.py makes of them."""

import json
from typing import NamedTuple

import numpy as np
import pytest
from steps import (
    BLOCK_BYTES,
    LAYERS,
    filled,
    inputs,
    placement_of,
    replaced,
    stepper,
)
from test_bench import COMMIT, run_all
from tolerance import assert_same_bits

from experiments.trace_marks import (
    Window,
    events,
    pauses,
    slot_spans,
    summary,
    table,
    whole_steps,
)
from kvjax.config import RingConfig
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.ring import Emulation, Ring, RingStats
from kvjax.delivery.timeline import COMPUTE, TRANSFER, Mark

STEPS = 3
SEGMENTS = 6  # of a layer: 700 cells in blocks of 128
FIVE_SLOTS = RingConfig(depth=2, slot_bytes=BLOCK_BYTES, budget_bytes=5 * BLOCK_BYTES)
DELAYS = Emulation(max_delay_us=50)


def placement() -> Placement:
    return placement_of(ring_id=801)


class Traced(NamedTuple):
    """STEPS that were traced from the first one on."""

    outs: list[np.ndarray]
    marks: list[Mark]
    missed: int
    stats: RingStats


def decode() -> list[np.ndarray]:
    place, outs = placement(), []
    cache, x = filled(place, [700]), inputs(place)
    for _ in range(STEPS):
        out, cache = stepper(place)(cache, x)
        outs.append(np.asarray(out))
    return outs


def traced(config: RingConfig = FIVE_SLOTS, max_marks: int = 10_000) -> Traced:
    with Ring.open(placement(), config, emulation=DELAYS) as ring:
        with ring.trace(max_marks) as trace:
            outs = decode()
        stats = ring.stats()
    ((device, marks),) = trace.marks.items()
    return Traced(outs, marks, trace.missed[device], stats)


@pytest.fixture(scope="module")
def plain() -> list[np.ndarray]:
    return decode()


@pytest.fixture(scope="module")
def found() -> Traced:
    return traced()


def of(found: Traced, *kinds: str) -> list[Mark]:
    return [mark for mark in found.marks if mark.kind in kinds]


def assert_same_steps(outs: list[np.ndarray], want: list[np.ndarray]) -> None:
    for got, expected in zip(outs, want, strict=True):
        assert_same_bits(got, expected)


# Marks


def test_a_trace_changes_no_bit(found, plain):
    assert_same_steps(found.outs, plain)


@pytest.mark.parametrize("kinds", [TRANSFER, COMPUTE], ids=["transfer", "compute"])
def test_marks_of_a_stream_lie_end_to_end(found, kinds):
    end = 0.0
    for mark in of(found, *kinds):
        assert mark.begin_s == end <= mark.end_s
        end = mark.end_s


def test_every_delivery_is_copied_once_and_read_once(found):
    copies, reads = of(found, "copy"), of(found, "launch")
    assert [m.delivery for m in copies] == [*range(len(copies))]
    assert [m.delivery for m in reads] == [*range(STEPS * LAYERS * SEGMENTS)]
    ahead = [m for m in copies if m.step == STEPS + 1]  # for a step that never came
    assert len(copies) == len(reads) + len(ahead)
    assert 0 < len(ahead) <= 5
    for read in reads:
        copy = copies[read.delivery]
        assert (copy.step, copy.layer, copy.slot) == (read.step, read.layer, read.slot)
        assert read.slot == read.delivery % 5


def test_marks_name_steps_and_layers_in_order(found):
    reads = [(mark.step, mark.layer) for mark in of(found, "launch")]
    wanted = [(s + 1, layer) for s in range(STEPS) for layer in range(LAYERS)]
    assert reads == [pair for pair in wanted for _ in range(SEGMENTS)]
    assert [m.layer for m in of(found, "resident")] == [layer for _, layer in wanted]
    assert [mark.step for mark in of(found, "begin")] == [1, 2, 3]


def test_copies_are_in_order_and_do_not_overlap(found):
    copies = of(found, "copy")
    for one, other in zip(copies, copies[1:]):
        assert one.begin_s <= one.end_s <= other.begin_s


def test_a_launch_begins_once_its_copy_ended(found):
    copies = of(found, "copy")
    for read in of(found, "launch"):
        assert copies[read.delivery].end_s <= read.begin_s


def test_a_slot_is_filled_again_once_its_reader_ended(found):
    reads = of(found, "launch")
    for copy in of(found, "copy")[5:]:
        assert reads[copy.delivery - 5].end_s <= copy.begin_s


def test_bytes_of_all_copies_are_those_that_were_counted(found):
    used = [mark.bytes for mark in of(found, "copy") if mark.step <= STEPS]
    assert sum(used) == found.stats.early_bytes + found.stats.gap_bytes
    assert {mark.kind for mark in found.marks if mark.bytes} == {"copy"}


def test_each_wait_of_a_copy_has_its_mark(found):
    assert len(of(found, "wait_release")) == len(of(found, "copy")) - 5
    assert len(of(found, "wait_begin")) == STEPS
    ahead = {(m.step, m.layer) for m in of(found, "wait_append")}
    assert ahead == {(step, 0) for step in range(2, STEPS + 2)}


def test_the_ordered_path_is_traced_on_one_stream(plain):
    got = traced(RingConfig(depth=0))
    assert_same_steps(got.outs, plain)
    assert of(got, *TRANSFER) == []
    num_bytes = sum(mark.bytes for mark in of(got, "ordered_copy"))
    assert num_bytes == got.stats.ordered_bytes
    assert len(of(got, "launch")) == len(of(got, "ordered_copy")) == STEPS * LAYERS
    assert {mark.slot for mark in got.marks} == {None}


def test_a_full_trace_stops_and_says_so(plain, capfd):
    got = traced(max_marks=100)
    assert_same_steps(got.outs, plain)
    assert len(got.marks) == 100
    (said,) = capfd.readouterr().err.splitlines()
    assert f"the trace stopped at 100 marks and missed {got.missed:,};" in said
    assert got.missed > 0


def test_a_trace_that_is_large_enough_says_nothing(found, plain, capfd):
    assert found.missed == 0
    enough = len(found.marks) + 20  # what is sent ahead at the end depends on delays
    assert traced(max_marks=enough).missed == 0
    assert capfd.readouterr().err == ""


def test_each_device_has_a_trace():
    pair = placement_of(
        ring_id=802, mesh=make_mesh({"tp": 2}), num_layers=2, num_kv_heads=2
    )
    with Ring.open(pair, FIVE_SLOTS) as ring:
        with ring.trace() as trace:
            stepper(pair)(filled(pair, [700]), inputs(pair))
    assert [*trace.marks] == [*pair.mesh.devices.flat]
    for marks in trace.marks.values():
        assert sum(mark.kind == "launch" for mark in marks) == 2 * SEGMENTS


def test_a_ring_that_closes_meanwhile_keeps_its_trace(plain):
    with Ring.open(placement(), FIVE_SLOTS) as ring:
        with ring.trace() as trace:
            assert_same_steps(decode(), plain)
            ring.close()
            decode()
    (marks,) = trace.marks.values()
    assert {"copy", "ordered_copy"} <= {mark.kind for mark in marks}


def test_steps_before_a_trace_leave_no_mark(plain):
    with Ring.open(placement(), FIVE_SLOTS) as ring:
        assert_same_steps(decode(), plain)
        with ring.trace() as trace:
            pass
    assert list(trace.marks.values()) == [[]]


def test_a_trace_may_be_taken_again_after_an_error():
    with Ring.open(placement(), FIVE_SLOTS) as ring:
        with pytest.raises(RuntimeError, match="of the caller"):
            with ring.trace() as failed:
                decode()
                raise RuntimeError("of the caller")
        with ring.trace() as again:
            decode()
    for trace in (failed, again):
        assert len(*trace.marks.values()) > 0


def test_what_cannot_be_traced_is_refused():
    reference = replaced(placement(), device_cells=0, backend="reference")
    with Ring.open(reference) as ring:
        with pytest.raises(ValueError, match="no ring to trace: the backend is ref"):
            with ring.trace():
                pass
    with Ring.open(placement()) as ring:
        for max_marks in (0, 1 << 23):
            with pytest.raises(ValueError, match="max_marks must be"):
                with ring.trace(max_marks):
                    pass
        with ring.trace() as outer:
            with pytest.raises(ValueError, match="ring_id 801: .* traced already"):
                with ring.trace():
                    pass
            decode()
        assert len(*outer.marks.values()) > 0


def test_a_ring_opened_in_the_place_of_a_traced_one_is_told():
    first = Ring.open(placement(), FIVE_SLOTS)
    with pytest.raises(ValueError, match="ring_id 801: the ring is not being traced"):
        with first.trace():
            first.close()
            second = Ring.open(placement(), FIVE_SLOTS)
    second.close()


# What trace.py makes of them


def copy(begin_s: float, end_s: float, *, slot: int = 0, kind: str = "copy") -> Mark:
    return Mark(kind, 1, 2, slot, slot, 1000, float(begin_s), float(end_s))


def test_slots_are_copied_to_ready_and_read():
    marks = [
        copy(0, 1),
        copy(1, 2, slot=1),
        copy(3, 4, kind="launch"),
        copy(5, 6),
        copy(7, 8),
    ]
    got = [(s.slot, s.state, s.begin_s, s.end_s) for s in slot_spans(marks)]
    assert got == [
        (0, "copying", 0, 1),
        (1, "copying", 1, 2),
        (0, "ready", 1, 3),
        (0, "read", 3, 4),
        (0, "copying", 5, 6),
        (0, "unread", 6, 7),  # a look-ahead that was dropped
        (0, "copying", 7, 8),
    ]


def test_pauses_are_told_by_length_with_what_filled_them():
    marks = [
        copy(0, 1),
        copy(1, 1.25, kind="idle_slots"),
        copy(1.25, 2, kind="wait_release"),
        copy(2, 3),
        copy(3, 5, kind="idle"),
        copy(5, 6),
        copy(6, 9, kind="idle"),
        copy(9, 10),
    ]
    got = [(p.begin_s, p.seconds, p.kinds) for p in pauses(marks, Window(0, 7))]
    assert got == [
        (3, 2, [("idle", 2)]),
        (1, 1, [("wait_release", 0.75), ("idle_slots", 0.25)]),
    ]


def test_a_part_of_a_step_is_drawn_around_its_begin():
    assert Window(3.0, 9.0).around(4.0) == Window(2.0, 6.0)


def test_a_summary_is_of_whole_steps():
    """Two steps of 10 s; copies of 3 s and 5 s in them, one more behind them."""
    marks = [Mark("xla", 0, None, None, None, 0, 0, 1)]
    for begin in (1, 11, 21):
        marks.append(Mark("begin", 1, None, None, None, 0, begin, begin + 1))
        marks.append(Mark("xla", 1, None, None, None, 0, begin + 1, begin + 10))
    marks += [copy(2, 5), copy(12, 17), copy(22, 29)]
    got = summary(marks)
    assert (got["steps"], got["step_ms"]) == (2, 10_000)
    assert (got["deliveries"], got["bytes"]) == (1, 1000)
    assert got["copy_bytes_s"] == 2000 / 8
    ms = {kind: value for kind, value in got["ms"].items() if value}
    assert ms == {"begin": 1000, "xla": 9000, "copy": 4000}
    with pytest.raises(ValueError, match="no whole step: raise --marks"):
        whole_steps(marks[:3])


def test_time_of_each_stream_adds_up_to_the_steps(found):
    got = summary(found.marks)
    assert got["steps"] == STEPS - 1
    for kinds in (COMPUTE, TRANSFER):
        total = sum(got["ms"][kind] for kind in kinds)
        assert total == pytest.approx(got["step_ms"])
    lines = list(table(found.marks))
    assert lines[0].startswith("whole steps: 2, of ")
    assert any("busy" in line and "copy" in line for line in lines)
    assert "before delivery" in lines[-1]


def check_events(found: list[dict]) -> dict[tuple[int, int], list[dict]]:
    """Complete and metadata events alone, that don't overlap; those of each thread."""
    threads: dict[tuple[int, int], list[dict]] = {}
    for event in found:
        assert {type(event["pid"]), type(event["tid"])} == {int}
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
        else:
            assert event["ph"] == "M"
    for mine in threads.values():
        mine.sort(key=lambda event: event["ts"])
        for one, other in zip(mine, mine[1:]):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3
    return threads


def test_events_are_those_of_the_trace_event_format(found):
    got = json.loads(json.dumps(events(found.marks, 7, "cpu:7")))
    threads = check_events(got)
    named = {e["tid"]: e["args"]["name"] for e in got if e["name"] == "thread_name"}
    slots = [f"slot {i}" for i in range(5)]
    assert named == dict(enumerate(["compute", "transfer", *slots]))
    assert [*threads] == [(7, tid) for tid in named]
    last = of(found, "copy")[-1]
    shown = [event for event in threads[7, 1] if event["cat"] == "copy"]
    assert len(shown) == len(of(found, "copy"))
    assert shown[-1]["ts"] == pytest.approx(1e6 * last.begin_s)
    assert shown[-1]["dur"] == pytest.approx(1e6 * last.seconds)
    assert shown[-1]["args"].items() >= dict(delivery=last.delivery, layer=0).items()


REFUSED = {
    "device": (["--cells=100", "--capacity=128", "--device_cells=128"], "lie on the d"),
    "block": (["--device_cells=100"], "multiple of the block of 128"),
    "capacity": (["--cells=100", "--capacity=105"], "must be at least 106 (100 cells"),
    "depth": (["--depth=65"], "depth must be between 0 and 64"),
    "slot": (["--slot_mib=0.01"], "slot_bytes must hold one block"),
    "budget": (["--slot_mib=1", "--budget_mib=1"], "budget_bytes allows 1048576"),
    "marks": (["--marks=0"], "--marks must be between 1"),
    "few": (["--cells=200", "--slot_mib=0.25", "--marks=9"], "raise --marks"),
    "mesh": (["--mesh=3"], "needs 3 devices, got 2"),
    "json": (["--json=/none/out.json"], "--json must be a file in a folder"),
    "summary": (["--summary=/none/out.json"], "--summary must be a file in a folder"),
    "plot_ms": (["--plot_ms=2"], "go with --plot; got 2 and None"),
}


def test_the_script_writes_trace_and_picture_and_refuses_the_rest(tmp_path):
    pytest.importorskip("matplotlib")
    names = "trace.json", "step.png", "summary.json", "begin.png"
    paths = [tmp_path / name for name in names]
    good = [
        *("--geometry=tiny", "--cells=300", "--batch=2", "--capacity=512"),
        *("--device_cells=128", "--depth=2", "--slot_mib=0.25", "--budget_mib=1"),
        *("--steps=2", f"--commit={COMMIT}"),
        *(f"--json={paths[0]}", f"--plot={paths[1]}"),
    ]
    ordered = ["--cells=200", "--depth=0", "--steps=1"]
    apart = ["--cells=200", "--slot_mib=0.25", "--steps=1", "--wait"]
    apart += [f"--summary={paths[2]}", f"--plot={paths[3]}", "--plot_ms=0.5"]
    apart.append("--mesh=2")
    cases = [args for args, _ in REFUSED.values()]
    # First the one that needs two devices: the others begin jax with one.
    waited, (code, shown, errors), plain, *refused = run_all(
        "trace.py", apart, good, ordered, *cases
    )
    assert code == 0, errors
    assert "whole steps: 2, of" in shown and "GB/s while copying" in shown
    written = json.loads(paths[0].read_text())
    check_events(written["traceEvents"])
    about = written["otherData"]
    assert about["commit"] == COMMIT
    assert (about["rows"][0]["steps"], about["rows"][0]["missed"]) == (2, 0)
    assert paths[1].stat().st_size > 1000
    assert plain[0] == 0, plain[2]
    assert "ordered_copy" in plain[1] and "transfer" not in plain[1]
    assert waited[0] == 0, waited[2]
    rows = json.loads(paths[2].read_text())["rows"]
    for device in (0, 1):
        kinds = {row.get("kind") for row in rows if row["device"] == device}
        assert {"copy", "begin", "launch"} <= kinds
    assert paths[3].stat().st_size > 1000
    for (code, _, said), (_, wanted) in zip(refused, REFUSED.values(), strict=True):
        assert code == 2
        assert wanted in said.splitlines()[-1]
