"""How close is close, by dtype. A test that needs more passes `rtol` and says why."""

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

RTOL = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


def assert_close(got: ArrayLike, want: ArrayLike, *, rtol: float | None = None):
    """Asserts |got - want| <= rtol x max |want|; NaN only where NaN is wanted.

    Args:
      got: Its dtype chooses the tolerance.
      want: The reference, of the same shape and any float dtype.
      rtol: In place of the table's.
    """
    dtype = jnp.asarray(got).dtype
    rtol = RTOL[dtype.name] if rtol is None else rtol
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    largest = np.max(np.abs(want), initial=0.0, where=np.isfinite(want))
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=rtol * largest)


def assert_same_bits(got: ArrayLike, want: ArrayLike):
    """Asserts equal shape, dtype and bytes: -0.0 is not 0.0, and each NaN its own."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if got.tobytes() != want.tobytes():
        different = np.argwhere(
            got.view(np.uint8).ravel() != want.view(np.uint8).ravel()
        )
        raise AssertionError(f"{len(different)} bytes differ, first {different[0]}")
