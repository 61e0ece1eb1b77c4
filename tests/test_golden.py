"""Attention gives the bits that a GPU gave: data/golden.json says which one."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import golden
from kvjax.delivery.ring import Ring
from kvjax.shapes import BLOCK, GROUP

PATH = Path(__file__).parent / "data" / "golden.json"


@pytest.mark.parametrize("head_dim, dtype", golden.geometries())
def test_attention_has_the_bits_of_the_gpu(head_dim, dtype):
    start = f"head size {head_dim}, {dtype}, "
    held = golden.read(PATH)["sha256"]
    wanted = {name: hash for name, hash in held.items() if name.startswith(start)}
    found = golden.hashes(head_dim, dtype, device_cells=128)
    assert golden.differences(found, wanted) == []


def test_the_file_holds_every_case_and_says_how_it_was_made():
    held = golden.read(PATH)
    cases = len(golden.geometries()) * len(golden.STEPS) * len(golden.VARIANTS)
    assert len(held["sha256"]) == cases
    assert len({*held["sha256"].values()}) == len(held["sha256"])
    assert held["made"]["gpu"].startswith("NVIDIA")
    for name in ("driver", "commit", "versions", "command"):
        assert held["made"][name]


def test_cases_lie_around_borders_of_blocks_and_groups():
    for border in (BLOCK, BLOCK * GROUP):
        assert {border - 1, border, border + 1} <= {*golden.LENGTHS}
    for num_new in (1, 8):
        assert {(num_new, group) for group in (1, 3, 4, 8)} <= {*golden.STEPS}


def test_inputs_are_these_bits():
    # Integers by hand from the definition, in Python's own arithmetic.
    x = golden.numbers((5,), salt=1, dtype="float32")
    assert x.tolist() == [by_hand(i) for i in range(5)]
    cut = golden.numbers((5,), salt=1, dtype="bfloat16")
    assert cut.view(np.uint16).tolist() == [bits >> 16 for bits in x.view(np.uint32)]


def by_hand(i: int) -> float:
    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    return (mix(i ^ mix(1)) // 256 - 2**23) / 2**22


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_denormal_values_reach_the_output(dtype):
    placement = golden.place(64, dtype, 128, group=1)
    with Ring.open(placement):
        outs, _ = golden.run(placement, 1, golden.make_cache(placement))
    out = np.abs(np.asarray(outs["denormal values"]))
    assert 0 < out.max() < jnp.finfo(jnp.float32).tiny
    assert np.count_nonzero(out) > out.size / 2


def test_another_bit_is_a_difference():
    held = {"a": "00", "b": "01"}
    assert golden.differences(held, {"a": "00", "b": "11", "c": "00"}) == ["b", "c"]
