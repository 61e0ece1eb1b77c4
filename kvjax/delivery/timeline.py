"""What a ring's streams did when: marks of a few steps (ops/timeline.h).

with ring.trace() as trace:
    run_steps(step, tokens, cache, 4)
trace.marks
"""

import ctypes
import sys
from typing import NamedTuple

import jax

MAX_MARKS = 1 << 16  # some 25 MB of events on the host
MOST_MARKS = 1 << 22

TRANSFER = (
    "idle",
    "idle_depth",
    "idle_slots",
    "wait_begin",
    "wait_release",
    "wait_append",
    "copy",
)
COMPUTE = (
    "xla",
    "begin",
    "resident",
    "host",
    "wait_ready",
    "launch",
    "ordered_copy",
    "finish",
)


class Mark(NamedTuple):
    """One piece of work of one stream; the marks of a stream lie end to end.

    Attributes:
      kind: Of TRANSFER or COMPUTE, which tells the stream; docs/delivery.md explains
        each.
      step: Begins since the ring was opened. What was sent ahead bears the number of
        the step that it is for.
      layer: Of the cells, or None.
      delivery: Segments sent since the ring was opened; None on the ordered path.
      slot: Through which it went, or None.
      bytes: That were copied, cells in gaps between sequences among them.
      begin_s: Seconds since the trace was started.
      end_s: Likewise.
    """

    kind: str
    step: int
    layer: int | None
    delivery: int | None
    slot: int | None
    bytes: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Trace:
    """Marks by device, in the order of issue; filled in when the tracing ends.

    Attributes:
      marks: Of each traced device.
      missed: Marks that came once a device's trace was full, and weren't kept.
    """

    def __init__(self):
        self.marks: dict[jax.Device, list[Mark]] = {}
        self.missed: dict[jax.Device, int] = {}


class _NativeMark(ctypes.Structure):
    """ops/timeline.h: Mark."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in Mark._fields[:6]),
        *((name, ctypes.c_double) for name in Mark._fields[6:]),
    ]


def start(lib: ctypes.CDLL, ring_id: int, ordinal: int, max_marks: int) -> None:
    """Starts the trace of one device's ring.

    Raises:
      ValueError: it is being traced already, or its events could not be made.
    """
    _call(lib.kvjax_trace_start, ring_id, ordinal, ctypes.c_int64(max_marks))


def stop(
    lib: ctypes.CDLL, ring_id: int, ordinal: int, max_marks: int
) -> tuple[list[Mark], int]:
    """Ends it: the marks, and how many more there would have been.

    Raises:
      ValueError: the ring that was traced isn't there any more.
    """
    marks = (_NativeMark * max_marks)()
    count, missed = ctypes.c_int64(), ctypes.c_int64()
    out = (marks, ctypes.byref(count), ctypes.byref(missed))
    _call(lib.kvjax_trace_stop, ring_id, ordinal, *out)
    lib.kvjax_trace_kinds.restype = ctypes.c_char_p
    kinds = lib.kvjax_trace_kinds().decode().rstrip(",").split(",")
    return [_mark(kinds, marks[i]) for i in range(count.value)], missed.value


def tell_missed(trace: Trace, max_marks: int) -> None:
    """Says once if a trace was too small."""
    if any(trace.missed.values()):
        print(
            f"kvjax: the trace stopped at {max_marks:,} marks and missed "
            f"{max(trace.missed.values()):,}; give it more, or trace fewer steps",
            file=sys.stderr,
        )


def _call(symbol, ring_id: int, ordinal: int, *args) -> None:
    symbol.restype = ctypes.c_bool
    reason = ctypes.create_string_buffer(512)
    where = ctypes.c_int64(ring_id), ctypes.c_int64(ordinal)
    if not symbol(*where, *args, reason, ctypes.c_int64(len(reason))):
        raise ValueError(f"cannot trace ring_id {ring_id}: {reason.value.decode()}")


def _mark(kinds: list[str], raw: _NativeMark) -> Mark:
    kind, step, *about, num_bytes = (getattr(raw, f) for f in Mark._fields[:6])
    known = [None if number < 0 else number for number in about]
    return Mark(kinds[kind], step, *known, num_bytes, raw.begin_s, raw.end_s)
