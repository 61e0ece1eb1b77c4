"""What XLA's GPU compiler makes of the decoder's programs: order, copies, collectives.

Compiled for NVIDIA H200s without one. What a step must come out as, where half of each
layer's cells lie on the device (the two appends in either order):

    begin | append append attend | append append attend | ...
            device tail   0        device tail   1
"""

import importlib.util
import itertools
import re
from collections import Counter
from typing import NamedTuple

import pytest

if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
    pytest.skip("needs XLA's GPU compiler: the extra test-aot", allow_module_level=True)

import hlo
from aot import CELLS, DEVICE_CELLS, MODEL, Case, compile_all

FUNCTIONS, PLACEMENTS = ("step", "prefill", "steps"), ("tail", "half", "device")
CASES = [
    *itertools.starmap(Case, itertools.product(FUNCTIONS, PLACEMENTS, (1, 2))),
    Case("step", "mixed"),
    Case("steps", "half", 8),
]
KEPT = [Case("step", "tail", 1, False), Case("prefill", "half", 1, False)]
FLOAT = re.compile(r"\b(f32|bf16)\[")
SMALL = 1 << 14  # elements; every weight of every device has more


class Program(NamedTuple):
    """A compiled case, read.

    Attributes:
      text: The scheduled HLO.
      memory: What XLA says that it takes, in bytes, by name.
      computations: By name.
      entry: Of them, where it starts.
      step: Of them, the one that holds a step.
    """

    text: str
    memory: dict[str, int]
    computations: dict[str, hlo.Computation]
    entry: hlo.Computation
    step: hlo.Computation

    @property
    def calls(self) -> list[hlo.Op]:
        """kvjax's calls in a step, in the order in which they run."""
        return [op for op in self.step.values() if op.target.startswith("kvjax_")]


@pytest.fixture(scope="module")
def programs(request, tmp_path_factory) -> dict[Case, Program]:
    """All programs that the selected tests ask for."""
    asked = {}  # in order, each once
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            case, other = map(item.callspec.params.get, ("case", "other"))
            asked[case] = None
            if other is not None:
                asked[case._replace(placement=other)] = None
    compiled = compile_all(list(asked), tmp_path_factory.mktemp("aot"))
    programs = {}
    for case, (text, memory) in compiled.items():
        parsed, entry = hlo.parse(text)
        step = hlo.step_of(parsed, entry)
        programs[case] = Program(text, memory, parsed, parsed[entry], step)
    return programs


def over(cases: list[Case]):
    return pytest.mark.parametrize("case", cases, ids=str)


def parts(case: Case) -> list[tuple[int, int]]:
    """(device cells, tail's cells) of each layer, by one sequence."""
    on_device = DEVICE_CELLS[case.placement]
    if isinstance(on_device, int):
        on_device = (on_device,) * MODEL.num_layers
    return [(cells, CELLS - cells) for cells in on_device]


def part_bytes(case: Case) -> tuple[int, int]:
    """(device cells, tails) of one device, all layers, bfloat16."""
    record = MODEL.num_kv_heads // case.num_devices * 2 * MODEL.head_dim * 2
    on_device, tails = (sum(cells) for cells in zip(*parts(case), strict=True))
    return on_device * record, tails * record


def expected_calls(case: Case) -> list[str]:
    """begin if there is a tail; then for each layer one append a part, one attend."""
    calls = ["begin"] if part_bytes(case)[1] else []
    for on_device, tail in parts(case):
        calls += ["append_device"] * bool(on_device) + ["append_ring"] * bool(tail)
        calls += ["attend_ring" if tail else "attend_device"]
    return calls


def in_order(names: list[str]) -> list[str]:
    """With a layer's appends, which do not depend on each other, sorted by part."""
    runs = itertools.groupby(names, lambda name: name.startswith("append"))
    return [name for appends, run in runs for name in (sorted(run) if appends else run)]


@over(CASES)
def test_nothing_but_our_calls_touches_a_tail(case, programs):
    computations = programs[case].computations
    assert hlo.host_accesses(computations) == []
    held = [op for op in hlo.all_ops(computations) if hlo.HOST in op.shape]
    assert bool(held) == (part_bytes(case)[1] > 0)


@over(CASES)
def test_cells_are_updated_where_they_lie(case, programs):
    on_device, tails = part_bytes(case)
    memory = programs[case].memory
    assert memory["host_alias_size"] == tails
    assert memory["host_argument_size"] == tails
    assert memory["host_output_size"] == tails
    assert memory["host_temp_size"] == 0
    assert on_device <= memory["alias_size"] < on_device + 64  # lengths and stamp too


@over(CASES)
def test_nothing_runs_on_the_host(case, programs):
    for mark in ('execution_thread="host"', "_xla_compute_type", "host_execute"):
        assert mark not in programs[case].text


