"""The benchmarks as a user runs them, on the CPU: what they write, what they refuse."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import waiting
from attention_arms import BitsDiffer, attend_all, check_bits, draw_inputs, place
from commit import is_commit
from copy_then_attend import copy_then_attend
from probe import Probe, Shown, compare_logits, explain, first_difference

from experiments import goals
from experiments.decode_rows import (
    Arm,
    Case,
    Links,
    Run,
    TokensDiffer,
    check_near,
    check_same,
    make_rows,
    unsteady,
    verdict,
)
from kvjax.cache.state import Cache
from kvjax.config import MIB, RingConfig
from kvjax.delivery.placement import make_mesh
from kvjax.delivery.plan import smallest_slot
from kvjax.measurement import WARMUP, random_cache, rewind, run_steps
from kvjax.model.transformer import ModelConfig, random_model, split

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
COMMIT = "abc0" * 10
CELL = 4 * 2 * (64 + 64) * 2  # bytes of geometry tiny's 4 layers and 2 heads, bfloat16

# Runs a script's main for each list of arguments in one process: a start costs seconds.
DRIVER = """
import contextlib, importlib, io, json, sys
from pathlib import Path
from absl import flags
from absl.testing import flagsaver

script = Path(sys.argv[1])
sys.path.insert(0, str(script.parent))
module = importlib.import_module(script.stem)
cases = json.loads(sys.argv[2])
found = []
for args in cases:
    sys.argv = [script.name, *args]
    out, errors = io.StringIO(), io.StringIO()
    with (
        flagsaver.flagsaver(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        flags.FLAGS(sys.argv)
        code = module.main([script.name])
    found.append((code, out.getvalue(), errors.getvalue()))
print(json.dumps(found))
"""


def run_all(script: str, *cases: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of each list of arguments."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    path = str(EXPERIMENTS / script)
    command = [sys.executable, "-c", DRIVER, path, json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


REFUSED = {
    "arm": (["--arms=device,magic"], "must be of device, ordered, pipelined, xla"),
    "no ring": (["--arms=pipelined", "--budget_mib=0"], "budget_bytes is 0"),
    "budget": (
        ["--arms=pipelined", "--budget_mib=1", "--slot_mib=1"],
        "slots of 1048576 bytes",
    ),
    "slot": (["--arms=ordered", "--slot_mib=0.01"], "slot_bytes must hold one block"),
    "no tail": (
        ["--arms=ordered", "--cells=90", "--device_cells=128"],
        "ordered +128 cannot run at 90 cells x 1: all cells lie on the device",
    ),
    "block": (["--device_cells=100"], "multiple of the block of 128"),
    "cells": (["--device_cells=-1"], "--device_cells must be numbers or half"),
    "number": (["--cells=many"], "--cells must be numbers, got ['many']"),
    "capacity": (["--cells=100", "--capacity=110"], "must be at least 134"),
    "memory": (["--cells=1000000000"], "of pinned memory for each device"),
    "model": (["--model=/none"], "there is no /none"),
    "json": (["--json=/none/out.json"], "--json must be a file in a folder"),
    "no json": (["--json="], "--json must be a file in a folder that exists, got ''"),
    "depth": (
        ["--arms=pipelined", "--depth=0"],
        "cannot run at 4,096 cells x 1: depth",
    ),
    "twice": (["--depth=1,1"], "give each setting once, pipelined, ring 64 MiB"),
    "nowhere": (["--device_cells="], "--device_cells must be numbers or half, got ''"),
    "infinite": (["--slot_mib=inf"], "--slot_mib must be numbers from 0 on"),
    "no number": (["--budget_mib=nan"], "--budget_mib must be numbers from 0 on"),
    "empty batch": (
        ["--batch=0,1"],
        "--batch must be numbers from 1 on",
    ),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> dict:
    """A run of every arm, what it wrote, and what each of REFUSED said."""
    path = tmp_path_factory.mktemp("results") / "decode.json"
    good = [
        *("--geometry=tiny", "--cells=128,256", "--capacity=512", "--batch=2"),
        *("--arms=device,ordered,pipelined,xla", "--device_cells=0", "--ragged"),
        *("--tokens=3", "--waiting=1", "--repeats=1", "--slot_mib=0.25,0.5"),
        *(f"--commit={COMMIT}", f"--json={path}"),
    ]
    lists_path = path.with_name("lists.json")
    lists = [
        *("--geometry=tiny", "--cells=200", "--batch=2", "--capacity=256,512"),
        *("--arms=device,ordered,pipelined", "--tokens=2", "--waiting=0"),
        *("--repeats=1", "--depth=1,2", "--slot_mib=0.0625,0.125,0.25"),
        *("--budget_mib=0.4", "--logits=3", f"--json={lists_path}"),
    ]
    cases = [arguments for arguments, _ in REFUSED.values()]
    ran, listed, *refused = run_all("bench_decode.py", good, lists, *cases)
    assert ran[0] == 0, ran[2]
    assert listed[0] == 0, listed[2]
    return {
        "lists": json.loads(lists_path.read_text()),
        "lists_shown": listed[1],
        "path": path,
        "found": json.loads(path.read_text()),
        "shown": ran[1],
        "refused": dict(zip(REFUSED, refused, strict=True)),
    }


def test_every_arm_has_a_row_for_every_number_of_cells(bench):
    rows = bench["found"]["rows"]
    arms = ["device", "ordered", "pipelined", "pipelined", "xla"]
    assert [row["arm"] for row in rows] == arms * 2
    assert [row["cells"] for row in rows] == [128] * 5 + [256] * 5
    assert [row["slot_bytes"] for row in rows[2:4]] == [MIB // 4, MIB // 2]


@pytest.mark.parametrize("commit", ["HEAD", "abc", COMMIT[1:], COMMIT + "+", ""])
def test_a_result_is_of_a_commits_whole_hash(commit):
    assert is_commit(COMMIT)
    assert not is_commit(commit)


def test_lists_of_settings_are_one_run_that_tells_which_rings_decline(bench):
    found, smallest = bench["lists"], MIB // 16
    got = [(row["capacity"], row["arm"]) for row in found["rows"]]
    arms = ["device", "ordered", *["pipelined"] * 4]
    assert got == [(cells, arm) for cells in (256, 512) for arm in arms]
    rings = [r for r in found["rows"] if r["arm"] == "pipelined"]
    for row in rings:
        assert (row["depth"], row["slot_bytes"]) in [
            (depth, slots * smallest) for depth in (1, 2) for slots in (1, 2)
        ]
        assert row["piece_bytes_s"] > 0
    declined = found["declined"]
    got = [(row["capacity"], row["depth"], row["slot_bytes"]) for row in declined]
    assert got == [(c, d, 4 * smallest) for c in (256, 512) for d in (1, 2)]
    for row in declined:
        assert "a ring needs 2 slots of 262144 bytes" in row["reason"]
        assert row["label"] in bench["lists_shown"]
        assert f"declined: {row['reason']}" in bench["lists_shown"]


def test_tokens_waited_for_are_drawn_again_from_the_midst_of_a_run():
    stepped = []

    def step(tokens, cache):
        stepped.append(int(cache.lengths[0]))
        return tokens * 3 + cache.lengths, cache._replace(lengths=cache.lengths + 1)

    def rewound(steps):
        return Cache(None, None, jnp.array([100 + steps]), no_stamp, (128, 128))

    first, no_stamp = jnp.array([7]), jnp.zeros((1, 2), jnp.uint32)
    drawn = run_steps(step, first, rewound(0), WARMUP + 9).drawn
    for count, begin in ((4, 2), (9, 0), (20, 0)):
        stepped.clear()
        waited = waiting.wait_for_each(step, first, drawn, rewound, count)
        assert stepped == [*range(100 + begin, 100 + begin + WARMUP + count)]
        assert (len(waited.seconds), waited.begin) == (count, begin)
        waiting.check_again(ORDERED, drawn, waited)
        other = [*drawn[:5], drawn[5] + 1, *drawn[6:]]
        differ = waiting.TokensDiffer
        with pytest.raises(differ, match="ordered drew other tokens while each was"):
            waiting.check_again(ORDERED, other, waited)


def test_logits_of_all_arms_are_compared_to_the_bit(bench):
    found = bench["lists"]
    assert "--xla_gpu_autotune_level=0" in found["xla_flags"]
    assert {row["logits_steps"] for row in found["rows"]} == {3}
    assert {row["logits_equal"] for row in found["rows"]} == {True}
    assert {row["logits_difference"] for row in found["rows"]} == {0.0}
    assert len({row["logits_sha256"] for row in found["rows"]}) == 1
    assert "logits_sha256" not in bench["found"]["rows"][0]


def test_arms_of_each_capacity_are_held_against_their_own(bench):
    """And all of them against the same tokens, in one process."""
    first, second = bench["lists"]["rows"][:6], bench["lists"]["rows"][6:]
    for rows in (first, second):
        device, ordered, *rings = rows
        for row in (ordered, *rings):
            assert row["agreed"] == 1
            assert row["device_ms"] == device["ms"]
            assert row["gain"] == ordered["ms"] / row["ms"]
    assert first[0]["ms"] != second[0]["ms"]


def test_the_result_says_where_it_comes_from(bench):
    found = bench["found"]
    assert found["commit"] == COMMIT
    assert found["versions"]["jax"] == jax.__version__
    assert found["command"].startswith("python ")
    assert "--json" not in found["command"]
    assert found["gpu"] is None and found["driver"] is None


def test_live_bytes_are_the_cells_that_a_step_reads(bench):
    # Sequences of 64 and 192 cells, two steps of warm-up, then three: 3 on the average.
    for row in bench["found"]["rows"]:
        cells = 64 + 192 if row["cells"] == 128 else 128 + 384
        live = 0 if row["arm"] == "device" else (cells + 2 * 3) * CELL
        assert row["live_bytes"] == live


def test_floor_bound_share_and_gain_follow_from_what_was_measured(bench):
    found = bench["found"]
    for start in (0, 5):
        device, ordered, *others = found["rows"][start : start + 5]
        assert device["share"] is None
        for row in (ordered, *others):
            floor = row["live_bytes"] / found["link_bytes_s"] * 1e3
            assert row["floor_ms"] == pytest.approx(floor)
            assert row["bound_ms"] == max(row["floor_ms"], device["ms"])
            assert row["share"] == row["bound_ms"] / row["ms"]
            assert row["gain"] == ordered["ms"] / row["ms"]
            low, high = min(row["runs_ms"]), max(row["runs_ms"])
            assert row["ms"] == pytest.approx((low + high) / 2)
            assert row["spread"] == pytest.approx((high - low) / row["ms"])


def test_only_pipelined_arms_have_a_ring_and_deliver_early(bench):
    for row in bench["found"]["rows"]:
        pipelined = row["arm"] == "pipelined"
        assert (row["ring_bytes"] > 0) == pipelined
        if row["arm"] in ("ordered", "pipelined"):
            assert row["early_share"] == float(pipelined)


def test_tokens_are_the_same_and_times_come_with_a_verdict(bench):
    for row in bench["found"]["rows"]:
        assert row["agreed"] == 1 or row["arm"] == "xla"
        assert row["verdict"] in bench["shown"]
    assert bench["found"]["errors"] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_in_one_line(bench, name):
    code, _, said = bench["refused"][name]
    assert code == 2
    assert said.splitlines()[-1].startswith("error: ")
    assert REFUSED[name][1] in said.splitlines()[-1]


DEVICE = Arm(name="device")
ORDERED = Arm(name="ordered", device_cells="0", ring=RingConfig(depth=0))
XLA = Arm(name="xla", device_cells="0")


def run_of(tokens: list[list[int]], *, step_s: float = 1.0) -> Run:
    """A run without a ring that drew `tokens`, all but the warm-up's timed."""
    drawn = np.array(tokens, np.int32)
    return Run(step_s, [], drawn, [], 0, 0, 0, 0)


def test_one_other_token_in_one_run_is_told():
    right, wrong = [[1, 2], [3, 4], [5, 6]], [[1, 2], [9, 4], [5, 6]]
    runs = {DEVICE: [run_of(right)] * 2, ORDERED: [run_of(right), run_of(wrong)]}
    said = "ordered drew 9 for sequence 0 in step 1, device 3"
    with pytest.raises(TokensDiffer, match=said) as caught:
        check_same(runs)
    assert caught.value.parting[1:] == (1, 0, (3, 9))
    assert unsteady(runs) == ["ordered"]
    runs[ORDERED][1] = run_of(right)
    assert check_same(runs)[1].tolist() == right


def test_xla_alone_may_round_but_not_draw_anything():
    wanted = np.arange(8).reshape(4, 2)
    near, far = wanted.copy(), wanted.copy()
    near[0, 0], far[:3] = 99, 99
    assert check_same({XLA: [run_of(wanted.tolist())]}) == {}
    assert check_near(XLA, near, wanted) == 7 / 8
    with pytest.raises(TokensDiffer, match="xla drew 25% of the others' tokens"):
        check_near(XLA, far, wanted)


def test_a_row_without_the_device_arm_is_held_against_the_copy_alone():
    tokens = [[1]] * (WARMUP + 2)
    case = Case(cells=1000, lengths=(1000,), needed=1024)
    runs = {XLA: [run_of(tokens, step_s=s) for s in (0.1, 0.4, 0.2)]}
    # 1,002.5 cells of 1,000 bytes at 10,025,000 bytes a second: 100 ms.
    links = Links(10_025_000.0, {1: [10_025_000.0]})
    (row,) = make_rows(runs, {XLA: None}, case, 1000, links)
    assert row["ms"] == 200
    assert row["floor_ms"] == row["bound_ms"] == pytest.approx(100)
    assert row["share"] == pytest.approx(0.5)
    assert row["gain"] is None
    assert row["spread"] == pytest.approx(1.5)


@pytest.fixture(scope="module")
def watched() -> Callable[..., list[Shown]]:
    """Runs a step of geometry tiny with cells in the tail, or on the device.

    In both cases from the same cells; `disturb` changes leaves or cells before it.
    """
    config, mesh = ModelConfig.of("tiny"), make_mesh()
    leaves = split(random_model(config, dtype="float32", mesh=mesh))[1]
    probes, tokens = {}, [np.array([5, 6], np.int32), np.array([7, 8], np.int32)]

    def run(arm, disturb=lambda leaves, cache: (leaves, cache)) -> list[Shown]:
        placement = place(config, 2, 300, arm, mesh, "bfloat16")
        cache = random_cache(placement, [299, 150])
        probe = probes.setdefault(placement, Probe(config, "float32", placement))
        own, cache = disturb(leaves, cache)
        shown = []
        for fed in tokens:
            one, cache = probe(own, cache, fed)
            shown.append(one)
        return shown

    return run


def zero_cell(layer: int) -> Callable:
    """Changes one stored cell of a layer, in its tail or its device part."""

    def disturb(leaves, cache):
        part = "tail" if cache.device is None else "device"
        held = getattr(cache, part)
        changed = np.array(held)
        num_layers = ModelConfig.of("tiny").num_layers
        changed.reshape(num_layers, 2, -1, *held.shape[1:])[layer, 1, 17] = 0
        there = jax.device_put(changed, held.sharding)
        return leaves, cache._replace(**{part: there})

    return disturb


def test_a_watched_step_is_the_same_wherever_cells_lie(watched):
    device, tail = watched("device"), watched("ordered")
    assert first_difference(device, tail) is None
    facts = compare_logits(device, tail)
    assert (facts["logits_steps"], facts["logits_equal"]) == (2, True)
    assert facts["logits_difference"] == 0.0
    said = explain(("a", "b"), (device, tail), 1, (3, 4))
    assert "layer 0 attention is equal to the bit" in said
    assert "watched, both arms give the same bits" in said
    first, second = (float(device[-1].logits[1, token]) for token in (3, 4))
    assert f"{first:.9g} and {second:.9g}, {first - second:.3g} apart" in said


def test_other_attention_is_told_from_other_matrix_kernels(watched):
    device = watched("device")
    other_cell = watched("ordered", zero_cell(2))
    found = first_difference(device, other_cell)
    assert found == (0, 2, "out") and "ATTENTION differs" in str(found)
    assert not compare_logits(device, other_cell)["logits_equal"]
    assert compare_logits(device, other_cell)["logits_difference"] > 0

    def other_weights(leaves, cache):
        return [leaf * jnp.float32(1 + 1e-6) for leaf in leaves], cache

    other = watched("ordered", other_weights)
    found = first_difference(device, other)
    assert found[:2] == (0, 0) and found.what in ("q", "k", "v")
    assert "matrix kernels before that attend differ" in str(found)
    said = explain(("a", "b"), (device, other), 1, (3, 4))
    assert "layer 0 attention is NOT equal" in said


def row_of(**changes) -> dict:
    row = {
        "arm": "pipelined",
        "cells": 32768,
        "batch": 1,
        "shortest": 32768,
        "longest": 32768,
        "capacity": 32800,
        "device_cells": 0,
        "ms": 80.0,
        "runs_ms": [80.0],
        "floor_ms": 78.0,
        "bound_ms": 78.0,
        "device_ms": 9.0,
        "live_bytes": 4.24e9,
        "gain": 1.2,
        "blocking_ms": 80.5,
        "ring_bytes": 64 * MIB,
        "depth": RingConfig().depth,
        "slot_bytes": RingConfig().slot,
        "budget_bytes": RingConfig().budget,
        "raw_bytes_s": [54.4e9],
    }
    return row | changes


def test_a_verdict_says_what_bounds_and_what_would_help():
    assert verdict(row_of()) == (
        "copy-bound: 53.0 of 54.4 GB/s; keeping 8,192 more cells on the device would "
        "save 20.0 ms a token"
    )
    # All in the tail but little above computing: no more than that can be saved.
    assert verdict(row_of(ms=10.0)).endswith("would save 1.0 ms a token")
    assert verdict(row_of(floor_ms=8.0, ms=9.5)) == (
        "compute-bound: copies of 8.00 ms could hide behind 9.00 ms of computing; a "
        "token takes 9.50 ms"
    )
    assert "the bound is the copy alone" in verdict(row_of(device_ms=None))


def result_of(experiment: str, *rows: dict) -> dict:
    return {
        "experiment": experiment,
        "model": goals.MODEL,
        "gpu": "NVIDIA H200",
        "rows": list(rows),
    }


def met(*found: dict) -> dict[str, str]:
    return {goal.what: goal.met for goal in goals.goals(found)}


def test_a_row_that_beats_its_bound_is_void():
    """Its raw copies were disturbed: a step cannot be faster than they."""
    what = "share of the bound, 32,768 cells"
    disturbed = row_of(runs_ms=[76.0, 80.0])
    assert met(result_of("bench_decode", disturbed))[what] == "not measured"
    assert met(result_of("bench_decode", row_of(runs_ms=[77.9])))[what] == "yes"


def test_goals_are_not_measured_without_rows_of_a_gpu():
    other = result_of("bench_decode", row_of()) | {"gpu": None}
    assert set(met()) == set(met(other))
    assert set(met(other).values()) == {"not measured"}


def test_the_median_of_all_runs_decides_and_none_is_left_out():
    good, bad = row_of(runs_ms=[79.0, 79.5, 79.2]), row_of(runs_ms=[86.0, 81.5])
    what = "share of the bound, 32,768 cells"
    for results, verdict_, count in (
        ([result_of("bench_decode", good)], "yes", 3),
        ([result_of("bench_decode", good), result_of("bench_decode", bad)], "yes", 5),
        ([result_of("bench_decode", good, bad, bad)], "no", 7),
    ):
        (goal,) = [goal for goal in goals.goals(results) if goal.what == what]
        assert (goal.met, len(goal.values)) == (verdict_, count)
    assert min(goal.values) == 78.0 / 86.0 and max(goal.values) == 78.0 / 79.0
    assert goal.value == 78.0 / 81.5


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"runs_ms": [81.0]}, "share of the bound, 32,768 cells"),
        (
            {"cells": 4096, "batch": 8, "shortest": 2048, "runs_ms": [83.0]},
            "share of the bound, 8 ragged sequences around 4,096 cells",
        ),
        (
            {"floor_ms": 7.0, "runs_ms": [90.0]},
            "share where copy = compute, within 30 %",
        ),
        ({"floor_ms": 11.0, "gain": 1.6}, "gain over ordered there"),
        ({"ring_bytes": 65 * MIB}, "MiB of the default ring"),
        ({"blocking_ms": 80.7}, "ms that waiting for every token adds"),
    ],
)
def test_a_row_that_misses_its_goal_is_told(changes, what):
    assert met(result_of("bench_decode", row_of(**changes)))[what] == "no"


