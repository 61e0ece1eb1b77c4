"""The ring's handle: opens it on every local device, counts, closes. Contract: ops/ring.h."""

import atexit
import ctypes
import weakref
from typing import NamedTuple

import jax

from kvjax.config import RingConfig
from kvjax.delivery import ffi
from kvjax.delivery.placement import Placement
from kvjax.delivery.plan import Decline, Slots, plan_ring

_open: weakref.WeakSet["Ring"] = weakref.WeakSet()  # the registry, for the exit


class RingStats(NamedTuple):
    """Counts of one device's ring, or of all local devices together, since it was opened.

    Bytes are of cells: early through slots, ordered on the compute stream; gap bytes were
    copied along between sequences.
    """

    steps: int
    deliveries: int
    early_bytes: int
    ordered_bytes: int
    gap_bytes: int
    slot_reuses: int
    ordered_depth: int
    ordered_sequence: int
    ordered_moved: int
    skipped_attends: int
    dropped_plans: int
    moved_tails: int
    given_back: int
    length_errors: int
    stop_slots: int
    stop_depth: int
    ring_bytes: int
    num_slots: int


class Emulation(NamedTuple):
    """What an emulated device (cpu platform) is like; for tests of delivery.

    Attributes:
      seed: Of the delays.
      max_delay_us: Of each copy and event on the transfer stream, drawn at random.
      free_bytes: Device memory that is free before the ring.
      fail_allocation: The ring's allocation fails although free_bytes would do.
    """

    seed: int = 0
    max_delay_us: int = 0
    free_bytes: int = 1 << 40
    fail_allocation: bool = False


class Ring:
    """The rings of one cache: one on each local device of its placement, each on its own.

    Without one, or after close, attends go by the ordered path: the same bits. Settings
    are the ring's; to change them close it and open another.
    """

    def __init__(self, placement: Placement, plans: dict[jax.Device, Slots | Decline]):
        self.placement = placement
        self.plans = plans
        _open.add(self)

    @classmethod
    def open(
        cls,
        placement: Placement,
        config: RingConfig | None = None,
        *,
        per_device: dict[jax.Device, RingConfig] | None = None,
        emulation: Emulation | dict[jax.Device, Emulation] | None = None,
    ) -> "Ring":
        """Opens a ring on every local device; memory is taken when the first step runs.

        Args:
          placement: Of the cache that it serves; its ring_id names the ring.
          config: Depth, budget and slot size; the defaults if None.
          per_device: Other settings for some devices.
          emulation: Of all or some emulated devices.

        Raises:
          ValueError: the id's ring is open already, a slot holds no block, or the native
            library is missing.
        """
        local = [d for d in placement.mesh.devices.flat if d.process_index == jax.process_index()]
        configs = {d: (per_device or {}).get(d, config or RingConfig()) for d in local}
        plans = {d: plan_ring(placement, configs[d]) for d in local}
        opened = []
        for device in local:
            emulated = emulation.get(device) if isinstance(emulation, dict) else emulation
            if not _open_native(placement, device, configs[device], plans[device], emulated):
                for other in opened:
                    _library(other).kvjax_ring_close(placement.ring_id, _ordinal(other))
                raise ValueError(
                    f"ring_id {placement.ring_id} is open already on {device}; close that "
                    "ring, or give this cache's Placement another ring_id"
                )
            opened.append(device)
        return cls(placement, plans)

    def stats(self, device: jax.Device | None = None) -> RingStats:
        """Counts of one device, or the sum over the local ones."""
        devices = self.plans if device is None else [device]
        counts = [_stats(self.placement.ring_id, d) for d in devices]
        return RingStats(*map(sum, zip(*counts, strict=True)))

    def declines(self) -> dict[jax.Device, str]:
        """Devices that have no ring, and why, with the numbers."""
        texts = {d: _decline(self.placement.ring_id, d) for d in self.plans}
        return {device: text for device, text in texts.items() if text}

    def close(self) -> None:
        """Waits for deliveries in flight and gives everything back. Later attends go ordered."""
        for device in self.plans:
            _library(device).kvjax_ring_close(
                ctypes.c_int64(self.placement.ring_id), ctypes.c_int64(_ordinal(device))
            )
        _open.discard(self)

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _library(device: jax.Device) -> ctypes.CDLL:
    return ffi.require(device.platform)


def _ordinal(device: jax.Device) -> int:
    """What a handler sees: the CUDA ordinal, or on the cpu platform the global id."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def _open_native(
    placement: Placement,
    device: jax.Device,
    config: RingConfig,
    plan: Slots | Decline,
    emulation: Emulation | None,
) -> bool:
    num_slots, decline = (plan.num_slots, "") if isinstance(plan, Slots) else (0, plan.reason)
    open_ring = _library(device).kvjax_ring_open
    open_ring.restype = ctypes.c_bool
    numbers = (placement.ring_id, _ordinal(device), config.depth, config.slot_bytes)
    args = [ctypes.c_int64(n) for n in (*numbers, num_slots, config.headroom_bytes)]
    args.append(ctypes.c_char_p(decline.encode()))
    if device.platform == "cpu":
        seed, delay, free, fail = emulation or Emulation()
        args += [ctypes.c_uint64(seed), ctypes.c_int64(delay), ctypes.c_int64(free)]
        args += [ctypes.c_bool(fail)]
    elif emulation is not None:
        raise ValueError(f"emulation is for the cpu platform, got {device}")
    return open_ring(*args)


def _stats(ring_id: int, device: jax.Device) -> RingStats:
    lib = _library(device)
    lib.kvjax_ring_stat_names.restype = ctypes.c_char_p
    names = lib.kvjax_ring_stat_names().decode().rstrip(",").split(",")
    counts = (ctypes.c_int64 * len(names))()
    lib.kvjax_ring_stats(ctypes.c_int64(ring_id), ctypes.c_int64(_ordinal(device)), counts)
    return RingStats(**dict(zip(names, counts, strict=True)))


def _decline(ring_id: int, device: jax.Device) -> str:
    text = ctypes.create_string_buffer(512)
    _library(device).kvjax_ring_decline(
        ctypes.c_int64(ring_id), ctypes.c_int64(_ordinal(device)), text, ctypes.c_int64(512)
    )
    return text.value.decode()


@atexit.register
def _close_all() -> None:
    """Interpreter exit is a close: before the client dies, touching nothing of XLA's."""
    for ring in list(_open):
        ring.close()
