r"""Where to put the cells, what a token will cost, and why: arithmetic over rates.

    copies    |====== tail / link ======|
    compute   |== weights and attention, slowed ==|-- alone --|
              |---------- a token: the longer of both --------|

Nothing here touches a device; `kvjax.measurement` makes the `Costs`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvjax.config import CacheConfig, RingConfig, check_range
from kvjax.shapes import BLOCK

GB = 1e9


class Costs(NamedTuple):
    """What one device does in a second, and what a step takes without stored cells.

    Attributes:
      link_bytes_s: Pinned host memory to the device, in pieces of a slot.
      attend_bytes_s: Cells that attention reads in device memory.
      step_s: A step over an empty cache, seconds: mostly reading the weights.
      slowdown: By which computing takes longer while a copy runs beside it; 1.09 is
        what an H200's copy engine costs.
    """

    link_bytes_s: float
    attend_bytes_s: float
    step_s: float
    slowdown: float = 1.09


class Forecast(NamedTuple):
    """What a token costs with so many cells of each sequence on the device, seconds.

    Attributes:
      device_cells: That placement.
      copy_s: The link is busy.
      compute_s: The step would take with all cells on the device.
      token_s: The longer of both, computing slowed while copies run.
    """

    device_cells: int
    copy_s: float
    compute_s: float
    token_s: float


class Advice(NamedTuple):
    """What `advise` found.

    Attributes:
      best: The placement to choose; give its device_cells to CacheConfig.
      all_in_tail: For comparison: no cell on the device.
      all_on_device: For comparison: every cell, whether or not that fits.
      device_bytes: Of device memory for the chosen cells and the ring.
      tail_bytes: Of pinned host memory.
      balance_cells: The fewest device cells with which copies hide behind computing.
      reason: Why, in words.
    """

    best: Forecast
    all_in_tail: Forecast
    all_on_device: Forecast
    device_bytes: int
    tail_bytes: int
    balance_cells: int
    reason: str


def advise(
    config: CacheConfig,
    lengths: Sequence[int],
    costs: Costs,
    *,
    budget_bytes: int,
    ring_bytes: int | None = None,
    num_heads: int | None = None,
) -> Advice:
    """Says where to put a cache's cells. Its own device_cells are not looked at.

    More cells on the device are never slower, so all that the budget holds go there.

    Args:
      config: What the cache holds.
      lengths: Cells that each sequence will hold: what a token has to read.
      costs: Of one device and this model at this batch size.
      budget_bytes: Device memory for cells and ring, beside weights and activations.
      ring_bytes: What the ring takes if there is a tail; None = a ring's default.
      num_heads: KV heads that one device stores; None = all.

    Raises:
      ValueError: lengths, costs or budget are out of range.
    """
    ring_bytes = RingConfig().budget if ring_bytes is None else ring_bytes
    _check(config, lengths, costs, budget_bytes, ring_bytes)
    per_cell = config.batch_size * cell_bytes(config, num_heads)
    if budget_bytes >= config.num_cells * per_cell:
        device_cells, ring_bytes = config.num_cells, 0
    else:
        fits = (budget_bytes - ring_bytes) // per_cell
        device_cells = fits // BLOCK * BLOCK

    def at(cells: int) -> Forecast:
        return forecast(config, lengths, costs, cells, num_heads)

    best, balance = at(device_cells), _balance(config, at)
    return Advice(
        best=best,
        all_in_tail=at(0),
        all_on_device=at(config.num_cells),
        device_bytes=device_cells * per_cell + ring_bytes,
        tail_bytes=(config.num_cells - device_cells) * per_cell,
        balance_cells=balance,
        reason=_reason(config, costs, best, at, balance, per_cell),
    )


def forecast(
    config: CacheConfig,
    lengths: Sequence[int],
    costs: Costs,
    device_cells: int,
    num_heads: int | None = None,
) -> Forecast:
    """What a token costs with `device_cells` cells of each sequence on the device.

    While the link is busy for copy_s, computing gets copy_s / slowdown done; the rest
    runs alone. So a token takes max(copy_s, compute_s + copy_s * (1 - 1 / slowdown)).
    A step's start and end, where the link idles, come on top: a few percent.
    """
    per_cell = cell_bytes(config, num_heads)
    copied = sum(max(length - device_cells, 0) for length in lengths) * per_cell
    copy_s = copied / costs.link_bytes_s
    compute_s = costs.step_s + sum(lengths) * per_cell / costs.attend_bytes_s
    slowed_s = compute_s + copy_s * (1 - 1 / costs.slowdown)
    return Forecast(device_cells, copy_s, compute_s, max(copy_s, slowed_s))


def cell_bytes(config: CacheConfig, num_heads: int | None = None) -> int:
    """Bytes of one sequence's cell in all layers; of K heads, or of `num_heads`."""
    heads = config.num_kv_heads if num_heads is None else num_heads
    return config.num_layers * heads * config.record_size * config.itemsize


def _balance(config: CacheConfig, at) -> int:
    """The fewest device cells with which copies no longer bound a token."""

    def hidden(blocks: int) -> bool:
        found = at(blocks * BLOCK)
        return found.token_s > found.copy_s or found.copy_s == 0

    low, high = 0, config.num_cells // BLOCK
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle + 1, high)
    return low * BLOCK


def _reason(config, costs, best, at, balance, per_cell) -> str:
    compute = f"{best.compute_s * 1e3:.1f} ms of computing"
    if best.device_cells == config.num_cells:
        return (
            f"all {config.num_cells:,} cells fit on the device: nothing is copied, a "
            f"token costs {compute}"
        )
    copied = best.copy_s * costs.link_bytes_s
    copies = (
        f"{copied / GB:.2f} GB of tail take {best.copy_s * 1e3:.1f} ms at "
        f"{costs.link_bytes_s / GB:.1f} GB/s"
    )
    if best.device_cells >= balance:
        rest = best.token_s - at(config.num_cells).token_s
        return (
            f"compute-bound: {copies} and hide behind {compute}; more cells on the "
            f"device would save at most {rest * 1e3:.1f} ms a token"
        )
    more = min(_up_to_block(config.num_cells / 4), balance - best.device_cells)
    saved = best.token_s - at(best.device_cells + more).token_s
    return (
        f"copy-bound: {copies}, longer than {compute}; {more:,} more cells on the "
        f"device ({more * per_cell / GB:.2f} GB) would save {saved * 1e3:.1f} ms a "
        f"token, up to {balance:,} cells in all"
    )


def _up_to_block(cells: float) -> int:
    return -int(-cells // BLOCK) * BLOCK


def _check(
    config: CacheConfig,
    lengths: Sequence[int],
    costs: Costs,
    budget_bytes: int,
    ring_bytes: int,
) -> None:
    if len(lengths) != config.batch_size:
        raise ValueError(
            f"lengths must name each of the {config.batch_size} sequences, got "
            f"{len(lengths)} numbers"
        )
    for length in lengths:
        check_range("a length", length, 0, config.num_cells)
    for name, value in costs._asdict().items():
        least = 1 if name == "slowdown" else 0
        if not value >= least or value == 0:
            raise ValueError(
                f"{name} must be {'at least 1' if least else 'above 0'}, got {value}"
            )
    if budget_bytes < ring_bytes:
        raise ValueError(
            f"budget_bytes must hold the ring's {ring_bytes} bytes, got "
            f"{budget_bytes}: raise it, or give a smaller ring_bytes"
        )
