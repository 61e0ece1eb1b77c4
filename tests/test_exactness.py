"""experiments/exactness.py: passes where all is well, fails where anything is not."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import exactness
from experiments.exactness import ControlDiffers, Runner, Sizes
from kvjax.cache.state import Cache
from kvjax.config import RingConfig
from kvjax.delivery.placement import make_mesh
from kvjax.model.transformer import ModelConfig, Transformer, random_model

SCRIPT = Path(exactness.__file__).resolve()
# Untied: a random tied model repeats its input, and then nothing is tested.
MODEL = ModelConfig(
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    width=64,
    mlp_width=96,
    vocab_size=300,
)
SIZES = Sizes(short=(9, 17, 26, 32), long=(300, 290, 200, 140), capacity=384,
              chunk=32, half=256)  # fmt: skip
ARMS = {arm.name: arm for arm in exactness.all_arms(SIZES)}
CONTROL, NONE = ARMS["all on the device"], ARMS["none on the device"]


@functools.cache
def model() -> Transformer:
    return random_model(MODEL, 1)


@functools.cache
def runner() -> Runner:
    return Runner(model(), make_mesh(), "bfloat16")


def prompts(lengths=SIZES.long) -> list[list[int]]:
    return exactness.make_prompts(
        lambda text: [*text.encode()], MODEL.vocab_size, lengths
    )


def compare(arms, lengths=SIZES.long, disturb=exactness.untouched):
    rows = exactness.compare(runner(), arms, "some", prompts(lengths), disturb)
    return {row.arm: row for row in rows}


@pytest.mark.parametrize("lengths", [SIZES.short, SIZES.long], ids=["short", "long"])
def test_every_arm_gives_the_bits_of_the_control(lengths):
    rows = compare([*ARMS.values()], lengths=lengths)
    assert {name: row.problems for name, row in rows.items() if row.problems} == {}
    exact = [rows[name] for name, arm in ARMS.items() if arm.exact]
    assert len({row.logits_sha256 for row in exact}) == 1
    assert sum(row.early_bytes > 0 for row in exact) >= 7
    assert rows[CONTROL.name].early_bytes == rows[CONTROL.name].ordered_bytes == 0


def test_prefill_in_other_widths_is_close_and_not_compared_by_bits():
    rows = compare([CONTROL, *(arm for arm in ARMS.values() if not arm.exact)])
    assert [*rows] == [CONTROL.name, "prefill by 1", "prefill by 8"]
    for row in rows.values():
        assert not row.problems and row.max_difference < 1e-2


def test_arms_are_all_that_the_question_asks_for():
    assert sum(arm.device_cells is None for arm in ARMS.values()) == 1
    assert {arm.device_cells for arm in ARMS.values()} == {None, 0, 128, SIZES.half}
    rings = {(a.depth, a.smallest_slots) for a in ARMS.values() if a.device_cells == 0}
    assert rings == {(d, small) for d in (0, 1, 2, 8) for small in (False, True)}
    assert {arm.capacity for arm in ARMS.values()} == {384, 768}
    assert {arm.chunk for arm in ARMS.values()} == {1, 8, 32}


def flip_a_bit(name: str):
    """Changes the lowest bit of one number of one cell in the arm of that name."""

    def disturb(arm: exactness.Arm, cache: Cache) -> Cache:
        if arm.name != name:
            return cache
        part = "tail" if cache.device is None else "device"
        held = getattr(cache, part)
        changed = np.array(held)
        layers = changed.reshape(MODEL.num_layers, 4, -1, *held.shape[1:])
        layers.view(np.uint16)[1, 2, 77, 1, 5] ^= 1
        there = jax.device_put(changed, held.sharding)
        return cache._replace(**{part: there}, stamp=cache.stamp * 0)

    return disturb


def test_one_bit_of_one_cell_is_found():
    arms = [CONTROL, ARMS["128 on the device"], NONE]
    rows = compare(arms, disturb=flip_a_bit(NONE.name))
    assert "logits differ" in rows[NONE.name].problems
    assert rows[NONE.name].max_difference > 0
    assert not rows["128 on the device"].problems


def test_a_control_that_differs_from_itself_stops_the_run():
    runs = []

    def disturb(arm, cache):
        runs.append(arm)
        return flip_a_bit(CONTROL.name)(arm, cache) if len(runs) == 2 else cache

    with pytest.raises(ControlDiffers, match="all on the device"):
        compare([CONTROL, NONE], disturb=disturb)
    assert len(runs) == 2


class Declining(exactness.Arm):
    """Means to be pipelined, but allows no ring."""

    def ring_config(self, placement):
        return RingConfig(depth=1, budget_bytes=0)


def test_an_arm_that_was_not_delivered_early_fails():
    arm = Declining(**dataclasses.asdict(NONE))
    row = compare([CONTROL, arm])[NONE.name]
    assert row.logits_sha256 == compare([CONTROL])[CONTROL.name].logits_sha256
    early, ordered = row.problems
    assert early.startswith("0 bytes went early, not ")
    assert ordered.endswith("bytes went in order, not 0")


def test_slots_that_were_hardly_reused_fail():
    outcome = runner().play(NONE, prompts())
    assert not [*exactness.delivery_problems(NONE, outcome)]
    slots = outcome.stats.num_slots
    few = outcome._replace(stats=outcome.stats._replace(slot_reuses=3 * slots - 1))
    wanted = f"{3 * slots - 1} reuses of {slots} slots in all"
    assert [*exactness.delivery_problems(NONE, few)] == [wanted]


def test_no_two_prompts_share_a_prefix():
    batches = [prompts(SIZES.short), prompts(SIZES.long)]
    every = [prompt for batch in batches for prompt in batch]
    assert [len(prompt) for prompt in every] == [*SIZES.short, *SIZES.long]
    exactness.check_prefixes(every)
    with pytest.raises(ValueError, match="share their first token"):
        exactness.check_prefixes([*every, every[0]])


def test_the_quick_run_on_the_real_model_finds_no_difference(tmp_path):
    path = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", f"--json={path}"],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--xla_gpu_autotune_level=0" in done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 10 and not any(row["problems"] for row in rows)


def test_the_exit_code_is_1_if_an_arm_differs(monkeypatch, capsys):
    monkeypatch.setitem(exactness.GEOMETRIES, "small", MODEL)
    code = exactness.run(
        quick=True,
        model_path=None,
        geometry="small",
        dtypes=["bfloat16"],
        weights=None,
        json_path=None,
        disturb=flip_a_bit(NONE.name),
    )
    assert code == 1
    said = capsys.readouterr().out
    assert said.count("logits differ") == 1 and "10 arms, 1 failed" in said
