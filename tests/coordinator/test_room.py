"""What is known of a decode worker between two of its reports."""

from __future__ import annotations

import math
from dataclasses import replace

from coordinator.placement import WorkerView
from coordinator.room import Held, Room

VIEW = WorkerView("d", 0, 0, 10, 100, 8)
REPORT, NEXT = object(), object()


def available(room: Room, report: object = REPORT) -> int:
    return room.seen(VIEW, report).num_available_blocks


def test_a_burst_sees_what_it_has_taken_itself_until_the_worker_tells() -> None:
    room = Room()
    room.took("d", REPORT, "a", Held(4, 8))
    room.took("d", REPORT, "b", Held(3, 8))
    assert available(room) == 3
    room.granted("d", "b", num_cached_blocks=2)
    assert available(room) == 5
    assert available(room, NEXT) == 10


def test_what_left_before_the_next_report_is_free_again() -> None:
    room = Room()
    room.took("d", REPORT, "a", Held(4, 8))
    room.left("d", "a")
    assert available(room) == 10
    assert not room._held


def test_a_stream_that_moves_counts_where_it_is_decoded() -> None:
    room = Room()
    room.took("d", REPORT, "a", Held(4, 8, itl_s=0.05, is_leftover=True))
    room.moved("a", "d", "e")
    here, there = room.seen(VIEW, REPORT), room.seen(replace(VIEW, worker_id="e"), REPORT)
    assert here == VIEW
    assert (there.num_leftover, there.leftover_blocks, there.gap_s) == (1, 8, 0.05)
    room.left("e", "a")
    assert not room._held


def test_after_a_refusal_only_smaller_demands_ask_until_something_changes() -> None:
    room = Room()
    room.took("d", REPORT, "a", Held(4, 8))
    room.took("d", REPORT, "b", Held(2, 2))
    room.refused("d", REPORT, "a")
    room.left("d", "a")  # its own end changes nothing
    assert available(room) == 3
    room.left("d", "b")
    assert available(room) == 10
    room.took("d", REPORT, "c", Held(1, 1))
    room.refused("d", REPORT, "c")
    assert available(room) == 0
    assert available(room, NEXT) == 10


def test_a_refusal_that_is_older_than_the_report_says_nothing() -> None:
    room = Room()
    room.took("d", REPORT, "a", Held(4, 8))
    room.refused("d", NEXT, "a")
    assert available(room, NEXT) == 10


def test_a_view_tells_of_our_own_requests_there() -> None:
    room = Room()
    room.took("d", REPORT, "chat", Held(1, 2, itl_s=0.05))
    room.took("d", REPORT, "tight", Held(1, 2, itl_s=0.02))
    room.took("d", REPORT, "batch", Held(2, 7, is_leftover=True))
    view = room.seen(VIEW, REPORT)
    assert (view.num_leftover, view.leftover_blocks, view.gap_s) == (1, 7, 0.02)
    room.left("d", "tight")
    room.left("d", "chat")
    assert room.seen(VIEW, REPORT).gap_s == math.inf


def test_nothing_is_kept_of_workers_that_are_gone() -> None:
    room = Room()
    for name in ("d", "e"):
        room.took(name, REPORT, "a", Held(1, 1))
        room.left(name, "a")
    assert room.all_seen([VIEW], lambda _: REPORT) == [VIEW]
    assert set(room._since) == {"d"}
