"""Golden hashes of attention: a GPU makes the file, any device checks its bits by it.

    python experiments/golden.py --out tests/data/golden.json       # on the GPU
    python experiments/golden.py --check tests/data/golden.json   # on any device

A hash is the SHA-256 of one attend's float32 output. Inputs are made by integer
arithmetic alone (a counter through MurmurHash3's finaliser), so they are the same bits
everywhere. Predicted: every hash equal on every device and at every placement, since
the order of each sum is fixed by cell index (ops/block_math.h).

Each case runs over these sequences:

    sequence   0    1    2    3    4     5     6     7
    length     0    1  127  128  129  1023  1024  1025     and up to T rows behind it
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from caches import cache_with
from commit import COMMIT
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from kvjax.cache.state import Cache
from kvjax.config import CACHE_DTYPES, CacheConfig, RingConfig
from kvjax.delivery.placement import Placement, make_mesh
from kvjax.delivery.plan import smallest_slot
from kvjax.delivery.ring import Ring
from kvjax.measurement import provenance
from kvjax.model.attention import Step

OUT = flags.DEFINE_string("out", None, "Writes the hashes of this device to this file.")
CHECK = flags.DEFINE_string("check", None, "Compares them with those of this file.")

PACKAGES = ("jax", "jaxlib", "numpy")
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 8)
LENGTHS = (0, 1, 127, 128, 129, 1023, 1024, 1025)  # around a block and a group of them
CAPACITY = 1152
NUM_KV_HEADS = 2
DEVICE_CELLS = (None, 0, 128)  # placements that must agree before a hash is written


class Variant(NamedTuple):
    """What an attend does beside its shapes. Layer 1 holds denormal values."""

    name: str
    layer: int = 0
    window: int | None = None
    soft_cap: float | None = None


VARIANTS = (
    Variant("plain"),
    Variant("window 130", window=130),
    Variant("soft cap 3", soft_cap=3.0),
    Variant("denormal values", layer=1),
)
STEPS = [(num_new, group) for num_new in (1, 8) for group in GROUPS] + [(40, 4)]


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1 or (OUT.value is None) == (CHECK.value is None):
        raise app.UsageError("give either --out or --check, and nothing else")
    found = {}
    for head_dim, dtype in geometries():
        found |= agreed_hashes(head_dim, dtype)
        print(f"head size {head_dim}, {dtype}: {len(found)} hashes", flush=True)
    if OUT.value is not None:
        made = provenance(jax.devices()[0], PACKAGES, sys.argv, COMMIT.value)
        golden = {"made": made, "sha256": found}
        Path(OUT.value).write_text(json.dumps(golden, indent=1) + "\n")
        return 0
    wrong = differences(found, read(CHECK.value)["sha256"])
    print(*wrong, f"{len(wrong)} of {len(found)} differ", sep="\n")
    return 1 if wrong else 0


def read(path: str | Path) -> dict[str, Any]:
    """What --out wrote: "made" says where and how, "sha256" has each case's hash."""
    return json.loads(Path(path).read_text())


def differences(found: dict[str, str], golden: dict[str, str]) -> list[str]:
    """Names of cases that differ, or that only one side has."""
    return sorted(
        name
        for name in found.keys() | golden.keys()
        if found.get(name) != golden.get(name)
    )


def geometries() -> list[tuple[int, str]]:
    """(head size, cache dtype) of all cases."""
    return [(head_dim, dtype) for head_dim in HEAD_DIMS for dtype in CACHE_DTYPES]


def agreed_hashes(head_dim: int, dtype: str) -> dict[str, str]:
    """Hashes that all placements agree on.

    Raises:
      ValueError: two placements differ.
    """
    first, *others = (hashes(head_dim, dtype, cells) for cells in DEVICE_CELLS)
    for other in others:
        if wrong := differences(first, other):
            raise ValueError(f"placements differ in {wrong}")
    return first


def hashes(head_dim: int, dtype: str, device_cells: int | None) -> dict[str, str]:
    """The hash of each case of a head size and a cache dtype, by its name.

    Args:
      head_dim: H, of keys and values.
      dtype: Of the cache.
      device_cells: Cells of each sequence on the device; the others come by the ring.
    """
    placements = {g: place(head_dim, dtype, device_cells, g) for g in GROUPS}
    first = placements[GROUPS[0]]
    config = RingConfig(depth=2, slot_bytes=2 * smallest_slot(first))
    cache = make_cache(first)
    found = {}
    with Ring.open(first, config):
        for num_new, group in STEPS:
            outs, cache = run(placements[group], num_new, cache)
            start = f"head size {head_dim}, {dtype}, {num_new} new, group {group}"
            for name, out in outs.items():
                digest = hashlib.sha256(np.asarray(out).tobytes()).hexdigest()
                found[f"{start}, {name}"] = digest
    return found


