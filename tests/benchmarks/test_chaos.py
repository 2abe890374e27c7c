"""What the chaos run concludes from what it saw, from trails and samples made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.chaos import Plan, Seen, checks_of, failures, summary
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


def seen_of(*trails: Trail, held: int | None = 0) -> Seen:
    steady = [Sample(float(second), 200_000 + second % 7, 20) for second in range(300)]
    return Seen({"c0": "abc"}, list(trails), lives=[Life(1, "decode", samples=steady)], held=held)


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


def test_the_same_seed_asks_the_same() -> None:
    assert Plan(seed=3).calls() == Plan(seed=3).calls() != Plan(seed=4).calls()


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