def test_rows_are_compared_at_the_same_cells_only():
    base = row_of()
    small = row_of(budget_bytes=16 * MIB, ms=81.0)
    half = row_of(device_cells=16384, ms=43.0)
    elsewhere = row_of(budget_bytes=16 * MIB, cells=4096, ms=1000.0)
    got = met(
        result_of("bench_decode", base, small, half, elsewhere),
        result_of(
            "hf_offload",
            {"arm": "hf_static", "cells": 32768, "batch": 1, "runs_ms": [900.0, 100.0]},
        ),
    )
    assert got["a ring of 16 MiB / the default, ms"] == "yes"
    assert got["half of 32,768 cells on the device / all in the tail, ms"] == "no"
    theirs = "Hugging Face's static offloaded cache / kvjax, 32,768 cells, ms"
    assert got[theirs] == "no"


def test_capacities_are_compared_within_one_run_and_others_where_there_is_one():
    what = "2,048 cells in a capacity of 131,072 / of at most 4,096, ms, in one run"
    tight = row_of(cells=2048, capacity=4096, ms=10.0)
    roomy = tight | {"capacity": 131072, "ms": 10.2}
    slow = result_of("bench_decode", tight | {"ms": 5.0})
    apart = [result_of("bench_decode", row) for row in (tight, roomy)]
    together = result_of("bench_decode", tight, roomy)
    assert met(*apart)[what] == "not measured"
    assert met(together, slow)[what] == "yes"
    assert met(result_of("bench_decode", tight, roomy | {"ms": 10.4}))[what] == "no"
    small = row_of(budget_bytes=16 * MIB, ms=81.0)
    pair = result_of("bench_decode", row_of(), small)
    disturbed = result_of("bench_decode", row_of(ms=70.0))
    assert met(pair, disturbed)["a ring of 16 MiB / the default, ms"] == "yes"


