"""What a request keeps over its attempts, and when it may have another. No workers, no clock."""

from __future__ import annotations

import pytest

from contracts.errors import (
    BatonError,
    DrainingError,
    EngineError,
    HandoffError,
    OutOfMemory,
    RequestError,
    WorkerLostError,
)
from contracts.request import Finished, GenerateRequest, SamplingParams
from coordinator.story import Story

EOS, STOP = 2, 9


def make_story(max_continuations: int = 3, output_ids: tuple[int, ...] = (), **sampling: object) -> Story:
    params = SamplingParams(**({"max_tokens": 4, "stop_token_ids": (STOP,)} | sampling))  # type: ignore[arg-type]
    request = GenerateRequest("r", (1, 1, 1), params, output_ids)
    return Story(request, frozenset({EOS}), max_continuations)


def send(story: Story, *token_ids: int) -> None:
    story.sent(token_ids)


def test_each_attempt_has_its_own_id_and_all_tokens_sent() -> None:
    story = make_story()
    assert (story.next_attempt().request_id, story.next_attempt().output_ids) == ("r.1", ())
    send(story, 5, 6)
    third = story.next_attempt()
    assert (third.request_id, third.prompt_ids, third.output_ids) == ("r.3", (1, 1, 1), (5, 6))


@pytest.mark.parametrize(
    ("sampling", "token_ids", "end"),
    [
        ({}, (5,), None),
        ({}, (5, 5, 5, 5), Finished("length")),
        ({}, (5, EOS), Finished("stop")),
        ({"ignore_eos": True}, (5, EOS), None),
        ({}, (5, STOP), Finished("stop", stop_token_id=STOP)),
        ({"min_tokens": 2}, (5, STOP), None),
        ({"min_tokens": 1}, (5, STOP), Finished("stop", stop_token_id=STOP)),
        ({"min_tokens": 2}, (5, EOS), None),
        ({"min_tokens": 4}, (5, 5, 5, EOS), Finished("length")),
        ({"grammar": "g", "ignore_eos": True}, (5, EOS), Finished("stop")),
        ({"grammar": "g", "min_tokens": 3}, (5, EOS), Finished("stop")),
        ({"grammar": "g", "stop_token_ids": (EOS,)}, (5, EOS), Finished("stop")),
        ({"grammar": "g", "ignore_eos": True}, (5, 5), None),
    ],
)
def test_the_end_that_a_lost_worker_did_not_tell_is_the_one_it_would_have_told(
    sampling: dict[str, object], token_ids: tuple[int, ...], end: Finished | None
) -> None:
    story = make_story(**sampling)
    send(story, *token_ids)
    assert story.end() == end


def test_nothing_has_ended_before_the_first_token() -> None:
    assert make_story(output_ids=(5, 5, 5, 5)).end() is None


@pytest.mark.parametrize("error", [WorkerLostError("x"), HandoffError("x"), OutOfMemory("x")])
def test_failures_are_counted_and_the_bound_ends_them(error: BatonError) -> None:
    story = make_story(max_continuations=2)
    assert [story.lost(error, ["d"], 0) for _ in range(3)] == [True, True, False]


def test_workers_that_leave_in_order_are_not_counted() -> None:
    story = make_story(max_continuations=0)
    assert all(story.lost(DrainingError("d leaves"), ["d"], 0) for _ in range(9))
    assert not story.lost(WorkerLostError("x"), ["d"], 0)


def test_a_failed_step_goes_on_once() -> None:
    story = make_story(max_continuations=9)
    assert [story.lost(EngineError("NaN"), ["d"], 0) for _ in range(2)] == [True, False]


def test_what_the_caller_did_wrong_does_not_go_on() -> None:
    assert not make_story().lost(RequestError("x"), ["d"], 0)


def test_all_workers_that_failed_are_avoided() -> None:
    story = make_story()
    story.lost(WorkerLostError("x"), ["p1", "d1"], 0)
    story.lost(WorkerLostError("x"), ["d2"], 0)
    assert story.avoid == {"p1", "d1", "d2"}
    assert story.is_resumed


def test_cache_hits_are_those_of_the_attempt_that_gave_the_first_token() -> None:
    """A continuation finds its own blocks in the cache: prompt and output, which nobody had computed for it before."""
    story = make_story()
    story.lost(WorkerLostError("before any token"), ["d1"], 3)
    send(story, 5)
    story.lost(WorkerLostError("x"), ["d1"], 1)
    send(story, 5)
    story.lost(WorkerLostError("x"), ["d2"], 5)
    assert story.finished(Finished("stop", num_cached_tokens=5)) == Finished("stop", num_cached_tokens=1)


def test_what_a_lost_attempt_has_read_is_no_cache_hit_though_no_token_came_of_it() -> None:
    """Its reader lives, and the next attempt finds there what this one had computed."""
    story = make_story()
    story.lost(WorkerLostError("before any token"), ["d1"], 0)
    assert story.finished(Finished("stop", num_cached_tokens=3)).num_cached_tokens == 0
    story.lost(WorkerLostError("before any token"), ["d2"], 3)
    send(story, 5)
    story.lost(WorkerLostError("x"), ["d2"], 3)
    assert story.finished(Finished("stop", num_cached_tokens=3)).num_cached_tokens == 0


def test_cache_hits_are_never_more_than_the_prompt() -> None:
    story = make_story(output_ids=(5, 5))
    assert story.finished(Finished("stop", num_cached_tokens=5)).num_cached_tokens == 3
