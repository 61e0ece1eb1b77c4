"""Does it matter to the bits where cells lie, how they are delivered, how many fit?

    python experiments/exactness.py                # all arms, both cache dtypes
    python experiments/exactness.py --quick        # fewer arms, shorter prompts

Four tasks, as one batch, are continued greedily by 16 tokens, first from short prompts,
then from long ones. Every arm is one way to hold and deliver the same cells:

    placement    all cells on the device (the control), 128, half, none; default ring
    ring         none on the device; depth 0, 1, 2, 8 x smallest and default slot
    capacity     none on the device; a larger cache
    prefill      none on the device; the prompt token by token, and in smaller chunks

Predicted: equal tokens and equal bits of all float32 logits in every arm but the last
kind, where other widths may round elsewhere: close, within TOLERANCE of the largest
logit, fed the control's tokens. Delivered bytes = the live cells of the tail before
each step x their bytes, to the byte; gap bytes are counted apart.

The exit code is 1 if any arm differs, or delivers otherwise than it should. Two
placements are two programs, for which XLA on a GPU would choose its matrix kernels by
timing them: autotuning is off here.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags, logging
from caches import cache_of
from commit import COMMIT
from jax.sharding import Mesh

from kvjax.cache.state import Cache
from kvjax.config import CACHE_DTYPES, RingConfig
from kvjax.delivery.allocate import init_cache
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.plan import smallest_slot
from kvjax.delivery.ring import Ring, RingStats
from kvjax.generate import GREEDY, Decoder, chunks
from kvjax.measurement import provenance
from kvjax.model.checkpoint import find_smollm2, load, open_checkpoint
from kvjax.model.tokenizer import read_tokenizer
from kvjax.model.transformer import (
    GEOMETRIES,
    WEIGHT_DTYPES,
    ModelConfig,
    Transformer,
    random_model,
)

QUICK = flags.DEFINE_bool("quick", False, "Fewer arms, shorter prompts: a minute.")
MODEL = flags.DEFINE_string(
    "model",
    None,
    "GGUF file or Hugging Face directory. Default: SmolLM2-135M-Instruct.",
)
GEOMETRY = flags.DEFINE_enum(
    "geometry", None, list(GEOMETRIES), "Random weights of this geometry instead."
)
DTYPE = flags.DEFINE_enum(
    "dtype", None, CACHE_DTYPES, "Of the cache. Default: both; bfloat16 if --quick."
)
WEIGHTS = flags.DEFINE_enum(
    "weights", None, WEIGHT_DTYPES, "Default: float32 on a CPU, else bfloat16."
)
JSON = flags.DEFINE_string("json", None, "Writes all rows to this file.")

NO_AUTOTUNING = "--xla_gpu_autotune_level=0"
PACKAGES = ("jax", "jaxlib", "flax", "numpy")
NEW_TOKENS = 16
SLOTS = 8  # of a ring of the smallest slots, as many as the default budget has
REUSES = 3  # of each slot at least, or an arm has not shown that slots can be reused
TOLERANCE = {  # of the largest logit, by weights and cache
    ("float32", "float32"): 1e-4,
    ("float32", "bfloat16"): 1e-2,
    ("bfloat16", "bfloat16"): 5e-2,
    ("bfloat16", "float32"): 5e-2,
}
NAMES = ("Ada", "Bela", "Chidi", "Dana", "Emil", "Farah", "Goran")
THINGS = ("lamp", "kettle", "ladder", "map", "violin")
PLACES = ("harbour", "mill", "station", "orchard", "tower", "bridge", "market", "cave")


def prose(i: int) -> str:
    name, thing, place = NAMES[i % 7], THINGS[i % 5], PLACES[i % 8]
    return f"On day {i + 1} {name} carried the {thing} to the {place} and left it. "


def code(i: int) -> str:
    thing, place = THINGS[i % 5], PLACES[i % 8]
    return (
        f"def {thing}_at_{place}_{i}(count: int) -> int:\n"
        f"    if count > {i % 11}:\n"
        f"        return count - {i}\n"
        f"    return {i * 7}\n\n\n"
    )


def record(i: int) -> str:
    held = {"id": i, "owner": NAMES[i % 7], "place": PLACES[i % 8], "price": i * 3.5}
    return json.dumps(held) + "\n"


def dialogue(i: int) -> str:
    one, other = NAMES[i % 7], NAMES[(i + 1 + i // 7 % 6) % 7]
    return f"{one}: Where is the {THINGS[i % 5]}?\n{other}: In the {PLACES[i % 8]}.\n"


TASKS = {"prose": prose, "code": code, "records": record, "dialogue": dialogue}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to hold and deliver the cells.

    Attributes:
      name: In the table.
      device_cells: Of each sequence; None = all.
      capacity: Cells of each sequence.
      chunk: Prompt tokens that one prefill call takes.
      depth: Of the ring.
      smallest_slots: The ring has SLOTS slots of one block, else the default ones.
      exact: Its bits must be those of the control.
    """

    name: str
    device_cells: int | None
    capacity: int
    chunk: int
    depth: int = 1
    smallest_slots: bool = False
    exact: bool = True

    def ring_config(self, placement: Placement) -> RingConfig:
        if not self.smallest_slots:
            return RingConfig(depth=self.depth)
        slot = smallest_slot(placement)
        return RingConfig(depth=self.depth, slot_bytes=slot, budget_bytes=SLOTS * slot)


