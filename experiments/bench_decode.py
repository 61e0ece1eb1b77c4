"""How near to the link's limit does decode come when the cache lies in host memory?

    python experiments/bench_decode.py --geometry=llama-3.1-8b --cells=4096,32768

A token must move the live bytes of the tail over the link once, and the model must
compute: no step is faster than max(live bytes / raw copy rate, device-resident step).
That is the bound; the share of it that an arm reaches is bound / measured. Over several
devices the copies are those of the device that takes longest for its own, at the rate
that it has while all of them copy. Arms, in A/B/B/A order within one process, all over
the same cells:

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
cost 78 ms a token to copy, and half of that on each of two devices.

    python experiments/bench_decode.py --mesh=1,2                    # arms over both
    python experiments/bench_decode.py --mesh=2 --local_processes=2  # a process each
"""

import json
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import processes
from absl import app, flags, logging
from attention_arms import attend_once
from commit import COMMIT
from decode_cases import (
    ARMS,
    Effort,
    Meshes,
    cache_config,
    check_case,
    make_arms,
    make_case,
    make_rings,
    mesh_sizes,
    numbers,
    place_cells,
)
from decode_meshes import (
    Theirs,
    gathered,
    key_of,
    measure_links,
    open_meshes,
    rate_alone,
    read_theirs,
    shown,
)
from decode_rows import (
    Arm,
    Case,
    Links,
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
from paths import check_paths
from probe import Probe, Shown, compare_logits, explain, same_bits
from tqdm import tqdm
from waiting import check_again, wait_for_each
from xla_alone import PlainPlacement, PlainTransformer

from kvjax.advice import GB, cell_bytes
from kvjax.cache.state import Cache
from kvjax.config import CACHE_DTYPES, MIB, RingConfig
from kvjax.delivery import agreement
from kvjax.delivery.allocate import footprint
from kvjax.delivery.placement import Placement
from kvjax.delivery.plan import plan_ring
from kvjax.delivery.ring import Ring, RingStats
from kvjax.generate import Decoder
from kvjax.measurement import (
    WARMUP,
    DecodeStep,
    device_memory,
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

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
NO_AUTOTUNING = "--xla_gpu_autotune_level=0"

GEOMETRY = flags.DEFINE_enum(
    "geometry", "tiny", list(GEOMETRIES), "Random weights of this geometry."
)
MODEL = flags.DEFINE_string(
    "model", None, "GGUF file or Hugging Face directory, instead of --geometry."
)
CELLS = flags.DEFINE_list("cells", ["4096"], "Cells that each sequence holds.")
BATCH = flags.DEFINE_list(
    "batch", ["1"], "Sequences. Cases run in the order given, all --cells of a batch."
)
MESH = flags.DEFINE_list(
    "mesh",
    ["1"],
    "Devices to split the heads over: 3, or tp=3; several are arms of one run. On a "
    "CPU, emulated.",
)
AGAINST = flags.DEFINE_string(
    "against",
    None,
    "JSON of the same cases in another layout, whose tokens all arms are held against.",
)
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
    "slot_mib", [], "Of rings. Default: RingConfig's (docs/delivery.md, Settings)."
)
BUDGET_MIB = flags.DEFINE_list(
    "budget_mib", [f"{RingConfig().budget / MIB:g}"], "Of rings."
)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", CACHE_DTYPES, "Of the cache's cells.")
TOKENS = flags.DEFINE_integer(
    "tokens",
    32,
    "Tokens of a timed run, which waits at its end only. It begins with a full ring, "
    "which few tokens share.",
    lower_bound=1,
)
WAITING = flags.DEFINE_integer(
    "waiting",
    4,
    "Tokens out of its midst, drawn again and each waited for.",
    lower_bound=0,
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
JSON = flags.DEFINE_string("json", None, "Writes the rows to this file.")
PLOT = flags.DEFINE_string("plot", None, "Draws ms a token over cells in this file.")


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
    if processes.starts_others():
        return processes.launch()
    try:
        sizes = mesh_sizes(MESH.value)
        rings = make_rings(DEPTH.value, SLOT_MIB.value, BUDGET_MIB.value)
        capacities = numbers("capacity", CAPACITY.value) if CAPACITY.value else [None]
        return run(
            geometry=GEOMETRY.value,
            model_path=MODEL.value,
            sizes=sizes,
            arms=make_arms(ARM.value, DEVICE_CELLS.value, rings, sizes, capacities),
            cells=numbers("cells", CELLS.value),
            batch=numbers("batch", BATCH.value, least=1),
            ragged=RAGGED.value,
            dtype=DTYPE.value,
            effort=Effort(
                tokens=TOKENS.value,
                waiting=WAITING.value,
                repeats=REPEATS.value,
                logits=LOGITS.value,
            ),
            against=AGAINST.value,
            commit=COMMIT.value,
            json_path=JSON.value,
            plot_path=PLOT.value,
        )
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        processes.tell(f"error: {error}")
        return 2


def run(
    *,
    geometry: str,
    model_path: str | None,
    sizes: list[int],
    arms: list[Arm],
    cells: list[int],
    batch: list[int],
    ragged: bool,
    dtype: str,
    effort: Effort,
    against: str | None,
    commit: str | None,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    check_paths(json_path, plot_path)
    # So that what the driver says is what is used, not the pool that XLA begins with.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if effort.logits:  # read when the first device is asked for
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_AUTOTUNING}"
    meshes = open_meshes(sizes)
    device = jax.local_devices()[0]
    weights = "float32" if device.platform == "cpu" else "bfloat16"
    checkpoint = None if model_path is None else open_checkpoint(model_path)
    config = ModelConfig.of(geometry) if checkpoint is None else checkpoint.config
    cases = [make_case(n, b, ragged, effort) for b in batch for n in cells]
    facts = {
        "model": geometry if checkpoint is None else checkpoint.path.name,
        "dtype": dtype,
        "weights": weights,
    }
    theirs = (
        {}
        if against is None
        else read_theirs(against, facts, cases, sizes, WARMUP + effort.tokens)
    )
    declines = {
        case: agreement.together(
            lambda case=case: check_case(arms, case, config, meshes, dtype, weights)
        )
        for case in cases
    }

    links, read = measure_links(meshes), read_rate(device)
    found = {
        "experiment": "bench_decode",
        **provenance(device, PACKAGES, processes.typed(), commit),
        **facts,
        "processes": jax.process_count(),
        "tokens": effort.tokens,
        "runs": 2 * effort.repeats,
        "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
        "link_bytes_s": links.alone,
        "read_bytes_s": read,
        "rows": [],
        "declined": [],
        "errors": [],
    }
    report = Report(found, json_path)
    report.say(
        f"{found['model']} on {device.device_kind}, weights {weights}, cells {dtype}",
        f"link {links.alone / GB:.1f} GB/s in pieces of 64 MiB, memory "
        f"{read / GB:,.0f} GB/s",
    )
    models = {}
    for size, mesh in meshes.items():
        if checkpoint is None:
            models[size] = random_model(config, dtype=weights, mesh=mesh)
        else:
            models[size], config = load(checkpoint, dtype=weights, mesh=mesh)
    bench = Bench(models, config, meshes, dtype, effort, links, theirs)
    running = {c: [arm for arm in arms if arm not in declines[c]] for c in cases}
    with tqdm(
        total=sum(bench.turns(running[case], case) for case in cases),
        leave=False,
        disable=None if report.heard else True,
    ) as bar:
        for case in cases:
            declined = decline_rows(declines[case], case)
            found["declined"] += declined
            try:
                rows = bench.measure(running[case], case, bar)
            except TokensDiffer as error:
                report.differs(case, error)
            else:
                report.add(case, rows, declined)
    if plot_path is not None and found["rows"] and report.heard:
        from figures import draw_decode

        draw_decode([found], plot_path)
    return 1 if found["errors"] else 0


class Report:
    """What was found: shown and written by the first process, after each case.

    Attributes:
      heard: Whether this is the process that says it.
    """

    def __init__(self, found: dict, json_path: str | None):
        self.heard = jax.process_index() == 0
        self._found, self._json_path = found, json_path

    def say(self, *lines: str) -> None:
        if self.heard:
            tqdm.write("\n".join(lines))

    def add(self, case: Case, rows: list[dict], declined: list[dict]) -> None:
        self._found["rows"] += rows
        self._found["errors"] += [
            f"{case.name}: the logits of {row['label']} differ by up to "
            f"{row['logits_difference']:.3g}"
            for row in rows
            if not row.get("logits_equal", True)
        ]
        self.say(*table(case, rows, declined))
        self._write()

    def differs(self, case: Case, error: TokensDiffer) -> None:
        self._found["errors"].append(f"{case.name}: {error}")
        self.say(f"error: {self._found['errors'][-1]}; its times are not shown")
        self._write()

    def _write(self) -> None:
        """After each case: the next may take long."""
        if self.heard and self._json_path is not None:
            text = json.dumps(self._found, indent=1) + "\n"
            Path(self._json_path).write_text(text)


class Bench:
    """A model on each mesh, and what it takes to run arms over them."""

    def __init__(
        self,
        models: dict[int, Transformer],
        config: ModelConfig,
        meshes: Meshes,
        dtype: str,
        effort: Effort,
        links: Links,
        theirs: Theirs,
    ):
        self.models, self.config, self.meshes = models, config, meshes
        self.leaves = {size: split(model)[1] for size, model in models.items()}
        weights = next(iter(models.values())).embedding.dtype
        self.plain = PlainTransformer(config, dtype=str(weights))
        self.dtype, self.effort, self.links = dtype, effort, links
        self.theirs = theirs
        self.piece_rates: dict[int, float] = {}
        self.probes: dict[Placement, Probe] = {}
        self.caches: dict[Placement, Cache] = {}
        self.programs: dict[Placement, Program] = {}

    def turns(self, arms: list[Arm], case: Case) -> int:
        """Steps of the progress bar that a case takes."""
        programs = {self.place(arm, case) for arm in arms}
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
        rows = make_rows(runs, agreed, case, per_cell, self.links)
        for row, arm in zip(rows, arms, strict=True):
            need = footprint(programs[arm].placement)
            row["processes"] = jax.process_count()
            row["against"] = bool(self.theirs)
            row["pinned_bytes"] = need.tail_bytes
            row["pinned_host_bytes"] = need.tail_bytes * arm.devices
            row["temp_bytes"] = programs[arm].temp_bytes
            row["compile_s"] = programs[arm].compile_s
            row["tokens"] = shown(runs[arm][0].tokens)
            row |= logits.get(arm, {})
            if arm.name == "pipelined":
                row["piece_bytes_s"] = self.piece_rate(arm, programs[arm].placement)
        return rows

    def piece_rate(self, arm: Arm, placement: Placement) -> float:
        """Bytes a second of raw copies in pieces of an arm's slot; measured once."""
        piece = plan_ring(placement, arm.ring).slot_bytes
        if piece not in self.piece_rates:
            self.piece_rates[piece] = rate_alone(placement.mesh, piece)
        return self.piece_rates[piece]

    def prepare(self, arms: list[Arm], case: Case, bar: tqdm) -> dict[Arm, Program]:
        """Fills cells and compiles; keeps what the case before had of the same kind."""
        places = {arm: self.place(arm, case) for arm in arms}
        for made in (self.caches, self.programs, self.probes):
            for place in made.keys() - places.values():
                del made[place]
        for arm, place in places.items():
            if place not in self.caches:
                bar.set_description(f"{case.name}: filling {arm.label}")
                self.caches[place] = fill(place, case.lengths)
            if place not in self.programs:
                bar.set_description(f"{case.name}: compiling {arm.label}")
                self.programs[place] = self.program(place)
                bar.update()
        return {arm: self.programs[place] for arm, place in places.items()}

    def place(self, arm: Arm, case: Case) -> Placement:
        return place_cells(arm, case, self.config, self.meshes, self.dtype)

    def program(self, placement: Placement) -> Program:
        start = time.perf_counter()
        size = placement.mesh.size
        plain = isinstance(placement, PlainPlacement)
        decoder = Decoder(self.plain if plain else self.models[size], placement)
        first = np.arange(7, 7 + placement.config.batch_size, dtype=np.int32)
        first = decoder.place(first % decoder.vocab_size)
        step = DecodeStep(decoder, self.leaves[size])
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
        device = program.placement.mesh.local_devices[0]
        before = device_memory(device)
        cache = self.rewound(program, case)
        with open_ring(arm, program.placement) as ring:
            warm = run_steps(program.step, program.first, cache, WARMUP)
            check_ring(arm, ring)
            start = counts(ring)
            timed = run_steps(
                program.step, warm.drawn[-1], warm.cache, self.effort.tokens
            )
            end = counts(ring)
            after = device_memory(device)
            self.caches[program.placement] = timed.cache
            drawn = [*warm.drawn, *timed.drawn]
            waiting_s = self.wait(program, arm, case, drawn)
        return Run(
            step_s=timed.seconds / self.effort.tokens,
            waiting_s=waiting_s,
            tokens=np.stack([np.asarray(tokens) for tokens in drawn]),
            delivered=to_each(start, end),
            ring_bytes=end[0].ring_bytes if end else 0,
            num_slots=end[0].num_slots if end else 0,
            ring_driver_bytes=before.free_bytes - after.free_bytes if ring else 0,
            used_bytes=after.total_bytes - after.free_bytes,
        )

    def wait(
        self, program: Program, arm: Arm, case: Case, drawn: list[jax.Array]
    ) -> list[float]:
        """Seconds of steps that are each waited for."""
        if self.effort.waiting == 0:
            return []
        waited = wait_for_each(
            program.step,
            program.first,
            drawn,
            lambda steps: self.rewound(program, case, steps),
            self.effort.waiting,
        )
        self.caches[program.placement] = waited.cache
        if not arm.plain:
            check_again(arm, drawn, waited)
        return waited.seconds

    def rewound(self, program: Program, case: Case, steps: int = 0) -> Cache:
        """The cache as it was after so many of a run's steps."""
        place = program.placement
        lengths = [length + steps for length in case.lengths]
        return rewind(place, self.caches[place], lengths)

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

        What rounds elsewhere (xla, another mesh than the first, another layout's run)
        is fed the tokens that it is held against one by one, so that a near tie which
        its rounding turns doesn't change what comes after.

        Raises:
          TokensDiffer: an arm doesn't draw them.
        """
        try:
            drawn = check_same(runs)
        except TokensDiffer as error:
            if jax.process_count() > 1:
                raise
            why = self.explain(error.parting, runs, programs, case)
            raise TokensDiffer(f"{error}. {why}", error.parting) from error
        if not drawn and not self.theirs:
            return dict.fromkeys(runs)
        first = next(iter(drawn.values()), None)
        agreed = dict.fromkeys(runs, 1.0)
        for arm in runs:
            wanted = self.theirs.get(key_of(case, arm.devices), first)
            if arm.plain or wanted is not drawn[arm.devices]:
                fed = self.feed(programs[arm], case, wanted)
                agreed[arm] = check_near(arm, fed, wanted)
        return agreed

    def watch(
        self, program: Program, arm: Arm, case: Case, tokens: np.ndarray, last: int
    ) -> list[Shown]:
        """The last steps of an arm that is fed these tokens [steps, B] in turn."""
        place = program.placement
        if place not in self.probes:
            dtype = str(self.models[place.mesh.size].embedding.dtype)
            self.probes[place] = Probe(self.config, dtype, place)
        leaves = self.leaves[place.mesh.size]
        cache, shown = self.rewound(program, case), deque(maxlen=last)
        with open_ring(arm, place):
            for fed in [np.asarray(program.first), *tokens[:-1]]:
                step, cache = self.probes[place](leaves, cache, fed)
                shown.append(step)
        self.caches[place] = cache
        return list(shown)

    def logits(
        self, runs: dict[Arm, list[Run]], programs: dict[Arm, Program], case: Case
    ) -> dict[Arm, dict]:
        """What rows say of the logits of each kvjax arm against its mesh's first."""
        own = [arm for arm in runs if not arm.plain and self.effort.logits]
        found, controls = {}, {}
        for arm in own:
            tokens, last = runs[own[0]][0].tokens, self.effort.logits
            shown = self.watch(programs[arm], arm, case, tokens, last)
            control = controls.setdefault(arm.devices, shown)
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


def fill(placement: Placement, lengths: Sequence[int]) -> Cache:
    """A cache of random cells: the same at every placement."""
    if isinstance(placement, PlainPlacement):
        return placement.split(random_cache(placement.whole, lengths))
    return random_cache(placement, lengths)


def counts(ring: Ring | None) -> list[RingStats]:
    """Of the ring of each device of this process; [] without one."""
    if ring is None:
        return []
    return [ring.stats(device) for device in ring.placement.mesh.local_devices]


def to_each(start: list[RingStats], end: list[RingStats]) -> list[RingStats]:
    """What was counted meanwhile on each device, those of other processes too."""
    mine = [since(a, b) for a, b in zip(start, end, strict=True)]
    return [RingStats(*counted) for counted in gathered(mine)]


def open_ring(arm: Arm, placement: Placement) -> AbstractContextManager[Ring | None]:
    return nullcontext() if arm.ring is None else Ring.open(placement, arm.ring)


def check_ring(arm: Arm, ring: Ring | None) -> None:
    """Raises ValueError if a pipelined arm's ring was declined once it ran."""
    if arm.name == "pipelined":
        reasons = ", ".join(sorted(set(ring.declines().values())))
        agreement.check_none(reasons and f"{arm.label} got no ring: {reasons}")


if __name__ == "__main__":
    app.run(main)
