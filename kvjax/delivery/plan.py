"""Whether a cache gets a ring, of how many slots: a plan, or a decline with numbers."""

from dataclasses import replace
from typing import NamedTuple

from kvjax.cache.state import layer_bytes
from kvjax.config import MIN_SLOTS, RingConfig
from kvjax.delivery.placement import Placement
from kvjax.shapes import BLOCK

SLOT_ALIGN = 256  # bytes that a slot's start is a multiple of: kernels load by 16
MARGIN_SLOTS = 3  # of a ring that a layer fits, if it may choose (ops/ring.h)


class Slots(NamedTuple):
    """A device's ring: `num_slots` slots of `slot_bytes`, outside XLA's memory."""

    num_slots: int
    slot_bytes: int

    @property
    def ring_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


class Decline(NamedTuple):
    """Why a device gets no ring; the same bits come by the ordered path.

    Attributes:
      reason: A sentence, with its numbers.
      asked_for: It is what the settings ask for, not what they fail to give.
      slot_bytes: What the ordered path copies at once, at most.
    """

    reason: str
    asked_for: bool = True
    slot_bytes: int = RingConfig().slot


def plan_ring(placement: Placement, config: RingConfig) -> Slots | Decline:
    """Decides before anything is allocated. No more slots than the device's tail fills,
    but two, and none larger than the largest layer's.

    Raises:
      ValueError: a slot does not hold one block of cells.
    """
    tails = [
        layer_bytes(placement.config, layer, placement.local_heads)[1]
        for layer in range(placement.config.num_layers)
    ]
    if not any(tails):
        return Decline("all cells lie on the device")
    slot_bytes = at_once = slot_of(placement, config, max(tails))
    allowed = config.budget // slot_bytes
    if allowed < MIN_SLOTS:  # then the budget says nothing of the ordered path
        at_once = slot_of(placement, replace(config, budget_bytes=None), max(tails))
    if config.depth == 0:
        return Decline("depth is 0", slot_bytes=at_once)
    if config.budget == 0:
        return Decline("budget_bytes is 0", slot_bytes=at_once)
    if allowed < MIN_SLOTS:
        reason = (
            f"a ring needs {MIN_SLOTS} slots of {slot_bytes} bytes, "
            f"{MIN_SLOTS * slot_bytes} in all, budget_bytes allows {config.budget}"
        )
        return Decline(reason, asked_for=False, slot_bytes=at_once)
    useful = sum(-(-tail // slot_bytes) for tail in tails)
    return Slots(max(MIN_SLOTS, min(allowed, useful)), slot_bytes)


def slot_of(placement: Placement, config: RingConfig, tail: int) -> int:
    """A slot's bytes, aligned, cut to the largest layer's `tail`; whole blocks, unless
    a size was asked for.

    Each segment takes a slot, the last few cells of a layer as well. So a layer that
    fits the ring makes even slots: else a good part of the ring would be empty while a
    step begins.

    Raises:
      ValueError: a slot of the asked size does not hold one block of a device's heads.
    """
    block = smallest_slot(placement)
    if config.slot_bytes is not None:
        if config.slot_bytes < block:
            raise ValueError(
                f"slot_bytes must hold one block of {BLOCK} cells, {block} bytes of "
                f"this cache, got {config.slot_bytes}"
            )
        return min(config.slot_bytes // SLOT_ALIGN * SLOT_ALIGN, tail)
    most = max(1, config.slot // block) * block
    if tail > config.budget:
        return min(most, tail)
    most = min(most, max(1, config.budget // MARGIN_SLOTS // block) * block)
    shares = -(-tail // most)
    return -(-tail // (shares * block)) * block


def smallest_slot(placement: Placement) -> int:
    """Bytes of one block of one sequence on one device."""
    config = placement.config
    return BLOCK * placement.local_heads * config.record_size * config.itemsize