class Outcome(NamedTuple):
    """What an arm made, and what its ring counted."""

    tokens: np.ndarray  # [steps, B]
    logits: np.ndarray  # [steps, B, V] float32
    stats: RingStats
    live_bytes: int  # of the tail before each call, all calls together

    @property
    def hashes(self) -> tuple[str, str]:
        """SHA-256 of the tokens' bytes and of the logits'."""
        each = (self.tokens, self.logits)
        return tuple(hashlib.sha256(x.tobytes()).hexdigest() for x in each)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    dtype: str
    prompts: str
    arm: str
    tokens_sha256: str
    logits_sha256: str
    early_bytes: int
    ordered_bytes: int
    gap_bytes: int
    deliveries: int
    num_slots: int
    slot_reuses: int
    max_difference: float  # of logits from the control's, over the largest one
    tokens_changed: int
    problems: tuple[str, ...]


class ControlDiffers(Exception):
    """The control run twice gave two results: nothing can be told from it."""


# Changes an arm's cache once the prompts are in it, to prove that this is found.
Disturb = Callable[[Arm, Cache], Cache]


def untouched(arm: Arm, cache: Cache) -> Cache:
    return cache


class Runner:
    """A model, and the programs of each placement that its arms share.

    Depth and slots are the ring's: arms that differ in those run one executable.

    Args:
      model: Over `mesh`.
      mesh: The devices.
      dtype: Of the cache.
    """

    def __init__(self, model: Transformer, mesh: Mesh, dtype: str):
        self.dtype = dtype
        self.tolerance = TOLERANCE[model.embedding.dtype.name, dtype]
        self._model, self._mesh = model, mesh
        self._decoders: dict[Placement, Decoder] = {}

    def decoder(self, arm: Arm) -> Decoder:
        config = self._model.config
        cache = cache_of(
            config,
            batch_size=len(TASKS),
            capacity=arm.capacity,
            dtype=self.dtype,
            device_cells=arm.device_cells,
        )
        place = Placement(config=cache, num_heads=config.num_heads, mesh=self._mesh)
        if place not in self._decoders:
            self._decoders[place] = Decoder(self._model, place)
        return self._decoders[place]

    def play(
        self,
        arm: Arm,
        prompts: Sequence[Sequence[int]],
        fed: np.ndarray | None = None,
        disturb: Disturb = untouched,
    ) -> Outcome:
        """Takes the prompts, then NEW_TOKENS steps.

        Args:
          arm: How.
          prompts: Token ids of each sequence.
          fed: Tokens [steps, B] to feed in place of those that are drawn.
          disturb: Has the cache between the prompts and the steps.
        """
        decoder = self.decoder(arm)
        placement = decoder.placement
        with Ring.open(placement, arm.ring_config(placement)) as ring:
            feed = Feed(decoder, init_cache(placement))
            for tokens, num_new in chunks(prompts, arm.chunk):
                feed(tokens, num_new)
            feed.cache = disturb(arm, feed.cache)
            drawn, logits = [], []
            for step in range(NEW_TOKENS):
                logits.append(np.asarray(feed.logits))
                drawn.append(feed.draw())
                if step < NEW_TOKENS - 1:
                    tokens = drawn[-1] if fed is None else fed[step]
                    feed(tokens[:, None], np.ones(len(prompts), np.int32))
            stats = ring.stats()
        return Outcome(np.stack(drawn), np.stack(logits), stats, feed.live_bytes)


