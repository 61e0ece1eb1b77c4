"""Drawings of results, made from the JSON that the experiments write."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from matplotlib import ticker
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from trace_marks import MS, STREAMS, Window, slot_spans

from kvjax.delivery.timeline import Mark

COLORS = {
    "device": "tab:gray",
    "ordered": "tab:orange",
    "pipelined": "tab:blue",
    "xla": "tab:red",
}
SPARE = ("tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
Line = tuple[str, str, list[int], list[float]]
PIECES = {  # label: what a timeline draws so, its color
    "copy": (("copy", "copying", "ordered_copy"), "tab:blue"),
    "attention": (("resident", "launch", "read"), "tab:green"),
    "ready": (("ready", "unread"), "#bcd9ee"),
    "begin": (("begin",), "tab:purple"),
    "waiting": (
        ("wait_begin", "wait_release", "wait_append", "wait_ready", "finish"),
        "tab:red",
    ),
    "XLA or idle": (("xla", "host"), "#e4e4e4"),
}
Rows = dict[str, list[tuple[str, float, float]]]  # name: (what, begin_s, end_s)


def draw_decode(found: Sequence[dict], path: str, peers: Sequence[dict] = ()) -> None:
    """Draws ms a token over cells: one line for each arm, the bound dashed.

    Args:
      found: Results of bench_decode; the largest batch of each isn't mixed with others.
      path: Of the picture; its suffix tells the format.
      peers: Results of experiments/peers, drawn beside.
    """
    rows = [row for one in found for row in one["rows"]]
    batch = min(row["batch"] for row in rows)
    rows = [row for row in rows if row["batch"] == batch]
    theirs = [r for one in peers for r in one["rows"] if r["batch"] == batch]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    spare = iter(SPARE * 4)
    first = {}  # label of the first line of each arm
    for label, arm, cells, ms in [*lines(rows, "label"), *lines(theirs, "arm")]:
        own = first.setdefault(arm, label) == label and arm in COLORS
        color = COLORS[arm] if own else next(spare)
        axes.plot(cells, ms, marker="o", color=color, label=label)
    fewest = min(row.get("devices", 1) for row in rows)
    mine = [row for row in rows if row.get("devices", 1) == fewest]
    bounds = {r["cells"]: r["bound_ms"] for r in mine if r["device_cells"] == 0}
    if bounds:
        cells = sorted(bounds)
        axes.plot(cells, [bounds[c] for c in cells], "k--", label="bound", zorder=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="cells of each sequence",
        ylabel="ms a token",
        title=f"{found[0]['model']}, batch {batch}, {found[0]['gpu'] or 'CPU'}",
    )
    axes.set_xticks(sorted({row["cells"] for row in rows}))
    axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def draw_timeline(
    marks: Sequence[Mark], window: Window, begin_s: float, title: str, path: str
) -> None:
    """Draws both streams and all slots over the time of a window.

    Args:
      marks: Of one device.
      window: What to draw of them.
      begin_s: When the step began that time is counted from.
      title: Of the picture.
      path: Of it; its suffix tells the format.
    """
    rows = timeline_rows(marks)
    figure = Figure(figsize=(12, 1.5 + 0.4 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for y, pieces in enumerate(rows.values()):
        for kinds, color in PIECES.values():
            bars = [
                (MS * (max(begin, window.begin_s) - begin_s), MS * seconds)
                for what, begin, end in pieces
                if what in kinds and (seconds := window.share(begin, end)) > 0
            ]
            axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=color, edgecolor="none")
    ends = MS * (window.begin_s - begin_s), MS * (window.end_s - begin_s)
    axes.set(xlabel="ms since the step began", xlim=ends)
    axes.set_title(title)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    legend = [Patch(color=color, label=label) for label, (_, color) in PIECES.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend))
    figure.savefig(path, dpi=150)


def timeline_rows(marks: Sequence[Mark]) -> Rows:
    """What each stream and each slot did, from the top of the picture down."""
    rows = {
        stream: [(m.kind, m.begin_s, m.end_s) for m in marks if m.kind in kinds]
        for stream, kinds in STREAMS.items()
    }
    spans = list(slot_spans(marks))
    for slot in sorted({span.slot for span in spans}):
        mine = [span for span in spans if span.slot == slot]
        rows[f"slot {slot}"] = [(s.state, s.begin_s, s.end_s) for s in mine]
    return {name: pieces for name, pieces in rows.items() if pieces}


def lines(rows: Sequence[dict], key: str) -> Iterator[Line]:
    """(label, arm, cells, ms) of each line; of equal rows the mean."""
    for label in dict.fromkeys(row[key] for row in rows):
        mine = [row for row in rows if row[key] == label]
        cells = sorted({row["cells"] for row in mine})
        ms = [fmean(r["ms"] for r in mine if r["cells"] == c) for c in cells]
        yield label, mine[0]["arm"], cells, ms
