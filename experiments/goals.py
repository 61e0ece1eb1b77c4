"""What measured figures are held against: one NVIDIA H200, Llama 3.1 8B's geometry.

Random bf16 weights, bf16 cells, medians of free-running loops. Where several rows fit a
goal the worst counts; of a ratio, the worst pair.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvjax.config import MIB, RingConfig

MODEL = "llama-3.1-8b"
SHARES = {4096: 0.92, 8192: 0.95, 16384: 0.96, 32768: 0.97, 131072: 0.97}
LLAMA_CPP_MS = {4096: 5.13, 16384: 5.84, 32768: 6.66}  # f16 cells, August 2026
PEERS = {"static": 1.4, "dynamic": 2.1}
Rows = list[dict]


class Goal(NamedTuple):
    """One figure: what, the least or the most that meets it, the measured value."""

    what: str
    least: float | None
    most: float | None
    value: float | None

    @property
    def met(self) -> str:
        if self.value is None:
            return "not measured"
        low = self.least is not None and self.value < self.least
        high = self.most is not None and self.value > self.most
        return "no" if low or high else "yes"


def at_least(what: str, bar: float, values: Iterable[float | None]) -> Goal:
    known = [value for value in values if value is not None]
    return Goal(what, bar, None, min(known, default=None))


def at_most(what: str, bar: float, values: Iterable[float | None]) -> Goal:
    known = [value for value in values if value is not None]
    return Goal(what, None, bar, max(known, default=None))


def goals(found: Sequence[dict]) -> list[Goal]:
    """Every goal, with what the results of a GPU and of this model say of it."""
    mine = [one for one in found if one.get("model") == MODEL and one["gpu"]]
    decode, attention, peers = (
        [row for one in mine if one["experiment"] == name for row in one["rows"]]
        for name in ("bench_decode", "bench_attention", "hf_offload")
    )
    return [
        *of_shares(decode),
        *of_crossing(decode),
        *of_rings(decode),
        *of_computing(decode, attention),
        *of_placements(decode),
        *of_others(decode, attention, peers),
    ]


def of_shares(decode: Rows) -> Iterator[Goal]:
    own = single(decode)
    for cells, bar in SHARES.items():
        shares = [row["share"] for row in own if row["cells"] == cells]
        yield at_least(f"share of the bound, {cells:,} cells", bar, shares)
    for batch in (8, 32):
        shares = [
            row["share"]
            for row in default_rows(decode)
            if row["batch"] == batch and row["cells"] == 4096 and is_ragged(row)
        ]
        what = f"share of the bound, {batch} ragged sequences around 4,096 cells"
        yield at_least(what, 0.95, shares)


def of_crossing(decode: Rows) -> Iterator[Goal]:
    near = [row for row in single(decode) if is_crossing(row)]
    shares, gains = [r["share"] for r in near], [r["gain"] for r in near]
    yield at_least("share where copy = compute, within 30 %", 0.88, shares)
    yield at_least("gain over ordered there", 1.65, gains)


def of_rings(decode: Rows) -> Iterator[Goal]:
    taken = [row["ring_bytes"] / MIB for row in default_rows(decode)]
    yield at_most("MiB of the default ring", 64, taken)
    small = [
        row
        for row in decode
        if row["arm"] == "pipelined"
        and in_tail(row)
        and row["budget_bytes"] == 16 * MIB
    ]
    yield at_most(
        "a ring of 16 MiB / the default, ms", 1.02, ratios(small, single(decode))
    )


def of_computing(decode: Rows, attention: Rows) -> Iterator[Goal]:
    for cells, ms in LLAMA_CPP_MS.items():
        steps = [
            row["ms"] / ms
            for row in decode
            if row["arm"] == "device" and (row["cells"], row["batch"]) == (cells, 1)
        ]
        what = f"device-resident step / llama.cpp's {ms} ms, {cells:,} cells"
        yield at_most(what, 1.08, steps)
    waits = [r["blocking_ms"] - r["ms"] for r in single(decode) if r["blocking_ms"]]
    yield at_most("ms that waiting for every token adds", 0.6, waits)
    shares = [
        row["share"]
        for row in attention
        if (row["arm"], row["cells"], row["batch"]) == ("device", 32768, 8)
    ]
    yield at_least("attention alone / memory's rate, 32,768 cells x 8", 0.75, shares)


def of_placements(decode: Rows) -> Iterator[Goal]:
    half = [
        row
        for row in decode
        if is_default(row)
        and (row["cells"], row["batch"], row["device_cells"]) == (32768, 1, 16384)
    ]
    what = "half of 32,768 cells on the device / all in the tail, ms"
    yield at_most(what, 0.53, ratios(half, single(decode)))
    short = [row for row in single(decode) if row["cells"] == 2048]
    roomy = [row for row in short if row["capacity"] >= 131072]
    tight = [row for row in short if row["capacity"] <= 4096]
    what = "2,048 cells in a capacity of 131,072 / of at most 4,096, ms"
    yield at_most(what, 1.03, ratios(roomy, tight))


def of_others(decode: Rows, attention: Rows, peers: Rows) -> Iterator[Goal]:
    own = [row for row in single(decode) if row["cells"] == 32768]
    for kind, bar in PEERS.items():
        theirs = [r for r in peers if r["arm"] == f"hf_{kind}" and r["batch"] == 1]
        what = f"Hugging Face's {kind} offloaded cache / kvjax, 32,768 cells, ms"
        yield at_least(what, bar, ratios(theirs, own))
    alone = [row.get("over_standalone") for row in attention if row["arm"] == "ordered"]
    yield at_most("ordered attention / a stand-alone loop, ms", 1.03, alone)


def default_rows(decode: Rows) -> Rows:
    """The pipelined arm with the default ring, all cells in the tail."""
    return [row for row in decode if is_default(row) and in_tail(row)]


def single(decode: Rows) -> Rows:
    return [row for row in default_rows(decode) if row["batch"] == 1]


def in_tail(row: dict) -> bool:
    return row["device_cells"] == 0


def is_default(row: dict) -> bool:
    ring = RingConfig()
    wanted = ("pipelined", ring.depth, ring.slot_bytes, ring.budget)
    return wanted == tuple(
        row.get(key) for key in ("arm", "depth", "slot_bytes", "budget_bytes")
    )


def is_ragged(row: dict) -> bool:
    return row["shortest"] < row["longest"]


def is_crossing(row: dict) -> bool:
    """Whether copying takes as long as computing, give or take 30 %."""
    return bool(row["device_ms"]) and abs(row["floor_ms"] / row["device_ms"] - 1) <= 0.3


def ratios(rows: Rows, base: Rows) -> list[float]:
    """ms over ms, of each pair of the same cells."""
    return [
        row["ms"] / other["ms"]
        for row in rows
        for other in base
        if (row["cells"], row["batch"]) == (other["cells"], other["batch"])
    ]
