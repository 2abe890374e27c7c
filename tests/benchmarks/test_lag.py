"""A late client voids its run, by either of its lags."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.lag import MAX_LOOP_LAG_MS, MAX_SEND_LAG_MS, Lag, LoopLag
from tests.benchmarks.builders import make_record


@pytest.mark.parametrize(
    ("send_ms", "loop_ms", "is_void"),
    [
        (MAX_SEND_LAG_MS, MAX_LOOP_LAG_MS, False),
        (MAX_SEND_LAG_MS + 1, 0.0, True),
        (0.0, MAX_LOOP_LAG_MS + 1, True),
        (None, 0.0, True),  # nothing was sent
    ],
)
def test_bounds(send_ms: float | None, loop_ms: float, is_void: bool) -> None:
    assert Lag(send_ms, loop_ms, loop_ms).is_void == is_void


async def test_a_loop_that_is_held_shows_it() -> None:
    with LoopLag() as loop_lag:
        rung = asyncio.Event()
        time.sleep(0.1)  # what must not happen in a client: the loop cannot run its timer
        asyncio.get_running_loop().call_later(0.02, rung.set)
        await rung.wait()
    lag = loop_lag.lag([make_record(1.0, (), sent_s=1.25)])
    assert lag.max_loop_ms is not None
    assert lag.max_loop_ms >= 80
    assert lag.p99_send_ms == 250.0


async def test_nothing_rings_after_the_block() -> None:
    with LoopLag() as loop_lag:
        pass
    await asyncio.sleep(0.03)
    assert loop_lag.lag([]) == Lag(None, 0.0, 0.0)
