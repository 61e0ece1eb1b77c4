"""What this installation is: versions, native libraries, devices, the pinned limit."""

import collections
import platform
from importlib import metadata

import jax

from kvjax.delivery import ffi
from kvjax.delivery.allocate import pool_limit_bytes

__version__ = "0.1.0"  # pyproject.toml reads it here

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
COMPILERS = {"cpu": "C++ compiler", "CUDA": "CUDA compiler (nvcc)"}


class Info(dict):
    """What `info` found: a dict that prints as a table."""

    def __repr__(self) -> str:
        width = max(len(key) for key in self)
        return "\n".join(f"{key:{width}}  {value}" for key, value in self.items())


def info() -> Info:
    """Tells what is installed. Loads the native libraries and starts jax's backends.

    Returns:
      Versions of kvjax and of what it stands on; for each native library its path, or
      why there is none; the devices by kind; the bytes that XLA's pool of pinned memory
      may take for each GPU.
    """
    found = Info(kvjax=__version__, python=platform.python_version())
    found |= {name: metadata.version(name) for name in PACKAGES}
    found |= libraries()
    found["devices"] = dict(collections.Counter(d.device_kind for d in jax.devices()))
    found["pinned_limit_bytes"] = pool_limit_bytes()
    return found


def libraries() -> dict[str, str]:
    """Loads each native library; its path, or why there is none, by its name."""
    return {name: _state(key) for key, name in ffi.LIBRARIES.items()}


def _state(key: str) -> str:
    try:
        loaded = ffi.library(key)
    except (OSError, ValueError) as error:
        return f"not loaded: {error}"
    if loaded is None:
        return f"not built: install kvjax where there is a {COMPILERS[key]}"
    return str(ffi.library_path(key))
