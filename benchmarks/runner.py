"""Sends a plan: each session at its arrival (open loop), or a fixed number of sessions at a time (closed loop).

    Session = turns, one after the other, each with the conversation so far
        open     turn 0 is scheduled at `at_s`, whatever the server does
        closed   turn 0 is scheduled when a place is free
        turn k   is scheduled when turn k−1 has ended and the user has thought

Stopping (Ctrl-C) starts nothing more and cancels what is in flight; every request that was sent leaves a record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from benchmarks.client import Call, Client, Message, RunClock, Trail
from benchmarks.records import Record

_Answer = TypeVar("_Answer")
OnRecord = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how long the answer is to be. `input_tokens`: of the whole prompt; None if an
    answer that is not known yet is part of it.
    """

    text: str
    output_tokens: int
    input_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """`at_s` counts in open loop only."""

    session_id: str
    turns: tuple[Turn, ...]
    at_s: float = 0.0
    think_time_s: float = 0.0
    label: str = ""


class StoppedError(Exception):
    """Somebody ended the command before there was anything to report."""


async def prepare(work: Coroutine[Any, Any, _Answer], stop: asyncio.Event) -> _Answer:
    """What `work` gives. Raises StoppedError, and cancels it, once `stop` is set."""
    task = asyncio.create_task(work, name="prepare")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise StoppedError("stopped before the run began")
        return task.result()
    finally:
        for each in (task, stopping):
            each.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


class Runner:
    """One run: its clock, its records, its end."""

    def __init__(
        self,
        client: Client,
        clock: RunClock,
        stop: asyncio.Event | None = None,
        on_record: OnRecord | None = None,
    ) -> None:
        self.records: list[Record] = []
        self._client = client
        self._clock = clock
        self._stop = stop or asyncio.Event()
        self._on_record = on_record

    async def open(self, sessions: Iterable[Session], end_s: float | None = None) -> None:
        """Until all have ended, or the run's clock shows `end_s`: the rest is cut off.

        Raises ValueError for sessions that are not in order of arrival.
        """
        await self._until_stopped(self._start_on_time(sessions), end_s)

    async def closed(self, sessions: Iterable[Session], concurrency: int, end_s: float | None = None) -> None:
        """`concurrency` at a time, until all have ended or `end_s`."""
        if concurrency < 1:
            raise ValueError(f"concurrency: expected at least 1 but got {concurrency}")
        waiting = iter(sessions)

        async def work() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._take_turns(waiting))

        await self._until_stopped(work(), end_s)

    async def _until_stopped(self, work: Coroutine[Any, Any, None], end_s: float | None) -> None:
        left_s = None if end_s is None else end_s - self._clock.now_s()
        task = asyncio.create_task(work, name="run")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({task, stopping}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (task, stopping):
                each.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)
        if not task.cancelled():
            task.result()

    async def _start_on_time(self, sessions: Iterable[Session]) -> None:
        sessions = list(sessions)
        for before, after in pairwise(sessions):
            if after.at_s < before.at_s:
                raise ValueError(f"expected arrivals in order but got {after.at_s} after {before.at_s}")
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                await asyncio.sleep(max(0.0, session.at_s - self._clock.now_s()))
                group.create_task(self._run(session, session.at_s), name=session.session_id)

    async def _take_turns(self, waiting: Iterator[Session]) -> None:
        for session in waiting:
            await self._run(session, self._clock.now_s())

    async def _run(self, session: Session, scheduled_s: float) -> None:
        messages: list[Message] = []
        for number, turn in enumerate(session.turns):
            messages.append({"role": "user", "content": turn.text})
            is_single = len(session.turns) == 1
            call = Call(
                request_id=session.session_id if is_single else f"{session.session_id}-{number}",
                prompt=turn.text if is_single else list(messages),
                output_tokens=turn.output_tokens,
                input_tokens=turn.input_tokens,
                label=session.label,
                turn=number,
            )
            trail = await self._send(call, scheduled_s)
            if trail.outcome != "ok":
                return  # a conversation cannot go on from an answer that never came
            if number + 1 < len(session.turns):
                messages.append({"role": "assistant", "content": trail.text})
                scheduled_s = self._clock.now_s() + session.think_time_s
                await asyncio.sleep(session.think_time_s)

    async def _send(self, call: Call, scheduled_s: float) -> Trail:
        trail = Trail(call, scheduled_s, is_length_fixed=not self._client.target.is_plain)
        try:
            await self._client.stream(trail, self._clock)
        finally:
            record = trail.record()
            self.records.append(record)
            if self._on_record is not None:
                self._on_record(record)
        return trail
