"""What the KV benchmark computes from its measurements; the measurements themselves are too slow for a test."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks import kv_raw
from benchmarks.kv_bandwidth import SHARES, Bench, checks_of
from benchmarks.kv_pair import block_order


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 64])
@pytest.mark.parametrize("run_length", [1, 4, 1000])
def test_block_ids_are_all_there_in_runs_of_the_length(num_blocks: int, run_length: int) -> None:
    order = block_order(num_blocks, run_length)
    assert sorted(order) == list(range(num_blocks))
    num_runs = 1 + sum(after != before + 1 for before, after in pairwise(order))
    if num_blocks > 2 * run_length:
        assert num_runs >= num_blocks / run_length / 2


def test_speed_is_of_the_shortest_run() -> None:
    assert kv_raw.gigabytes_per_s(2_000_000_000, [1.0, 0.5, 2.0]) == 4.0


def test_what_was_not_measured_has_failed_and_what_was_is_a_share_of_raw() -> None:
    bench = Bench.__new__(Bench)
    bench.rows = [
        {"path": "raw ucx", "MB": 64, "GB/s": 2.0},
        {"path": "ucx", "MB": 64, "GB/s": 1.0},
        {"path": "ucx", "MB": 64, "GB/s": 1.8},
        {"path": "raw memcpy", "MB": 64, "GB/s": 10.0},
    ]
    checks = {check.name: check for check in checks_of(bench, 0.05, None)}
    assert set(checks) == {*SHARES, "exposed_1024", "control_rtt_ms"}
    assert checks["ucx_64mb"].value == pytest.approx(0.9)
    assert [name for name, check in checks.items() if check.is_ok] == ["ucx_64mb", "exposed_1024"]


def test_raw_ucx_that_was_disturbed_gives_way_to_plain_sockets() -> None:
    bench = Bench.__new__(Bench)
    speeds = [
        ("ucx", 1, 0.8),
        ("raw ucx", 1, 0.1),
        ("raw tcp", 1, 2.0),
        ("ucx", 64, 1.8),
        ("raw ucx", 64, 2.0),
        ("raw tcp", 64, 3.0),
    ]
    bench.rows = [{"path": path, "MB": megabytes, "GB/s": speed} for path, megabytes, speed in speeds]
    checks = {check.name: check.value for check in checks_of(bench, 0.05, None)}
    assert (checks["ucx_1mb"], checks["ucx_64mb"]) == (pytest.approx(0.4), pytest.approx(0.9))
