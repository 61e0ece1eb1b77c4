"""Strict JAX for all tests, eight CPU devices, and what many tests share."""

import jax
import pytest
from jax.sharding import Mesh

jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# kvjax is imported late here: its types are checked only if the hook comes first.


def pytest_report_header() -> list[str]:
    from kvjax.installation import libraries

    return [f"{name}: {state}" for name, state in libraries().items()]


def pytest_runtest_setup(item: pytest.Item):
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU, and jax found none")


@pytest.fixture
def mesh1() -> Mesh:
    """One device, axis "tp"."""
    from kvjax.delivery.placement import make_mesh

    return make_mesh()
