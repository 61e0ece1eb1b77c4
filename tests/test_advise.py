"""Advice: hand-made rates, so that every expected number can be checked in the head."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvjax import CacheConfig, Costs, advise
from kvjax.advice import cell_bytes, forecast

ROOT = Path(__file__).parents[1]
# 2 layers x 4 heads x (64 + 64) x 2 bytes: a cell of one sequence takes 2,048 bytes.
CELL = 2048
KIB = 1024


def cache_of(num_seqs: int = 1, capacity: int = 1024) -> CacheConfig:
    return CacheConfig(
        num_layers=2,
        batch_size=num_seqs,
        capacity=capacity,
        num_kv_heads=4,
        head_dim=64,
    )


def costs_of(
    *, copy_s: float, attend_s: float = 0.0, step_s: float, slowdown: float = 1.0
) -> Costs:
    """Rates at which 1,024 cells take so long to copy and to attend."""
    return Costs(
        link_bytes_s=1024 * CELL / copy_s,
        attend_bytes_s=1024 * CELL / attend_s if attend_s else float("inf"),
        step_s=step_s,
        slowdown=slowdown,
    )


def test_a_cell_counts_all_layers_and_the_heads_of_one_device():
    assert cell_bytes(cache_of()) == CELL
    assert cell_bytes(cache_of(), num_heads=1) == CELL // 4


def test_a_token_costs_the_longer_of_copy_and_compute():
    slow_link = costs_of(copy_s=8.0, attend_s=1.0, step_s=2.0)
    assert forecast(cache_of(), [1024], slow_link, 0) == (0, 8.0, 3.0, 8.0)
    assert forecast(cache_of(), [1024], slow_link, 512) == (512, 4.0, 3.0, 4.0)
    assert forecast(cache_of(), [1024], slow_link, 768) == (768, 2.0, 3.0, 3.0)
    assert forecast(cache_of(), [1024], slow_link, 1024) == (1024, 0.0, 3.0, 3.0)


def test_only_live_cells_behind_those_on_the_device_are_copied():
    costs = costs_of(copy_s=8.0, step_s=1.0)
    found = forecast(cache_of(3), [1024, 128, 512], costs, 256)
    assert found.copy_s == 8.0 * (768 + 0 + 256) / 1024


def test_computing_is_slowed_while_a_copy_runs():
    costs = costs_of(copy_s=2.0, step_s=3.0, slowdown=1.25)
    # In the 2 s of copies 1.6 s of computing get done, 1.4 s are left.
    assert forecast(cache_of(), [1024], costs, 0).token_s == pytest.approx(3.4)


def test_all_cells_go_to_the_device_if_they_fit_and_then_no_ring_is_needed():
    costs = costs_of(copy_s=8.0, step_s=3.0)
    found = advise(cache_of(), [1024], costs, budget_bytes=1024 * CELL, ring_bytes=0)
    with_ring = advise(
        cache_of(), [1024], costs, budget_bytes=1024 * CELL, ring_bytes=9
    )
    assert found.best.device_cells == with_ring.best.device_cells == 1024
    assert found.device_bytes == with_ring.device_bytes == 1024 * CELL
    assert found.tail_bytes == 0
    assert found.reason.startswith("all 1,024 cells fit on the device")


@pytest.mark.parametrize(
    ("spare", "device_cells"), [(0, 0), (128 * CELL - 1, 0), (128 * CELL, 128)]
)
def test_the_budget_holds_the_ring_and_then_whole_blocks(spare, device_cells):
    costs = costs_of(copy_s=8.0, step_s=3.0)
    budget = 64 * KIB + spare
    found = advise(cache_of(), [1024], costs, budget_bytes=budget, ring_bytes=64 * KIB)
    assert found.best.device_cells == device_cells
    assert found.device_bytes == 64 * KIB + device_cells * CELL <= budget
    assert found.tail_bytes == (1024 - device_cells) * CELL


def test_a_batch_shares_the_budget():
    costs = costs_of(copy_s=8.0, step_s=3.0)
    found = advise(
        cache_of(4), [1024] * 4, costs, budget_bytes=1024 * CELL, ring_bytes=0
    )
    assert found.best.device_cells == 256


def test_a_ring_is_its_default_size_unless_told():
    costs = costs_of(copy_s=8.0, step_s=3.0)
    with pytest.raises(
        ValueError, match="must hold the ring's 67108864 bytes, got 1000"
    ):
        advise(cache_of(), [1024], costs, budget_bytes=1000)


def test_copy_bound_says_what_more_device_cells_would_save():
    # 8 s for 1,024 cells, so 256 cells save 2 s; at 640 cells copies take 3 s.
    costs = costs_of(copy_s=8.0, attend_s=1.0, step_s=2.0)
    found = advise(cache_of(), [1024], costs, budget_bytes=0, ring_bytes=0)
    assert found.best.token_s == found.all_in_tail.token_s == 8.0
    assert found.all_on_device.token_s == 3.0
    assert found.balance_cells == 768
    assert found.reason == (
        "copy-bound: 0.00 GB of tail take 8000.0 ms at 0.0 GB/s, longer than 3000.0 "
        "ms of computing; 256 more cells on the device (0.00 GB) would save 2000.0 ms "
        "a token, up to 768 cells in all"
    )


def test_compute_bound_says_that_more_device_cells_save_little():
    costs = costs_of(copy_s=1.0, step_s=3.0, slowdown=1.25)
    found = advise(cache_of(), [1024], costs, budget_bytes=0, ring_bytes=0)
    assert found.balance_cells == 0
    assert found.best.token_s == pytest.approx(3.2)
    assert found.reason.startswith("compute-bound: ")
    assert found.reason.endswith("would save at most 200.0 ms a token")


@pytest.mark.parametrize("copy_s", [0.5, 2.0, 3.5, 8.0, 40.0])
def test_balance_is_where_copies_begin_to_hide(copy_s):
    costs = costs_of(copy_s=copy_s, attend_s=1.0, step_s=2.0, slowdown=1.09)
    found = advise(cache_of(), [1000], costs, budget_bytes=0, ring_bytes=0)
    token = {
        cells: forecast(cache_of(), [1000], costs, cells)
        for cells in range(0, 1025, 128)
    }
    hidden = [cells for cells, at in token.items() if at.token_s > at.copy_s]
    assert found.balance_cells == min(hidden)
    times = [at.token_s for at in token.values()]
    assert times == sorted(times, reverse=True)


def test_an_empty_cache_costs_a_bare_step():
    costs = costs_of(copy_s=8.0, attend_s=1.0, step_s=2.0)
    found = advise(cache_of(), [0], costs, budget_bytes=0, ring_bytes=0)
    assert found.best.token_s == 2.0
    assert found.balance_cells == 0


GOOD = dict(lengths=[1024], budget_bytes=1 << 30)
BAD = {
    "lengths": (GOOD | {"lengths": [1, 2]}, "each of the 1 sequences, got 2 numbers"),
    "length": (GOOD | {"lengths": [1025]}, "between 0 and 1024, got 1025"),
    "budget": (GOOD | {"budget_bytes": -1}, "raise it, or give a smaller ring_bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_out_of_range_is_refused(name):
    given, said = BAD[name]
    with pytest.raises(ValueError, match=said):
        advise(cache_of(), costs=costs_of(copy_s=1.0, step_s=1.0), **given)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"link_bytes_s": 0.0}, "link_bytes_s must be above 0, got 0.0"),
        ({"step_s": -1.0}, "step_s must be above 0"),
        ({"attend_bytes_s": float("nan")}, "attend_bytes_s must be above 0, got nan"),
        ({"slowdown": 0.9}, "slowdown must be at least 1, got 0.9"),
    ],
)
def test_costs_must_be_possible(changed, said):
    costs = costs_of(copy_s=1.0, step_s=1.0)._replace(**changed)
    with pytest.raises(ValueError, match=said):
        advise(cache_of(), [1024], costs, budget_bytes=1 << 30)


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "experiments" / "advise.py"), *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_the_script_takes_given_rates_for_another_machine():
    done = run_script(
        *("--geometry=llama-3.1-8b", "--cells=32768", "--budget_gib=1"),
        *("--link_gbs=55", "--attend_gbs=2000", "--step_ms=5"),
    )
    assert done.returncode == 0, done.stderr
    # A cell takes 131,072 bytes: 64 MiB of ring and 7,680 cells fill the GiB.
    assert "device_cells=7680" in done.stdout
    assert "copy-bound" in done.stdout


def test_the_script_refuses_half_of_the_rates():
    done = run_script("--link_gbs=55")
    assert done.returncode == 2
    assert "error: give all of --link_gbs, --attend_gbs and --step_ms" in done.stderr
