"""What XLA's GPU compiler makes of the decoder's programs: order, copies, collectives.

Compiled for NVIDIA H200s without one. What a step must come out as, with a layer's cells
half on the device:

    begin | append append attend | append append attend | ...
            device tail   0        device tail   1
"""

import importlib.util
import itertools
import re

import pytest

if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
    pytest.skip("needs XLA's GPU compiler: the extra test-aot", allow_module_level=True)

import hlo
from aot import CELLS, DEVICE_CELLS, MODEL, Case, Compiled, compile_all

CASES = [
    *itertools.starmap(
        Case,
        itertools.product(("step", "prefill", "steps"), ("tail", "half", "device"), (1, 2)),
    ),
    Case("step", "mixed"),
    Case("steps", "half", 8),
]
KEPT = [Case("step", "tail", 1, False), Case("prefill", "half", 1, False)]
SMALL = 1 << 14  # elements; every weight of every device has more


@pytest.fixture(scope="module")
def programs(request, tmp_path_factory) -> dict[Case, Compiled]:
    """All programs that the selected tests ask for."""
    asked = {
        item.callspec.params["case"]: None
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    return compile_all(list(asked), tmp_path_factory.mktemp("aot"))


def over(cases: list[Case]):
    return pytest.mark.parametrize("case", cases, ids=str)


def parts(case: Case) -> list[tuple[int, int]]:
    """(device cells, tail's cells) of each layer, by one sequence."""
    on_device = DEVICE_CELLS[case.placement]
    if isinstance(on_device, int):
        on_device = (on_device,) * MODEL.num_layers
    return [(cells, CELLS - cells) for cells in on_device]


def tail_bytes(case: Case) -> int:
    """Of one device's tails, bfloat16."""
    record = MODEL.num_kv_heads // case.num_devices * 2 * MODEL.head_dim * 2
    return sum(tail for _, tail in parts(case)) * record


def step_calls(program: Compiled) -> list[hlo.Op]:
    """kvjax's calls in a step, in the order in which they run."""
    ops = hlo.step_of(*hlo.parse(program.text))
    return [op for op in ops.values() if op.target.startswith("kvjax_")]


def names(calls: list[hlo.Op]) -> list[str]:
    return [op.target.removeprefix("kvjax_").rpartition("_")[0] for op in calls]


def expected_calls(case: Case) -> list[str]:
    """begin if there is a tail; then one append a part and one attend, layer by layer."""
    calls = ["begin"] if tail_bytes(case) else []
    for on_device, tail in parts(case):
        calls += ["append"] * bool(on_device) + ["append"] * bool(tail)
        calls += ["attend_ring" if tail else "attend_device"]
    return calls


@over(CASES)
def test_nothing_but_our_calls_touches_a_tail(case, programs):
    computations, _ = hlo.parse(programs[case].text)
    assert hlo.host_accesses(computations) == []
    held = any(hlo.HOST in op.shape for ops in computations.values() for op in ops.values())
    assert held == (tail_bytes(case) > 0)


@over(CASES)
def test_tails_are_updated_where_they_lie(case, programs):
    memory = programs[case].memory
    assert memory["host_alias_size"] == tail_bytes(case)
    assert memory["host_argument_size"] == tail_bytes(case)
    assert memory["host_output_size"] == tail_bytes(case)
    assert memory["host_temp_size"] == 0


@over(CASES)
def test_nothing_runs_on_the_host(case, programs):
    for mark in ('execution_thread="host"', "_xla_compute_type", "host_execute"):
        assert mark not in programs[case].text


@over(CASES)
def test_calls_run_in_program_order(case, programs):
    calls = step_calls(programs[case])
    assert names(calls) == expected_calls(case)
    attributes = [re.search(r"\blayer = (\d+)", call.rest) for call in calls]
    layers = [int(found.group(1)) for found in attributes if found]
    assert layers == [i for i, (_, tail) in enumerate(parts(case)) if tail]


@over(CASES)
def test_calls_are_only_in_the_step(case, programs):
    computations, _ = hlo.parse(programs[case].text)
    ops = [op for ops in computations.values() for op in ops.values()]
    calls = [op for op in ops if op.target.startswith("kvjax_")]
    assert len(calls) == len(expected_calls(case))


@over(CASES)
def test_attend_reads_what_its_appends_wrote(case, programs):
    ops = hlo.step_of(*hlo.parse(programs[case].text))
    wrote = []
    for call in step_calls(programs[case]):
        if "append" in call.target:
            wrote.append(call.name)
        elif "attend" in call.target:
            read = [hlo.source(ops, name).name for name in call.operands]
            assert sorted(read[-len(wrote) :]) == sorted(wrote), call.name
            wrote = []


@over([case for case in CASES if tail_bytes(case)])
def test_begin_runs_before_any_weight_is_read(case, programs):
    ops = hlo.step_of(*hlo.parse(programs[case].text))
    for op in ops.values():
        if op.target.startswith("kvjax_begin"):
            return
        if op.opcode in hlo.NAMES:
            continue
        large = [n for n in op.operands if max(ops[n].sizes, default=0) >= SMALL]
        assert large == [], op.name
    raise AssertionError("no begin")


@over([case for case in CASES if case.function != "prefill"])
def test_a_decode_step_makes_no_large_array(case, programs):
    """Weights and cells are read where they lie: not copied, transposed or gathered."""
    computations, entry = hlo.parse(programs[case].text)
    for ops in (computations[entry], hlo.step_of(computations, entry)):
        made = {
            op.name: op.shape
            for op in ops.values()
            if op.opcode not in hlo.NAMES | {"while"}
            and not op.target.startswith("kvjax_append")
            and max(op.sizes, default=0) >= SMALL
        }
        assert made == {}


@over(CASES)
def test_devices_exchange_activations_only(case, programs):
    computations, entry = hlo.parse(programs[case].text)
    ops = hlo.step_of(computations, entry)
    found = [op for op in ops.values() if hlo.COLLECTIVE.fullmatch(op.opcode)]
    outside = [
        op.name
        for name, other in computations.items()
        for op in other.values()
        if hlo.COLLECTIVE.fullmatch(op.opcode) and other is not ops
    ]
    assert outside == []
    kinds = [op.opcode.removesuffix("-start") for op in found]
    if case.num_devices == 1:
        assert kinds == []
        return
    # The embedding, then attention's o and the mlp's down in each layer, then the head.
    assert kinds == ["all-reduce"] * (1 + 2 * MODEL.num_layers) + ["all-gather"]
    limit = max(case.num_new * MODEL.width, MODEL.vocab_size)
    assert max(max(op.sizes) for op in found) <= limit


@over(KEPT)
def test_a_cache_that_is_not_donated_is_seen(case, programs):
    """The control: without donation in the outermost jit these checks find the copies."""
    computations, _ = hlo.parse(programs[case].text)
    copies = [op for op in hlo.host_accesses(computations) if op.opcode == "copy"]
    assert len(copies) >= MODEL.num_layers
    assert all(hlo.HOST in op.shape for op in copies)
    assert programs[case].memory["host_alias_size"] == 0