def test_every_run_of_a_configuration_is_shown_with_its_own_link(tmp_path):
    pytest.importorskip("matplotlib")
    rows = row_of(runs_ms=[79.0, 79.5]), row_of(runs_ms=[86.0, 81.5], floor_ms=77.7)
    for number, row in enumerate(rows):
        shown = {"label": "pipelined", "verdict": "", "spread": 0.0, "share": 0.98}
        one = result_of("bench_decode", row | shown)
        one |= dict(commit="abc", versions={}, command="python x", driver=None)
        one |= dict(link_bytes_s=(55 + number) * 1e9)
        (tmp_path / f"run{number}.json").write_text(json.dumps(one))
    page = tmp_path / "results.md"
    good = [f"--results={tmp_path}", f"--page={page}"]
    ((code, _, errors),) = run_all("report.py", good)
    assert code == 0, errors
    text = page.read_text()
    found = "| 32,768 | 1 | [run0](run0.json) | 55.0 | 78.00 | 79.00, 79.50 |"
    assert f"{found} 0.987, 0.981 |" in text
    found = "| 32,768 | 1 | [run1](run1.json) | 56.0 | 77.70 | 86.00, 81.50 |"
    assert f"{found} 0.907, 0.957 |" in text
    assert "| at least 0.97 | 0.969 | 0.907 | 0.987 | 4 | no |" in text


