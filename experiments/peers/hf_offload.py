"""The same cells through Hugging Face's offloaded caches: what a torch user has today.

    python experiments/peers/hf_offload.py --geometry=llama-3.1-8b --cells=4096,32768

Needs torch with a GPU, and transformers 5.17, in the environment that holds kvjax; jax
computes nothing here and takes no memory of the GPU. The model has random weights; the
cache is filled with random keys and values by its own `update`, as a prefill would, so
that no prompt is computed. Then it decodes one token after the other. An offloaded
cache brings each layer's keys and values to the GPU while the layer before computes,
and copies them back afterwards: predicted, twice the live bytes over the link, and more
for the dynamic one, which also makes a new, longer array of each layer in every step.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from absl import app, flags, logging
from tqdm import tqdm

from kvjax.measurement import PIECE_BYTES, WARMUP, provenance, spread
from kvjax.model.transformer import GEOMETRIES, ModelConfig, RopeScaling

MISSING = [name for name in ("torch", "transformers") if find_spec(name) is None]
if not MISSING:
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

ARMS = ("hf_dynamic", "hf_static", "hf_dynamic_device", "hf_static_device")
MS = 1e3

GEOMETRY = flags.DEFINE_enum("geometry", "tiny", list(GEOMETRIES), "Of the model.")
CELLS = flags.DEFINE_list("cells", ["4096"], "Cells that each sequence holds.")
BATCH = flags.DEFINE_integer("batch", 1, "Sequences.", lower_bound=1)
ARM = flags.DEFINE_list(
    "arms",
    ["hf_dynamic", "hf_static"],
    f"Of {', '.join(ARMS)}; device = without offloading, also on a CPU.",
)
TOKENS = flags.DEFINE_integer("tokens", 12, "Of a timed run.", lower_bound=1)
WAITING = flags.DEFINE_integer(
    "waiting", 4, "Tokens after it, each waited for.", lower_bound=0
)
REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each arm.", lower_bound=1)
COMMIT = flags.DEFINE_string("commit", None, "Of this code, where git can't tell.")
flags.register_validator(
    "commit",
    lambda commit: commit is None or len(commit) == 40,
    "must be the 40 digits of `git rev-parse HEAD`",
)
JSON = flags.DEFINE_string("json", None, "Writes the rows to this file.")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    try:
        run(
            geometry=GEOMETRY.value,
            cells=[int(cells) for cells in CELLS.value],
            batch=BATCH.value,
            arms=ARM.value,
            tokens=TOKENS.value,
            waiting=WAITING.value,
            repeats=REPEATS.value,
            commit=COMMIT.value,
            json_path=JSON.value,
        )
    except ValueError as error:
        logging.debug("traceback", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(
    *,
    geometry: str,
    cells: list[int],
    batch: int,
    arms: list[str],
    tokens: int,
    waiting: int,
    repeats: int,
    commit: str | None,
    json_path: str | None,
) -> None:
    device = pick_device(arms)
    config = ModelConfig.of(geometry)
    found = {
        "experiment": "hf_offload",
        **provenance(None, ("torch", "transformers"), sys.argv, commit),
        "model": geometry,
        "dtype": "bfloat16",
        "weights": "bfloat16",
        "tokens": tokens,
        "runs": repeats,
        "link_bytes_s": link_rate() if device == "cuda" else None,
        "rows": [],
    }
    with torch.inference_mode():
        model = make_model(config, device)
        with tqdm(
            total=len(cells) * len(arms) * repeats, leave=False, disable=None
        ) as bar:
            for length in cells:
                for arm in arms:
                    bar.set_description(f"{length:,} x {batch}: {arm}")
                    row = measure(
                        model, arm, length, batch, tokens, waiting, repeats, bar.update
                    )
                    add_floor(row, found["link_bytes_s"])
                    found["rows"].append(row)
                    bar.write(
                        f"{arm:18}{length:>8,} cells x {batch:<3}{row['ms']:9.2f} ms a "
                        f"token, spread {row['spread']:.1%}; waiting for each "
                        f"{row['blocking_ms'] or 0:.2f} ms"
                    )
                    if json_path is not None:
                        Path(json_path).write_text(json.dumps(found, indent=1) + "\n")


def pick_device(arms: list[str]) -> str:
    """Refuses what cannot run here."""
    if not arms or not set(arms) <= set(ARMS):
        raise ValueError(f"--arms must be of {', '.join(ARMS)}, got {arms}")
    if MISSING:
        raise ValueError(
            f"{' and '.join(MISSING)} are not installed: pip install torch "
            "transformers==5.17.0"
        )
    if torch.cuda.is_available():
        return "cuda"
    offloading = [arm for arm in arms if not arm.endswith("_device")]
    if offloading:
        raise ValueError(
            f"{', '.join(offloading)} need a GPU, torch {torch.__version__} sees none; "
            "arms that end in _device run without one"
        )
    return "cpu"


def link_rate(pieces: int = 16, passes: int = 5) -> float:
    """Bytes a second of raw pinned copies in pieces of 64 MiB, the median.

    By torch: kvjax.measurement's asks for a jax device, and with it jax takes memory.
    """
    source = torch.randint(
        0, 255, (pieces, PIECE_BYTES), dtype=torch.uint8, pin_memory=True
    )
    target = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda")

    def seconds() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for piece in source:
            target.copy_(piece, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    times = [seconds() for _ in range(passes + 1)][1:]
    return pieces * PIECE_BYTES / statistics.median(times)


def make_model(config: ModelConfig, device: str) -> "LlamaForCausalLM":
    """The geometry as transformers' Llama, random weights in bfloat16."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if isinstance(config.rope_scaling, RopeScaling):
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": (
                config.rope_scaling.original_max_position
            ),
        }
    theirs = LlamaConfig(
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tied,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(theirs).eval()
    finally:
        torch.set_default_dtype(before)


def make_cache(
    model: "LlamaForCausalLM", arm: str, length: int, batch: int, room: int
) -> "DynamicCache | StaticCache":
    """A cache that holds `length` random cells and has room for `room` more.

    Filled in the order of the layers: an offloaded cache brings the first layer back
    when the last one is updated, and a step expects it there.
    """
    config, offloading = model.config, not arm.endswith("_device")
    if "static" in arm:
        cache = StaticCache(
            config=config, max_cache_len=length + room, offloading=offloading
        )
    else:
        cache = DynamicCache(config=config, offloading=offloading)
    shape = (batch, config.num_key_value_heads, length, config.head_dim)
    draw = torch.Generator(device=model.device).manual_seed(0)
    for layer in range(config.num_hidden_layers):
        k, v = (
            torch.randn(
                shape, generator=draw, dtype=torch.bfloat16, device=model.device
            )
            for _ in range(2)
        )
        cache.update(k, v, layer)
    return cache


def measure(
    model: "LlamaForCausalLM",
    arm: str,
    length: int,
    batch: int,
    tokens: int,
    waiting: int,
    repeats: int,
    on_run: Callable[[], None],
) -> dict:
    """Decodes `repeats` times, each from a fresh cache of `length` cells."""
    free_s, waited_s, drawn = [], [], []
    for _ in range(repeats):
        cache = make_cache(model, arm, length, batch, WARMUP + tokens + waiting)
        first = torch.arange(7, 7 + batch, device=model.device)[:, None]
        fed, _, _ = decode(model, cache, first % model.config.vocab_size, WARMUP)
        fed, ids, seconds = decode(model, cache, fed, tokens)
        free_s.append(seconds / tokens)
        drawn.append([token[:, 0].tolist() for token in ids])
        for _ in range(waiting):
            fed, _, seconds = decode(model, cache, fed, 1)
            waited_s.append(seconds)
        used = used_bytes(model.device)
        del cache
        on_run()
    ms = MS * statistics.median(free_s)
    config = model.config
    cell = 2 * config.num_key_value_heads * config.head_dim * 2
    grown = length + WARMUP + (tokens - 1) / 2
    return {
        "arm": arm,
        "label": arm,
        "cells": length,
        "batch": batch,
        "ms": ms,
        "spread": spread(free_s),
        "runs_ms": [MS * seconds for seconds in free_s],
        "blocking_ms": MS * statistics.median(waited_s) if waited_s else None,
        "live_bytes": batch * grown * cell * config.num_hidden_layers,
        "device_memory": used,
        "same_tokens": all(ids == drawn[0] for ids in drawn),
    }


def decode(
    model: "LlamaForCausalLM", cache, fed: "torch.Tensor", count: int
) -> tuple["torch.Tensor", list["torch.Tensor"], float]:
    """(last token [B, 1], all of them, seconds) of `count` greedy steps, one wait."""
    drawn = []
    wait(model.device)
    start = time.perf_counter()
    for _ in range(count):
        logits = model(fed, past_key_values=cache, use_cache=True).logits
        fed = logits[:, -1].argmax(dim=-1, keepdim=True)
        drawn.append(fed)
    wait(model.device)
    return fed, drawn, time.perf_counter() - start


def wait(device: "torch.device") -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def used_bytes(device: "torch.device") -> int | None:
    """Device memory in use, as the driver says."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def add_floor(row: dict, link: float | None) -> None:
    """The copy floor; a bound needs a device-resident step, which bench_decode has."""
    offloaded = link is not None and not row["arm"].endswith("_device")
    row["floor_ms"] = MS * row["live_bytes"] / link if offloaded else None
    row["bound_ms"] = row["share"] = None


if __name__ == "__main__":
    app.run(main)
