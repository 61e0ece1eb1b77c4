"""What trace makes of a ring's marks: events for a viewer, slots, pauses, a table."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvjax.advice import GB
from kvjax.delivery.timeline import COMPUTE, TRANSFER, Mark

MS, US = 1e3, 1e6
PAUSES = 5  # that the table shows
FIRST_SLOT = 2  # thread id of slot 0; the streams' come before it
STREAMS = {"compute": COMPUTE, "transfer": TRANSFER}

WORK = {  # stream: heading: kinds
    "transfer": {
        "busy": ("copy",),
        "waiting": ("wait_begin", "wait_release", "wait_append"),
        "idle": ("idle", "idle_depth", "idle_slots"),
    },
    "compute": {
        "busy": ("resident", "launch", "ordered_copy"),
        "waiting": ("wait_ready", "begin", "host", "finish"),
        "XLA or idle": ("xla",),
    },
}
WHY = {
    "idle": "all that was planned had been sent",
    "idle_depth": "the next segment was beyond the depth",
    "idle_slots": "every slot held cells whose launch was yet to be enqueued",
    "wait_begin": "the step before still ran",
    "wait_release": "the slot was still read",
    "wait_append": "the append before a look-ahead still ran",
}


class Window(NamedTuple):
    """Some time of a trace, in seconds."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def around(self, seconds: float) -> "Window":
        """So much time, a quarter of it before this one begins."""
        return Window(self.begin_s - seconds / 4, self.begin_s + 3 * seconds / 4)

    def holds(self, mark: Mark) -> bool:
        return self.begin_s <= mark.begin_s < self.end_s

    def share(self, begin_s: float, end_s: float) -> float:
        """Seconds of a span that lie within."""
        return max(0.0, min(end_s, self.end_s) - max(begin_s, self.begin_s))


class SlotSpan(NamedTuple):
    """What a slot was while: copying, ready, read, or unread (dropped once there)."""

    slot: int
    state: str
    mark: Mark
    begin_s: float
    end_s: float


class Pause(NamedTuple):
    """Time between two copies: the one that ended it, and what filled it."""

    copy: Mark
    begin_s: float
    seconds: float
    kinds: list[tuple[str, float]]  # the longest first


def whole_steps(marks: Sequence[Mark]) -> list[Window]:
    """Each step from its begin to the next one's.

    Raises:
      ValueError: there is none.
    """
    begins = [mark.begin_s for mark in marks if mark.kind == "begin"]
    if len(begins) < 2:
        raise ValueError("the trace holds no whole step: raise --marks")
    return [Window(a, b) for a, b in zip(begins, begins[1:])]


def slot_spans(marks: Sequence[Mark]) -> Iterator[SlotSpan]:
    """The states of all slots, as copies and launches tell them."""
    held: dict[int, Mark] = {}  # by slot: the copy that nothing has read
    for mark in marks:
        if mark.slot is None or mark.kind not in ("copy", "launch"):
            continue
        state = "copying" if mark.kind == "copy" else "read"
        copy = held.pop(mark.slot, None)
        if copy is not None:
            before = "unread" if mark.kind == "copy" else "ready"
            yield SlotSpan(mark.slot, before, copy, copy.end_s, mark.begin_s)
        yield SlotSpan(mark.slot, state, mark, mark.begin_s, mark.end_s)
        if mark.kind == "copy":
            held[mark.slot] = mark


def pauses(marks: Sequence[Mark], window: Window) -> list[Pause]:
    """What lay between the copies that began in a window, the longest first."""
    found, between, last = [], [], None
    for mark in marks:
        if mark.kind not in TRANSFER:
            continue
        if mark.kind != "copy":
            between.append(mark)
            continue
        if last is not None and window.holds(mark):
            kinds = Counter()
            for each in between:
                kinds[each.kind] += each.seconds
            seconds = mark.begin_s - last.end_s
            found.append(Pause(mark, last.end_s, seconds, kinds.most_common()))
        between, last = [], mark
    return sorted(found, key=lambda pause: -pause.seconds)