def test_the_report_is_made_of_the_files(bench, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "decode.json").write_text(bench["path"].read_text())
    unknown = bench["found"] | {
        "experiment": "new",
        "rows": [{"alpha": 1, "beta": 2.5}],
    }
    (folder / "new.json").write_text(json.dumps(unknown))
    page = tmp_path / "results.md"
    good = [f"--results={folder}", f"--page={page}"]
    empty = [f"--results={tmp_path}", f"--page={page}"]
    (code, _, errors), (refused, _, said) = run_all("report.py", good, empty)
    assert code == 0, errors
    text = page.read_text()
    row = bench["found"]["rows"][2]
    assert f"| 128 | 2 | {row['label']} | {row['ms']:.2f} |" in text
    assert f"`{bench['found']['command']}`" in text
    assert "| alpha | beta |\n|---|---|\n| 1 | 2.5 |" in text
    assert "![ms a token over cells](results/decode.png)" in text
    assert (folder / "decode.png").stat().st_size > 1000
    assert refused == 2 and "run an experiment with --json" in said


def test_a_report_lays_slots_over_depths(bench, tmp_path):
    pytest.importorskip("matplotlib")
    found, page = bench["lists"], tmp_path / "results.md"
    (tmp_path / "lists.json").write_text(json.dumps(found))
    good = [f"--results={tmp_path}", f"--page={page}"]
    ((code, _, errors),) = run_all("report.py", good)
    assert code == 0, errors
    lines = page.read_text().splitlines()
    for capacity in (256, 512):
        of = f"capacity {capacity}, rings of 0.4 MiB"
        (start,) = [i for i, text in enumerate(lines) if of in text]
        heads = "| slot MiB | GB/s of raw copies of a slot | depth 1 | depth 2 |"
        assert lines[start + 2] == heads
        one, two = (
            f"{row['ms']:.2f} ({row['share']:.3f})"
            for row in found["rows"]
            if (row["arm"], row["capacity"]) == ("pipelined", capacity)
            and row["slot_bytes"] == MIB // 8
        )
        assert lines[start + 5].startswith("| 0.125 |")
        assert lines[start + 5].endswith(f" | {one} | {two} |")
        assert lines[start + 6] == "| 0.25 |  | declined | declined |"


