"""contracts/heap.py: when garbage is looked for."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from contracts.heap import loading


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    yield
    gc.set_threshold(*thresholds)
    if not frozen:
        gc.unfreeze()


def test_nothing_is_collected_while_loading_and_what_was_loaded_is_kept() -> None:
    gc.set_threshold(50_000, 10, 10)  # as in a process that the launcher started
    with loading():
        assert not gc.isenabled()
        loaded = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_threshold() == (700, 10, 10)
    assert gc.get_freeze_count() >= len(loaded)


def test_a_load_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ValueError, match="no model"), loading():
        raise ValueError("no model")
    assert gc.isenabled()
