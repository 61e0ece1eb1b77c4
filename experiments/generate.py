"""Generates text with the KV cache partly in host memory, and says what that took.

    python experiments/generate.py --prompt "What is a cache?" --max_new_tokens 64

Every step reads all live cells: a token moves the live bytes of the tail over the link
once, so tokens a second are at most link bandwidth / live tail bytes.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from absl import app, flags, logging
from caches import ring_of
from jax.sharding import Mesh
from tqdm import tqdm

from kvjax.cache.state import Cache, cache_bytes
from kvjax.config import CACHE_DTYPES, CacheConfig, RingConfig
from kvjax.delivery.allocate import footprint, init_cache
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.plan import Decline, Slots, plan_ring
from kvjax.delivery.ring import Ring, RingStats
from kvjax.generate import Decoder, Generated, Sampling, check_room, generate
from kvjax.model.checkpoint import Checkpoint, find_smollm2, load, open_checkpoint
from kvjax.model.tokenizer import Tokenizer, read_tokenizer
from kvjax.model.transformer import ModelConfig

PROMPT = flags.DEFINE_multi_string(
    "prompt", [], "A user's message. Repeat it for a batch."
)
PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "File with one prompt.")
RAW = flags.DEFINE_bool("raw", False, "Continue the bare text: no chat template.")
MODEL = flags.DEFINE_string(
    "model",
    None,
    "GGUF file or Hugging Face directory. Default: SmolLM2-135M-Instruct.",
)
CAPACITY = flags.DEFINE_integer(
    "capacity",
    None,
    "Cells of each sequence. Default: the longest prompt and its new tokens.",
    lower_bound=1,
)
DEVICE_CELLS = flags.DEFINE_integer(
    "device_cells",
    0,
    "Cells of each sequence that stay on the device, a multiple of 128; 0 = none.",
    lower_bound=0,
)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", CACHE_DTYPES, "Of the cache's cells.")
DEPTH = flags.DEFINE_integer(
    "depth",
    RingConfig().depth,
    "Attends that a delivery may run ahead; 0 = no ring.",
    lower_bound=0,
)
BUDGET_MIB = flags.DEFINE_float(
    "budget_mib", 64, "The most a ring takes of a device; 0 = no ring.", lower_bound=0
)
SLOT_MIB = flags.DEFINE_float(
    "slot_mib",
    None,
    "Size of a ring's slot. Default: RingConfig's (docs/delivery.md, Settings).",
    lower_bound=0,
)
CHUNK = flags.DEFINE_integer(
    "chunk", 256, "Prompt tokens that one prefill call takes.", lower_bound=1
)
MESH = flags.DEFINE_string(
    "mesh", "1", "Devices to split the heads over: 3, or tp=3. On a CPU, emulated."
)
MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 64, "The most tokens to make for each prompt.", lower_bound=1
)
IGNORE_EOS = flags.DEFINE_bool("ignore_eos", False, "Go on beyond end tokens.")
TEMPERATURE = flags.DEFINE_float(
    "temperature", 0, "Of sampling; 0 = greedy.", lower_bound=0
)
TOP_K = flags.DEFINE_integer(
    "top_k", 0, "Sample from the k best tokens; 0 = all.", lower_bound=0
)
TOP_P = flags.DEFINE_float(
    "top_p",
    1,
    "Sample from the best tokens that reach p together; 1 = all.",
    lower_bound=0,
    upper_bound=1,
)
SEED = flags.DEFINE_integer("seed", 0, "Of sampling.", lower_bound=0)
JSON = flags.DEFINE_string("json", None, "Writes ids and the table to this file.")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: prompts go in --prompt")
    try:
        run(
            prompts=read_prompts(PROMPT.value, PROMPT_FILE.value),
            raw=RAW.value,
            model=MODEL.value,
            mesh_sizes=parse_mesh(MESH.value),
            capacity=CAPACITY.value,
            device_cells=DEVICE_CELLS.value,
            cache_dtype=DTYPE.value,
            ring_config=ring_of(DEPTH.value, BUDGET_MIB.value, SLOT_MIB.value),
            chunk=CHUNK.value,
            max_new_tokens=MAX_NEW_TOKENS.value,
            ignore_eos=IGNORE_EOS.value,
            sampling=Sampling(
                temperature=TEMPERATURE.value,
                top_k=TOP_K.value,
                top_p=TOP_P.value,
                seed=SEED.value,
            ),
            json_path=JSON.value,
        )
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(
    *,
    prompts: list[str],
    raw: bool,
    model: str | None,
    mesh_sizes: dict[str, int],
    capacity: int | None,
    device_cells: int,
    cache_dtype: str,
    ring_config: RingConfig,
    chunk: int,
    max_new_tokens: int,
    ignore_eos: bool,
    sampling: Sampling,
    json_path: str | None,
) -> None:
    start = time.perf_counter()
    check_json_path(json_path)
    mesh = make_devices(mesh_sizes)
    checkpoint = open_checkpoint(find_smollm2() if model is None else model)
    tokenizer = read_tokenizer(checkpoint)
    ids = [tokenizer.encode(prompt, raw=raw) for prompt in prompts]
    placement = place_cache(
        checkpoint.config,
        mesh,
        batch_size=len(ids),
        capacity=capacity or max(map(len, ids)) + max_new_tokens,
        device_cells=device_cells,
        dtype=cache_dtype,
    )
    check_room(placement.config.num_cells, [0] * len(ids), ids, max_new_tokens)
    plan = plan_ring(placement, ring_config)
    print(*describe(checkpoint, placement, plan), sep="\n", flush=True)

    with Ring.open(placement, ring_config) as ring:
        cache = pin(placement)
        dtype = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
        weights, config = load(checkpoint, dtype=dtype, mesh=mesh)
        decoder = Decoder(weights, placement, chunk=chunk)
        screen = Screen(tokenizer, ids, ring, start)
        result = generate(
            decoder,
            cache,
            ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=() if ignore_eos else config.end_tokens,
            on_token=screen.show,
            on_prefill=screen.prefilled,
        )
        screen.finish()
        table = summarize(placement, result, screen, ring.stats())
        declines = set(ring.declines().values())
    print_table(table, declines)
    if json_path is not None:
        written = {"prompt_ids": ids, "output_ids": result.output_ids, "table": table}
        Path(json_path).write_text(json.dumps(written) + "\n", encoding="utf-8")


def read_prompts(prompts: list[str], file: str | None) -> list[str]:
    """The prompts of --prompt or of --prompt_file."""
    if bool(prompts) == (file is not None):
        raise ValueError("give either --prompt, as often as you like, or --prompt_file")
    if file is None:
        return prompts
    try:
        return [Path(file).read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt_file cannot be read: {error}") from error


def parse_mesh(text: str) -> dict[str, int]:
    """Axis sizes of "3" or "tp=3"."""
    size = text.removeprefix("tp=")
    if not size.isdecimal() or not 1 <= int(size) <= 4096:
        raise ValueError(f"--mesh must be a number of devices, 3 or tp=3, got {text!r}")
    return {"tp": int(size)}


def check_json_path(path: str | None) -> None:
    """Refuses a path that couldn't be written once all the work is done."""
    if path is not None and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise ValueError(f"--json must be a file in a folder that exists, got {path!r}")


