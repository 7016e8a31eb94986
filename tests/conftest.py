"""Shared by all tests: after each of them JAX is as it was before."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] += (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compile fast
)

import pytest

from morphax import _jax


@pytest.fixture(autouse=True)
def _trace_state_is_clean():
    """Whatever a test did, the current trace is JAX's own again."""
    yield
    left = _jax.trace_ctx.trace
    _jax.trace_ctx.set_trace(_jax.eval_trace)
    assert left is _jax.eval_trace
