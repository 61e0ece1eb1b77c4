"""How near to the link's limit does decode come when the cache lies in host memory?

    python experiments/bench_decode.py --geometry=llama-3.1-8b --cells=4096,32768

A token must move the live bytes of the tail over the link once, and the model must
compute: no step is faster than max(live bytes / raw copy rate, device-resident step).
That is the bound; the share of it that an arm reaches is bound / measured. Arms, in
A/B/B/A order within one process, all over the same cells:

    device      every cell in device memory: what computing costs
    ordered     kvjax without a ring: copy, then attend, layer by layer
    pipelined   kvjax with a ring, one arm for each of its settings
    xla         each layer put on the device in the jit, without kvjax

All caches of a case live at once, those of several capacities too: arms of all take
turns. No time is shown unless kvjax's arms drew the same tokens; if they did not, both
are run again step by step and the message says what parts them. --logits=N compares the
last N steps' logits to the bit as well; it turns off XLA's autotuning, which chooses
matrix kernels for each program anew.

With Llama 3.1 8B and a bf16 cache a cell takes 131,072 bytes: at 55 GB/s 32,768 cells
cost 78 ms a token to copy.
"""

import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from attention_arms import attend_once
from decode_rows import (
    Arm,
    Case,
    Parting,
    Run,
    TokensDiffer,
    check_near,
    check_same,
    decline_rows,
    make_rows,
    since,
    table,
    unsteady,
)
from jax.sharding import Mesh
from probe import Probe, Shown, compare_logits, explain, same_bits
from tqdm import tqdm
from xla_alone import PlainTransformer

from kvjax.advice import GB, cell_bytes
from kvjax.cache.state import Cache
from kvjax.config import CACHE_DTYPES, MIB, CacheConfig, RingConfig
from kvjax.delivery.allocate import available_host_bytes, check_host, footprint
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.plan import Decline, plan_ring
from kvjax.delivery.ring import Ring
from kvjax.generate import Decoder
from kvjax.measurement import (
    PIECE_BYTES,
    WARMUP,
    DecodeStep,
    device_memory,
    link_rate,
    provenance,
    random_cache,
    read_rate,
    rewind,
    run_steps,
)
from kvjax.model.checkpoint import load, open_checkpoint
from kvjax.model.transformer import (
    GEOMETRIES,
    ModelConfig,
    Transformer,
    random_model,
    split,
)

ARMS = ("device", "ordered", "pipelined", "xla")
PACKAGES = ("jax", "jaxlib", "flax", "numpy")
NO_AUTOTUNING = "--xla_gpu_autotune_level=0"