class Feed:
    """Runs a decoder's calls, and counts the live bytes of the tail before each.

    Attributes:
      cache: As the last call left it.
      logits: [B, V] of each sequence's last token.
      live_bytes: What the calls had to be delivered.
    """

    def __init__(self, decoder: Decoder, cache: Cache):
        config = decoder.placement.config
        self.cache = cache
        self.logits = decoder.place(
            np.zeros((config.batch_size, decoder.vocab_size), np.float32)
        )
        self.live_bytes = 0
        self._decoder = decoder
        self._lengths = np.zeros(config.batch_size, np.int64)

    def __call__(self, tokens: np.ndarray, num_new: np.ndarray) -> None:
        decoder = self._decoder
        self.live_bytes += live_bytes(decoder.placement, self._lengths)
        operands = map(decoder.place, (tokens, num_new))
        self.logits, self.cache = decoder.prefill(
            decoder.leaves, self.cache, *operands, self.logits
        )
        self._lengths += num_new

    def draw(self) -> np.ndarray:
        """The best token of each sequence [B]."""
        seed = self._decoder.place(np.uint32(0))
        tokens = self._decoder.first(
            self.logits, self.cache.lengths, seed, sampling=GREEDY
        )
        return np.asarray(tokens)


def live_bytes(placement: Placement, lengths: np.ndarray) -> int:
    """Bytes of the cells that sequences of these lengths hold in the tails."""
    config = placement.config
    cell = placement.stored_heads * config.record_size * config.itemsize
    return cell * sum(
        int(np.maximum(lengths - on_device, 0).sum())
        for on_device in config.layer_device_cells
    )


def compare(
    runner: Runner,
    arms: Sequence[Arm],
    name: str,
    prompts: Sequence[Sequence[int]],
    disturb: Disturb = untouched,
) -> Iterator[Row]:
    """Plays the control twice, then every arm against it; a row of each.

    Args:
      runner: The model.
      arms: The control first.
      name: Of the prompts.
      prompts: Token ids of each task.
      disturb: See Runner.play.

    Raises:
      ControlDiffers: the control's two runs differ.
    """
    first, *others = arms
    control, again = (runner.play(first, prompts, None, disturb) for _ in range(2))
    if control.hashes != again.hashes:
        raise ControlDiffers(
            f"the control ({first.name}) of {name} prompts and a {runner.dtype} cache "
            f"gave {control.hashes}, then {again.hashes}"
        )
    yield judge(runner, first, name, control, control)
    for arm in others:
        fed = None if arm.exact else control.tokens
        got = runner.play(arm, prompts, fed, disturb)
        yield judge(runner, arm, name, got, control)


def judge(runner: Runner, arm: Arm, name: str, got: Outcome, control: Outcome) -> Row:
    """An arm's row: what it made against the control's, what was delivered."""
    largest = np.abs(control.logits).max()
    difference = float(np.abs(got.logits - control.logits).max() / largest)
    problems = [*delivery_problems(arm, got)]
    if arm.exact:
        for what, mine, wanted in zip(("tokens", "logits"), got.hashes, control.hashes):
            if mine != wanted:
                problems.append(f"{what} differ")
    elif not difference <= runner.tolerance:
        problems.append(f"logits differ by more than {runner.tolerance}")
    tokens, logits = got.hashes
    return Row(
        dtype=runner.dtype,
        prompts=name,
        arm=arm.name,
        tokens_sha256=tokens,
        logits_sha256=logits,
        early_bytes=got.stats.early_bytes,
        ordered_bytes=got.stats.ordered_bytes,
        gap_bytes=got.stats.gap_bytes,
        deliveries=got.stats.deliveries,
        num_slots=got.stats.num_slots,
        slot_reuses=got.stats.slot_reuses,
        max_difference=difference,
        tokens_changed=int((got.tokens != control.tokens).sum()),
        problems=tuple(problems),
    )


