"""Makes a cache: what it will take, whether the host has that, then the memory."""

import os
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from kvjax.cache.state import Cache, cache_bytes, part_rows
from kvjax.delivery import agreement, ffi
from kvjax.delivery.placement import Placement

POOL_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class Footprint(NamedTuple):
    """Bytes that a cache takes, before anything is allocated. Ring: delivery/plan.py.

    Attributes:
      device_bytes: Device memory on each device.
      tail_bytes: Pinned host memory for each device.
      host_bytes: Pinned host memory of this process: of all its devices.
    """

    device_bytes: int
    tail_bytes: int
    host_bytes: int


def footprint(placement: Placement) -> Footprint:
    """What init_cache will allocate, to the byte (lengths and stamp left out)."""
    device, tail = cache_bytes(placement.config, placement.local_heads)
    return Footprint(device, tail, tail * len(_local_devices(placement)))


def pool_limit_bytes() -> int:
    """The limit of XLA's pinned pool for each GPU: 64 GiB, or what its variable says.

    The only environment variable that kvjax reads, since XLA offers no other way to
    ask.

    Raises:
      ValueError: the variable is not a whole number.
    """
    gib = os.environ.get(POOL_LIMIT, "64")
    if not gib.isdecimal():
        raise ValueError(f"{POOL_LIMIT} must be a whole number of GiB, got {gib!r}")
    return int(gib) << 30


def available_host_bytes() -> int:
    """Host memory that is free or can be freed (Linux's MemAvailable)."""
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def check_host(placement: Placement) -> None:
    """Raises ValueError if the pinned pool or the host cannot hold the tails."""
    need = footprint(placement)
    limit = pool_limit_bytes()
    if need.tail_bytes > limit:
        raise ValueError(
            f"the tails need {need.tail_bytes} bytes of pinned memory for each device, "
            f"XLA's pool allows {limit}: set {POOL_LIMIT} (GiB) above "
            f"{need.tail_bytes >> 30} before jax starts, or keep more cells on the "
            "device"
        )
    free = available_host_bytes()
    if need.host_bytes > free:
        raise ValueError(
            f"the tails need {need.host_bytes} bytes of host memory for "
            f"{len(_local_devices(placement))} devices, {free} are available: lower "
            "the capacity, or keep more cells on the device"
        )


def init_cache(
    placement: Placement, progress: Callable[[int, int], None] | None = None
) -> Cache:
    """Allocates an empty cache: pinning many GB takes a while.

    Args:
      placement: What it holds and where.
      progress: Called with (bytes made, bytes in all) after each part.

    Raises:
      ValueError: the pinned pool or a host cannot hold the tails, the native library is
        not built, or processes ask for different caches. Raised on every process, and
        nothing has been allocated then.
    """
    agreement.check_placement(placement)
    agreement.check_none(_problem(placement))
    shardings = placement.cache_shardings()
    total = sum(cache_bytes(placement.config, placement.stored_heads))
    made, parts, where = 0, [], (shardings.device, shardings.tail)
    for num_rows, sharding in zip(part_rows(placement.config), where, strict=True):
        parts.append(jax.block_until_ready(_zeros(placement, num_rows, sharding)))
        made += 0 if parts[-1] is None else parts[-1].nbytes
        if progress is not None:
            progress(made, total)
    lengths = jnp.zeros(
        placement.config.batch_size, jnp.int32, device=shardings.lengths
    )
    stamp = jnp.zeros((placement.mesh.size, 2), jnp.uint32, device=shardings.stamp)
    return Cache(*parts, lengths, stamp, placement.config.layout)


def _problem(placement: Placement) -> str:
    """What keeps this process from holding its share; "" if nothing does."""
    try:
        if placement.backend == "native":
            ffi.require(placement.mesh.devices.flat[0].platform)
        check_host(placement)
    except ValueError as error:
        return str(error)
    return ""


def _zeros(
    placement: Placement, num_rows: int, sharding: NamedSharding | None
) -> jax.Array | None:
    """One part. A tail is filled from the host: XLA would make it on the device."""
    if sharding is None:
        return None
    config = placement.config
    shape = (num_rows, placement.stored_heads, config.record_size)
    if sharding.memory_kind != "pinned_host":
        return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)(
            shape, config.dtype
        )
    local = np.zeros(sharding.shard_shape(shape), jnp.dtype(config.dtype))
    return jax.make_array_from_callback(shape, sharding, lambda _: local)


def _local_devices(placement: Placement) -> list[jax.Device]:
    here = jax.process_index()
    return [d for d in placement.mesh.devices.flat if d.process_index == here]
