"""What a refused request is told to wait, and the order of the line."""

from __future__ import annotations

import asyncio

import pytest

from contracts.errors import OverloadedError
from coordinator.line import Line, Pace


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


async def test_a_full_line_tells_the_wait_of_the_moment() -> None:
    line = Line(max_waiting=0)
    with pytest.raises(OverloadedError, match="0 of 0 requests wait") as caught:
        async with line.turn(7):
            pass
    assert caught.value.retry_after_s == 7


async def test_turns_come_in_order_and_the_resumed_go_first() -> None:
    line, order = Line(max_waiting=5), list[str]()
    gate = asyncio.Event()

    async def wait(name: str, is_resumed: bool) -> None:
        async with line.turn(1, is_resumed):
            order.append(name)
            await gate.wait()

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for name in ("head", "second", "moved"):
            group.create_task(wait(name, name == "moved"))
        while line.num_waiting < 3:
            await asyncio.sleep(0)
        gate.set()
    assert order == ["head", "moved", "second"]
    assert line.is_empty