def test_attention_alone_is_held_against_memory_link_and_a_loop(tmp_path):
    path = tmp_path / "attention.json"
    arms = "device,ordered,pipelined,standalone"
    good = [
        *("--geometry=tiny", "--cells=1000", "--batch=3", f"--arms={arms}"),
        *("--passes=2", "--repeats=1", f"--json={path}"),
    ]
    bad = ["--arms=alone"]
    (code, _, said), (refused, _, why) = run_all("bench_attention.py", good, bad)
    assert code == 0, said
    found = json.loads(path.read_text())
    assert [row["arm"] for row in found["rows"]] == arms.split(",")
    rates = {"device": found["read_bytes_s"]}
    for row in found["rows"]:
        assert row["live_bytes"] == 3000 * CELL
        bound = row["live_bytes"] / rates.get(row["arm"], found["link_bytes_s"]) * 1e3
        assert row["bound_ms"] == pytest.approx(bound)
        assert row["share"] == pytest.approx(bound / row["ms"])
        assert len(row["runs_ms"]) == 2
    _, ordered, _, alone = found["rows"]
    assert ordered["over_standalone"] == pytest.approx(ordered["ms"] / alone["ms"])
    assert refused == 2 and "--arms must be of device, ordered" in why


def test_an_attend_of_other_bits_stops_its_times():
    wanted = np.zeros((4, 1, 1, 2, 8), jnp.bfloat16)
    out = wanted.copy()
    out[2, 0, 0, 1, 3] = -0.0
    check_bits("ordered", wanted.copy(), wanted)
    with pytest.raises(BitsDiffer, match="1 layers, the first of them 2"):
        check_bits("ordered", out, wanted)


