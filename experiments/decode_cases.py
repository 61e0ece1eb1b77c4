"""What bench_decode is asked for: meshes, rings, arms, cases; if there is room."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from caches import cache_of, ring_of
from decode_rows import Arm, Case
from jax.sharding import Mesh
from xla_alone import PlainPlacement

from kvjax.advice import GB
from kvjax.config import MIN_SLOTS, CacheConfig, RingConfig
from kvjax.delivery.allocate import (
    POOL_LIMIT,
    available_host_bytes,
    footprint,
    pool_limit_bytes,
)
from kvjax.delivery.placement import Placement
from kvjax.delivery.plan import Decline, plan_ring
from kvjax.measurement import WARMUP, device_memory
from kvjax.model.transformer import ModelConfig

ARMS = ("device", "ordered", "pipelined", "xla")
Meshes = dict[int, Mesh]  # by number of devices


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure; see the flags."""

    tokens: int
    waiting: int
    repeats: int
    logits: int = 0

    @property
    def cells(self) -> int:
        """That a run adds to each sequence."""
        return WARMUP + max(self.tokens, self.waiting)


def mesh_sizes(values: Sequence[str]) -> list[int]:
    """Numbers of devices of "2", or of "tp=2"."""
    texts = [value.removeprefix("tp=") for value in values]
    sizes = [int(text) for text in texts if text.isdecimal()]
    if not sizes or len(set(sizes)) < len(texts) or min(sizes) < 1:
        raise ValueError(
            f"--mesh must be numbers of devices, 3 or tp=3, each once, got "
            f"{','.join(values)!r}"
        )
    return sizes


def make_rings(
    depths: Sequence[str], slots_mib: Sequence[str], budgets_mib: Sequence[str]
) -> list[RingConfig]:
    """A ring for each combination of the flags' values."""
    slots = numbers("slot_mib", slots_mib, float) if slots_mib else [None]
    settings = itertools.product(
        numbers("depth", depths), slots, numbers("budget_mib", budgets_mib, float)
    )
    return [ring_of(depth, budget, slot) for depth, slot, budget in settings]


def make_arms(
    names: Sequence[str],
    device_cells: Sequence[str],
    rings: list[RingConfig],
    sizes: Sequence[int] = (1,),
    capacities: Sequence[int | None] = (None,),
) -> list[Arm]:
    """The arms in the order of ARMS; some once for each placement or ring, all once for
    each mesh and capacity.
    """
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise ValueError(f"--arms must be of {', '.join(ARMS)}, got {unknown}")
    for cells in device_cells or [""]:
        if cells != "half" and not cells.isdecimal():
            raise ValueError(f"--device_cells must be numbers or half, got {cells!r}")
    if "xla" in names and [*sizes] != [1]:
        raise ValueError(
            "the arm xla runs on one device: leave it out, or give --mesh=1, got "
            f"{','.join(map(str, sizes))}"
        )
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
    every = [
        replace(arm, devices=size, capacity=cells)
        for size in sizes
        for cells in capacities
        for arm in arms
    ]
    if twice := [arm.label for arm in every if every.count(arm) > 1]:
        raise ValueError(f"give each setting once, {twice[0]} is asked for twice")
    return every


def make_case(cells: int, batch: int, ragged: bool, effort: Effort) -> Case:
    lengths = [cells] * batch
    if ragged:  # evenly from half to one and a half, in no order
        spaced = np.linspace(0.5 * cells, 1.5 * cells, batch).round().astype(int)
        lengths = np.random.default_rng(0).permutation(spaced).tolist()
    needed = max(lengths) + effort.cells
    return Case(cells=cells, lengths=tuple(lengths), needed=needed)


def cache_config(arm: Arm, case: Case, config: ModelConfig, dtype: str) -> CacheConfig:
    return cache_of(
        config,
        batch_size=len(case.lengths),
        capacity=arm.cells(case),
        dtype=dtype,
        device_cells=arm.cells_on_device(case),
    )