def place(head_dim: int, dtype: str, device_cells: int | None, group: int) -> Placement:
    config = CacheConfig(
        num_layers=1 + max(variant.layer for variant in VARIANTS),
        batch_size=len(LENGTHS),
        capacity=CAPACITY,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        dtype=dtype,
        device_cells=device_cells,
    )
    num_heads = NUM_KV_HEADS * group
    return Placement(config=config, num_heads=num_heads, mesh=make_mesh())


def make_cache(placement: Placement) -> Cache:
    """Cells of all layers, also at and above the lengths: nothing may see those."""
    config = placement.config
    shape = (len(LENGTHS), config.num_cells, NUM_KV_HEADS, config.record_size)
    layers = []
    for layer in range(config.num_layers):
        records = numbers(shape, salt=1, dtype=config.dtype)
        if layer == 1:
            values = records[..., config.head_dim :]
            values[...] = denormal(values)
        layers.append(records)
    return cache_with(placement, layers, np.array(LENGTHS))


def run(
    placement: Placement, num_new: int, cache: Cache
) -> tuple[dict[str, Array], Cache]:
    """One step over the cells below LENGTHS: the output of each variant, and the cache.

    Args:
      placement: Of the cache; its query heads are those of one group size.
      num_new: T; some sequences drop up to two of their rows.
      cache: Donated. It may hold an earlier step's rows above LENGTHS.
    """
    shardings = placement.cache_shardings()
    lengths = jax.device_put(np.array(LENGTHS, np.int32), shardings.lengths)
    cache = cache._replace(lengths=lengths, stamp=cache.stamp * 0)
    rows = jax.device_put(make_rows(placement, num_new), placement.sharding(P()))
    return program(placement)(cache, *rows)


def make_rows(placement: Placement, width: int) -> tuple[np.ndarray, ...]:
    """tokens [B, T], num_new [B], q [B, T, N, H], k and, for each layer, v."""
    config = placement.config
    shape = (len(LENGTHS), width)
    num_new = width - np.arange(len(LENGTHS)) % min(3, width)
    q = (*shape, placement.num_heads, config.head_dim)
    kv = (*shape, NUM_KV_HEADS, config.head_dim)
    v = numbers(kv, salt=3, dtype=config.dtype)
    return (
        np.zeros(shape, np.int32),
        num_new.astype(np.int32),
        numbers(q, salt=4, dtype="float32"),
        numbers(kv, salt=2, dtype=config.dtype),
        np.stack([v, denormal(v)]),
    )


def program(placement: Placement) -> Callable[..., Any]:
    """A jitted step that attends once for each variant."""

    def step(cache, tokens, num_new, q, k, v):
        attends = tuple((variant.layer, variant.window) for variant in VARIANTS)
        _, step = Step.begin(placement, cache, tokens, num_new, attends)
        outs = {
            variant.name: step.attend(
                variant.layer,
                q,
                k,
                v[variant.layer],
                scale=placement.config.head_dim**-0.5,
                window=variant.window,
                soft_cap=variant.soft_cap,
            )
            for variant in VARIANTS
        }
        return outs, step.end()

    return jax.jit(
        step,
        donate_argnames="cache",
        out_shardings=(placement.sharding(P()), placement.cache_shardings()),
        compiler_options={"xla_backend_optimization_level": 0},  # the work is in ops
    )


def numbers(shape: tuple[int, ...], *, salt: int, dtype: str) -> np.ndarray:
    """An even spread over [-2, 2), float32 or cut (not rounded) to bfloat16.

    Number i is mix(i ^ mix(salt)): its upper 24 bits, less 2**23, times 2**-22. All
    exact: no rounding takes part.
    """
    count = np.arange(np.prod(shape), dtype=np.uint32)
    bits = mix(count ^ mix(np.array([salt], np.uint32)))
    whole = (bits >> 8).astype(np.int32) - (1 << 23)
    x = (whole.astype(np.float32) * np.float32(2.0**-22)).reshape(shape)
    if dtype == "float32":
        return x
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(jnp.bfloat16)


def denormal(x: np.ndarray) -> np.ndarray:
    """The same numbers without their exponent: all below the least normal one."""
    if x.dtype == np.float32:
        return (x.view(np.uint32) & np.uint32(0x807FFFFF)).view(np.float32)
    return (x.view(np.uint16) & np.uint16(0x807F)).view(jnp.bfloat16)


def mix(x: np.ndarray) -> np.ndarray:
    """Scatters the bits of uint32 numbers: the finaliser of MurmurHash3."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


if __name__ == "__main__":
    app.run(main)