GEOMETRY = flags.DEFINE_enum(
    "geometry", "tiny", list(GEOMETRIES), "Random weights of this geometry."
)
MODEL = flags.DEFINE_string(
    "model", None, "GGUF file or Hugging Face directory, instead of --geometry."
)
CELLS = flags.DEFINE_list("cells", ["4096"], "Cells that each sequence holds.")
BATCH = flags.DEFINE_list("batch", ["1"], "Sequences.")
RAGGED = flags.DEFINE_bool(
    "ragged", False, "Spread a batch's lengths from half to one and a half --cells."
)
CAPACITY = flags.DEFINE_list(
    "capacity",
    [],
    "Cells of each sequence's cache; every arm runs over each. Default: what the run "
    "needs.",
)
DEVICE_CELLS = flags.DEFINE_list(
    "device_cells",
    ["0"],
    "Cells that stay on the device, a multiple of 128, or half. Not of the arm device.",
)
ARM = flags.DEFINE_list("arms", ["device", "ordered", "pipelined"], f"Of {ARMS}.")
DEPTH = flags.DEFINE_list("depth", [str(RingConfig().depth)], "Of rings.")
SLOT_MIB = flags.DEFINE_list(
    "slot_mib", [f"{RingConfig().slot_bytes / MIB:g}"], "Of rings."
)
BUDGET_MIB = flags.DEFINE_list(
    "budget_mib", [f"{RingConfig().budget / MIB:g}"], "Of rings."
)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", CACHE_DTYPES, "Of the cache's cells.")
TOKENS = flags.DEFINE_integer(
    "tokens", 16, "Tokens of a timed run, which waits at its end only.", lower_bound=1
)
WAITING = flags.DEFINE_integer(
    "waiting", 4, "Tokens after it, each waited for.", lower_bound=0
)
REPEATS = flags.DEFINE_integer(
    "repeats", 2, "A/B/B/A rounds: each arm runs twice in one.", lower_bound=1
)
LOGITS = flags.DEFINE_integer(
    "logits",
    0,
    "Compares the logits of so many last steps to the bit, and turns off autotuning.",
    lower_bound=0,
)
COMMIT = flags.DEFINE_string("commit", None, "Of this code, where git can't tell.")
JSON = flags.DEFINE_string("json", None, "Writes the rows to this file.")
PLOT = flags.DEFINE_string("plot", None, "Draws ms a token over cells in this file.")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure; see the flags."""

    tokens: int
    waiting: int
    repeats: int
    logits: int

    @property
    def cells(self) -> int:
        """That a run adds to each sequence."""
        return WARMUP + self.tokens + self.waiting


class Program(NamedTuple):
    """A compiled step and the placement of its cells; rings are opened beside it."""

    placement: Placement
    step: DecodeStep
    first: jax.Array  # [B], fed first
    temp_bytes: int  # of device memory that XLA takes for a step
    compile_s: float


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    try:
        return run(
            geometry=GEOMETRY.value,
            model_path=MODEL.value,
            arms=make_arms(
                ARM.value,
                DEVICE_CELLS.value,
                make_rings(DEPTH.value, SLOT_MIB.value, BUDGET_MIB.value),
                numbers("capacity", CAPACITY.value) if CAPACITY.value else [None],
            ),
            cells=numbers("cells", CELLS.value),
            batch=numbers("batch", BATCH.value),
            ragged=RAGGED.value,
            dtype=DTYPE.value,
            effort=Effort(
                tokens=TOKENS.value,
                waiting=WAITING.value,
                repeats=REPEATS.value,
                logits=LOGITS.value,
            ),
            commit=COMMIT.value,
            json_path=JSON.value,
            plot_path=PLOT.value,
        )
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(
    *,
    geometry: str,
    model_path: str | None,
    arms: list[Arm],
    cells: list[int],
    batch: list[int],
    ragged: bool,
    dtype: str,
    effort: Effort,
    commit: str | None,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    check_paths(json_path, plot_path)
    # So that what the driver says is what is used, not the pool that XLA begins with.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if effort.logits:  # read when the first device is asked for
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_AUTOTUNING}"
    mesh = make_mesh()
    device = mesh.devices.flat[0]
    weights = "float32" if device.platform == "cpu" else "bfloat16"
    checkpoint = None if model_path is None else open_checkpoint(model_path)
    config = ModelConfig.of(geometry) if checkpoint is None else checkpoint.config
    cases = [make_case(n, b, ragged, effort) for b in batch for n in cells]
    declines = {
        case: check_case(arms, case, config, mesh, dtype, weights) for case in cases
    }

    link, read = link_rate(device, piece_bytes=PIECE_BYTES), read_rate(device)
    found = {
        "experiment": "bench_decode",
        **provenance(device, PACKAGES, sys.argv, commit),
        "model": geometry if checkpoint is None else checkpoint.path.name,
        "dtype": dtype,
        "weights": weights,
        "tokens": effort.tokens,
        "runs": 2 * effort.repeats,
        "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
        "link_bytes_s": link,
        "read_bytes_s": read,
        "rows": [],
        "declined": [],
        "errors": [],
    }
    print(f"{found['model']} on {device.device_kind}, weights {weights}, cells {dtype}")
    print(
        f"link {link / GB:.1f} GB/s in pieces of 64 MiB, memory {read / GB:,.0f} GB/s"
    )
    if checkpoint is None:
        model = random_model(config, dtype=weights, mesh=mesh)
    else:
        model, config = load(checkpoint, dtype=weights, mesh=mesh)
    bench = Bench(model, config, mesh, dtype, effort, link)
    running = {c: [arm for arm in arms if arm not in declines[c]] for c in cases}
    turns = sum(bench.turns(running[case], case) for case in cases)
    with tqdm(total=turns, leave=False, disable=None) as bar:
        for case in cases:
            declined = decline_rows(declines[case], case)
            found["declined"] += declined
            try:
                rows = bench.measure(running[case], case, bar)
            except TokensDiffer as error:
                found["errors"].append(f"{case.name}: {error}")
                bar.write(f"error: {found['errors'][-1]}; its times are not shown")
            else:
                found["rows"] += rows
                found["errors"] += [
                    f"{case.name}: the logits of {row['label']} differ by up to "
                    f"{row['logits_difference']:.3g}"
                    for row in rows
                    if not row.get("logits_equal", True)
                ]
                bar.write("\n".join(table(case, rows, declined)))
            if json_path is not None:  # after each case: the next may take long
                Path(json_path).write_text(json.dumps(found, indent=1) + "\n")
    if plot_path is not None and found["rows"]:
        from figures import draw_decode

        draw_decode([found], plot_path)
    return 1 if found["errors"] else 0


class Bench:
    """A model, and what it takes to run arms over it."""

    def __init__(
        self,
        model: Transformer,
        config: ModelConfig,
        mesh: Mesh,
        dtype: str,
        effort: Effort,
        link: float,
    ):
        self.model, self.config = model, config
        self.leaves = split(model)[1]
        self.plain = PlainTransformer(config, dtype=str(model.embedding.dtype))
        self.mesh, self.dtype, self.effort, self.link = mesh, dtype, effort, link
        self.piece_rates: dict[int, float] = {}
        self.probes: dict[Placement, Probe] = {}
        self.caches: dict[Placement, Cache] = {}
        self.programs: dict[tuple[Placement, bool], Program] = {}

    def turns(self, arms: list[Arm], case: Case) -> int:
        """Steps of the progress bar that a case takes."""
        programs = {(self.place(arm, case), arm.plain) for arm in arms}
        return len(programs) + len(arms) * 2 * self.effort.repeats

    def measure(self, arms: list[Arm], case: Case, bar: tqdm) -> list[dict]:
        """Runs all arms in A/B/B/A order; rows, once all have drawn the same tokens."""
        programs = self.prepare(arms, case, bar)
        runs = {arm: [] for arm in arms}
        for turn in range(2 * self.effort.repeats):
            for arm in arms if turn % 2 == 0 else arms[::-1]:
                bar.set_description(f"{case.name}: {arm.label}")
                runs[arm].append(self.run(programs[arm], arm, case))
                bar.update()
        agreed = self.check_tokens(runs, programs, case)
        logits = self.logits(runs, programs, case)
        per_cell = cell_bytes(cache_config(arms[0], case, self.config, self.dtype))
        rows = make_rows(runs, agreed, case, per_cell, self.link)
        for row, arm in zip(rows, arms, strict=True):
            row["temp_bytes"] = programs[arm].temp_bytes
            row["compile_s"] = programs[arm].compile_s
            row |= logits.get(arm, {})
            if arm.name == "pipelined":
                row["piece_bytes_s"] = self.piece_rate(arm, programs[arm].placement)
        return rows

    def piece_rate(self, arm: Arm, placement: Placement) -> float:
        """Bytes a second of raw copies in pieces of an arm's slot; measured once."""
        piece = plan_ring(placement, arm.ring).slot_bytes
        if piece not in self.piece_rates:
            device = self.mesh.devices.flat[0]
            self.piece_rates[piece] = link_rate(device, piece_bytes=piece)
        return self.piece_rates[piece]

    def prepare(self, arms: list[Arm], case: Case, bar: tqdm) -> dict[Arm, Program]:
        """Fills cells and compiles; keeps what the case before had of the same kind."""
        keys = {arm: (self.place(arm, case), arm.plain) for arm in arms}
        places = {place for place, _ in keys.values()}
        self.caches = {p: cache for p, cache in self.caches.items() if p in places}
        kept = {key: made for key, made in self.programs.items() if key[0] in places}
        self.programs = kept
        self.probes = {p: probe for p, probe in self.probes.items() if p in places}
        for arm, (place, plain) in keys.items():
            if place not in self.caches:
                bar.set_description(f"{case.name}: filling {arm.label}")
                self.caches[place] = random_cache(place, case.lengths)
            if (place, plain) not in self.programs:
                bar.set_description(f"{case.name}: compiling {arm.label}")
                self.programs[place, plain] = self.program(place, plain)
                bar.update()
        return {arm: self.programs[key] for arm, key in keys.items()}

    def place(self, arm: Arm, case: Case) -> Placement:
        return place_cells(arm, case, self.config, self.mesh, self.dtype)

    def program(self, placement: Placement, plain: bool) -> Program:
        start = time.perf_counter()
        decoder = Decoder(self.plain if plain else self.model, placement)
        first = np.arange(7, 7 + placement.config.batch_size, dtype=np.int32)
        first = decoder.place(first % decoder.vocab_size)
        step = DecodeStep(decoder, self.leaves)
        memory = step.compile(first, self.caches[placement]).memory_analysis()
        return Program(
            placement=placement,
            step=step,
            first=first,
            temp_bytes=memory.temp_size_in_bytes,
            compile_s=time.perf_counter() - start,
        )

    def run(self, program: Program, arm: Arm, case: Case) -> Run:
        """Rewinds the cache, warms up, then times; a ring lives as long as that."""
        device = self.mesh.devices.flat[0]
        before = device_memory(device)
        cache = self.rewound(program, case)
        with open_ring(arm, program.placement) as ring:
            warm = run_steps(program.step, program.first, cache, WARMUP)
            check_ring(arm, ring)
            start = ring.stats() if ring else None
            timed = run_steps(
                program.step, warm.drawn[-1], warm.cache, self.effort.tokens
            )
            end = ring.stats() if ring else None
            drawn, cache, waiting_s = [*warm.drawn, *timed.drawn], timed.cache, []
            for _ in range(self.effort.waiting):
                one = run_steps(program.step, drawn[-1], cache, 1)
                waiting_s.append(one.seconds)
                drawn, cache = drawn + one.drawn, one.cache
            after = device_memory(device)
        self.caches[program.placement] = cache
        return Run(
            step_s=timed.seconds / self.effort.tokens,
            waiting_s=waiting_s,
            tokens=np.stack([np.asarray(tokens) for tokens in drawn]),
            delivered=since(start, end) if ring else None,
            ring_bytes=end.ring_bytes if ring else 0,
            num_slots=end.num_slots if ring else 0,
            ring_driver_bytes=before.free_bytes - after.free_bytes if ring else 0,
            used_bytes=after.total_bytes - after.free_bytes,
        )

    def rewound(self, program: Program, case: Case) -> Cache:
        place = program.placement
        return rewind(place, self.caches[place], case.lengths)

    def feed(self, program: Program, case: Case, tokens: np.ndarray) -> np.ndarray:
        """What a program draws if it is fed these tokens [steps, B], not its own."""
        cache = self.rewound(program, case)
        drawn, fed = [], program.first
        for row in tokens:
            done = run_steps(program.step, fed, cache, 1)
            drawn.append(np.asarray(done.drawn[0]))
            fed, cache = jax.device_put(row, program.first.sharding), done.cache
        self.caches[program.placement] = cache
        return np.stack(drawn)

    def check_tokens(
        self, runs: dict[Arm, list[Run]], programs: dict[Arm, Program], case: Case
    ) -> dict[Arm, float | None]:
        """The share of tokens in which each arm agrees; None if nothing can tell.

        xla is fed kvjax's tokens one by one, so that a near tie which its rounding
        turns doesn't change what comes after.

        Raises:
          TokensDiffer: an arm doesn't draw them.
        """
        try:
            wanted = check_same(runs)
        except TokensDiffer as error:
            why = self.explain(error.parting, runs, programs, case)
            raise TokensDiffer(f"{error}. {why}", error.parting) from error
        if wanted is None:
            return dict.fromkeys(runs)
        agreed = dict.fromkeys(runs, 1.0)
        for arm in runs:
            if arm.plain:
                drawn = self.feed(programs[arm], case, wanted)
                agreed[arm] = check_near(arm, drawn, wanted)
        return agreed

    def watch(
        self, program: Program, arm: Arm, case: Case, tokens: np.ndarray, last: int
    ) -> list[Shown]:
        """The last steps of an arm that is fed these tokens [steps, B] in turn."""
        place = program.placement
        if place not in self.probes:
            dtype = str(self.model.embedding.dtype)
            self.probes[place] = Probe(self.config, dtype, place)
        cache, shown = self.rewound(program, case), deque(maxlen=last)
        with open_ring(arm, place):
            for fed in [np.asarray(program.first), *tokens[:-1]]:
                step, cache = self.probes[place](self.leaves, cache, fed)
                shown.append(step)
        self.caches[place] = cache
        return list(shown)

    def logits(
        self, runs: dict[Arm, list[Run]], programs: dict[Arm, Program], case: Case
    ) -> dict[Arm, dict]:
        """What rows say of the logits of each kvjax arm against the first one's."""
        own = [arm for arm in runs if not arm.plain and self.effort.logits]
        found, control = {}, None
        for arm in own:
            tokens, last = runs[own[0]][0].tokens, self.effort.logits
            shown = self.watch(programs[arm], arm, case, tokens, last)
            control = control or shown
            found[arm] = compare_logits(shown, control)
        return found

    def explain(
        self,
        parting: Parting,
        runs: dict[Arm, list[Run]],
        programs: dict[Arm, Program],
        case: Case,
    ) -> str:
        """What parts two arms: runs both again, watched, and attention alone."""
        tokens = runs[parting.arms[0]][0].tokens[: parting.step + 1]
        shown, alone = [], []
        for arm in parting.arms:
            program = programs[arm]
            shown.append(self.watch(program, arm, case, tokens, len(tokens)))
            cache = self.rewound(program, case)
            with open_ring(arm, program.placement):
                alone.append(attend_once(program.placement, cache))
        labels = tuple(arm.label for arm in parting.arms)
        same = "" if same_bits(*alone) else "NOT "
        runs_differ = ", ".join(unsteady(runs)) or "none"
        return (
            f"Arms whose own runs differ: {runs_differ}. Attention alone, of equal "
            f"queries over both caches, is {same}equal to the bit. "
            + explain(labels, tuple(shown), parting.sequence, parting.tokens)
        )