def place_cells(
    arm: Arm, case: Case, config: ModelConfig, meshes: Meshes, dtype: str
) -> Placement:
    cache = cache_config(arm, case, config, dtype)
    kind = PlainPlacement if arm.plain else Placement
    return kind(config=cache, num_heads=config.num_heads, mesh=meshes[arm.devices])


def check_case(
    arms: list[Arm],
    case: Case,
    config: ModelConfig,
    meshes: Meshes,
    dtype: str,
    weights: str,
) -> dict[Arm, str]:
    """Refuses what cannot run before anything is loaded or pinned.

    The first device is in every mesh and the caches of all arms live together, so it
    holds a share of each. The processes of a job are taken to run on one host.

    Returns:
      Of several pipelined arms those whose ring is declined, and why.

    Raises:
      ValueError: an ordered arm has no tail, no pipelined one a ring, a capacity is too
        small, or memory is short.
    """
    for arm in arms:
        check_capacity(arm, case)
    places = {arm: place_cells(arm, case, config, meshes, dtype) for arm in arms}
    declined = find_declined(case, places)
    needs = {placement: footprint(placement) for placement in places.values()}
    itemsize = jnp.dtype(weights).itemsize
    on_device = sum(-(-config.num_parameters * itemsize // n) for n in meshes)
    on_device += sum(need.device_bytes for need in needs.values())
    # A plain cache is split out of a whole one, which lies beside it for that time.
    times = {place: 2 if isinstance(place, PlainPlacement) else 1 for place in needs}
    pinned = sum(need.tail_bytes * times[place] for place, need in needs.items())
    on_host = sum(
        need.tail_bytes * times[place] * place.mesh.size
        for place, need in needs.items()
    )
    limit = pool_limit_bytes()
    if pinned > limit:
        raise ValueError(
            f"{case.name} needs {pinned} bytes of pinned memory for each device for "
            f"the tails of all arms, XLA's pool allows {limit}: set {POOL_LIMIT} (GiB) "
            f"above {pinned >> 30} before jax starts, lower --cells or --batch, or "
            "leave arms out"
        )
    device = next(iter(meshes.values())).local_devices[0]
    for what, need, free in (
        ("device", on_device, free_device_bytes(device)),
        ("host", on_host, available_host_bytes()),
    ):
        if need > free:
            raise ValueError(
                f"{case.name} needs {need / GB:.1f} GB of {what} memory for weights "
                f"and the cells of all arms, {free / GB:.1f} GB are free: lower "
                "--cells or --batch, or leave arms out"
            )
    return declined


def find_declined(case: Case, places: dict[Arm, Placement]) -> dict[Arm, str]:
    """The pipelined arms whose ring is declined; refused if no ring is left."""
    declined = {}
    for arm, placement in places.items():
        if arm.ring is None:
            continue
        ring = arm.ring
        if arm.name == "ordered":  # it takes no ring: only its slot must do
            ring = replace(ring, depth=1, budget_bytes=MIN_SLOTS * ring.slot)
        plan = plan_ring(placement, ring)
        if isinstance(plan, Decline):
            declined[arm] = plan.reason
    pipelined = {arm for arm in places if arm.name == "pipelined"}
    for arm, reason in declined.items():
        if arm not in pipelined or declined.keys() >= pipelined:
            raise ValueError(f"{arm.label} cannot run at {case.name}: {reason}")
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


def numbers(flag: str, values: Sequence[str], kind: type = int, least: int = 0) -> list:
    """The numbers of a list flag."""
    try:
        found = [kind(value) for value in values]
    except ValueError as error:
        raise ValueError(f"--{flag} must be numbers, got {list(values)}") from error
    if not found or not all(least <= number < math.inf for number in found):
        raise ValueError(
            f"--{flag} must be numbers from {least} on, got {list(values)}"
        )
    return found
