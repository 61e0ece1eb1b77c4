"""Whether a cache gets a ring, of how many slots: a plan, or a decline with numbers."""

from typing import NamedTuple

from kvjax.cache.state import layer_bytes
from kvjax.config import MIN_SLOTS, RingConfig
from kvjax.delivery.placement import Placement
from kvjax.shapes import BLOCK

SLOT_ALIGN = 256  # bytes that a slot's start is a multiple of: kernels load by 16
MARGIN_SLOTS = 3  # the one being read and a margin of two (ops/ring.h)


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
    """

    reason: str
    asked_for: bool = True


def plan_ring(placement: Placement, config: RingConfig) -> Slots | Decline:
    """Decides before anything is allocated. No more slots than the device's tail fills,
    and none larger than the largest layer's.

    Raises:
      ValueError: a slot does not hold one block of cells.
    """
    tails = [
        layer_bytes(placement.config, layer, placement.local_heads)[1]
        for layer in range(placement.config.num_layers)
    ]
    if not any(tails):
        return Decline("all cells lie on the device")
    slot_bytes = slot_of(placement, config)
    if config.depth == 0:
        return Decline("depth is 0")
    if config.budget == 0:
        return Decline("budget_bytes is 0")
    slot_bytes = min(slot_bytes, max(tails))
    fits = max(tails) <= config.budget
    if fits and config.slot_bytes is None:
        slot_bytes = _even_share(placement, max(tails), config.budget, slot_bytes)
    # A layer's copies that outlast a filled ring outlast what else the layer computes.
    least = MARGIN_SLOTS if fits else MIN_SLOTS
    useful = sum(-(-tail // slot_bytes) for tail in tails)
    allowed = config.budget // slot_bytes
    if allowed < least:
        return Decline(
            f"a ring needs {least} slots of {slot_bytes} bytes, "
            f"{least * slot_bytes} in all, budget_bytes allows {config.budget}",
            asked_for=False,
        )
    return Slots(max(least, min(allowed, useful)), slot_bytes)


def _even_share(placement: Placement, tail: int, budget: int, most: int) -> int:
    """Of a layer's tail, so many bytes that its last slot is about as full as others.

    Each segment takes a slot. Where a few segments make a layer, a small one at its end
    would leave much of the ring empty while a step begins.
    """
    block = smallest_slot(placement)
    most = max(block, min(most, budget // MARGIN_SLOTS))
    shares = -(-tail // most)
    return min(most, -(-tail // (shares * block)) * block)


def slot_of(placement: Placement, config: RingConfig) -> int:
    """A slot's bytes, aligned; at least a block's unless another size was asked for.

    Raises:
      ValueError: a slot of the asked size does not hold one block of a device's heads.
    """
    block_bytes = smallest_slot(placement)
    if config.slot_bytes is None:
        return max(config.slot // SLOT_ALIGN * SLOT_ALIGN, block_bytes)
    if config.slot_bytes < block_bytes:
        raise ValueError(
            f"slot_bytes must hold one block of {BLOCK} cells, {block_bytes} bytes of "
            f"this cache, got {config.slot_bytes}"
        )
    return config.slot_bytes // SLOT_ALIGN * SLOT_ALIGN


def smallest_slot(placement: Placement) -> int:
    """Bytes of one block of one sequence on one device."""
    config = placement.config
    return BLOCK * placement.local_heads * config.record_size * config.itemsize
