"""Winner, tie, and nothing to compare, on numbers that can be worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report_verdict import (
    Place,
    Spread,
    goodput_of,
    grid_of,
    judge,
    sentences,
    spreads_of,
    text_verdict,
    value_of,
)


def make_row(arm: str, load: float = 1.0, **values: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "arm": arm,
        "arrival": "poisson",
        "rate": load,
        "input_tokens": "256",
        "output_tokens": "64",
        "offered": 10,
        "completed": 10,
        "is_void": False,
    }
    return {**fields, **values}


def spreads(**values: list[float]) -> dict[str, Spread]:
    found = {arm: Spread.of(numbers) for arm, numbers in values.items()}
    return {arm: spread for arm, spread in found.items() if spread is not None}


def test_a_spread_is_median_least_and_greatest_of_what_was_measured() -> None:
    assert Spread.of([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert str(Spread.of([3.0, 1.0, 2.0])) == "2 (1–3)"
    assert str(Spread.of([3.0, None])) == "3 (one run)"
    assert Spread.of([None]) is None


@pytest.mark.parametrize(
    ("a", "b", "is_lower_better", "winner", "leaders"),
    [
        ([10, 11, 12], [20, 21, 22], True, "a", ("a",)),
        ([10, 11, 12], [20, 21, 22], False, "b", ("b",)),
        ([10, 11, 20], [19, 21, 22], True, None, ("a", "b")),  # ranges overlap
        ([10, 11, 12], [12, 13, 14], True, None, ("a", "b")),  # ranges touch
        ([100, 101, 102], [103, 104, 105], True, None, ("a", "b")),  # apart, but by 3% only
        ([100, 101, 102], [107, 108, 109], True, "a", ("a",)),
        ([1, 1, 1], [1, 1, 1], True, None, ("a", "b")),
        ([0, 0, 0], [0, 0, 0], False, None, ("a", "b")),
        ([0, 0, 0], [0.5, 0.6, 0.7], False, "b", ("b",)),
        ([10], [20, 21], True, None, ("b",)),  # one seed has no spread to be judged by
    ],
)
def test_a_winner_is_beyond_the_spread_of_all_others(
    a: list[float], b: list[float], is_lower_better: bool, winner: str | None, leaders: tuple[str, ...]
) -> None:
    judgement = judge(spreads(a=a, b=b), is_lower_better)
    assert (judgement.winner, judgement.leaders) == (winner, leaders)
    assert judgement.is_tie == (len(leaders) > 1)


def test_a_third_that_is_worse_does_not_break_a_tie() -> None:
    judgement = judge(spreads(a=[10, 12], b=[11, 13], c=[30, 31]), is_lower_better=True)
    assert judgement.leaders == ("a", "b")
    assert judgement.winner is None


def test_a_single_arm_wins_nothing() -> None:
    judgement = judge(spreads(a=[1, 2]), is_lower_better=True)
    assert (judgement.winner, judgement.is_tie) == (None, False)
    assert judge({}, is_lower_better=True).leaders == ()


def test_rows_meet_at_the_same_work_and_load_and_void_ones_nowhere() -> None:
    rows = [
        make_row("a", 2.0),
        make_row("a", 1.0),
        make_row("b", 1.0),
        make_row("b", 2.0, is_void=True),
        {"arm": "b", "kind": "ratio"},
        {"itl_p99_ms": 3.0},
        make_row("b", arrival="closed", concurrency=4, rate=None),
    ]
    grid = grid_of(rows)
    assert {str(place): list(arms) for place, arms in grid.items()} == {
        "256/64 tokens, closed, 4 streams": ["b"],
        "256/64 tokens, poisson, 1 requests/s": ["a", "b"],
        "256/64 tokens, poisson, 2 requests/s": ["a"],
    }


def test_a_trace_and_gamma_name_what_tells_them_apart() -> None:
    trace = Place.of(make_row("a", arrival="trace", rate=None, trace="azure", time_scale=2.0))
    assert str(trace) == "azure, trace, 2 × the trace's rate"
    assert str(Place.of(make_row("a", arrival="gamma", burstiness=0.5))) == (
        "256/64 tokens, gamma of shape 0.5, 1 requests/s"
    )


def test_answered_counts_offered_requests_and_right_lengths() -> None:
    assert value_of(make_row("a", offered=10, completed=8, wrong_length=1), "answered") == 0.7
    assert value_of(make_row("a", offered=0), "answered") is None


def test_goodput_is_the_last_rate_before_the_first_that_fails() -> None:
    shares = {1.0: 1.0, 2.0: 0.95, 3.0: 0.5, 4.0: 0.92}
    grid = grid_of(
        make_row("a", load, attainment=share + shift)
        for load, share in shares.items()
        for shift in (-0.01, 0.0, 0.01)
    )
    workload = next(iter(grid)).workload
    assert goodput_of(grid, workload, "a", 0.9) == 2.0  # 4.0 passed by luck after 3.0 had failed
    assert goodput_of(grid, workload, "a", 0.99) == 1.0
    assert goodput_of(grid, workload, "a", 1.01) == 0.0
    assert goodput_of(grid, workload, "b", 0.9) is None


def test_the_verdict_says_who_wins_what_where() -> None:
    rows = [
        make_row(arm, load, p50_ttft_ms=ttft + shift, output_throughput=100.0 + shift)
        for arm, load, ttft in (("a", 1.0, 50), ("b", 1.0, 80), ("a", 2.0, 60), ("b", 2.0, 60))
        for shift in (0, 1, 2)
    ]
    assert sentences(grid_of(rows)) == [
        "256/64 tokens, poisson (requests/s): a wins TTFT p50 at 1; 5 of 6 comparisons are ties"
    ]
    assert spreads_of(grid_of(rows)[Place("256/64 tokens, poisson", 1.0)], "p50_ttft_ms")["a"].median == 51
    text = text_verdict(rows)
    assert "51 (50–52)" in text
    assert "over 3 seeds" in text
    assert text_verdict([]) == "No valid load run yet: no verdict."
    alone = sentences(grid_of([make_row("a", p50_ttft_ms=1.0), make_row("a", p50_ttft_ms=2.0)]))
    assert alone == ["nothing to compare: one server, or one seed"]