def open_ring(arm: Arm, placement: Placement) -> AbstractContextManager[Ring | None]:
    return nullcontext() if arm.ring is None else Ring.open(placement, arm.ring)


def check_ring(arm: Arm, ring: Ring | None) -> None:
    """Raises ValueError if a pipelined arm's ring was declined once it ran."""
    if arm.name == "pipelined" and ring.declines():
        raise ValueError(f"{arm.label} got no ring: {set(ring.declines().values())}")


def make_rings(
    depths: Sequence[str], slots_mib: Sequence[str], budgets_mib: Sequence[str]
) -> list[RingConfig]:
    """A ring for each combination of the flags' values."""
    return [
        RingConfig(depth=d, slot_bytes=round(s * MIB), budget_bytes=round(b * MIB))
        for d, s, b in itertools.product(
            numbers("depth", depths),
            numbers("slot_mib", slots_mib, float),
            numbers("budget_mib", budgets_mib, float),
        )
    ]


def make_arms(
    names: Sequence[str],
    device_cells: Sequence[str],
    rings: list[RingConfig],
    capacities: list[int | None],
) -> list[Arm]:
    """The arms in the order of ARMS, for each capacity; some for each place or ring."""
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise ValueError(f"--arms must be of {', '.join(ARMS)}, got {unknown}")
    for cells in device_cells:
        if cells != "half" and not cells.isdecimal():
            raise ValueError(f"--device_cells must be numbers or half, got {cells!r}")
    arms = [Arm(name="device")] if "device" in names else []
    for cells in device_cells:
        if "ordered" in names:
            arms.append(
                Arm(name="ordered", device_cells=cells, ring=replace(rings[0], depth=0))
            )
        if "pipelined" in names:
            arms += [Arm(name="pipelined", device_cells=cells, ring=r) for r in rings]
    if "xla" in names:
        arms.append(Arm(name="xla", device_cells="0"))
    return [replace(arm, capacity=cells) for cells in capacities for arm in arms]


