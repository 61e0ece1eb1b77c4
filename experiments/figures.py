"""Drawings of results, made from the JSON that the experiments write."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from matplotlib import ticker
from matplotlib.figure import Figure

COLORS = {
    "device": "tab:gray",
    "ordered": "tab:orange",
    "pipelined": "tab:blue",
    "xla": "tab:red",
}
SPARE = ("tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
Line = tuple[str, str, list[int], list[float]]


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


def lines(rows: Sequence[dict], key: str) -> Iterator[Line]:
    """(label, arm, cells, ms) of each line; of equal rows the mean."""
    for label in dict.fromkeys(row[key] for row in rows):
        mine = [row for row in rows if row[key] == label]
        cells = sorted({row["cells"] for row in mine})
        ms = [fmean(r["ms"] for r in mine if r["cells"] == c) for c in cells]
        yield label, mine[0]["arm"], cells, ms
