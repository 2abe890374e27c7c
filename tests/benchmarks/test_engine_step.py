"""What the engine benchmarks compute from their measurements; the measurements themselves are too slow for a test."""

from __future__ import annotations

import math

import pytest

from benchmarks import perplexity
from benchmarks.engine_step import BANDWIDTH_BYTES, REQUIRED, Clock, bounds_of, checks_of, rows_of

TIMES = {
    "read": BANDWIDTH_BYTES / 1e6,  # 1 GB/s
    **{f"linears {rows}": 10.0 * rows for rows in (1, 8, 256, 1024)},
    "head 1": 2.0,
    "head 8": 4.0,
    "prefill_1024": 15000.0,
    "prefill_256": 3000.0,
    "decode_b1_c256": 18.0,
    "decode_b8_c1000": 100.0,
    "int8_b1": 9.0,
    "int4_b1": 6.0,
    "invariant_prefill_256": 6000.0,
    "invariant_b1": 27.0,
    "invariant_b8": 150.0,
}


def test_a_bound_is_what_no_engine_could_leave_out() -> None:
    bounds = bounds_of(TIMES, kv_bytes_per_token=1000.0)
    assert bounds["prefill_1024"] == 10240.0
    assert bounds["decode_b1_c256"] == 12.0
    assert bounds["decode_b8_c1000"] == pytest.approx(80 + 4 + 8)  # 8 MB of KV at 1 GB/s
    assert bounds["int4_b1"] == bounds["int8_b1"] == 18.0


def test_what_was_not_measured_has_failed() -> None:
    checks = {check.name: check for check in checks_of(list(rows_of(TIMES, 1000.0)), None)}
    assert set(checks) == {*REQUIRED, "rss_overhead_mb"}
    assert [name for name, check in checks.items() if not check.is_ok] == [
        "decode_b1_c256",
        "rss_overhead_mb",
    ]
    assert not any(check.is_ok for check in checks_of([], 500.0))


def test_a_clock_keeps_the_shortest_time() -> None:
    clock = Clock()
    for times in (1, 1000, 1):
        clock.run("work", lambda: sum(range(times * 1000)))  # noqa: B023 (called at once)
    shortest = clock.best_ms["work"]
    clock.run("work", lambda: sum(range(10**6)))
    assert clock.best_ms["work"] == shortest


def test_perplexity_is_compared_with_expanded_weights() -> None:
    checks = {c.name: c for c in perplexity.checks_of({"none": 10.0, "int8": 10.02, "int4": 10.2})}
    assert checks["perplexity_int8"].is_ok
    assert not checks["perplexity_int4"].is_ok
    assert math.isclose(checks["perplexity_int4"].value or 0.0, 1.02)
    assert not any(check.is_ok for check in perplexity.checks_of({"int8": 10.0}))
