"""What all tests share. Nothing here imports torch: a test that needs none should not pay for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from coordinator.local_ray import RAY_ENVIRONMENT
from tests.lanes import (  # noqa: F401  # hooks
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    pytest_xdist_make_scheduler,
)

# Read by OpenMP when torch is first imported, here or in a process that a test starts: one compute thread each, so
# that a test run leaves the machine usable and timings comparable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Serve reads these when it is first imported. As under the launcher, unless the caller knows better: what the tests of
# Serve's adapter prove is then true of what people run.
for name, value in RAY_ENVIRONMENT.items():
    if name.startswith("RAY_SERVE_"):
        os.environ.setdefault(name, value)


# An example that takes long says something about the machine, not about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Kernels are interpreted on CPU tensors if this is set when Triton is first imported: by a test, or by a further
# conftest that pytest reads before it collects. Processes that tests start do without.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    try:
        return (yield)
    finally:
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(scope="session")
def embedded_model_path() -> Path:
    """The GGUF file of the embedded model; fetched once into the user's cache."""
    from engine.embedded import ensure_embedded_model

    return ensure_embedded_model()