def make_case(cells: int, batch: int, ragged: bool, effort: Effort) -> Case:
    lengths = [cells] * batch
    if ragged:  # evenly from half to one and a half, in no order
        spaced = np.linspace(0.5 * cells, 1.5 * cells, batch).round().astype(int)
        lengths = np.random.default_rng(0).permutation(spaced).tolist()
    needed = max(lengths) + effort.cells
    return Case(cells=cells, lengths=tuple(lengths), needed=needed)


def cache_config(arm: Arm, case: Case, config: ModelConfig, dtype: str) -> CacheConfig:
    return CacheConfig(
        num_layers=config.num_layers,
        batch_size=len(case.lengths),
        capacity=arm.cells(case),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device_cells=arm.cells_on_device(case),
    )


def place_cells(
    arm: Arm, case: Case, config: ModelConfig, mesh: Mesh, dtype: str
) -> Placement:
    cache = cache_config(arm, case, config, dtype)
    return Placement(config=cache, num_heads=config.num_heads, mesh=mesh)


def check_case(
    arms: list[Arm],
    case: Case,
    config: ModelConfig,
    mesh: Mesh,
    dtype: str,
    weights: str,
) -> dict[Arm, str]:
    """Refuses what cannot run before anything is loaded. All caches live at once.

    Returns:
      Of several pipelined arms those whose ring is declined, and why.

    Raises:
      ValueError: an ordered arm has no tail, no pipelined one a ring, a capacity is too
        small, or memory is short.
    """
    needs, declined = {}, {}
    for arm in arms:
        check_capacity(arm, case)
        placement = place_cells(arm, case, config, mesh, dtype)
        needs[placement] = footprint(placement)
        if arm.ring is None:
            continue
        plan = plan_ring(placement, replace(arm.ring, depth=arm.ring.depth or 1))
        if isinstance(plan, Decline):
            declined[arm] = plan.reason
        check_host(placement)
    pipelined = {arm for arm in arms if arm.name == "pipelined"}
    for arm, reason in declined.items():
        if arm not in pipelined or declined.keys() >= pipelined:
            raise ValueError(f"{arm.label} cannot run at {case.name}: {reason}")
    on_device = sum(need.device_bytes for need in needs.values())
    on_device += config.num_parameters * jnp.dtype(weights).itemsize
    on_host = sum(need.host_bytes for need in needs.values())
    for what, need, free in (
        ("device", on_device, free_device_bytes(mesh.devices.flat[0])),
        ("host", on_host, available_host_bytes()),
    ):
        if need > free:
            raise ValueError(
                f"{case.name} needs {need / GB:.1f} GB of {what} memory for weights "
                f"and the cells of all arms, {free / GB:.1f} GB are free: lower "
                "--cells or --batch, or leave arms out"
            )
    return declined


