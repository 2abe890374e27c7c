"""Side by side: turns, ratios, and what is refused; against two servers that differ in a known way."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.compare import Comparison, Contender, Ratio, ratios
from benchmarks.progress import Board
from benchmarks.report_verdict import Metric
from benchmarks.result import read_result
from benchmarks.servers import Arm, Launch
from benchmarks.spec import Lengths, LoadSpec
from tests.benchmarks.builders import fake_server, stamps
from tests.benchmarks.test_servers import LAUNCHER

LATER, MORE = Metric("late_ms", "late"), Metric("many", "many", is_lower_better=False)


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    with fake_server(ttft_s=0.05, gap_s=0.004) as fast, fake_server(ttft_s=0.3, gap_s=0.004) as slow:
        yield fast, slow


def arguments(urls: tuple[str, str], out: Path, *more: str) -> list[str]:
    fast, slow = urls
    return [
        "--server", f"fast={fast}", "--server", f"slow={slow}", "--out", str(out), "--arrival", "closed",
        "--num-requests", "3", "--input-tokens", "20", "--output-tokens", "4", *more,
    ]  # fmt: skip


def make_rows(**series: list[float | None]) -> list[dict[str, Any]]:
    return [
        {"arm": arm, "seed": seed, "late_ms": value, "many": value, "is_void": False}
        for arm, values in series.items()
        for seed, value in enumerate(values)
    ]


def test_a_ratio_is_of_one_round() -> None:
    [found] = ratios(make_rows(a=[10, 20, 30], b=[15, 40, 45]), ["a", "b"], [LATER])
    assert found.values == (1.5, 2.0, 1.5)
    assert found.row() | {"metric_title": ""} == {
        "kind": "ratio", "arm": "b", "baseline": "a", "metric": "late_ms", "metric_title": "",
        "ratio_median": 1.5, "ratio_min": 1.5, "ratio_max": 2.0, "num_rounds": 3, "verdict": "worse",
    }  # fmt: skip


def test_what_was_not_measured_in_both_has_no_ratio() -> None:
    rows = make_rows(a=[10, None, 0, 10, 10], b=[20, 20, 20, 20, None])
    rows[3]["is_void"] = True
    [found] = ratios(rows, ["a", "b"], [LATER])
    assert found.values == (2.0,)
    assert ratios(make_rows(a=[None], b=[1.0]), ["a", "b"], [LATER]) == []


@pytest.mark.parametrize(
    ("values", "metric", "verdict"),
    [
        ((1.1, 1.2, 1.3), LATER, "worse"),
        ((1.1, 1.2, 1.3), MORE, "better"),
        ((0.5, 0.6, 0.9), LATER, "better"),
        ((0.5, 0.6, 0.9), MORE, "worse"),
        ((0.9, 1.2, 1.3), LATER, "tie"),
        ((1.0, 1.2, 1.3), LATER, "tie"),
        ((1.5,), LATER, "tie"),
    ],
)
def test_a_range_that_holds_one_is_a_tie(values: tuple[float, ...], metric: Metric, verdict: str) -> None:
    assert Ratio("b", "a", metric, values).verdict == verdict


def test_servers_take_turns_with_the_same_seeds_and_the_slow_one_is_slower(
    urls: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(arguments(urls, tmp_path, "--seed", "40")) == 0
    printed = capsys.readouterr().out
    result = read_result(tmp_path / "result.json")
    rows = [row for row in result.rows if row.get("kind") != "ratio"]
    assert [(row["arm"], row["seed"]) for row in rows] == [
        ("fast", 40), ("slow", 40), ("fast", 41), ("slow", 41), ("fast", 42), ("slow", 42),
    ]  # fmt: skip
    # The servers' own clocks, which are the machine's: no turn begins before the one before it is over.
    turns = []
    for seed in (40, 41, 42):
        for url in urls:
            mine = [
                stamp for name, stamp in stamps(url).items() if name.startswith("r") and f"-{seed}" in name
            ]
            assert len(mine) == 3
            turns.append((min(s["received_s"] for s in mine), max(s["chunks_s"][-1] for s in mine)))
    assert all(before[1] < after[0] for before, after in pairwise(turns))
    prompts = [[stamps(url)[f"r{index}-41"]["body"]["messages"] for index in range(3)] for url in urls]
    assert prompts[0] == prompts[1]
    [ttft] = [row for row in result.rows if row.get("metric") == "p50_ttft_ms"]
    assert ttft["verdict"] == "worse"
    values = [row["p50_ttft_ms"] for row in rows]
    assert ttft["ratio_median"] == statistics.median(
        slow / fast for fast, slow in zip(values[::2], values[1::2], strict=True)
    )
    assert "server over fast" in printed
    assert (tmp_path / "report.html").exists()


def test_ours_are_started_for_their_turn_only_unless_all_stay_up(tmp_path: Path) -> None:
    def starts(is_together: bool) -> list[str]:
        spec = LoadSpec(
            "http://each",
            arrival="closed",
            num_requests=1,
            input_tokens=Lengths(20, 20),
            output_tokens=Lengths(2, 2),
        )
        contenders = [Contender.ours("disaggregated"), Contender.ours("colocated")]
        comparison = Comparison(contenders, range(2), spec, None, tmp_path, [])
        with Board("turns") as board:
            lines: list[str] = []
            board.quote = lines.append  # type: ignore[method-assign]
            assert comparison.run(Launch(command=LAUNCHER), board, is_together)
        return [line.split()[1] for line in lines if line.startswith("starting")]

    assert starts(is_together=False) == ["disaggregated", "colocated"] * 2
    assert starts(is_together=True) == ["disaggregated", "colocated"]


def test_who_takes_part_is_read_from_one_word() -> None:
    assert Contender.ours("colocated:1:2").arm == Arm("colocated", 0, 3)
    assert Contender.given("vllm=http://h:8000/v1") == Contender("vllm", None, "http://h:8000/v1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--server", "nourl"], "expected NAME=URL but got 'nourl'"),
        (["--baton", "nowhere"], "mode: expected one of disaggregated, colocated, local-only"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
)
def test_arguments_that_are_none_are_refused_with_the_reason(
    change: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.main(arguments(("http://a", "http://b"), tmp_path, *change))
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--server", "fast=http://c"], "two servers or more of different names"),
        (["--rounds", "2"], "--rounds: expected at least 3 but got 2"),
    ],
)
def test_a_comparison_that_cannot_be_judged_is_refused(
    change: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(arguments(("http://a", "http://b"), tmp_path, *change)) == 2
    assert message in capsys.readouterr().err
