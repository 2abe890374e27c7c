"""What is told of decisions: whoever was refused or waits finds out by which numbers, of every worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from contracts.service import Service
from coordinator import records
from coordinator.ask import RULES, Ask
from coordinator.placement import NotNow, WorkerView
from policy.place import Option
from tests.coordinator.test_predict import D1, D2, P1, STEPS, last, predictor, put, request

D1_BUSY = replace(D1, num_tokens=100_000, num_requests=1, gap_s=0.050)
SLOW = replace(STEPS, decode=(0.060, 20e-6, 10e-9))  # no stream keeps a gap of 50 ms here


def told(
    views: Sequence[WorkerView], readers: Sequence[WorkerView] = (), **promise: float
) -> dict[str, Option]:
    """The options of one look, by decode worker."""
    p = predictor(**promise)
    put(p, request(), 0.0, readers, views)
    return {option.decode_id: option for option in last(p).options}


def test_a_worker_that_breaks_the_gap_is_told_with_its_gap_and_what_is_allowed() -> None:
    options = told([replace(D1, steps=SLOW), replace(D2, steps=replace(SLOW, margin=1.25))])
    assert options["d1"].gap_s == pytest.approx(0.060 + 20e-6 + 10e-9 * (1000 + 64 // 2))
    assert options["d1"].drawback == "the gap is above the 46.0 ms that are allowed"
    assert options["d2"].drawback == "the gap with a margin of 25% is above the 46.0 ms that are allowed"
    assert math.isinf(options["d1"].ttft_s)


def test_a_worker_that_has_enough_to_read_is_told_with_the_time_until_it_has_not() -> None:
    p = predictor()
    put(p, request(), 0.0, [replace(P1, num_tokens=100_000)], [D1_BUSY])
    [reader, writer] = last(p).options
    wait_s = p._models["p1"][1].prefill_s(100_000, 0, 256) - RULES.horizon_s
    assert (reader.decode_id, reader.drawback) == (
        "p1",
        f"open for the next prompt in {1000 * wait_s:.0f} ms",
    )
    assert (writer.decode_id, writer.drawback[:27]) == ("d1", "open for the next prompt in")


def test_a_worker_without_sequences_or_blocks_is_told_with_what_it_lacks() -> None:
    full = replace(D1, num_requests=64)
    tight = replace(D2, num_available_blocks=10)
    small = replace(D2, worker_id="d3", num_blocks=40, num_available_blocks=40)
    p = predictor()
    answer = put(p, request(), 0.0, [P1], [full, tight, small], frozenset({"d1"}))
    assert isinstance(answer, NotNow)
    assert [option.drawback for option in last(p).options] == [
        "it failed this request",
        "10 blocks are free, 63 needed",
        "it has 40 blocks, 67 may be needed",
    ]
    assert told([full])["d1"].drawback == "all 64 sequences are taken"


def test_a_request_that_was_placed_is_told_what_was_weighed_and_no_more() -> None:
    options = told([D1, replace(D2, steps=SLOW)], [P1])
    assert set(options) == {"d1"}


@pytest.mark.parametrize("is_refused", [True, False])
def test_who_goes_without_a_worker_keeps_the_numbers_of_the_last_look(is_refused: bool) -> None:
    p = predictor()
    put(p, request(), 0.0, [], [replace(D1, num_requests=1, steps=SLOW)])
    seen = last(p).options
    assert seen
    ask = Ask(request(), Service("interactive", 0.5, 0.05))
    if is_refused:
        p.refused(ask, "no_room")
    else:
        p.left(ask)
    assert last(p).options == seen
    assert last(p).rule == ("refused" if is_refused else "left")
    assert (last(p).ttft_s, last(p).itl_s) == (0.5, 0.05)


def test_reasons_are_found_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits is looked at at every change of the fleet, and hardly ever by an operator."""
    asked: list[str] = []
    tell = records._against
    monkeypatch.setattr(records, "_against", lambda *told: (asked.append(told[2].worker_id), tell(*told))[1])
    p = predictor()
    put(p, request(), 0.0, [], [replace(D1, num_requests=1, steps=SLOW)])
    assert asked == []
    assert [option.decode_id for option in last(p).options] == ["d1"]
    assert asked == ["d1"]