def delivery_problems(arm: Arm, got: Outcome) -> Iterator[str]:
    """What the ring did otherwise than the arm says; nothing if all is well.

    A pipelined arm sends every live byte early and none in order, and reuses each slot:
    deliveries go round the slots in turn.
    """
    stats, pipelined = got.stats, arm.depth > 0
    early, ordered = (got.live_bytes, 0) if pipelined else (0, got.live_bytes)
    if stats.early_bytes != early:
        yield f"{stats.early_bytes} bytes went early, not {early}"
    if stats.ordered_bytes != ordered:
        yield f"{stats.ordered_bytes} bytes went in order, not {ordered}"
    if pipelined and got.live_bytes > 0:
        if stats.slot_reuses < REUSES * stats.num_slots:
            yield f"{stats.slot_reuses} reuses of {stats.num_slots} slots in all"
    for count in ("moved_tails", "skipped_attends", "dropped_plans", "length_errors"):
        if getattr(stats, count):
            yield f"{count}: {getattr(stats, count)}"


class Sizes(NamedTuple):
    """Prompts in tokens, of each task, and the cache that holds them."""

    short: tuple[int, ...]
    long: tuple[int, ...]
    capacity: int
    chunk: int
    half: int  # cells


FULL = Sizes((40, 97, 140, 201), (2048,) * 4, 2176, 256, 1024)
FEW = Sizes((9, 17, 26, 32), (192, 181, 150, 131), 384, 32, 256)


def all_arms(sizes: Sizes) -> list[Arm]:
    """The control first; arms that share programs stand together."""
    base = dict(capacity=sizes.capacity, chunk=sizes.chunk)
    none = dict(base, device_cells=0)
    arms = [Arm(name="all on the device", device_cells=None, **base)]
    for cells in (128, sizes.half):
        arms.append(Arm(name=f"{cells} on the device", device_cells=cells, **base))
    arms.append(Arm(name="none on the device", **none))
    for depth in (0, 1, 2, 8):
        arms.append(
            Arm(
                name=f"depth {depth}, smallest slot",
                depth=depth,
                smallest_slots=True,
                **none,
            )
        )
        if depth != 1:  # which is "none on the device"
            arms.append(Arm(name=f"depth {depth}", depth=depth, **none))
    for chunk in (1, sizes.chunk // 4):
        name = f"prefill by {chunk}"
        arms.append(Arm(name=name, exact=False, **(none | dict(chunk=chunk))))
    larger = none | dict(capacity=sizes.capacity + 384)
    arms.append(Arm(name=f"capacity {larger['capacity']}", **larger))
    return arms


def few_arms(sizes: Sizes) -> list[Arm]:
    """Those of three programs, and of two rings beside the default one."""
    names = {
        "all on the device",
        "128 on the device",
        "none on the device",
        "depth 0",
        "depth 2, smallest slot",
    }
    return [arm for arm in all_arms(sizes) if arm.name in names]


def make_prompts(
    encode: Callable[[str], list[int]], vocab_size: int, lengths: Sequence[int]
) -> list[list[int]]:
    """Each task's text, cut to its length, behind a nonce of four tokens.

    Args:
      encode: Text to token ids.
      vocab_size: V.
      lengths: Tokens of each task's prompt.
    """
    prompts = []
    for (name, item), length in zip(TASKS.items(), lengths, strict=True):
        ids, count = nonce(name, length, vocab_size), 0
        while len(ids) < length:
            ids += encode(item(count))
            count += 1
        prompts.append(ids[:length])
    return prompts


def nonce(name: str, length: int, vocab_size: int) -> list[int]:
    """Four tokens of the vocabulary's upper half, by the task's name and length."""
    digest = np.frombuffer(hashlib.sha256(f"{name} {length}".encode()).digest(), "<u4")
    start = vocab_size // 2
    return [start + int(number) % (vocab_size - start) for number in digest[:4]]


def check_prefixes(prompts: Sequence[Sequence[int]]) -> None:
    """Raises ValueError if two prompts begin with the same token."""
    if len({prompt[0] for prompt in prompts}) < len(prompts):
        raise ValueError("two prompts share their first token: change a length")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    # Read when the first device is asked for.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_AUTOTUNING}"
    try:
        return run(
            quick=QUICK.value,
            model_path=MODEL.value,
            geometry=GEOMETRY.value,
            dtypes=choose_dtypes(DTYPE.value, QUICK.value),
            weights=WEIGHTS.value,
            json_path=JSON.value,
            commit=COMMIT.value,
        )
    except ControlDiffers as error:
        print(f"aborted: {error}")
        return 1
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 2


def choose_dtypes(dtype: str | None, quick: bool) -> list[str]:
    if dtype is not None:
        return [dtype]
    return ["bfloat16"] if quick else list(CACHE_DTYPES)


def run(
    *,
    quick: bool,
    model_path: str | None,
    geometry: str | None,
    dtypes: Sequence[str],
    weights: str | None,
    json_path: str | None,
    commit: str | None = None,
    disturb: Disturb = untouched,
) -> int:
    """Plays all arms and prints the table; returns the exit code."""
    check_json_path(json_path)
    mesh = make_mesh()
    device = mesh.devices.flat[0]
    weights = weights or ("float32" if device.platform == "cpu" else "bfloat16")
    sizes, arms = (FEW, few_arms(FEW)) if quick else (FULL, all_arms(FULL))
    model, encode, name = read_model(model_path, geometry, weights, mesh)
    prompts = {
        "short": make_prompts(encode, model.config.vocab_size, sizes.short),
        "long": make_prompts(encode, model.config.vocab_size, sizes.long),
    }
    check_prefixes([*prompts["short"], *prompts["long"]])
    found = {
        "experiment": "exactness",
        **provenance(device, PACKAGES, sys.argv, commit),
        "model": name,
        "weights": weights,
        "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
        "prompt_tokens": {what: [*map(len, batch)] for what, batch in prompts.items()},
        "new_tokens": NEW_TOKENS,
        "rows": [],
    }
    print(*header(found, device), sep="\n", flush=True)
    for dtype in dtypes:
        runner = Runner(model, mesh, dtype)
        for what, batch in prompts.items():
            for row in compare(runner, arms, what, batch, disturb):
                found["rows"].append(asdict(row))
                print(line(row), flush=True)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(found, indent=1) + "\n")
    failed = sum(bool(row["problems"]) for row in found["rows"])
    print(f"{len(found['rows'])} arms, {failed} failed")
    return 1 if failed else 0