def test_the_stand_alone_loop_gives_the_bits_of_each_layer_or_refuses(mesh1):
    """Cells of other layers are others: a loop over the wrong tail would show."""
    placement = place(ModelConfig.of("tiny"), 2, 300, "ordered", mesh1, "float32")
    cache, inputs = random_cache(placement, [300, 129]), draw_inputs(placement)
    outs = attend_all(placement)(*inputs, cache)
    given = dict(scale=placement.config.head_dim**-0.5, passes=1)
    args = placement, cache, *map(np.asarray, inputs)
    smallest = smallest_slot(placement)
    for slot_bytes in (smallest, 5 * smallest):
        seconds, alone = copy_then_attend(*args, slot_bytes=slot_bytes, **given)
        assert seconds > 0
        assert alone.tobytes() == np.stack(list(map(np.asarray, outs))).tobytes()
    assert len({out.tobytes() for out in alone}) == len(outs)
    with pytest.raises(ValueError, match="holds no block of cells"):
        copy_then_attend(*args, slot_bytes=smallest - 1, **given)
    args = placement, rewind(placement, cache, [0, 1]), *args[2:]
    with pytest.raises(ValueError, match="sequence 0 holds 0 of 384 cells"):
        copy_then_attend(*args, slot_bytes=smallest, **given)


def test_a_peer_that_cannot_run_says_what_is_missing():
    arms = (["--arms=hf_dynamic"], "torch"), (["--arms=mine"], "--arms must be of")
    results = run_all("peers/hf_offload.py", *[args for args, _ in arms])
    for (code, _, said), (_, wanted) in zip(results, arms, strict=True):
        assert code == 2
        assert wanted in said.splitlines()[-1]
