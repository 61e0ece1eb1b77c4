"""experiments/generate.py as a user runs it: output, JSON, errors of one line."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from kvjax.model.checkpoint import NAMES, hf_config, stored_shapes

SCRIPT = Path(__file__).parents[1] / "experiments" / "generate.py"
ROOT = str(SCRIPT.parents[1])
HEADS, LAYERS, RECORD_BYTES = 3, 2, 2 * 32 * 2  # of the small model, bfloat16 cells
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2 * HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
}

# Runs main for each list of arguments in one process: starting Python costs seconds.
DRIVER = """
import contextlib, importlib.util, io, json, os, sys
from absl import flags
from absl.testing import flagsaver

sys.path.insert(0, os.path.dirname(sys.argv[1]))  # as for a script
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
found = []
for args in json.loads(sys.argv[2]):
    said = io.StringIO()
    with flagsaver.flagsaver(), contextlib.redirect_stderr(said):
        flags.FLAGS(["generate.py", *args])
        code = script.main(["generate.py"])
    found.append((code, said.getvalue()))
print(json.dumps(found))
"""


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, in GPT-2's letters."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    """A Hugging Face directory of random weights without a chat template."""
    path = tmp_path_factory.mktemp("small")
    (path / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().save(str(path / "tokenizer.json"))
    rng = np.random.default_rng(0)
    tensors = {
        NAMES[role].hf.format(i=layer): rng.normal(0, 0.2, shape).astype(np.float32)
        for (role, layer), shape in stored_shapes(hf_config(path, CONFIG, {})).items()
    }
    save_file(tensors, path / "model.safetensors")
    return path


def run_script(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *args]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    return done


def environment() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def in_the_tail(small_model, tmp_path_factory) -> tuple[str, dict]:
    """What a batch of two on three devices prints and writes, cells in the tail."""
    path = tmp_path_factory.mktemp("json") / "out.json"
    done = run_script(
        *("--model", str(small_model), "--raw", "--ignore_eos", "--mesh", "tp=3"),
        *("--prompt", "hello", "--prompt", "two\nlines", "--max_new_tokens", "6"),
        *("--slot_mib", "0.0625", "--json", str(path)),
    )
    return done.stdout, json.loads(path.read_text())


def test_ids_are_written(in_the_tail):
    _, written = in_the_tail
    encode = byte_tokenizer().encode
    assert written["prompt_ids"] == [encode("hello").ids, encode("two\nlines").ids]
    assert [len(ids) for ids in written["output_ids"]] == [6, 6]


def test_the_places_of_all_bytes_come_before_the_text(in_the_tail):
    stdout, written = in_the_tail
    tail = 2 * 128 * RECORD_BYTES * LAYERS  # of one device: one of the three heads
    before, after = stdout.split("[0] ", 1)
    assert f"{tail:,} bytes pinned on the host for each device" in before
    assert "2 slots of 32,768 bytes, 65,536 in all on each device" in before
    assert written["table"]["tail_bytes"] == 3 * tail
    assert written["table"]["ring_bytes"] == 3 * 65_536
    assert written["table"]["device_cell_bytes"] == 0
    assert "live bytes per token" in after


def test_text_of_a_batch_comes_in_lines_with_their_number(in_the_tail):
    stdout, written = in_the_tail
    lines = stdout.splitlines()
    for i, ids in enumerate(written["output_ids"]):
        shown = [line.removeprefix(f"[{i}] ") for line in lines if line[:3] == f"[{i}]"]
        assert "\n".join(shown).split() == byte_tokenizer().decode(ids).split()


def test_delivered_bytes_are_those_of_the_live_cells(in_the_tail):
    _, written = in_the_tail
    table = written["table"]
    live = [len("hello") + len("two\nlines") + 2 * step for step in range(6)]
    cell_bytes = RECORD_BYTES * HEADS * LAYERS
    assert table["decode_steps"] == 6
    assert table["live_bytes_per_token"] == round(np.mean(live) * cell_bytes, 2)
    assert table["early_share"] == 1.0


def test_cells_on_the_device_give_the_same_tokens_and_no_delivery(
    in_the_tail, small_model, tmp_path
):
    (tmp_path / "prompt").write_text("hello")
    done = run_script(
        *("--model", str(small_model), "--raw", "--ignore_eos"),
        *("--prompt_file", str(tmp_path / "prompt"), "--max_new_tokens", "6"),
        *("--device_cells", "128", "--json", str(tmp_path / "out.json")),
    )
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["output_ids"] == in_the_tail[1]["output_ids"][:1]
    assert written["table"]["live_bytes_per_token"] == 0
    assert written["table"]["ring_bytes"] == 0
    assert "all cells lie on the device" in done.stdout


def test_smollm2_answers_and_stops(tmp_path):
    done = run_script(
        *("--prompt", "What is the capital of France?", "--max_new_tokens", "48"),
        *("--json", str(tmp_path / "out.json")),
    )
    written = json.loads((tmp_path / "out.json").read_text())
    assert "Paris" in done.stdout
    assert len(written["output_ids"][0]) < 48
    assert 2 not in written["output_ids"][0]
    assert written["table"]["early_share"] == 1.0


ERRORS = {
    "no prompt": ([], "give either --prompt"),
    "two prompts": (["--prompt=a", "--prompt_file=b"], "give either --prompt"),
    "no file": (["--prompt_file=/none"], "--prompt_file cannot be read"),
    "no model": (["--prompt=a", "--model=/none"], "there is no /none"),
    "architecture": (["--prompt=a", "--model={gpt2}"], "'GPT2LMHeadModel'"),
    "template": (["--prompt=a", "--model={small}"], "no chat template"),
    "capacity": (["--capacity=9", "--max_new_tokens=200"], "the cache has 128"),
    "block": (["--device_cells=100"], "multiple of the block of 128 cells, got 100"),
    "cells": (["--device_cells=1280"], "exceed the capacity of 128 cells, got 1280"),
    "budget": (["--budget_mib=1e6"], "--budget_mib must be between 0 and 65536 MiB"),
    "infinite": (["--budget_mib=inf"], "--budget_mib must be between 0 and 65536 MiB"),
    "no number": (["--slot_mib=nan"], "--slot_mib must be between 0 and 65536 MiB"),
    "no slot": (["--slot_mib=0"], "slot_bytes must be between 1024"),
    "depth": (["--depth=65"], "depth must be between 0 and 64, got 65"),
    "slot": (["--slot_mib=0.0001"], "slot_bytes must be between 1024"),
    "small slot": (["--slot_mib=0.01"], "slot_bytes must hold one block"),
    "pinned": (["--capacity=1000000000"], "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"),
    "top_p": (["--top_p=0"], "top_p must be above 0"),
    "mesh": (["--mesh=dp=2"], "--mesh must be a number of devices"),
    "json": (["--json=/none/out.json"], "--json must be a file in a folder"),
    "chunk": (["--chunk=2000000"], "chunk must be between 1 and"),
}
PLAIN = ["--prompt=a", "--raw", "--model={small}"]


@pytest.fixture(scope="module")
def errors(small_model, tmp_path_factory) -> dict[str, tuple[int, str]]:
    """What each of ERRORS exits with and prints."""
    gpt2 = tmp_path_factory.mktemp("gpt2")
    (gpt2 / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    cases = []
    for args, _ in ERRORS.values():
        whole = args if not args or "prompt" in args[0] else [*PLAIN, *args]
        cases.append([arg.format(small=small_model, gpt2=gpt2) for arg in whole])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(SCRIPT), json.dumps(cases)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(ERRORS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", ERRORS)
def test_a_users_mistake_gives_one_line(errors, name):
    code, said = errors[name]
    last = said.splitlines()[-1]
    assert code == 2
    assert last.startswith("error: ")
    assert ERRORS[name][1] in last
    assert "Traceback" not in said


def test_heads_that_do_not_divide_say_what_would(small_model):
    done = run_script(*PLAIN[:2], f"--model={small_model}", "--mesh=4", code=2)
    assert "axis sizes that work: [1, 3, 6]" in done.stderr
    assert "Traceback" not in done.stderr