def check_capacity(arm: Arm, case: Case) -> None:
    if arm.cells(case) < case.needed:
        raise ValueError(
            f"--capacity must be at least {case.needed} ({max(case.lengths)} cells and "
            f"{case.needed - max(case.lengths)} tokens), got {arm.capacity}"
        )


def free_device_bytes(device: jax.Device) -> int:
    """What XLA may still allocate."""
    stats = device.memory_stats()
    if stats is None:
        return device_memory(device).free_bytes
    return stats["bytes_limit"] - stats["bytes_in_use"]


def check_paths(json_path: str | None, plot_path: str | None) -> None:
    """Refuses a path that couldn't be written once all the work is done."""
    for flag, path in (("json", json_path), ("plot", plot_path)):
        if path and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise ValueError(
                f"--{flag} must be a file in a folder that exists, got {path!r}"
            )
    if plot_path is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: install it with the extra plot")


def numbers(flag: str, values: Sequence[str], kind: type = int) -> list:
    """The numbers of a list flag."""
    try:
        found = [kind(value) for value in values]
    except ValueError as error:
        raise ValueError(f"--{flag} must be numbers, got {list(values)}") from error
    if not found or min(found) < 0:
        raise ValueError(f"--{flag} must be numbers from 0 on, got {list(values)}")
    return found


if __name__ == "__main__":
    app.run(main)
