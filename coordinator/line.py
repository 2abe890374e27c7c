"""The waiting line in front of placement: policy/queue.py with somebody behind each entry.

    turn ─► a look: has anybody in the queue's order a place now? ─┬─► granted
             ▲ a newcomer, a change of the fleet, time             ├─► refused: too many wait, or its promise is lost
             └──────────────── else wait ──────────────────────────┴─► the caller leaves (cancelled, its own deadline)

Nobody chooses a worker before it is about to be free (late binding), and nobody stands in another's way: who cannot be
placed now is passed by those behind it who can, for OVERTAKE_S from the first time that somebody did. From then on
nobody behind it of its own class or a later one gets anything, until it is placed: what becomes free gathers for it.
Batch and best effort get nothing while an interactive request waits, unless a batch one is older than the age cap.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from contracts.errors import OverloadedError
from contracts.service import CLASSES, ServiceClass
from coordinator.placement import NotNow
from policy.queue import Waiting, WaitingQueue

logger = logging.getLogger("baton.coordinator")

Place = TypeVar("Place")


class Pace:
    """How fast places become free, from the last ones that did: what a Retry-After is made of."""

    WINDOW: ClassVar[int] = 64
    MIN_WAIT_S: ClassVar[int] = 1
    MAX_WAIT_S: ClassVar[int] = 120  # clients do not obey longer ones

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=self.WINDOW)

    def note(self, held_s: float, num_running: int) -> None:
        """A place was held for `held_s`, one of `num_running`: so many of them are free once every
        `held_s / num_running` (Little's law).
        """
        self._gaps_s.append(held_s / max(num_running, 1))

    def wait_s(self, num_waiting: int) -> int:
        """Whole seconds until one behind `num_waiting` others should have a place; a second each if nobody knows."""
        gap_s = sum(self._gaps_s) / len(self._gaps_s) if self._gaps_s else 1.0
        return min(max(math.ceil((num_waiting + 1) * gap_s), self.MIN_WAIT_S), self.MAX_WAIT_S)


class LineWatcher(Protocol):
    """Who is told of what happens in the line."""

    def waits(self, service_class: ServiceClass, change: int) -> None: ...

    def refused(self, entry: Waiting, reason: str) -> None: ...


@dataclass(eq=False, slots=True)
class _Waiter(Generic[Place]):
    """`kind`: entries of one kind hear the same from `NotNow.from_blocks` on. `passed_s`: when it was first passed."""

    entry: Waiting
    kind: Hashable
    grant: Callable[[], Place | NotNow]
    future: asyncio.Future[Place]
    rank: int  # of its class; 0 goes first
    passed_s: float | None = None


class Line(Generic[Place]):
    """Everybody who waits, and one task for as long as anybody does."""

    OVERTAKE_S: ClassVar[float] = 2.0
    TRIAGE_S: ClassVar[float] = 0.02  # between two of them
    MAX_TRIES: ClassVar[int] = 16  # places asked for in vain in one look
    MAX_NAP_S: ClassVar[float] = 1.0
    MIN_NAP_S: ClassVar[float] = 0.002
    REST: ClassVar[float] = 3.0  # after a look, times what it took: looking is a quarter of the time at most

    def __init__(
        self,
        max_waiting: int,
        changed: Callable[[float], Awaitable[None]],
        num_servers: Callable[[], float],
        drop: Callable[[Place], None],
        watcher: LineWatcher,
        age_cap_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`changed(timeout_s)` returns when a look may find more; `drop` takes back what nobody is there for."""
        self.pace = Pace()
        self._max_waiting = max_waiting
        self._changed = changed
        self._num_servers = num_servers
        self._drop = drop
        self._watcher = watcher
        self._clock = clock
        self._queue = WaitingQueue(age_cap_s)
        self._waiters: dict[str, _Waiter[Place]] = {}
        self._task: asyncio.Task[None] | None = None
        self._triaged_s = -math.inf
        self._opens_in_s = math.inf
        self._looks_at_s = math.inf
        self._rests_until_s = -math.inf

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def turn(
        self,
        entry: Waiting,
        grant: Callable[[], Place | NotNow],
        kind: Hashable = None,
        is_back: bool = False,
    ) -> Place:
        """What `grant` gives when it is the caller's turn; it is asked at once, and then at every look.

        `is_back`: it had a place, which was none after all. Raises what `grant` raises; OverloadedError when too many
        wait, or for an entry that is not kept when its latest start has passed.
        """
        future: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        rank = 0 if entry.is_resumed else CLASSES.index(entry.service_class)
        waiter = _Waiter(entry, kind, grant, future, rank)
        if is_back:
            self._queue.give_back(entry, self._clock())
        else:
            self._queue.add(entry)
        self._waiters[entry.request_id] = waiter
        self._watcher.waits(entry.service_class, +1)
        try:
            self._look_unless_tired()
            while (
                self._queue.num_newcomers > self._max_waiting and (last := self._queue.surplus()) is not None
            ):
                self._refuse_surplus(last)
            self._arm()
            return await future
        except BaseException:
            self._forsake(waiter)
            raise
        finally:
            self._leave(waiter)

    def look(self) -> None:
        """Give a place to whoever can have one now: something has happened that `changed` does not tell."""
        self._look_unless_tired()
        self._arm()

    def used(self, tenant: str, device_s: float) -> None:
        """Device time of a tenant beyond the reading of its prompts, which counts when they are given away."""
        self._queue.shares.note(tenant, device_s, self._clock())

    def _look_unless_tired(self) -> None:
        """In a large fleet a look takes milliseconds, and many things happen in one."""
        rest_s = self._rests_until_s - self._clock()
        if rest_s > 0 and len(self._waiters) > 1:
            self._opens_in_s = min(self._opens_in_s, rest_s)
        else:
            self._look()

    def _look(self) -> None:
        now_s = self._clock()
        self._look_through(now_s)
        ended_s = self._clock()
        self._rests_until_s = ended_s + self.REST * (ended_s - now_s)

    def _look_through(self, now_s: float) -> None:
        self._triage(now_s)
        self._opens_in_s = math.inf
        found: dict[Hashable, float] = {}  # by kind: demand that finds nothing
        passed: list[_Waiter[Place]] = []
        barrier, num_tries, has_interactive = len(CLASSES), 0, False
        for entry in self._queue.candidates(now_s, len(self._queue)):
            waiter = self._waiters[entry.request_id]
            if waiter.future.done() or waiter.rank >= barrier or (waiter.rank and has_interactive):
                continue
            is_told = entry.num_blocks >= found.get(waiter.kind, math.inf)
            if not is_told and self._queue.may_try(entry.request_id, num_tries, self.MAX_TRIES, now_s):
                answer = self._try(waiter)
                if not isinstance(answer, NotNow):
                    self._pass(passed, now_s)
                    continue
                num_tries += 1
                self._queue.tried(entry.request_id, now_s)
                found[waiter.kind] = min(found.get(waiter.kind, math.inf), answer.from_blocks)
                self._opens_in_s = min(self._opens_in_s, answer.opens_in_s)
                if answer.is_hopeless:
                    self._refuse_late(entry, answer.verdict)
                    continue
            elif not is_told:
                self._opens_in_s = min(self._opens_in_s, self._queue.REST_S)
            passed.append(waiter)
            has_interactive |= waiter.rank == 0
            if waiter.passed_s is not None and now_s - waiter.passed_s >= self.OVERTAKE_S:
                barrier = waiter.rank

    def _try(self, waiter: _Waiter[Place]) -> NotNow | None:
        """None: it waits no more."""
        try:
            answer = waiter.grant()
        except Exception as error:  # the waiter's own end, whoever looked
            self._end(waiter, error)
            return None
        if isinstance(answer, NotNow):
            return answer
        self._queue.take(waiter.entry.request_id, self._clock())
        self._out(waiter)
        waiter.future.set_result(answer)
        return None

    @staticmethod
    def _pass(passed: list[_Waiter[Place]], now_s: float) -> None:
        for waiter in passed:
            if waiter.passed_s is None:
                waiter.passed_s = now_s

    def _triage(self, now_s: float) -> None:
        if len(self._queue) > 1 and now_s - self._triaged_s >= self.TRIAGE_S:
            self._triaged_s = now_s
            for entry in self._queue.triage(now_s, self._num_servers()):
                self._refuse_late(entry, "too_late")

    def _refuse_late(self, entry: Waiting, reason: str) -> None:
        """No worker can keep its promise any more."""
        ttft_s = entry.deadline_s - entry.arrived_s
        self._queue.remove(entry.request_id)
        wait_s = self._queue.retry_after_s(self._num_servers(), entry.service_s, ttft_s)
        error = OverloadedError(
            f"expected a first token after {1000 * ttft_s:.0f} ms at most (the promise less a reserve) but no "
            f"worker can give it in time: reading the prompt takes {1000 * entry.service_s:.0f} ms, and others wait",
            retry_after_s=wait_s,
        )
        self._refuse(entry, error, reason)

    def _refuse_surplus(self, entry: Waiting) -> None:
        self._queue.remove(entry.request_id)
        error = OverloadedError(
            f"the queue is full: {self._max_waiting} of {self._max_waiting} requests wait",
            retry_after_s=self.pace.wait_s(len(self._queue)),
        )
        self._refuse(entry, error, "queue_full")

    def _refuse(self, entry: Waiting, error: OverloadedError, reason: str) -> None:
        self._watcher.refused(entry, reason)
        self._end(self._waiters[entry.request_id], error)

    def _end(self, waiter: _Waiter[Place], error: Exception) -> None:
        self._queue.remove(waiter.entry.request_id)
        self._out(waiter)
        if not waiter.future.done():  # else it is on its way out by itself
            waiter.future.set_exception(error)

    def _out(self, waiter: _Waiter[Place]) -> None:
        del self._waiters[waiter.entry.request_id]
        self._watcher.waits(waiter.entry.service_class, -1)

    def _forsake(self, waiter: _Waiter[Place]) -> None:
        """The caller leaves; what it was given in the same moment goes back."""
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            self._drop(future.result())

    def _leave(self, waiter: _Waiter[Place]) -> None:
        if self._waiters.get(waiter.entry.request_id) is waiter:
            self._queue.remove(waiter.entry.request_id)
            self._out(waiter)
            if waiter.passed_s is not None:  # others may have waited for it to go first
                self._look_unless_tired()
        self._arm()

    def _arm(self) -> None:
        """The task runs while anybody waits, and looks again no later than something is due."""
        if self._task is not None and (not self._waiters or self._nap_until_s() < self._looks_at_s):
            self._task.cancel()
            self._task = None
        if self._waiters and self._task is None:
            self._looks_at_s = self._nap_until_s()
            self._task = asyncio.create_task(self._look_often(), name="line")

    def _nap_until_s(self) -> float:
        now_s = self._clock()
        due_in_s = self._queue.next_due_s(now_s) - now_s
        return now_s + max(min(self.MAX_NAP_S, self._opens_in_s, due_in_s), self.MIN_NAP_S)

    async def _look_often(self) -> None:
        try:
            while True:
                self._looks_at_s = self._nap_until_s()
                await self._changed(self._looks_at_s - self._clock())
                await asyncio.sleep(max(self._rests_until_s - self._clock(), 0.0))
                self._look()
        except Exception as error:  # the task's outer edge: nobody waits for looks that do not come
            logger.exception("the waiting line stopped")
            self._task = None
            for waiter in list(self._waiters.values()):
                self._end(waiter, error)