def make_devices(sizes: dict[str, int]) -> Mesh:
    """The mesh; on a CPU, emulated devices. Must come before any use of a device."""
    jax.config.update("jax_num_cpu_devices", sizes["tp"])
    return make_mesh(sizes)


def place_cache(
    config: ModelConfig,
    mesh: Mesh,
    *,
    batch_size: int,
    capacity: int,
    device_cells: int,
    dtype: str,
) -> Placement:
    cache = CacheConfig(
        num_layers=config.num_layers,
        batch_size=batch_size,
        capacity=capacity,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device_cells=device_cells,
    )
    return Placement(config=cache, num_heads=config.num_heads, mesh=mesh)


def describe(
    checkpoint: Checkpoint, placement: Placement, plan: Slots | Decline
) -> Iterator[str]:
    """Lines that say where all will lie, before any of it is allocated."""
    cache, need = placement.config, footprint(placement)
    cells, on_device = cache.num_cells, cache.layer_device_cells[0]
    yield f"model    {checkpoint.path.name}"
    kind = placement.mesh.devices.flat[0].device_kind
    yield f"devices  {placement.mesh.size} x {kind}"
    yield (
        f"cache    {cache.batch_size} x {cells} cells of {cache.dtype}: {on_device} on "
        f"the device, {cells - on_device} in the tail"
    )
    yield f"         {need.device_bytes:,} bytes in the memory of each device"
    yield f"         {need.tail_bytes:,} bytes pinned on the host for each device"
    if isinstance(plan, Decline):
        yield f"ring     none: {plan.reason}"
    else:
        yield (
            f"ring     {plan.num_slots} slots of {plan.slot_bytes:,} bytes, "
            f"{plan.ring_bytes:,} in all on each device"
        )
    trained = checkpoint.config.max_position
    if cells > trained:
        yield f"note     the model was trained for {trained} tokens"


