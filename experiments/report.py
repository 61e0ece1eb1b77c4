"""Makes docs/results.md and its pictures out of docs/results/*.json, and nothing else.

    python experiments/report.py

Every figure in that page is in one of the files, with the commit, the GPU, the versions
and the command that made it. The rows of an experiment that isn't known here are shown
as they are.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import figures
from absl import app, flags, logging
from decode_rows import of_each_device
from goals import (
    MODEL,
    Goal,
    Rows,
    default_rows,
    goals,
    is_void,
    num_devices,
    rows_of,
    shares,
)

from kvjax.config import MIB

GB, MS = 1e9, 1e3
KEYS = ("experiment", "commit", "gpu", "versions", "command", "rows")
INTRODUCTION = """\
# Results

Made by `python experiments/report.py` from the files in [results](results); each
section says which, and with which command and commit it was made. A + behind a commit:
tracked files differed from it.

A step must bring the live bytes of the tail over the link, and compute. The *floor* is
those bytes over the rate of a raw pinned copy in pieces of 64 MiB, measured in the same
process; the *bound* is the larger of the floor and of the device-resident step of the
same run; the *share* is bound / measured, the *gain* is over the ordered arm. A row
that beats its bound is void: its raw copies were disturbed. Over several devices the
floor is that of the device that takes longest for its own bytes, at its rate while all
of them copy. Times are ms a token of a loop that waits only at its end, medians of runs
in A/B/B/A order; the spread is from the least to the most. *Waiting* is a loop that
waits for every token. *Slots raw* is the rate of a raw copy in pieces of the ring's
slot. No time is shown unless all arms of kvjax drew the same tokens in every run; what
rounds elsewhere, xla or another number of devices, at least half of them, fed one by
one.
"""
GOALS = {  # heading: (key, format)
    "figure": ("what", "{}"),
    "goal": ("bar", "{}"),
    "median": ("median", "{:.3f}"),
    "least": ("least", "{:.3f}"),
    "most": ("most", "{:.3f}"),
    "of": ("count", "{}"),
    "met": ("met", "{}"),
}
REPEATS = {
    "cells": ("cells", "{:,}"),
    "batch": ("batch", "{}"),
    "result": ("where", "{}"),
    "link GB/s": ("link", "{:.1f}"),
    "floor": ("floor_ms", "{:.2f}"),
    "ms of each run": ("runs", "{}"),
    "share of each run": ("shares", "{}"),
}
DECODE = {
    "cells": ("cells", "{:,}"),
    "batch": ("batch", "{}"),
    "arm": ("label", "{}"),
    "ms": ("ms", "{:.2f}"),
    "spread": ("spread", "{:.1%}"),
    "waiting": ("blocking_ms", "{:.2f}"),
    "tail GB": ("gb", "{:.3f}"),
    "floor": ("floor_ms", "{:.2f}"),
    "bound": ("bound_ms", "{:.2f}"),
    "share": ("share", "{:.3f}"),
    "gain": ("gain", "{:.2f}x"),
    "GB/s": ("rate", "{:.1f}"),
    "slots raw": ("piece_rate", "{:.1f}"),
    "slots": ("num_slots", "{}"),
    "ring MiB": ("ring_mib", "{:.1f}"),
    "XLA temp MiB": ("temp_mib", "{:.0f}"),
    "GPU memory GiB": ("memory_gib", "{:.1f}"),
    "pinned GiB a device": ("pinned_gib", "{:.2f}"),
    "over one device": ("over_one", "{:.2f}x"),
    "of the raw rates' gain": ("scaling", "{:.3f}"),
    "tokens": ("agreed_share", "{:.0%}"),
}
ATTENTION = {
    "cells": ("cells", "{:,}"),
    "batch": ("batch", "{}"),
    "arm": ("arm", "{}"),
    "ms a pass": ("ms", "{:.3f}"),
    "spread": ("spread", "{:.1%}"),
    "GB": ("gb", "{:.2f}"),
    "GB/s": ("rate", "{:,.1f}"),
    "share of memory's or link's rate": ("share", "{:.3f}"),
    "over stand-alone": ("over_standalone", "{:.3f}x"),
}
PEERS = {
    "cells": ("cells", "{:,}"),
    "batch": ("batch", "{}"),
    "arm": ("arm", "{}"),
    "ms": ("ms", "{:.2f}"),
    "spread": ("spread", "{:.1%}"),
    "waiting": ("blocking_ms", "{:.2f}"),
    "live GB": ("gb", "{:.3f}"),
    "floor": ("floor_ms", "{:.2f}"),
    "fastest": ("fastest", "{:.2f}"),
    "fastest over kvjax pipelined": ("over", "{:.2f}x"),
    "runs of equal tokens": ("same_tokens", "{}"),
}
ADVICE = {
    "cells": ("cells", "{:,}"),
    "batch": ("batch", "{}"),
    "budget GiB": ("budget_gib", "{:.2f}"),
    "advised device cells": ("device_cells", "{:,}"),
    "predicted ms": ("token_ms", "{:.2f}"),
    "measured ms": ("ms", "{:.2f}"),
    "why": ("reason", "{}"),
}

FOLDER = flags.DEFINE_string("results", "docs/results", "Folder of the JSON files.")
PAGE = flags.DEFINE_string("page", "docs/results.md", "Page to write.")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    try:
        run(folder=Path(FOLDER.value), page=Path(PAGE.value))
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(*, folder: Path, page: Path) -> None:
    found = {path: read(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise ValueError(f"there is no JSON in {folder}: run an experiment with --json")
    lines = [INTRODUCTION, *summary(list(found.values())), *repeats(found, page)]
    for path, one in found.items():
        lines += ["", *section(path, one, list(found.values()), page)]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{page}: {len(found)} results")


def read(path: Path) -> dict:
    try:
        one = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    missing = [key for key in KEYS if key not in one]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    return one


def summary(found: list[dict]) -> Iterator[str]:
    """The goals and whether they are met; nothing if no result is of their kind."""
    if not any(one.get("model") == MODEL and one["gpu"] for one in found):
        return
    yield "## Goals\n"
    yield f"One NVIDIA H200, the geometry of {MODEL}, random bf16 weights, bf16 cells;"
    yield "several of one host where the figure says so."
    yield "The median of all that was measured counts: of shares every run, else every"
    yield "row or pair of rows. Least and most stand beside it.\n"
    yield from table(map(goal_row, goals(found)), GOALS)


def goal_row(goal: Goal) -> dict:
    least, most = f"at least {goal.least}", f"at most {goal.most}"
    return {
        "what": goal.what,
        "bar": least if goal.most is None else most,
        "median": goal.value,
        "least": min(goal.values, default=None),
        "most": max(goal.values, default=None),
        "count": len(goal.values) or None,
        "met": goal.met,
    }


def repeats(found: dict[Path, dict], page: Path) -> Iterator[str]:
    """Every run of the default ring, where several results hold one configuration."""
    results = list(found.values())
    paths = list(found)
    kept: dict[tuple, Rows] = {}
    for row in default_rows(rows_of(results, "bench_decode")):
        names = ("cells", "batch", "shortest", "longest")
        key = (num_devices(row), *(row[name] for name in names))
        kept.setdefault(key, []).append(row)
    rows = [
        row | run_facts(row, paths[row["result"]], results[row["result"]], page)
        for key in sorted(kept)
        if len({row["result"] for row in kept[key]}) > 1
        for row in kept[key]
    ]
    if rows:
        yield "\n## Runs of one configuration\n"
        yield "The default ring, all cells in the tail: each result's own link, all of"
        yield "its runs in their order. None is left out.\n"
        yield from table(rows, REPEATS)


def run_facts(row: dict, path: Path, one: dict, page: Path) -> dict:
    return {
        "where": f"[{path.stem}]({link(path, page)})",
        "link": one["link_bytes_s"] / GB,
        "runs": ", ".join(f"{ms:.2f}" for ms in row["runs_ms"]),
        "shares": ", ".join(f"{share:.3f}" for share in shares(row))
        + (" (void)" if is_void(row) else ""),
    }


def section(path: Path, one: dict, found: list[dict], page: Path) -> Iterator[str]:
    yield f"## {path.stem.replace('_', ' ')}\n"
    yield from facts(path, one, page)
    known = {
        "bench_decode": decode,
        "bench_attention": attention,
        "hf_offload": peers,
        "advise": lambda one, *_: table(map(derived, one["rows"]), ADVICE),
    }
    yield from known.get(one["experiment"], plain)(one, found, path, page)


def facts(path: Path, one: dict, page: Path) -> Iterator[str]:
    """Where it was measured, with what, and how to do it again."""
    versions = ", ".join(f"{k} {v}" for k, v in one["versions"].items() if v)
    driver = f", driver {one['driver']}" if one.get("driver") else ""
    yield f"- [{path.name}]({link(path, page)}), commit `{one['commit']}`"
    yield f"- `{one['command']}`"
    yield f"- {one['gpu'] or one.get('cpu') or 'CPU'}{driver}; {versions}"
    measured = {"link": "link_bytes_s", "memory": "read_bytes_s"}
    rates = [
        f"{name} {one[key] / GB:,.1f} GB/s"
        for name, key in measured.items()
        if one.get(key)
    ]
    named = [one[key] for key in ("model", "dtype") if one.get(key)]
    if one.get("processes", 1) > 1:
        named.append(f"{one['processes']} processes")
    yield f"- {', '.join([*named, *rates])}\n"


def link(path: Path, page: Path) -> str:
    return Path(os.path.relpath(path, page.parent)).as_posix()


def decode(one: dict, found: list[dict], path: Path, page: Path) -> Iterator[str]:
    if one["rows"]:
        yield from table(map(derived, one["rows"]), DECODE)
        yield ""
    for row in one["rows"]:
        if row["arm"] == "pipelined":
            name = f"{row['cells']:,} cells x {row['batch']}, {row['label']}"
            said = [row["verdict"], *of_each_device(row)]
            if is_void(row):
                said.append(
                    "**void**: faster than the raw copies, which were disturbed"
                )
            yield f"- {name}: {'; '.join(said)}"
    for error in one.get("errors", ()):
        yield f"- **no result**: {error}"
    yield from settings(one)
    if len({row["cells"] for row in one["rows"]}) > 1:
        picture = path.with_suffix(".png")
        theirs = [
            other
            for other in found
            if other["experiment"] == "hf_offload" and other["model"] == one["model"]
        ]
        figures.draw_decode([one], str(picture), theirs)
        yield f"\n![ms a token over cells]({link(picture, page)})"


def settings(one: dict) -> Iterator[str]:
    """Where an arm had rings of several settings: slots over depths, one table a kind.

    A cell is ms a token and the share of the bound, or why there is none.
    """
    rings = [r for r in one["rows"] if r["arm"] == "pipelined"]
    rings += one.get("declined", ())
    kinds = ("cells", "batch", "capacity", "device_cells", "budget_bytes")
    for kind in dict.fromkeys(tuple(row[key] for key in kinds) for row in rings):
        same = [row for row in rings if tuple(row[key] for key in kinds) == kind]
        cells, batch, capacity, on_device, budget = kind
        if len(same) < 3:
            continue
        yield (
            f"\n{cells:,} cells x {batch}, {on_device:,} of them on the device, "
            f"capacity {capacity:,}, rings of {budget / MIB:g} MiB: ms a token (share "
            "of the bound)\n"
        )
        yield from table(*grid(same))


def grid(rings: list[dict]) -> tuple[list[dict], dict[str, tuple[str, str]]]:
    """(rows, columns) of a table: a row for each slot, a column for each depth."""
    made: dict[int, dict] = {}
    for ring in sorted(rings, key=lambda ring: (ring["slot_bytes"], ring["depth"])):
        row = made.setdefault(ring["slot_bytes"], {"slot": ring["slot_bytes"] / MIB})
        if "reason" in ring:
            row[ring["depth"]] = "declined"
            continue
        row[ring["depth"]] = f"{ring['ms']:.2f} ({ring['share']:.3f})"
        row["raw"] = derived(ring).get("piece_rate")
    columns = {
        "slot MiB": ("slot", "{:g}"),
        "GB/s of raw copies of a slot": ("raw", "{:.1f}"),
    }
    for depth in sorted({ring["depth"] for ring in rings}):
        columns[f"depth {depth}"] = (depth, "{}")
    return list(made.values()), columns


def attention(one: dict, *_) -> Iterator[str]:
    if one["rows"]:
        yield from table(map(derived, one["rows"]), ATTENTION)
        yield ""
    for error in one.get("errors", ()):
        yield f"- **no result**: {error}"


def peers(one: dict, found: list[dict], path: Path, page: Path) -> Iterator[str]:
    """Each row over the fastest pipelined one of the same model, GPU and cells."""
    own: dict[tuple, float] = {}
    for other in found:
        same = other["experiment"] == "bench_decode" and other["gpu"] == one["gpu"]
        if same and other["model"] == one["model"]:
            for row in other["rows"]:
                if (
                    row["arm"] == "pipelined"
                    and row["device_cells"] == 0
                    and num_devices(row) == 1
                ):
                    key = row["cells"], row["batch"]
                    own[key] = min(row["ms"], own.get(key, row["ms"]))
    rows = []
    for row in one["rows"]:
        ours = own.get((row["cells"], row["batch"]))
        fastest = min(row["runs_ms"])
        more = {"fastest": fastest, "over": ours and fastest / ours}
        rows.append(derived(row) | more)
    yield from table(rows, PEERS)


def plain(one: dict, *_) -> Iterator[str]:
    """All keys of all rows."""
    names = dict.fromkeys(key for row in one["rows"] for key in row)
    yield from table(one["rows"], {name: (name, "{}") for name in names})


def derived(row: dict) -> dict:
    """The row with its figures in the tables' units."""
    made = dict(row)
    if row.get("live_bytes") is not None and row.get("ms"):
        made["gb"] = row["live_bytes"] / GB
        made["rate"] = row["live_bytes"] / row["ms"] * MS / GB or None
    if num_devices(row) > 1:
        made["agreed_share"] = row["agreed"]
    for name, key, unit in (
        ("ring_mib", "ring_bytes", MIB),
        ("temp_mib", "temp_bytes", MIB),
        ("memory_gib", "device_memory", 1 << 30),
        ("pinned_gib", "pinned_bytes", 1 << 30),
        ("piece_rate", "piece_bytes_s", GB),
        ("budget_gib", "budget_bytes", 1 << 30),
    ):
        if row.get(key) is not None:
            made[name] = row[key] / unit
    return made


def table(rows, columns: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Markdown; what a row lacks stays empty, a column that all lack is left out."""
    rows = list(rows)
    shown = {
        heading: (key, form)
        for heading, (key, form) in columns.items()
        if any(row.get(key) is not None for row in rows)
    }
    yield f"| {' | '.join(shown)} |"
    yield f"|{'---|' * len(shown)}"
    for row in rows:
        values = [(row.get(key), form) for key, form in shown.values()]
        cells = ["" if value is None else form.format(value) for value, form in values]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    app.run(main)