def check_json_path(path: str | None) -> None:
    """Refuses a path that couldn't be written once all the work is done."""
    if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise ValueError(f"--json must be a file in a folder that exists, got {path!r}")


def read_model(
    path: str | None, geometry: str | None, weights: str, mesh: Mesh
) -> tuple[Transformer, Callable[[str], list[int]], str]:
    """The model, what encodes its text (bytes, for a geometry), and its name."""
    if geometry is not None:
        if path is not None:
            raise ValueError("give either --model or --geometry")
        config = ModelConfig.of(geometry)
        model = random_model(config, dtype=weights, mesh=mesh)
        return model, lambda text: [*text.encode()], f"random {geometry}"
    checkpoint = open_checkpoint(find_smollm2() if path is None else path)
    tokenizer = read_tokenizer(checkpoint)
    model, _ = load(checkpoint, dtype=weights, mesh=mesh)
    return model, lambda text: tokenizer.encode(text, raw=True), checkpoint.path.name


def header(found: dict, device: jax.Device) -> Iterator[str]:
    versions = ", ".join(f"{name} {v}" for name, v in found["versions"].items())
    yield f"{found['model']}, {found['weights']} weights, on {device.device_kind}"
    yield f"{versions}; XLA_FLAGS {found['xla_flags']} (set here)"
    for what, lengths in found["prompt_tokens"].items():
        yield f"{what} prompts of {lengths} tokens, then {found['new_tokens']} each"
    yield (
        f"{'cache':9}{'prompts':8}{'arm':23}{'tokens':13}{'logits':13}{'early MB':>9}"
        f"{'ordered':>9}{'gap':>8}{'reuses':>8}{'max diff':>10}  result"
    )


def line(row: Row) -> str:
    moved = (row.early_bytes, row.ordered_bytes, row.gap_bytes)
    early, ordered, gap = (f"{count / 1e6:,.1f}" for count in moved)
    reuses = f"{row.slot_reuses / row.num_slots:,.0f}" if row.num_slots else "-"
    return (
        f"{row.dtype:9}{row.prompts:8}{row.arm:23}{row.tokens_sha256[:12]} "
        f"{row.logits_sha256[:12]} {early:>9}{ordered:>9}{gap:>8}{reuses:>8}"
        f"{row.max_difference:>10.1e}  {'; '.join(row.problems) or 'ok'}"
    )


if __name__ == "__main__":
    app.run(main)
