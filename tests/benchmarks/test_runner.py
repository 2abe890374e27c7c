"""Who is sent when, and what is left of a run that is stopped: with a client that does what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.client import Client, RunClock, Target, Trail
from benchmarks.runner import Runner, Session, StoppedError, Turn, prepare


class ScriptedClient(Client):
    """Answers only when released; remembers the order of calls."""

    def __init__(self, outcome: str = "ok", is_released: bool = True) -> None:
        super().__init__(Target("http://nowhere"))
        self.started: list[Trail] = []
        self.news = asyncio.Event()
        self.released = asyncio.Event()
        if is_released:
            self.released.set()
        self._outcome = outcome

    async def stream(self, trail: Trail, clock: RunClock) -> None:
        trail.sent_s = clock.now_s()
        self.started.append(trail)
        self.news.set()
        try:
            await self.released.wait()
            trail.outcome = self._outcome  # type: ignore[assignment]
            trail.texts.append(f"answer {len(self.started)}")
        finally:
            trail.end_s = clock.now_s()

    async def until_started(self, count: int) -> None:
        while len(self.started) < count:
            self.news.clear()
            await self.news.wait()


def make_sessions(count: int, at_s: float = 0.0, num_turns: int = 1) -> list[Session]:
    turns = tuple(Turn(f"says {number}", 4) for number in range(num_turns))
    return [Session(f"s{index}", turns, at_s * index) for index in range(count)]


async def test_open_loop_sends_without_waiting_for_answers() -> None:
    client = ScriptedClient(is_released=False)
    runner = Runner(client, RunClock())
    async with asyncio.timeout(10):
        run = asyncio.create_task(runner.open(make_sessions(5)))
        await client.until_started(5)
        assert runner.records == []
        client.released.set()
        await run
    assert [record.outcome for record in runner.records] == ["ok"] * 5


async def test_open_loop_keeps_its_schedule() -> None:
    runner = Runner(ScriptedClient(), RunClock())
    await runner.open(make_sessions(3, at_s=0.02))
    assert [record.scheduled_s for record in runner.records] == [0.0, 0.02, 0.04]
    assert all((record.send_lag_s or 0.0) >= 0 for record in runner.records)


async def test_closed_loop_starts_the_next_when_one_has_ended() -> None:
    client = ScriptedClient(is_released=False)
    runner = Runner(client, RunClock())
    async with asyncio.timeout(10):
        run = asyncio.create_task(runner.closed(make_sessions(5), 2))
        await client.until_started(2)
        await asyncio.sleep(0)
        assert len(client.started) == 2
        client.released.set()
        await run
    assert [trail.call.request_id for trail in client.started] == ["s0", "s1", "s2", "s3", "s4"]
    assert len(runner.records) == 5


async def test_stopping_cancels_what_is_in_flight_and_records_it() -> None:
    client, stop = ScriptedClient(is_released=False), asyncio.Event()
    runner = Runner(client, RunClock(), stop)
    async with asyncio.timeout(10):
        run = asyncio.create_task(runner.open([*make_sessions(4, at_s=0.001), Session("late", (), 3600.0)]))
        await client.until_started(4)
        stop.set()
        await run
    assert [record.outcome for record in runner.records] == ["cancelled"] * 4
    assert all(record.end_s is not None for record in runner.records)


async def test_an_end_cuts_off_what_is_in_flight() -> None:
    client = ScriptedClient(is_released=False)
    runner = Runner(client, RunClock())

    def endless() -> Iterator[Session]:
        while True:
            yield from make_sessions(1)

    async with asyncio.timeout(10):
        await runner.closed(endless(), 3, end_s=0.05)
    assert [record.outcome for record in runner.records] == ["cancelled"] * 3


async def test_being_cancelled_leaves_records_and_no_task() -> None:
    client = ScriptedClient(is_released=False)
    runner = Runner(client, RunClock())
    run = asyncio.create_task(runner.open(make_sessions(2)))
    await client.until_started(2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [record.outcome for record in runner.records] == ["cancelled"] * 2
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_conversation_goes_on_with_the_answer() -> None:
    client = ScriptedClient()
    await Runner(client, RunClock()).closed(make_sessions(1, num_turns=2), 1)
    assert [trail.call.request_id for trail in client.started] == ["s0-0", "s0-1"]
    assert client.started[1].call.prompt == [
        {"role": "user", "content": "says 0"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "says 1"},
    ]


async def test_a_conversation_ends_with_an_answer_that_never_came() -> None:
    client = ScriptedClient(outcome="error")
    await Runner(client, RunClock()).closed(make_sessions(1, num_turns=3), 1)
    assert len(client.started) == 1


async def test_arrivals_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="in order"):
        await Runner(ScriptedClient(), RunClock()).open(make_sessions(2, at_s=0.001)[::-1])


async def test_no_concurrency_is_refused() -> None:
    with pytest.raises(ValueError, match="concurrency"):
        await Runner(ScriptedClient(), RunClock()).closed([], 0)


async def test_preparation_ends_when_stopped() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_soon(stop.set)
    with pytest.raises(StoppedError):
        await prepare(asyncio.Event().wait(), stop)
    assert await prepare(asyncio.sleep(0, 7), asyncio.Event()) == 7