def pin(placement: Placement) -> Cache:
    total = sum(cache_bytes(placement.config, placement.stored_heads))
    with tqdm(total=total, desc="cache", unit="B", unit_scale=True) as bar:
        return init_cache(placement, lambda made, _: bar.update(made - bar.n))


class Screen:
    """Shows progress, then text as it comes: one stream, or whole lines of several."""

    def __init__(
        self, tokenizer: Tokenizer, prompts: list[list[int]], ring: Ring, start: float
    ):
        self.first_token_s = math.nan
        self.at_prompts_end = ring.stats()
        self._streams = [tokenizer.stream(prompt) for prompt in prompts]
        self._lines = [""] * len(prompts)
        self._ring = ring
        self._start = start
        self._bar = tqdm(total=sum(map(len, prompts)), desc="prefill", unit="token")

    def prefilled(self, num_tokens: int) -> None:
        self._bar.update(num_tokens)
        if self._bar.n == self._bar.total:
            self._bar.close()
            self.at_prompts_end = self._ring.stats()

    def show(self, sequence: int, token: int) -> None:
        if math.isnan(self.first_token_s):
            self.first_token_s = time.perf_counter() - self._start
        self._write(sequence, self._streams[sequence].push(token))

    def finish(self) -> None:
        for sequence, stream in enumerate(self._streams):
            self._write(sequence, stream.finish() + "\n")

    def _write(self, sequence: int, text: str) -> None:
        if len(self._streams) == 1:
            print(text, end="", flush=True)
            return
        *lines, self._lines[sequence] = (self._lines[sequence] + text).split("\n")
        for line in lines:
            print(f"[{sequence}] {line}", flush=True)


def summarize(
    placement: Placement, result: Generated, screen: Screen, stats: RingStats
) -> dict[str, float]:
    """The table: numbers by name. Deliveries are those of decode steps."""
    need, times = footprint(placement), result.timings
    since = RingStats(*(b - a for a, b in zip(screen.at_prompts_end, stats)))
    new_tokens = sum(map(len, result.output_ids))
    delivered = since.early_bytes + since.ordered_bytes
    return {
        "devices": placement.mesh.size,
        "device_cell_bytes": need.device_bytes * placement.mesh.size,
        "tail_bytes": need.tail_bytes * placement.mesh.size,
        "ring_bytes": stats.ring_bytes,
        "prompt_tokens": times.prompt_tokens,
        "new_tokens": new_tokens,
        "decode_steps": times.decode_steps,
        "first_token_s": round(screen.first_token_s, 3),
        "compile_s": round(times.compile_s, 3),
        "prefill_tokens_per_s": rate(times.prompt_tokens, times.prefill_s),
        "decode_tokens_per_s": rate(new_tokens, times.decode_s),
        "live_bytes_per_token": rate(delivered, times.decode_steps),
        "gap_bytes_per_token": rate(since.gap_bytes, times.decode_steps),
        "early_share": rate(since.early_bytes, delivered, digits=4),
    }


def rate(amount: float, per: float, digits: int = 2) -> float:
    return round(amount / per, digits) if per else 0.0


def print_table(table: dict[str, float], declines: set[str]) -> None:
    print(*[f"no ring: {text}" for text in sorted(declines)], sep="\n")
    for name, value in table.items():
        print(f"{name.replace('_', ' '):22}{value:>16,}")


if __name__ == "__main__":
    app.run(main)
