"""The arithmetic of stages, on a clock that the test turns."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from contracts.request import Timings
from coordinator.stages import StageClock


class Clock:
    """The time, in seconds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def same(found: Timings, *expected: float | None) -> bool:
    return astuple(found) == pytest.approx(expected)


def test_stages_share_the_whole_between_them() -> None:
    clock = Clock()
    stages = StageClock(clock)
    clock.now_s = 102.0
    stages.placed(2.0)
    clock.now_s = 105.0
    stages.first_token(clock.now_s)
    clock.now_s = 106.0
    stages.first_token(clock.now_s)
    clock.now_s = 109.0
    timings = stages.timings(0.25)
    assert same(timings, 2.0, 3.0, 0.25, 4.0, 1)
    assert timings.total_s == 9.0


def test_attempts_before_the_first_token_are_queue_while_they_wait_and_prefill_else() -> None:
    clock = Clock()
    stages = StageClock(clock)
    clock.now_s = 101.0
    stages.placed(1.0)
    clock.now_s = 103.0
    stages.lost(None)
    clock.now_s = 107.0
    stages.placed(4.0)
    clock.now_s = 108.0
    stages.first_token(clock.now_s)
    assert same(stages.timings(), 5.0, 3.0, 0.0, 0.0, 2)


def test_what_a_lost_worker_costs_after_the_first_token_is_decode_and_handoffs_add_up() -> None:
    clock = Clock()
    stages = StageClock(clock)
    stages.placed(0.0)
    clock.now_s = 101.0
    stages.first_token(clock.now_s)
    stages.lost(0.5)
    clock.now_s = 111.0
    stages.placed(10.0)
    clock.now_s = 112.0
    stages.first_token(clock.now_s)
    assert same(stages.timings(0.25), 0.0, 1.0, 0.75, 11.0, 2)


def test_an_untold_handoff_of_the_last_attempt_is_unknown() -> None:
    stages = StageClock(Clock())
    stages.placed(0.0)
    stages.lost(0.5)
    stages.placed(0.0)
    assert stages.timings(None).handoff_s is None


def test_a_request_without_a_token_has_no_decode() -> None:
    clock = Clock()
    stages = StageClock(clock)
    clock.now_s = 102.0
    assert same(stages.timings(), 0.0, 2.0, 0.0, 0.0, 0)
