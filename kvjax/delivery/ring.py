"""The ring's handle: opens it on every local device, counts, closes (ops/ring.h)."""

import ctypes
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax

from kvjax.config import RingConfig, check_range
from kvjax.delivery import ffi, timeline
from kvjax.delivery.placement import Placement
from kvjax.delivery.plan import Decline, Slots, plan_ring


class RingStats(NamedTuple):
    """Counts of one device's ring, or of all local devices together, since it was
    opened.

    Bytes are of cells: early through slots, ordered on the compute stream; gap bytes
    were copied along between sequences.
    """

    steps: int = 0
    deliveries: int = 0
    early_bytes: int = 0
    ordered_bytes: int = 0
    gap_bytes: int = 0
    slot_reuses: int = 0
    ahead_used: int = 0
    ahead_dropped: int = 0
    ordered_depth: int = 0
    ordered_sequence: int = 0
    ordered_moved: int = 0
    skipped_attends: int = 0
    dropped_plans: int = 0
    moved_tails: int = 0
    given_back: int = 0
    length_errors: int = 0
    stop_slots: int = 0
    stop_depth: int = 0
    ring_bytes: int = 0
    num_slots: int = 0


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
    """The rings of one cache: one on each local device of its placement, each on its
    own.

    Without one, or after close, attends go by the ordered path: the same bits. Settings
    are the ring's; to change them close it and open another. A ring that nobody holds
    any more is closed, and so are all at interpreter exit: before the client dies,
    touching nothing of XLA's. The reference backend has none: one that says so.
    """

    def __init__(self, placement: Placement, plans: dict[jax.Device, Slots | Decline]):
        self.placement = placement
        self.plans = plans
        self._devices = [] if placement.backend == "reference" else [*plans]
        self._close = weakref.finalize(
            self, _close_native, placement.ring_id, self._devices
        )

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
          ValueError: the settings are no RingConfig, the id's ring is open already, a
            slot holds no block, or the native library is missing. No device is left
            open then.
        """
        for given in (config, *(per_device or {}).values()):
            if not isinstance(given, RingConfig | None):
                raise ValueError(
                    f"a ring's settings are a RingConfig, got {given!r}: "
                    "Ring.open(placement, RingConfig(depth=...))"
                )
        here = jax.process_index()
        local = [d for d in placement.mesh.devices.flat if d.process_index == here]
        if placement.backend == "reference":
            none = Decline("the reference backend has no ring")
            return cls(placement, dict.fromkeys(local, none))
        configs = {d: (per_device or {}).get(d, config or RingConfig()) for d in local}
        plans = {d: plan_ring(placement, configs[d]) for d in local}
        opened = []
        for device in local:
            like = emulation.get(device) if isinstance(emulation, dict) else emulation
            if not _open_native(
                placement, device, configs[device], plans[device], like
            ):
                _close_native(placement.ring_id, opened)
                raise ValueError(
                    f"ring_id {placement.ring_id} is open already on {device}; close "
                    "that ring, or give this cache's Placement another ring_id"
                )
            opened.append(device)
        _tell(plans)
        return cls(placement, plans)

    def stats(self, device: jax.Device | None = None) -> RingStats:
        """Counts of one device, or the sum over the local ones.

        Of steps that have run: wait for their results first, steps are asynchronous.
        """
        devices = [d for d in self._devices if device in (None, d)]
        counts = [_stats(self.placement.ring_id, d) for d in devices] or [RingStats()]
        return RingStats(*map(sum, zip(*counts, strict=True)))

    def declines(self) -> dict[jax.Device, str]:
        """Devices that have no ring, and why, with the numbers."""
        texts = {d: _decline(self.placement.ring_id, d) for d in self._devices}
        if not self._devices:
            texts = {d: plan.reason for d, plan in self.plans.items()}
        return {device: text for device, text in texts.items() if text}

    @contextmanager
    def trace(self, max_marks: int = timeline.MAX_MARKS) -> Iterator[timeline.Trace]:
        """Notes when what ran, within a `with`; its trace is filled in at the end.

        The end waits for the last work that was noted. Steps run on their own: wait for
        them (jax.block_until_ready(cache)) within the `with`.

        Args:
          max_marks: Kept of each device; what comes later is counted only, and said.

        Raises:
          ValueError: there is nothing to trace, or it is being traced already; at the
            end: another ring took the place of the one that was traced.
        """
        check_range("max_marks", max_marks, 1, timeline.MOST_MARKS)
        if not self._devices:
            raise ValueError("there is no ring to trace: the backend is reference")
        trace, started = timeline.Trace(), []
        try:
            for device in self._devices:
                timeline.start(*self._place(device), max_marks)
                started.append(device)
            yield trace
        finally:
            for device in started:
                ended = timeline.stop(*self._place(device), max_marks)
                trace.marks[device], trace.missed[device] = ended
        timeline.tell_missed(trace, max_marks)

    def _place(self, device: jax.Device) -> tuple[ctypes.CDLL, int, int]:
        return _library(device), self.placement.ring_id, _ordinal(device)

    def close(self) -> None:
        """Waits for deliveries in flight and gives everything back, once.

        Later attends go ordered.
        """
        self._close()

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _tell(plans: dict[jax.Device, Slots | Decline]) -> None:
    """Says each reason once for which a device gets no ring that was asked for."""
    declines = [plan for plan in plans.values() if isinstance(plan, Decline)]
    for reason in sorted({plan.reason for plan in declines if not plan.asked_for}):
        print(
            f"kvjax: no ring, going on with the ordered path: {reason}", file=sys.stderr
        )


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
    if isinstance(plan, Decline):
        plan, decline = Slots(0, plan.slot_bytes), plan.reason
    else:
        decline = ""
    open_ring = _library(device).kvjax_ring_open
    open_ring.restype = ctypes.c_bool
    numbers = (placement.ring_id, _ordinal(device), config.depth)
    numbers += (plan.slot_bytes, plan.num_slots, config.headroom_bytes)
    args = [ctypes.c_int64(n) for n in numbers]
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
    lib.kvjax_ring_stats(
        ctypes.c_int64(ring_id), ctypes.c_int64(_ordinal(device)), counts
    )
    return RingStats(**dict(zip(names, counts, strict=True)))


def _decline(ring_id: int, device: jax.Device) -> str:
    text = ctypes.create_string_buffer(512)
    _library(device).kvjax_ring_decline(
        ctypes.c_int64(ring_id),
        ctypes.c_int64(_ordinal(device)),
        text,
        ctypes.c_int64(512),
    )
    return text.value.decode()


def _close_native(ring_id: int, devices: list[jax.Device]) -> None:
    for device in devices:
        _library(device).kvjax_ring_close(
            ctypes.c_int64(ring_id), ctypes.c_int64(_ordinal(device))
        )
