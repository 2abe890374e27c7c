"""What the chaos run concludes from what it saw, from trails and samples made by hand."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from benchmarks.chaos import MIN_HANDOFFS_EACH, Plan, Seen, checks_of, failures, summary
from benchmarks.client import Call, Trail
from benchmarks.growth import Life, Sample, growths_of
from benchmarks.processes import children, command_of, num_files, own_kib, parent, resident_kib


def trail(text: str = "abc", status: int = 200, ends: tuple[str, ...] = ("length",)) -> Trail:
    """One letter a chunk, a second apart; `ends`: finish reasons, or "error" for an error event."""
    made = Trail(Call("c0", "hi", len(text)), 0.0, is_length_fixed=True)
    made.status = status
    for at_s, letter in enumerate(text if status == 200 else ""):
        made.take(json.dumps({"choices": [{"text": letter}]}).encode(), float(at_s))
    for end in ends if status == 200 else ():
        if end == "error":
            with pytest.raises(ValueError, match="lost"):
                made.take(b'{"error": {"message": "worker lost"}}', 9.0)
        else:
            made.take(json.dumps({"choices": [{"text": "", "finish_reason": end}]}).encode(), 9.0)
    made.outcome = "ok" if status == 200 and ends == ("length",) else "error"
    return made


def seen_of(*trails: Trail, held: int | None = 0, num_handoffs: int | None = None) -> Seen:
    """`num_handoffs` None: one for each request."""
    steady = [Sample(float(second), 200_000 + second % 7, 20) for second in range(300)]
    counters = {"handoffs": float(len(trails) if num_handoffs is None else num_handoffs)}
    lives = [Life(1, "decode", samples=steady)]
    return Seen({"c0": "abc"}, list(trails), lives=lives, held=held, counters=counters)


def failed(seen: Seen) -> list[str]:
    return [check.name for check in checks_of(seen, growths_of(seen.lives)) if not check.is_ok]


def test_a_run_in_which_nobody_noticed_anything_passes() -> None:
    seen = seen_of(*[trail()] * 200, trail(status=503))
    assert failed(seen) == []
    assert failures(seen) == []
    assert summary(Plan(60.0), seen)["refused"] == 1
    assert summary(Plan(60.0), seen)["longest_gap_max_ms"] == 1000.0


def test_one_in_two_hundred_may_fail_but_not_two() -> None:
    broken = trail(ends=("error",))
    assert failed(seen_of(*[trail()] * 199, broken)) == []
    assert failed(seen_of(*[trail()] * 198, broken, broken)) == ["completed_share"]
    assert [row["ends"] for row in failures(seen_of(trail(), broken))] == [1]


def test_another_answer_a_missing_end_a_second_end_and_a_held_block_are_found() -> None:
    many = [trail()] * 1000
    assert failed(seen_of(*many, trail("abd"))) == ["same_outputs"]
    assert failed(seen_of(*many, trail(ends=()))) == ["one_end"]
    assert failed(seen_of(*many, trail(ends=("length", "length")))) == ["one_end"]
    assert failed(seen_of(*many, held=3)) == ["audit_blocks"]
    assert failed(seen_of(*many, held=None)) == ["audit_blocks"]


def test_a_run_that_measured_nothing_has_failed() -> None:
    assert len(failed(Seen())) == len(checks_of(Seen(), []))


def test_a_run_in_which_hardly_any_kv_moved_says_little_about_moving_it() -> None:
    many = [trail()] * 200
    assert failed(seen_of(*many, num_handoffs=MIN_HANDOFFS_EACH * 200)) == []
    assert failed(seen_of(*many, num_handoffs=MIN_HANDOFFS_EACH * 200 - 1)) == ["handoffs_per_request"]
    assert summary(Plan(60.0), seen_of(*many, num_handoffs=150))["handoffs"] == 150


def test_the_same_seed_asks_the_same() -> None:
    assert Plan(seed=3).stories() == Plan(seed=3).stories() != Plan(seed=4).stories()


def test_no_cache_knows_a_story_that_is_asked_again_and_its_answers_are_the_same() -> None:
    told = list(islice(Plan(seed=3).told(random.Random(1)), 200))
    references = {call.request_id: call for story in Plan(seed=3).stories() for call in story}
    asked = [(call.request_id, str(call.more["cache_salt"])) for call in told]
    assert len(set(asked)) == len(asked)
    for call in told:
        assert replace(call, more={}) == references[call.request_id]


def test_each_call_of_a_story_goes_on_from_the_one_before_under_the_same_salt() -> None:
    told = list(islice(Plan(seed=3).told(random.Random(1)), 200))
    for before, after in pairwise(told):
        if before.more == after.more:
            assert str(after.prompt).startswith(str(before.prompt))
            assert len(after.prompt) > len(before.prompt)
    assert len({str(call.more["cache_salt"]) for call in told}) < len(told)


def test_a_process_is_looked_at_from_outside() -> None:
    pipe, script = subprocess.PIPE, "print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", script, "mark"], stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it has started
        assert resident_kib(process.pid) > own_kib(process.pid) > 0
        assert num_files(process.pid) >= 3
        assert parent(process.pid) == os.getpid()
        assert process.pid in children(os.getpid())
        assert command_of(process.pid).endswith("mark")
    finally:
        process.communicate(b"\n")
