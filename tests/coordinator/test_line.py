"""What a refused request is told to wait, and who of those that wait gets the next place."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from contracts.errors import OverloadedError
from contracts.service import ServiceClass
from coordinator.line import Line, Pace
from coordinator.placement import NotNow
from policy.queue import Waiting, WaitingQueue
from tests.policy.builders import make_waiting


def paced(*held: tuple[float, int]) -> Pace:
    pace = Pace()
    for held_s, num_running in held:
        pace.note(held_s, num_running)
    return pace


@pytest.mark.parametrize(
    ("held", "num_waiting", "seconds"),
    [
        ([(8.0, 4)], 0, 2),  # four places, each held for 8 s: one is free every 2 s
        ([(8.0, 4)], 9, 20),
        ([(8.0, 4), (4.0, 4)], 1, 3),
        ([(1.0, 3)], 3, 2),  # 4/3 s are told as 2
        ([(0.01, 8)], 5, 1),  # never 0: clients would come back at once
        ([(600.0, 1)], 50, 120),  # never more than clients obey
    ],
)
def test_the_wait_is_the_line_times_the_time_between_free_places(
    held: list[tuple[float, int]], num_waiting: int, seconds: int
) -> None:
    assert paced(*held).wait_s(num_waiting) == seconds


def test_before_any_place_became_free_a_second_each_is_guessed() -> None:
    assert Pace().wait_s(0) == 1
    assert Pace().wait_s(9) == 10


def test_only_recent_places_count() -> None:
    assert paced((100.0, 1), *[(2.0, 1)] * Pace.WINDOW).wait_s(0) == 2


@dataclass
class Desk:
    """A counter with `room` blocks, and who was served at it."""

    room: float = 0
    now_s: float = 0.0
    is_closed: bool = False
    served: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    waiting: Counter[str] = field(default_factory=Counter)
    num_asked: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    naps_s: list[float] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.line: Line[str] = Line(
            8, self._change, lambda: 1.0, self.dropped.append, self, age_cap_s=30.0, clock=lambda: self.now_s
        )

    def waits(self, service_class: ServiceClass, change: int) -> None:
        self.waiting[service_class] += change

    def refused(self, entry: Waiting, reason: str) -> None:
        self.refusals.append((entry.request_id, reason))

    async def _change(self, timeout_s: float) -> None:
        self.naps_s.append(timeout_s)
        self.changed.clear()
        await self.changed.wait()

    def _grant(self, entry: Waiting, needs: int) -> str | NotNow:
        self.num_asked += 1
        if self.is_closed:
            raise OverloadedError("closed")
        if needs > self.room:
            return NotNow("no room", needs)
        self.room -= needs
        self.served.append(entry.request_id)
        return entry.request_id

    async def come(self, entry: Waiting, needs: int = 1) -> None:
        """It stands in line, or has been served, when this returns."""
        entry = Waiting(
            entry.request_id,
            entry.arrived_s,
            entry.deadline_s,
            entry.service_s,
            needs,
            entry.tenant,
            entry.service_class,
            entry.is_kept,
            entry.is_resumed,
        )
        turn = self.line.turn(entry, lambda: self._grant(entry, needs))
        self.tasks[entry.request_id] = asyncio.create_task(turn)
        await self.settle()

    async def open(self, room: float, now_s: float | None = None) -> None:
        """So much room is free now, at that time."""
        self.room = room
        if now_s is not None:
            self.now_s = now_s
        self.changed.set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def error_of(self, name: str) -> OverloadedError:
        with pytest.raises(OverloadedError) as caught:
            await self.tasks[name]
        return caught.value


@contextlib.asynccontextmanager
async def counter() -> AsyncIterator[Desk]:
    """Left with nobody in line and no task."""
    found = Desk()
    try:
        yield found
    finally:
        for task in found.tasks.values():
            task.cancel()
        await asyncio.gather(*found.tasks.values(), return_exceptions=True)
        await found.settle()
    assert (found.line.num_waiting, len(found.line._queue), found.line._task) == (0, 0, None)
    assert not found.waiting.total()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_who_finds_room_does_not_wait() -> None:
    async with counter() as c:
        c.room = 1
        assert await c.line.turn(make_waiting("a"), lambda: c._grant(make_waiting("a"), 1)) == "a"


async def test_least_slack_goes_first_and_the_resumed_before_all() -> None:
    async with counter() as c:
        await c.come(make_waiting("relaxed", 9.0))
        await c.come(make_waiting("urgent", 1.0))
        await c.come(make_waiting("long but urgent", 1.5, service_s=1.0))
        await c.come(make_waiting("resumed", math.inf, is_resumed=True))
        await c.open(9)
        assert c.served == ["resumed", "long but urgent", "urgent", "relaxed"]


async def test_classes_give_way_and_one_after_the_other_is_served() -> None:
    async with counter() as c:
        await c.come(make_waiting("effort", math.inf, service_class="best_effort"))
        await c.come(make_waiting("batch", math.inf, service_class="batch"))
        await c.come(make_waiting("chat", math.inf))
        await c.open(9)
        assert c.served == ["chat", "batch", "effort"]


async def test_leftover_classes_get_nothing_while_an_interactive_request_waits() -> None:
    async with counter() as c:
        await c.come(make_waiting("large chat", math.inf), needs=5)
        await c.come(make_waiting("batch", math.inf, service_class="batch"))
        await c.open(3)
        assert c.served == []
        await c.come(make_waiting("small chat", math.inf))
        assert c.served == ["small chat"]


async def test_an_aged_batch_request_goes_first_and_holds_no_chat_up() -> None:
    async with counter() as c:
        await c.come(make_waiting("batch", math.inf, service_class="batch"), needs=5)
        await c.open(0, now_s=40.0)
        await c.come(make_waiting("chat", math.inf, arrived_s=40.0))
        await c.open(4)
        assert c.served == ["chat"]
        await c.come(make_waiting("chat 2", math.inf, arrived_s=41.0), needs=6)
        await c.open(5)
        assert c.served == ["chat", "batch"]


async def test_who_cannot_be_placed_is_passed_for_a_while_and_then_by_nobody() -> None:
    async with counter() as c:
        await c.come(make_waiting("large", math.inf), needs=5)
        await c.come(make_waiting("first", math.inf, arrived_s=0.1))
        await c.come(make_waiting("second", math.inf, arrived_s=0.2))
        await c.come(make_waiting("third", math.inf, arrived_s=0.3))
        await c.open(1, now_s=1.0)  # the first to pass it
        await c.open(1, now_s=2.9)
        assert c.served == ["first", "second"]
        await c.open(4, now_s=3.0)  # what is free gathers for it
        assert c.served == ["first", "second"]
        await c.open(5, now_s=9.0)
        assert c.served == ["first", "second", "large"]
        await c.open(1)
        assert c.served[-1] == "third"


async def test_those_behind_go_when_the_one_that_held_them_up_leaves() -> None:
    async with counter() as c:
        await c.come(make_waiting("large", math.inf), needs=5)
        await c.come(make_waiting("a", math.inf, arrived_s=0.1))
        await c.come(make_waiting("b", math.inf, arrived_s=0.2))
        await c.open(1)
        await c.open(1, now_s=5.0)
        assert c.served == ["a"]
        c.tasks["large"].cancel()
        await c.settle()
        assert c.served == ["a", "b"]


async def test_a_demand_that_found_nothing_speaks_for_larger_ones() -> None:
    async with counter() as c:
        for number in range(8):
            await c.come(make_waiting(str(number), math.inf, arrived_s=float(number)), needs=5 + number)
        c.num_asked = 0
        await c.open(4)
        assert c.num_asked == 1


async def test_some_that_fit_nowhere_keep_nobody_behind_them_from_a_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Line, "MAX_TRIES", 4)
    async with counter() as c:
        for number in range(6):
            await c.come(make_waiting(str(number), math.inf, arrived_s=float(number)), needs=20 - number)
        c.room = 1
        await c.come(make_waiting("small", math.inf, arrived_s=9.0))
        assert c.served == ["small"]


async def test_where_all_can_be_tried_nobody_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "MAX_TRIES", 6)
    async with counter() as c:
        for number in range(6):
            await c.come(make_waiting(str(number), math.inf, arrived_s=float(number)), needs=20 - number)
        await c.open(15)
        assert c.served == ["5"]


async def test_when_not_all_can_be_tried_the_next_look_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "MAX_TRIES", 4)
    async with counter() as c:
        for number in range(6):
            await c.come(make_waiting(str(number), math.inf, arrived_s=float(number)), needs=20 - number)
        for now_s in (0.1, 0.11):  # the first two and two others, then the first two and those that are left
            assert c.naps_s[-1] == pytest.approx(WaitingQueue.REST_S)
            await c.open(15, now_s)
        assert c.served == ["5"]


async def test_a_full_line_refuses_the_youngest_with_the_wait_of_the_moment() -> None:
    async with counter() as c:
        for number in range(9):
            await c.come(make_waiting(str(number), math.inf, arrived_s=float(number)))
        error = await c.error_of("8")
        assert (error.message, error.retry_after_s) == ("the queue is full: 8 of 8 requests wait", 9)
        assert c.refusals == [("8", "queue_full")]
        await c.come(make_waiting("moved", math.inf, is_resumed=True))
        assert c.line.num_waiting == 9  # never refused, and nobody leaves for it


async def test_a_full_line_is_cleared_of_the_last_class_first_and_of_whoever_fills_it() -> None:
    async with counter() as c:
        for number in range(6):
            await c.come(make_waiting(f"greedy {number}", math.inf, float(number), tenant="greedy"))
        await c.come(make_waiting("batch", math.inf, service_class="batch"))
        await c.come(make_waiting("effort", math.inf, service_class="best_effort"))
        for number in range(3):
            await c.come(make_waiting(f"modest {number}", math.inf, arrived_s=9.0 + number, tenant="modest"))
        assert [name for name, _ in c.refusals] == ["effort", "batch", "greedy 5"]


async def test_a_lost_promise_is_told_with_the_time_that_the_backlog_takes() -> None:
    async with counter() as c:
        await c.come(make_waiting("kept", math.inf, service_s=20.0))
        await c.come(make_waiting("late", 1.0, service_s=0.5))
        assert c.naps_s[-1] == pytest.approx(0.5)  # it looks again when that one becomes late
        await c.open(0, now_s=0.6)
        error = await c.error_of("late")
        assert "after 1000 ms at most" in error.message
        assert error.retry_after_s == 20  # 20 s wait before it, half a second to read, one second is allowed
        assert c.refusals == [("late", "too_late")]


async def test_a_hopeless_one_is_refused_at_once() -> None:
    async with counter() as c:
        entry = make_waiting("hopeless", 1.0, service_s=3.0)
        with pytest.raises(OverloadedError, match="reading the prompt takes 3000 ms"):
            await c.line.turn(entry, lambda: NotNow("too_late", is_hopeless=True))
        assert c.refusals == [("hopeless", "too_late")]


async def test_who_comes_back_from_a_worker_without_room_stands_where_it_stood() -> None:
    async with counter() as c:
        c.room = 1
        first = make_waiting("first", math.inf, arrived_s=0.0, tenant="t")
        await c.come(first)
        assert c.line._queue.shares.tenants == {"t"}
        await c.come(make_waiting("second", math.inf, arrived_s=0.1, tenant="t"))
        back = asyncio.create_task(c.line.turn(first, lambda: c._grant(first, 1), is_back=True))
        await c.settle()
        await c.open(1)
        assert await back == "first"
        assert c.served == ["first", "first"]


async def test_a_place_given_to_somebody_who_leaves_in_that_moment_goes_back() -> None:
    async with counter() as c:
        await c.come(make_waiting("a", math.inf))
        c.room = 1
        c.line.look()
        c.tasks["a"].cancel()
        await c.settle()
        assert c.dropped == ["a"]


async def test_nothing_is_given_to_somebody_who_is_leaving() -> None:
    async with counter() as c:
        await c.come(make_waiting("a", math.inf))
        c.tasks["a"].cancel()
        c.room = 1
        c.line.look()
        await c.settle()
        assert (c.served, c.dropped) == ([], [])


async def test_an_error_is_the_end_of_whoever_asked_and_of_nobody_else() -> None:
    async with counter() as c:
        await c.come(make_waiting("a", math.inf))
        await c.come(make_waiting("b", math.inf, arrived_s=0.1))
        c.is_closed = True
        await c.open(0)
        assert (await c.error_of("a")).message == "closed"
        assert (await c.error_of("b")).message == "closed"


async def test_a_look_that_fails_ends_all_waits() -> None:
    async with counter() as c:
        await c.come(make_waiting("a", math.inf))
        c.line._queue.candidates = lambda *_: 1 / 0  # type: ignore[assignment,method-assign]
        await c.open(1)
        with pytest.raises(ZeroDivisionError):
            await c.tasks["a"]


async def test_looks_that_take_long_are_seldom_and_nobody_is_forgotten() -> None:
    async with counter() as c:
        await c.come(make_waiting("a", math.inf))

        def slow(name: str) -> str | NotNow:
            c.num_asked += 1
            c.now_s += 0.01
            return name if c.room else NotNow("no room", 0)

        turns = [
            asyncio.create_task(
                c.line.turn(make_waiting(f"n{n}", math.inf, float(n)), lambda n=n: slow(f"n{n}"))  # type: ignore[misc]
            )
            for n in range(5)
        ]
        await c.settle()
        assert c.num_asked <= 4
        c.tasks |= {str(n): turn for n, turn in enumerate(turns)}
        c.now_s += 1.0
        await c.open(9)
        async with asyncio.timeout(5):
            await asyncio.gather(*turns)
