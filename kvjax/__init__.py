"""Exact decoding with a KV cache whose cells lie partly in host memory.

Here are the names that most programs need. The loop is in `kvjax.generate`, models,
checkpoints and tokenizers are in `kvjax.model`. Importing kvjax starts no backend.
"""

from kvjax.advice import Costs, advise
from kvjax.cache.state import Cache, LayerCells, cache_bytes, layer_cells, reset
from kvjax.config import CacheConfig, RingConfig
from kvjax.delivery.allocate import footprint, init_cache
from kvjax.delivery.placement import Placement, device_bytes, make_mesh
from kvjax.delivery.ring import Ring, RingStats
from kvjax.installation import __version__, info
from kvjax.model.attention import Step

__all__ = [
    "Cache",
    "CacheConfig",
    "Costs",
    "LayerCells",
    "Placement",
    "Ring",
    "RingConfig",
    "RingStats",
    "Step",
    "__version__",
    "advise",
    "cache_bytes",
    "device_bytes",
    "footprint",
    "info",
    "init_cache",
    "layer_cells",
    "make_mesh",
    "reset",
]