def events(marks: Sequence[Mark], pid: int, name: str) -> list[dict]:
    """One device's marks in Chrome's trace event format: a process of its own.

    Args:
      marks: In the order of issue.
      pid: Any number that no other device has.
      name: Of the device.
    """
    slots = list(slot_spans(marks))
    names = {tid: stream for tid, stream in enumerate(STREAMS)}
    names |= {FIRST_SLOT + s.slot: f"slot {s.slot}" for s in slots}
    found = [_named(pid, 0, "process_name", name)]
    for tid in sorted(names):
        found.append(_named(pid, tid, "thread_name", names[tid]))
        found.append(_named(pid, tid, "thread_sort_index", tid))
    for tid, kinds in enumerate(STREAMS.values()):
        mine = [mark for mark in marks if mark.kind in kinds]
        shown = [mark for mark in mine if not mark.kind.startswith("idle")]
        found += [_event(pid, tid, m.kind, m, m.begin_s, m.end_s) for m in shown]
    for span in slots:
        tid = FIRST_SLOT + span.slot
        found.append(_event(pid, tid, span.state, span.mark, span.begin_s, span.end_s))
    return found


def _named(pid: int, tid: int, what: str, value: str | int) -> dict:
    key = "sort_index" if what.endswith("sort_index") else "name"
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {key: value}}


def _event(
    pid: int, tid: int, what: str, mark: Mark, begin_s: float, end_s: float
) -> dict:
    args = {
        name: value
        for name in ("step", "layer", "delivery", "slot")
        if (value := getattr(mark, name)) is not None
    }
    if mark.bytes and mark.seconds > 0:
        args |= {"bytes": mark.bytes, "GB/s": mark.bytes / mark.seconds / GB}
    layer = "" if mark.layer is None else f" layer {mark.layer}"
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": what + layer,
        "cat": what,
        "ts": US * begin_s,
        "dur": US * (end_s - begin_s),
        "args": args,
    }


def summary(marks: Sequence[Mark]) -> dict:
    """Of whole steps: ms a step of each kind, bytes, and the link's rate."""
    steps = whole_steps(marks)
    window = Window(steps[0].begin_s, steps[-1].end_s)
    seconds = dict.fromkeys((*TRANSFER, *COMPUTE), 0.0)
    for mark in marks:
        seconds[mark.kind] += window.share(mark.begin_s, mark.end_s)
    copies = [mark for mark in marks if mark.kind == "copy" and window.holds(mark)]
    copied_s = sum(mark.seconds for mark in copies)
    copied_bytes = sum(mark.bytes for mark in copies)
    return {
        "steps": len(steps),
        "step_ms": MS * window.seconds / len(steps),
        "ms": {kind: MS * s / len(steps) for kind, s in seconds.items()},
        "deliveries": len(copies) / len(steps),
        "bytes": copied_bytes / len(steps),
        "copy_bytes_s": copied_bytes / copied_s if copied_s > 0 else None,
    }


def table(marks: Sequence[Mark]) -> Iterator[str]:
    """Lines for a person: the streams' time, and the transfer stream's long pauses."""
    found = summary(marks)
    yield f"whole steps: {found['steps']}, of {found['step_ms']:.3f} ms"
    if found["copy_bytes_s"] is not None:
        yield (
            f"a step: {found['deliveries']:,.1f} deliveries, {found['bytes'] / GB:.3f} "
            f"GB, at {found['copy_bytes_s'] / GB:.1f} GB/s while copying"
        )
    for stream, groups in WORK.items():
        if any(found["ms"][kind] for kind in STREAMS[stream]):  # else it was not used
            for group, kinds in groups.items():
                yield _line(stream, group, kinds, found)
    steps = whole_steps(marks)
    longest = pauses(marks, Window(steps[0].begin_s, steps[-1].end_s))[:PAUSES]
    if longest:
        yield "the longest pauses between two copies:"
    for pause in longest:
        yield _pause_line(pause)


def _line(stream: str, group: str, kinds: Sequence[str], found: dict) -> str:
    ms = {kind: found["ms"][kind] for kind in kinds}
    parts = ", ".join(f"{kind} {value:.3f}" for kind, value in ms.items())
    total = sum(ms.values())
    share = total / found["step_ms"]
    return f"{stream:10}{group:12}{total:10.3f} ms{share:8.1%}   {parts}"


def _pause_line(pause: Pause) -> str:
    where = f"step {pause.copy.step}, layer {pause.copy.layer}"
    why = "; ".join(
        f"{MS * seconds:.3f} {WHY[kind]}" for kind, seconds in pause.kinds if seconds
    )
    return (
        f"{MS * pause.seconds:10.3f} ms before delivery {pause.copy.delivery} "
        f"({where}): {why}"
    )
