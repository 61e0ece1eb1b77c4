"""The stand-alone loop of ops/copy_then_attend.h over the tails of a JAX cache."""

import ctypes

import numpy as np

from kvjax.cache.state import Cache, layer_extents
from kvjax.delivery import ffi
from kvjax.delivery.placement import Placement

TYPES = {"float32": 0, "bfloat16": 1}  # as in ops/attention.h
NUMBERS = (
    "num_seqs num_new num_heads num_kv_heads head_dim value_dim record_size capacity "
    "window"
).split()


class Shape(ctypes.Structure):
    """AttentionShape of ops/attention.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in NUMBERS),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("query_type", ctypes.c_int32),
        ("cell_type", ctypes.c_int32),
    ]


def shape_of(placement: Placement, query_dtype: str, scale: float) -> Shape:
    config = placement.config
    return Shape(
        num_seqs=config.batch_size,
        num_new=1,
        num_heads=placement.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        value_dim=config.value_dim,
        record_size=config.record_size,
        capacity=config.num_cells,
        scale=scale,
        query_type=TYPES[query_dtype],
        cell_type=TYPES[config.dtype],
    )


def copy_then_attend(
    placement: Placement,
    cache: Cache,
    q: np.ndarray,
    rows: np.ndarray,
    *,
    scale: float,
    slot_bytes: int,
    passes: int,
) -> tuple[float, np.ndarray]:
    """Runs one pass over all layers, then `passes` that are timed.

    Args:
      placement: On one device, all cells in the tail.
      cache: Nothing may be running on it; read where it lies, and left as it is.
      q: Queries [B, 1, N, H] of every layer.
      rows: The step's rows [B, 1, K, R] of every layer.
      scale: Of the scores.
      slot_bytes: Cells are copied in segments of at most so many bytes.
      passes: At least 1.

    Returns:
      Seconds of all timed passes together, and what each layer gave [L, B, 1, N, Hv].

    Raises:
      ValueError: memory is short, or a slot or a sequence doesn't fit.
    """
    (device,) = placement.mesh.devices.flat
    config = placement.config
    ordinal = device.id if device.platform == "cpu" else device.local_hardware_id
    tails = (ctypes.c_void_p * config.num_layers)(*addresses(placement, cache))
    lengths = np.asarray(cache.lengths)
    out = np.empty((config.num_layers, *q.shape[:3], config.value_dim), q.dtype)
    seconds, reason = ctypes.c_double(), ctypes.create_string_buffer(512)
    call = ffi.require(device.platform).kvjax_copy_then_attend
    call.restype = ctypes.c_bool
    done = call(
        ctypes.c_int64(ordinal),
        ctypes.byref(shape_of(placement, q.dtype.name, scale)),
        ctypes.c_int64(config.num_layers),
        tails,
        *(ctypes.c_void_p(x.ctypes.data) for x in (lengths, q, rows)),
        ctypes.c_int64(slot_bytes),
        ctypes.c_int64(passes),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.byref(seconds),
        reason,
        ctypes.c_int64(len(reason)),
    )
    if not done:
        raise ValueError(f"the stand-alone loop cannot run: {reason.value.decode()}")
    return seconds.value, out


def addresses(placement: Placement, cache: Cache) -> list[int]:
    """Where each layer's tail lies: pinned host memory, which the GPU reads too."""
    (shard,) = cache.tail.addressable_shards
    start = shard.data.unsafe_buffer_pointer()
    row_bytes = shard.data.nbytes // shard.data.shape[0]
    extents = layer_extents(placement.config)
    return [start + row_bytes * extent.tail.first for extent in extents]
