"""The search for the highest rate: right within its tolerance, in few measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import goodput
from benchmarks.goodput import Search, find_goodput
from benchmarks.result import read_result
from tests.benchmarks.builders import fake_server


class Cliff:
    """Attainment falls from 1 with a slope after `knee`; counts what it is asked."""

    def __init__(self, knee: float) -> None:
        self.knee = knee
        self.asked: list[tuple[float, int]] = []

    def __call__(self, rate: float, seed: int) -> float:
        self.asked.append((rate, seed))
        return min(1.0, self.knee / rate)


@settings(max_examples=200)
@given(st.floats(0.02, 900.0), st.floats(0.01, 1000.0))
def test_goodput_is_within_five_percent_below_the_truth(knee: float, start: float) -> None:
    cliff = Cliff(knee)
    rates = find_goodput(cliff, (0.99, 0.9), Search(start_rate=start)).rates
    for target, rate in rates.items():
        truth = min(knee / target, 1000.0)
        assert truth / 1.0501 <= rate <= truth * (1 + 1e-9)
    assert rates[0.99] <= rates[0.9]
    assert len(cliff.asked) == len(set(cliff.asked))  # no point is measured twice


def test_two_of_three_seeds_decide_and_the_third_is_asked_only_if_needed() -> None:
    asked = []

    def measure(rate: float, seed: int) -> float:
        asked.append(seed)
        return 1.0 if rate <= 1.0 or (rate <= 2.0 and seed != 1) else 0.0

    search = Search(start_rate=1.0, min_rate=1.0, max_rate=4.0, tolerance=1.0)
    found = find_goodput(measure, (0.9,), search)
    assert found.rates == {0.9: 2.0}
    assert asked == [0, 1, 0, 1, 2, 0, 1]  # 1: two pass; 2: one of two fails, the third passes; 4: two fail


def test_no_rate_that_passes_is_a_goodput_of_zero() -> None:
    assert find_goodput(lambda rate, seed: 0.0, (0.9, 0.99)).rates == {0.9: 0.0, 0.99: 0.0}


def test_nothing_offered_does_not_pass() -> None:
    assert find_goodput(lambda rate, seed: None, (0.9,)).rates == {0.9: 0.0}


def test_a_server_that_always_passes_gives_the_highest_rate_asked_for() -> None:
    assert find_goodput(lambda rate, seed: 1.0, (0.9,), Search(max_rate=48.0)).rates == {0.9: 48.0}


def test_every_measurement_is_on_the_curve() -> None:
    cliff = Cliff(3.0)
    found = find_goodput(cliff, (0.9,))
    assert set(found.curve) == set(cliff.asked)


@pytest.mark.parametrize(
    "bounds", [{"min_rate": 0.0}, {"start_rate": 5.0, "max_rate": 4.0}, {"tolerance": 0.0}, {"seeds": ()}]
)
def test_impossible_searches_are_refused(bounds: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Search(**bounds)  # type: ignore[arg-type]


def test_the_command_searches_and_writes_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--num-requests",
        "4",
        "--input-tokens",
        "9",
        "--output-tokens",
        "2",
        "--slo-ttft-ms",
        "60000",
    ]
    with fake_server() as url:
        bounds = ["--rate", "50", "--max-rate", "100", "--seeds", "1"]
        assert goodput.main([url, *arguments, *bounds, "--json", str(tmp_path / "g.json")]) == 0
    assert "goodput@99" in capsys.readouterr().out
    result = read_result(tmp_path / "g.json")
    assert [row["goodput"] for row in result.rows if "goodput" in row] == [100.0, 100.0]
    assert [row["rate"] for row in result.rows if "rate" in row] == [50.0, 100.0]


def test_the_command_needs_a_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert goodput.main(["http://127.0.0.1:9"]) == 2
    assert "slo-ttft-ms" in capsys.readouterr().err
