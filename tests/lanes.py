"""Who runs what when `make test` runs several tests at a time: hooks of pytest and pytest-xdist, for conftest.py.

lane of ALONE   one test after the other, in one worker; all others make way
other lanes     a file to whoever is free, those of FIRST first
"""

from __future__ import annotations

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling

ALONE = ("tests/benchmarks/", "tests/cluster/", "tests/coordinator/test_handles.py", "tests/deploy/")
"""What starts instances or looks at the clock."""

FIRST = (
    "tests/local/test_conformance.py",
    "tests/engine/test_golden.py",
    "tests/local/test_parity.py",
    "tests/engine/kernels/test_kernel_set.py",
    "tests/worker/test_ranks.py",
    "tests/kvtransfer/test_faults.py",
    "tests/kvtransfer/test_network.py",
    "tests/engine/test_invariance.py",
    "tests/coordinator/gateway/test_fuzz.py",
    "tests/engine/kernels/test_aot.py",
    "tests/kvtransfer/test_hostile.py",
    "tests/local/test_continuations.py",
    "tests/local/test_shapes.py",
    "tests/local/test_roles.py",
)
"""The longest of the others, so that no worker has one left for itself in the end."""

MAKES_WAY = 5  # of niceness


class Lanes(LoadFileScheduling):
    """A file goes to one worker, and those of ALONE to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if nodeid.startswith(ALONE) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # in the order of collection
    return Lanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _is_one_of_several():
        items.sort(key=lambda item: turn(item.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Beside a test that looks at the clock, all others make way. A process cannot take that back."""
    if _is_one_of_several() and not item.nodeid.startswith(ALONE) and os.nice(0) < MAKES_WAY:
        os.nice(MAKES_WAY - os.nice(0))


def turn(nodeid: str) -> int:
    """Lower begins earlier."""
    if nodeid.startswith(ALONE):
        return -1
    file, _, _ = nodeid.partition("::")
    return FIRST.index(file) if file in FIRST else len(FIRST)


def _is_one_of_several() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ
