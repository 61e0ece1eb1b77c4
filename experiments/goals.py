"""What measured figures are held against: NVIDIA H200, Llama 3.1 8B's geometry.

Random bf16 weights, bf16 cells, free-running loops. A figure that was measured several
times is the median of all: of shares every single run counts, of ratios every pair of
rows, from one process where there are such. The least and the most stand beside it.
A peer counts with its fastest run. Goals of several GPUs are among them once something
was measured on several.
"""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from kvjax.config import MIB, RingConfig

MODEL = "llama-3.1-8b"
SHARES = {4096: 0.92, 8192: 0.95, 16384: 0.96, 32768: 0.97, 131072: 0.97}
LLAMA_CPP_MS = {4096: 5.13, 16384: 5.84, 32768: 6.66}  # f16 cells, August 2026
PEERS = {"static": 1.4, "dynamic": 2.1}
FASTEST = 1.01  # share of a bound, which two clocks tell apart
LAYOUTS = {"in one process": False, "a process each": True}
SHARES_OF_MANY = {2: 0.95, 8: 0.90}  # by GPUs, at 32,768 cells
Rows = list[dict]


class Goal(NamedTuple):
    """One figure: what, the least or the most that meets it, all measured values."""

    what: str
    least: float | None
    most: float | None
    values: tuple[float, ...]

    @property
    def value(self) -> float | None:
        return median(self.values) if self.values else None

    @property
    def met(self) -> str:
        if self.value is None:
            return "not measured"
        low = self.least is not None and self.value < self.least
        high = self.most is not None and self.value > self.most
        return "no" if low or high else "yes"


def at_least(what: str, bar: float, values: Iterable[float | None]) -> Goal:
    return Goal(what, bar, None, tuple(v for v in values if v is not None))


def at_most(what: str, bar: float, values: Iterable[float | None]) -> Goal:
    return Goal(what, None, bar, tuple(v for v in values if v is not None))


def goals(found: Sequence[dict]) -> list[Goal]:
    """Every goal, with what the results of a GPU and of this model say of it."""
    rows, attention, peers, heads, soaks = (
        rows_of(found, name)
        for name in ("bench_decode", "bench_attention", "hf_offload", "heads", "soak")
    )
    decode = [row for row in rows if num_devices(row) == 1]
    many = [row for row in rows if num_devices(row) > 1]
    return [
        *of_shares(decode),
        *of_crossing(decode),
        *of_rings(decode),
        *of_computing(decode, attention),
        *of_placements(decode),
        *of_others(decode, attention, peers),
        *(of_many(decode, many, heads, soaks) if many or heads or soaks else ()),
    ]


def rows_of(found: Sequence[dict], experiment: str) -> Rows:
    """All rows of an experiment on a GPU over this model, each with its result."""
    return [
        row | {"result": number}
        for number, one in enumerate(found)
        if one["experiment"] == experiment and one.get("model") == MODEL and one["gpu"]
        for row in one["rows"]
    ]


def shares(row: dict) -> list[float]:
    """The share of the bound in each run."""
    return [row["bound_ms"] / ms for ms in row["runs_ms"]]


def is_void(row: dict) -> bool:
    """Whether it beat its bound: the raw copies were disturbed, shares mean nothing."""
    return row["bound_ms"] is not None and max(shares(row)) > FASTEST


def counted(row: dict) -> list[float]:
    """The shares that count for a goal."""
    return [] if is_void(row) else shares(row)


def of_shares(decode: Rows) -> Iterator[Goal]:
    own = single(decode)
    for cells, bar in SHARES.items():
        found = [share for r in own if r["cells"] == cells for share in counted(r)]
        yield at_least(f"share of the bound, {cells:,} cells", bar, found)
    for batch in (8, 32):
        found = [
            share
            for row in default_rows(decode)
            if row["batch"] == batch and row["cells"] == 4096 and is_ragged(row)
            for share in counted(row)
        ]
        what = f"share of the bound, {batch} ragged sequences around 4,096 cells"
        yield at_least(what, 0.95, found)


def of_crossing(decode: Rows) -> Iterator[Goal]:
    near = [row for row in single(decode) if is_crossing(row)]
    found = [share for row in near for share in counted(row)]
    yield at_least("share where copy = compute, within 30 %", 0.88, found)
    yield at_least("gain over ordered there", 1.65, [row["gain"] for row in near])


