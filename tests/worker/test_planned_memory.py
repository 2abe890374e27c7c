"""What a worker asks memory for before it reads weights."""

from __future__ import annotations

import pytest

from contracts.config import load_config
from worker.loading import CPU_KV_BYTES, planned_kv_bytes


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({}, "cpu", CPU_KV_BYTES),
        ({}, "cuda", 0),
        ({"engine.kv_cache_bytes": 5000}, "cpu", 5000),
        ({"engine.kv_cache_bytes": 5000}, "cuda", 5000),
        ({"engine.num_blocks": 8}, "cpu", 0),
    ],
)
def test_the_default_cache_is_not_asked_for_where_blocks_are_counted(
    changes: dict[str, int], device: str, expected: int
) -> None:
    assert planned_kv_bytes(load_config(None, changes).engine, device) == expected
