"""The verdicts of the failover probe, from trails made by hand."""

from __future__ import annotations

import json
import signal
from itertools import accumulate

from benchmarks.client import Call, Trail
from benchmarks.failover import Plan, Round, report

PLAN = Plan(num_streams=2, num_tokens=3, roles=("decode",), number=signal.SIGKILL)


def trail(text: str, *gaps_s: float, is_whole: bool = True) -> Trail:
    """One letter a chunk; the first at 1 s, the others after the gaps."""
    made = Trail(Call("s", "hi", len(text)), 0.0, is_length_fixed=True)
    for letter, at_s in zip(text, accumulate(gaps_s, initial=1.0), strict=True):
        made.take(json.dumps({"choices": [{"text": letter}]}).encode(), at_s)
    if is_whole:
        made.outcome = "ok"
    else:
        made.fail("worker lost")
    return made


def test_a_pause_is_the_longest_gap_of_a_stream() -> None:
    usual = Round([trail("abc", 0.1, 0.2), trail("xyz", 0.1, 0.1)])
    broken = Round([trail("abc", 0.1, 3.0), trail("xyz", 2.0, 0.1)], ready_s=9.0)
    row, checks = report(PLAN, usual, broken)
    assert (round(float(row["usual_gap_max_ms"] or 0)), round(float(row["pause_max_ms"] or 0))) == (200, 3000)
    assert row["signal"] == "SIGKILL to decode"
    assert all(check.is_ok for check in checks)


def test_another_answer_and_a_failed_stream_are_seen() -> None:
    usual = Round([trail("abc", 0.1, 0.1), trail("xyz", 0.1, 0.1)])
    broken = Round([trail("abd", 0.1, 0.1), trail("x", is_whole=False)], ready_s=9.0)
    _, checks = report(PLAN, usual, broken)
    assert [(check.name, check.value) for check in checks] == [("failed_requests", 1), ("changed_answers", 2)]