def of_rings(decode: Rows) -> Iterator[Goal]:
    taken = [row["ring_bytes"] / MIB for row in default_rows(decode)]
    # A cap, so the largest alone.
    yield at_most("MiB of the default ring", 64, [max(taken)] if taken else [])
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
    waits = [
        row["blocking_ms"] - row["ms"]
        for row in single(decode)
        if row["blocking_ms"] and row["depth"] == RingConfig().depth
    ]
    yield at_most("ms that waiting for every token adds", 0.6, waits)
    rates = [
        row["share"]
        for row in attention
        if (row["arm"], row["cells"], row["batch"]) == ("device", 32768, 8)
    ]
    yield at_least("attention alone / memory's rate, 32,768 cells x 8", 0.75, rates)


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
    what = "2,048 cells in a capacity of 131,072 / of at most 4,096, ms, in one run"
    yield at_most(what, 1.03, ratios(roomy, tight, in_one_run=True))


def of_others(decode: Rows, attention: Rows, peers: Rows) -> Iterator[Goal]:
    own = [row for row in single(decode) if row["cells"] == 32768]
    for kind, bar in PEERS.items():
        theirs = [
            row | {"ms": min(row["runs_ms"])}  # their first runs are slow
            for row in peers
            if row["arm"] == f"hf_{kind}" and row["batch"] == 1
        ]
        what = f"Hugging Face's {kind} offloaded cache / kvjax, 32,768 cells, ms"
        yield at_least(what, bar, ratios(theirs, own))
    alone = [row.get("over_standalone") for row in attention if row["arm"] == "ordered"]
    yield at_most("ordered attention / a stand-alone loop, ms", 1.03, alone)


def of_many(one: Rows, many: Rows, heads: Rows, soaks: Rows) -> Iterator[Goal]:
    """Of several GPUs of one host, with what one GPU gave."""
    own = [row for row in single(many) if row["cells"] == 32768]
    alone = [row for row in single(one) if row["cells"] == 32768]
    for devices in (2, 4, 8):
        for layout, apart in LAYOUTS.items():
            rows = [
                row
                for row in own
                if row["devices"] == devices and (row["processes"] > 1) == apart
            ]
            where = f"{devices} GPUs, {layout}, 32,768 cells"
            if bar := SHARES_OF_MANY.get(devices):
                found = [share for row in rows for share in counted(row)]
                yield at_least(f"share of the bound on {where}", bar, found)
            what = f"gain over one GPU / that of the raw rates, {where}"
            kept = [row for row in rows if not is_void(row)]
            gains = [gain for row in kept for gain in gains_of(row, alone)]
            yield at_least(what, 0.95, gains)
    apart = [r["agreed"] for r in many if r["processes"] > 1 and r["against"]]
    yield at_least("share of tokens equal between process layouts", 1, apart)
    differ = [len(row["differ"]) for row in heads if row["devices"] > 1]
    yield at_most("heads whose bits differ from those of one GPU", 0, differ)
    steps = [0 if row["problems"] else row["steps"] for row in soaks]
    yield at_least("steps on several GPUs with every ring active, no hang", 2000, steps)


def gains_of(row: dict, alone: Rows) -> list[float]:
    """Its gain over one GPU over that of the raw rates: of its own run if that had one
    GPU, else held against each run that had.
    """
    if row["scaling"] is not None:
        return [row["scaling"]]
    raw = sum(row["raw_bytes_s"]) / row["raw_alone_bytes_s"]
    return [other["ms"] / row["ms"] / raw for other in alone]


def num_devices(row: dict) -> int:
    return row.get("devices", 1)


def default_rows(decode: Rows) -> Rows:
    """The pipelined arm with the default ring, all cells in the tail."""
    return [row for row in decode if is_default(row) and in_tail(row)]


def single(decode: Rows) -> Rows:
    return [row for row in default_rows(decode) if row["batch"] == 1]


def in_tail(row: dict) -> bool:
    return row["device_cells"] == 0


def is_default(row: dict) -> bool:
    """Whether its ring has the default's memory; of whatever depth."""
    wanted = ("pipelined", RingConfig().slot, RingConfig().budget)
    return wanted == tuple(
        row.get(key) for key in ("arm", "slot_bytes", "budget_bytes")
    )


def is_ragged(row: dict) -> bool:
    return row["shortest"] < row["longest"]


def is_crossing(row: dict) -> bool:
    """Whether copying takes as long as computing, give or take 30 %."""
    return bool(row["device_ms"]) and abs(row["floor_ms"] / row["device_ms"] - 1) <= 0.3


def ratios(rows: Rows, base: Rows, in_one_run: bool = False) -> list[float]:
    """ms over ms of each pair of the same cells: of one result where there are such.

    Args:
      rows: Above the line.
      base: Below it.
      in_one_run: Pairs of two results don't count.
    """
    pairs = [
        (row, other)
        for row in rows
        for other in base
        if (row["cells"], row["batch"]) == (other["cells"], other["batch"])
    ]
    together = [(a, b) for a, b in pairs if a["result"] == b["result"]]
    return [
        a["ms"] / b["ms"] for a, b in (together if together or in_one_run else pairs)
    ]
