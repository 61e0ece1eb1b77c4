"""XLA's scheduled program, read from its text: ops in the order in which they run."""

import math
import re
from typing import NamedTuple

HOST = "S(5)"  # in a shape: the array lies in pinned host memory
# Ops that name arrays and run nothing.
NAMES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|ragged-all-to-all)(-start)?"
)
COMPUTATION = re.compile(r"(ENTRY )?%([\w.-]+) \(.*\{$")
OP = re.compile(r"\s+(?:ROOT )?%([\w.-]+) = (.*)$")
ARRAY = re.compile(r"\b[a-z]+[0-9a-z]*\[([0-9,]*)\]")


class Op(NamedTuple):
    """One instruction.

    Attributes:
      name: Unique in its computation.
      opcode: What it does.
      shape: Its result, as text.
      operands: Their names.
      rest: Its attributes, as text.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    rest: str

    @property
    def target(self) -> str:
        """Whom a custom call calls; "" for other ops."""
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found.group(1) if found else ""

    @property
    def sizes(self) -> list[int]:
        """Elements of each array of the result."""
        return elements(self.shape)


Computation = dict[str, Op]  # by name, in the order in which they run


def elements(shape: str) -> list[int]:
    """Elements of each array in a shape's text."""
    dims = [found.split(",") for found in ARRAY.findall(shape)]
    return [math.prod(int(size) for size in sizes if size) for sizes in dims]


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations by name, and the entry's name.

    Raises:
      ValueError: the program is not scheduled.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("the program is not scheduled: its order would mean nothing")
    computations, entry, ops = {}, "", {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := COMPUTATION.match(line):
            ops = computations[header.group(2)] = {}
            entry = header.group(2) if header.group(1) else entry
        elif found := OP.match(line):
            ops[found.group(1)] = _op(*found.groups())
    return computations, entry


def _op(name: str, text: str) -> Op:
    shape_end = _closing(text, 0) if text[0] == "(" else text.index(" ")
    shape, text = text[:shape_end], text[shape_end:].lstrip()
    start = text.index("(")
    end = _closing(text, start)
    operands = tuple(re.findall(r"%([\w.-]+)", text[start:end]))
    return Op(name, text[:start], shape, operands, text[end:])


def _closing(text: str, start: int) -> int:
    """The place behind the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    raise ValueError(f"no closing bracket in {text[:80]!r}")


def step_of(computations: dict[str, Computation], entry: str) -> Computation:
    """The computation that holds a step: the loop's body if there is a loop."""
    loops = [op for op in computations[entry].values() if op.opcode == "while"]
    if not loops:
        return computations[entry]
    (loop,) = loops
    return computations[re.search(r"body=%([\w.-]+)", loop.rest).group(1)]


def all_ops(computations: dict[str, Computation]) -> list[Op]:
    return [op for ops in computations.values() for op in ops.values()]


def collectives(ops: Computation) -> list[Op]:
    return [op for op in ops.values() if COLLECTIVE.fullmatch(op.opcode)]


def kernel(computations: dict[str, Computation], op: Op) -> tuple:
    """What an op computes, whatever it and its parts are called."""
    called = re.search(r"\bcalls=%([\w.-]+)", op.rest)
    ops = computations[called.group(1)] if called else {op.name: op}
    places = {name: place for place, name in enumerate(ops)}
    return tuple(
        (
            part.opcode,
            part.shape,
            tuple(places.get(name) for name in part.operands),
            re.sub(r"%[\w.-]+|, (metadata|backend_config)=.*", "", part.rest),
        )
        for part in ops.values()
    )


def source(ops: Computation, name: str) -> Op:
    """The op that made an array, behind the names that it went by."""
    while ops[name].opcode in ("bitcast", "get-tuple-element"):
        name = ops[name].operands[0]
    return ops[name]


def host_accesses(computations: dict[str, Computation]) -> list[Op]:
    """Ops that read or make arrays in host memory, kvjax's calls left out."""

    def touches(op: Op, ops: Computation) -> bool:
        shapes = [op.shape, *(ops[name].shape for name in op.operands if name in ops)]
        return any(HOST in shape for shape in shapes)

    return [
        op
        for ops in computations.values()
        for op in ops.values()
        if touches(op, ops)
        and op.opcode not in NAMES | {"while"}
        and not op.target.startswith("kvjax_")
    ]