@over(CASES)
def test_calls_run_in_program_order(case, programs):
    calls = programs[case].calls
    names = [op.target.removeprefix("kvjax_").rpartition("_")[0] for op in calls]
    assert in_order(names) == expected_calls(case)
    attributes = [re.search(r"\blayer = (\d+)", call.rest) for call in calls]
    layers = [int(found.group(1)) for found in attributes if found]
    assert layers == [i for i, (_, tail) in enumerate(parts(case)) if tail]


@over(CASES)
def test_calls_are_only_in_the_step(case, programs):
    ops = hlo.all_ops(programs[case].computations)
    calls = [op for op in ops if op.target.startswith("kvjax_")]
    assert len(calls) == len(programs[case].calls)


@over(CASES)
def test_attend_reads_what_its_appends_wrote(case, programs):
    step, wrote = programs[case].step, []
    for call in programs[case].calls:
        if "append" in call.target:
            wrote.append(call.name)
        elif "attend" in call.target:
            read = [hlo.source(step, name).name for name in call.operands]
            assert sorted(read[-len(wrote) :]) == sorted(wrote), call.name
            wrote = []


@over([case for case in CASES if part_bytes(case)[1]])
def test_nothing_reads_a_weight_before_begin(case, programs):
    """Not even could: all that reads a large array needs what begin returns."""
    step, behind = programs[case].step, set()
    for op in step.values():
        if "begin" in op.target or behind.intersection(op.operands):
            behind.add(op.name)
        elif op.opcode not in hlo.NAMES:
            assert all(max(step[n].sizes, default=0) < SMALL for n in op.operands), op
    assert behind


@over([case for case in CASES if case.function == "step" and part_bytes(case)[1]])
def test_one_kernel_runs_before_begin(case, programs):
    """What the tokens need. All else waits, and is captured in the first graph."""
    calls, before = programs[case].calls, []
    for op in programs[case].step.values():
        if op.name == calls[0].name:
            break
        before += [op.name] * (op.opcode not in hlo.NAMES)
    assert len(before) == 1


@over([case for case in CASES if case.function == "step"])
def test_a_decode_step_copies_nothing(case, programs):
    """Not even lengths and stamp, a few bytes: each copy is a kernel."""
    ops = programs[case].step.values()
    assert [op.name for op in ops if op.opcode.startswith("copy")] == []


@over([case for case in CASES if case.function == "step"])
def test_a_layers_norm_is_sliced_within_its_kernel(case, programs):
    step = programs[case].step
    shape = f"bf16[{2 * MODEL.num_layers + 1},{MODEL.width}]"
    (norms,) = [op.name for op in step.values() if op.shape.startswith(shape)]
    readers = [op for op in step.values() if norms in op.operands]
    assert len(readers) >= 2 * MODEL.num_layers + 1
    for op in readers:
        assert op.opcode == "fusion" and "wrapped_" not in op.rest, op


@pytest.mark.parametrize("other", ["half", "device"])
@over([Case(function, "tail") for function in FUNCTIONS])
def test_numbers_are_computed_alike_wherever_cells_lie(case, other, programs):
    """The same kernels make every float; only places of cells differ."""

    def kernels(program: Program) -> Counter:
        floats = [op for op in program.step.values() if FLOAT.search(op.shape)]
        ran = [op for op in floats if op.opcode not in hlo.NAMES]
        own = [op for op in ran if not op.target.startswith("kvjax_")]
        return Counter(hlo.kernel(program.computations, op) for op in own)

    wanted = kernels(programs[case])
    assert wanted.total() > 8 * MODEL.num_layers
    assert kernels(programs[case._replace(placement=other)]) == wanted


@over([case for case in CASES if case.function != "prefill"])
def test_a_decode_step_makes_no_large_array(case, programs):
    """Weights and cells are read where they lie: not copied, transposed or gathered."""
    for ops in (programs[case].entry, programs[case].step):
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
    found = hlo.collectives(programs[case].step)
    everywhere = map(hlo.collectives, programs[case].computations.values())
    assert len(found) == sum(map(len, everywhere))
    kinds = [op.opcode.removesuffix("-start") for op in found]
    # The embedding, then attention's o and the mlp's down in each layer, then the head.
    once = ["all-reduce"] * (1 + 2 * MODEL.num_layers) + ["all-gather"]
    assert kinds == (once if case.num_devices > 1 else [])
    largest = max(case.num_new * MODEL.width, MODEL.vocab_size)
    assert all(max(op.sizes) <= largest for op in found)


@over(KEPT)
def test_a_cache_that_is_not_donated_is_seen(case, programs):
    """The control: where the outermost jit doesn't donate, these checks find a copy."""
    accesses = hlo.host_accesses(programs[case].computations)
    copies = [op for op in accesses if op.opcode == "copy"]
    assert len(copies) == 1
    assert all(hlo.HOST in op.shape for op in copies)
    assert programs[case].memory["host_alias_size"] == 0
