"""A deadline that moves: rings when it passes, and only then."""

from __future__ import annotations

import asyncio
import time

from coordinator.alarm import Alarm


async def test_it_rings_once_when_nobody_moves_it() -> None:
    rung = asyncio.Event()
    times: list[float] = []

    def ring() -> None:
        times.append(time.monotonic())
        rung.set()

    alarm, due_s = Alarm(ring), time.monotonic() + 0.02
    alarm.set(due_s)
    async with asyncio.timeout(5):
        await rung.wait()
    assert len(times) == 1
    assert times[0] >= due_s
    rung.clear()
    alarm.set(time.monotonic())  # again, for the next deadline
    async with asyncio.timeout(5):
        await rung.wait()
    assert len(times) == 2
    alarm.close()


async def test_who_moves_it_in_time_hears_nothing_and_a_nearer_deadline_counts() -> None:
    first, second = asyncio.Event(), asyncio.Event()
    moved, near = Alarm(first.set), Alarm(second.set)
    moved.set(time.monotonic() + 0.01)
    moved.set(time.monotonic() + 60)
    near.set(time.monotonic() + 60)
    near.set(time.monotonic() + 0.03)
    async with asyncio.timeout(5):
        await second.wait()  # later than the first deadline of the other
    assert not first.is_set()
    for alarm in (moved, near):
        alarm.close()


async def test_what_is_off_or_closed_is_silent_and_leaves_no_timer() -> None:
    rung = asyncio.Event()
    off, closed = Alarm(rung.set), Alarm(rung.set)
    for alarm in (off, closed):
        alarm.set(time.monotonic() + 0.01)
    off.off()
    closed.close()
    later = asyncio.Event()
    clock = Alarm(later.set)
    clock.set(time.monotonic() + 0.03)
    async with asyncio.timeout(5):
        await later.wait()
    assert not rung.is_set()
    assert off._timer is closed._timer is None
