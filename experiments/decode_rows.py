"""What bench_decode makes of its runs: the check of tokens, rows, verdicts, a table."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvjax.advice import GB
from kvjax.config import MIB, RingConfig
from kvjax.delivery.ring import RingStats
from kvjax.measurement import WARMUP, spread
from kvjax.shapes import BLOCK

MS = 1e3
AGREE = 0.5  # of the tokens of what rounds elsewhere at least: that turns near ties


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to decode: which of ARMS, where cells lie, and the ring's settings."""

    name: str
    devices: int = 1  # that share the heads
    device_cells: str | None = None  # as --device_cells; None = all
    ring: RingConfig | None = None  # of ordered and pipelined
    capacity: int | None = None  # cells of a sequence; None = what the case needs

    @property
    def label(self) -> str:
        where = "" if self.device_cells in ("0", None) else f" +{self.device_cells}"
        over = "" if self.devices == 1 else f", {self.devices} devices"
        room = "" if self.capacity is None else f", capacity {self.capacity:,}"
        if self.name != "pipelined":
            return self.name + where + room + over
        sizes = f"ring {self.ring.budget / MIB:g} MiB"
        if self.ring.slot_bytes is not None:
            sizes += f", slots {self.ring.slot_bytes / MIB:g} MiB"
        return f"pipelined{where}, {sizes}, depth {self.ring.depth}{room}{over}"

    @property
    def plain(self) -> bool:
        return self.name == "xla"

    def cells(self, case: "Case") -> int:
        """Of each sequence's cache."""
        return case.needed if self.capacity is None else self.capacity

    def cells_on_device(self, case: "Case") -> int | None:
        if self.device_cells != "half":
            return None if self.device_cells is None else int(self.device_cells)
        return round(case.cells / 2 / BLOCK) * BLOCK


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all arms decode: so many cells in so many sequences."""

    cells: int
    lengths: tuple[int, ...]
    needed: int  # cells of the longest sequence, at the end of a run

    @property
    def name(self) -> str:
        return f"{self.cells:,} cells x {len(self.lengths)}"


class Links(NamedTuple):
    """Bytes a second of raw pinned copies.

    Attributes:
      alone: Of the first device while the others rest.
      together: Of each device of a mesh while all of them copy, by their number.
    """

    alone: float
    together: dict[int, list[float]]


class Run(NamedTuple):
    """One arm, once."""

    step_s: float
    waiting_s: list[float]
    tokens: np.ndarray  # [steps, B], those of the warm-up among them
    delivered: list[RingStats]  # to each device in the timed steps; [] = no ring
    ring_bytes: int
    num_slots: int
    ring_driver_bytes: int  # by which the driver's free bytes fell
    used_bytes: int  # of device memory, as the driver says

    @property
    def steps(self) -> int:
        """That were timed."""
        return len(self.tokens) - WARMUP


class Parting(NamedTuple):
    """Where two arms first drew other tokens."""

    arms: tuple[Arm, Arm]
    step: int
    sequence: int
    tokens: tuple[int, int]

    def __str__(self) -> str:
        (first, other), (wanted, drawn) = self.arms, self.tokens
        return (
            f"{other.label} drew {drawn} for sequence {self.sequence} in step "
            f"{self.step}, {first.label} {wanted}"
        )


class TokensDiffer(Exception):
    """An arm drew other tokens: its times mean nothing.

    Attributes:
      parting: Of two of kvjax's arms; None of xla.
    """

    def __init__(self, said: object, parting: Parting | None = None):
        super().__init__(str(said))
        self.parting = parting


def check_same(runs: dict[Arm, list[Run]]) -> dict[int, np.ndarray]:
    """The tokens that kvjax's arms drew, by number of devices; [steps, B].

    Arms of one mesh must draw the same in every run. Those of another may not: sums
    over devices are rounded in other places.

    Raises:
      TokensDiffer: one drew others.
    """
    firsts: dict[int, tuple[Arm, np.ndarray]] = {}
    own = [(arm, run.tokens) for arm in runs if not arm.plain for run in runs[arm]]
    for arm, tokens in own:
        first, wanted = firsts.setdefault(arm.devices, (arm, tokens))
        if not np.array_equal(tokens, wanted):
            step, sequence = map(int, np.argwhere(tokens != wanted)[0])
            both = int(wanted[step, sequence]), int(tokens[step, sequence])
            parting = Parting((first, arm), step, sequence, both)
            raise TokensDiffer(parting, parting)
    return {devices: tokens for devices, (_, tokens) in firsts.items()}


def unsteady(runs: dict[Arm, list[Run]]) -> list[str]:
    """Labels of arms whose own runs drew different tokens."""
    return [
        arm.label
        for arm, mine in runs.items()
        if any(not np.array_equal(run.tokens, mine[0].tokens) for run in mine)
    ]


def check_near(arm: Arm, drawn: np.ndarray, wanted: np.ndarray) -> float:
    """The share of tokens [steps, B] that are as wanted.

    Raises:
      TokensDiffer: that is less than AGREE.
    """
    agreed = float((drawn == wanted).mean())
    if agreed < AGREE:
        raise TokensDiffer(f"{arm.label} drew {agreed:.0%} of the others' tokens")
    return agreed


def since(start: RingStats, end: RingStats) -> RingStats:
    return RingStats(*(b - a for a, b in zip(start, end, strict=True)))


def total(counts: Sequence[RingStats]) -> RingStats:
    return RingStats(*map(sum, zip(*counts, strict=True)))


def make_rows(
    runs: dict[Arm, list[Run]],
    agreed: dict[Arm, float | None],
    case: Case,
    per_cell: int,
    links: Links,
) -> list[dict]:
    """A row for each arm: what was measured, the bound, and the verdict.

    Args:
      runs: Of each arm; at least one.
      agreed: The share of tokens in which each arm agrees with the others.
      case: What they decoded.
      per_cell: Bytes of one sequence's cell in all layers.
      links: Rates of the raw copy.
    """
    ms = {arm: MS * statistics.median(r.step_s for r in runs[arm]) for arm in runs}
    device_ms = {(a.devices, a.capacity): ms[a] for a in runs if a.name == "device"}
    ordered_ms = {
        (a.devices, a.device_cells, a.capacity): ms[a]
        for a in runs
        if a.name == "ordered"
    }
    rows = []
    for arm in runs:
        raw = links.together[arm.devices]
        brought = brought_bytes(arm, runs[arm][0], case, per_cell)
        floor_ms = MS * max(live / rate for live, rate in zip(brought, raw))
        computing_ms = device_ms.get((arm.devices, arm.capacity))
        in_order_ms = ordered_ms.get((arm.devices, arm.device_cells, arm.capacity))
        bound_ms = None if arm.name == "device" else max(floor_ms, computing_ms or 0.0)
        alone_ms = ms.get(replace(arm, devices=1)) if arm.devices > 1 else None
        over_one = ratio(alone_ms, ms[arm])
        row = {
            "arm": arm.name,
            "label": arm.label,
            "devices": arm.devices,
            "cells": case.cells,
            "batch": len(case.lengths),
            "shortest": min(case.lengths),
            "longest": max(case.lengths),
            "capacity": arm.cells(case),
            "device_cells": arm.cells_on_device(case),
            "ms": ms[arm],
            "spread": spread([r.step_s for r in runs[arm]]),
            "runs_ms": [MS * r.step_s for r in runs[arm]],
            "blocking_ms": blocking_ms(runs[arm]),
            "live_bytes": sum(brought),
            "busiest_bytes": max(brought),
            "floor_ms": floor_ms,
            "bound_ms": bound_ms,
            "share": None if bound_ms is None else bound_ms / ms[arm],
            "device_ms": computing_ms,
            "gain": ratio(in_order_ms, ms[arm]),
            "over_one": over_one,
            "scaling": ratio(over_one, sum(raw) / links.alone),
            "delivered_bytes_s": [MS * live / ms[arm] for live in brought],
            "raw_bytes_s": raw,
            "raw_alone_bytes_s": links.alone,
            "agreed": agreed[arm],
            **ring_facts(arm, runs[arm]),
        }
        row["verdict"] = verdict(row)
        rows.append(row)
    return rows


def decline_rows(declines: dict[Arm, str], case: Case) -> list[dict]:
    """Settings that were asked for and got no ring, and why."""
    return [
        {
            "label": arm.label,
            "cells": case.cells,
            "batch": len(case.lengths),
            "capacity": arm.cells(case),
            "device_cells": arm.cells_on_device(case),
            **ring_settings(arm.ring),
            "reason": reason,
        }
        for arm, reason in declines.items()
    ]


def ring_settings(ring: RingConfig) -> dict:
    return {
        "depth": ring.depth,
        "slot_bytes": ring.slot,
        "budget_bytes": ring.budget,
    }


def brought_bytes(arm: Arm, run: Run, case: Case, per_cell: int) -> list[float]:
    """Bytes of tail that a timed step must bring to each device: the ring's count, or
    the cells'.
    """
    if run.delivered:
        return [(d.early_bytes + d.ordered_bytes) / run.steps for d in run.delivered]
    if arm.device_cells is None:
        return [0.0] * arm.devices
    grown = WARMUP + (run.steps - 1) / 2
    return [per_cell * sum(length + grown for length in case.lengths)]


def blocking_ms(runs: list[Run]) -> float | None:
    waited = [seconds for run in runs for seconds in run.waiting_s]
    return MS * statistics.median(waited) if waited else None


def ring_facts(arm: Arm, runs: list[Run]) -> dict:
    """Settings and counts of a ring; what the driver says is that of the last run."""
    facts = {
        "ring_bytes": runs[-1].ring_bytes,
        "ring_driver_bytes": runs[-1].ring_driver_bytes,
        "device_memory": runs[-1].used_bytes,
    }
    if arm.ring is None:
        return facts
    counts = total(runs[-1].delivered)
    return facts | {
        **ring_settings(arm.ring),
        "num_slots": runs[-1].num_slots,
        "early_share": ratio(
            counts.early_bytes, counts.early_bytes + counts.ordered_bytes
        ),
        "gap_bytes": counts.gap_bytes / runs[-1].steps,
        "counts": {name: n for name, n in counts._asdict().items() if n},
    }


def ratio(a: float | None, b: float) -> float | None:
    return None if a is None or not b else a / b


def verdict(row: dict) -> str:
    """What bounds this arm, in words, and what would help."""
    link = sum(row["raw_bytes_s"])
    ms, floor_ms, device_ms = row["ms"], row["floor_ms"], row["device_ms"]
    if row["arm"] == "device":
        return f"computing takes {ms:.2f} ms a token"
    if device_ms is not None and floor_ms < device_ms:
        return (
            f"compute-bound: copies of {floor_ms:.2f} ms could hide behind "
            f"{device_ms:.2f} ms of computing; a token takes {ms:.2f} ms"
        )
    rate = row["live_bytes"] / ms * MS
    words = f"copy-bound: {rate / GB:.1f} of {link / GB:.1f} GB/s"
    if device_ms is None:
        return words + "; without the arm device the bound is the copy alone"
    tail = row["longest"] - row["device_cells"]
    more = min(max(round(tail / 4 / BLOCK), 1) * BLOCK, tail)
    saved = min(ms * more / tail, ms - device_ms)
    return (
        f"{words}; keeping {more:,} more cells on the device would save "
        f"{saved:.1f} ms a token"
    )


COLUMNS = {  # heading: (key, format)
    "ms": ("ms", "{:.3f}"),
    "spread": ("spread", "{:.1%}"),
    "waiting": ("blocking_ms", "{:.3f}"),
    "tail GB": ("gb", "{:.3f}"),
    "floor": ("floor_ms", "{:.3f}"),
    "bound": ("bound_ms", "{:.3f}"),
    "share": ("share", "{:.3f}"),
    "gain": ("gain", "{:.2f}x"),
    "GB/s": ("rate", "{:.1f}"),
    "slots raw": ("piece_rate", "{:.1f}"),
    "slots": ("num_slots", "{}"),
    "ring MiB": ("ring_mib", "{:.1f}"),
    "temp MiB": ("temp_mib", "{:.0f}"),
    "used GiB": ("memory_gib", "{:.2f}"),
    "tokens": ("agreed", "{:.0%}"),
    "logits": ("logits", "{}"),
}


SAME = {None: None, True: "equal", False: "DIFFER"}


def table(case: Case, rows: list[dict], declined: list[dict]) -> Iterator[str]:
    """Lines for a person: ms a token of each arm, the verdicts, what was declined.

    "slots raw": GB/s of raw copies in pieces of the arm's slot.
    """
    width = max(len(row["label"]) for row in [*rows, *declined])
    yield f"\n{case.name}; ms a token"
    yield " " * width + "".join(f"{heading:>10}" for heading in COLUMNS)
    for row in rows:
        piece = row.get("piece_bytes_s")
        shown = row | {
            "gb": row["live_bytes"] / GB,
            "rate": row["live_bytes"] / row["ms"] * MS / GB,
            "piece_rate": piece and piece / GB,
            "num_slots": row.get("num_slots"),
            "ring_mib": row["ring_bytes"] / MIB,
            "temp_mib": row["temp_bytes"] / MIB,
            "memory_gib": row["device_memory"] / (1 << 30),
            "logits": SAME[row.get("logits_equal")],
        }
        values = [(shown[key], form) for key, form in COLUMNS.values()]
        cells = ["" if value is None else form.format(value) for value, form in values]
        yield f"{row['label']:{width}}" + "".join(f"{cell:>10}" for cell in cells)
    for row in declined:
        yield f"{row['label']:{width}}  declined: {row['reason']}"
    for row in rows:
        yield f"{row['label']}: {row['verdict']}"
        yield from (f"  {line}" for line in of_each_device(row))


def of_each_device(row: dict) -> Iterator[str]:
    """A sentence on the links of several devices, and on their gain over one."""
    if row.get("devices", 1) == 1 or not row["live_bytes"]:
        return
    each, raw = (
        " ".join(f"{rate / GB:.1f}" for rate in row[key])
        for key in ("delivered_bytes_s", "raw_bytes_s")
    )
    yield (
        f"GB/s of each device: {each}; raw with all copying {raw}, one alone "
        f"{row['raw_alone_bytes_s'] / GB:.1f}"
    )
    if row["over_one"]:
        yield (
            f"{row['over_one']:.2f}x one device, {row['scaling']:.3f} of what the "
            "raw rates gain"
        )
