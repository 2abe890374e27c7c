"""What all tests share. Nothing here imports torch: a test that needs none should not pay for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling

from coordinator.local_ray import RAY_ENVIRONMENT

# Read by OpenMP when torch is first imported, here or in a process that a test starts: one compute thread each, so
# that a test run leaves the machine usable and timings comparable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Serve reads these when it is first imported. As under the launcher, unless the caller knows better: what the tests of
# Serve's adapter prove is then true of what people run.
for name, value in RAY_ENVIRONMENT.items():
    if name.startswith("RAY_SERVE_"):
        os.environ.setdefault(name, value)


# Kernels are interpreted on CPU tensors if this is set when Triton is first imported: by a test, or by a further
# conftest that pytest reads before it collects. Processes that tests start do without.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    try:
        return (yield)
    finally:
        del os.environ["TRITON_INTERPRET"]


# What starts instances or looks at the clock: one test after the other, however many workers there are.
ALONE = ("tests/benchmarks/", "tests/cluster/", "tests/coordinator/test_handles.py", "tests/deploy/")
MAKES_WAY = 5  # of niceness


class Lanes(LoadFileScheduling):
    """A file goes to one worker of pytest-xdist, and those of ALONE to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if nodeid.startswith(ALONE) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return Lanes(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Beside a test that looks at the clock, all others make way. A process cannot take that back."""
    if "PYTEST_XDIST_WORKER" in os.environ and not item.nodeid.startswith(ALONE) and os.nice(0) < MAKES_WAY:
        os.nice(MAKES_WAY - os.nice(0))


@pytest.fixture(scope="session")
def embedded_model_path() -> Path:
    """The GGUF file of the embedded model; fetched once into the user's cache."""
    from engine.embedded import ensure_embedded_model

    return ensure_embedded_model()
