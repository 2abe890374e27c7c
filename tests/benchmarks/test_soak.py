"""The soak run: what it concludes from its samples, and a short one for real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.result import read_result
from benchmarks.soak import Soak, checks_of, growth

ROOT = Path(__file__).parents[2]
SECONDS = 60


def soak_of(kib_per_request: float, files_per_request: float) -> Soak:
    soak = Soak(0)
    soak.left = {"d0 blocks": 0}
    soak.ends["ok"] = 20_000
    for number in range(0, 20_000, 100):
        for name in ("p0", "d0"):
            kib, files = 200_000 + int(number * kib_per_request), 20 + int(number * files_per_request)
            soak.samples.append((name, number, kib + number % 700, files))
    return soak


def failed(soak: Soak) -> list[str]:
    return [check.name for check in checks_of(soak) if not check.is_ok]


def test_growth_is_the_slope_of_the_line_through_the_samples() -> None:
    assert growth([(0, 5), (10, 25), (20, 45)]) == pytest.approx(2.0)
    assert growth([(3, 1), (3, 9)]) == growth([]) == 0.0


def test_what_grows_with_the_requests_or_is_left_behind_is_found() -> None:
    assert failed(soak_of(0.0, 0.0)) == []
    assert failed(soak_of(4.0, 0.0)) == ["rss_slope"]
    assert failed(soak_of(0.0, 0.01)) == ["fds"]
    soak = soak_of(0.0, 0.0)
    soak.left = {"d0 blocks": 0, "d0 slots": 1}
    soak.num_overdue = soak.ends["wrong"] = 1
    assert failed(soak) == ["audit_zero", "overdue", "wrong"]


def test_a_run_that_measured_nothing_has_failed() -> None:
    assert set(failed(Soak(0))) == {"rss_slope", "fds", "audit_zero", "handed_over"}


@pytest.mark.slow
def test_a_short_soak_with_cancels_and_kills_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--seconds", str(SECONDS), "--json", str(path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(path)
    assert {check.name for check in result.checks} == {
        "rss_slope", "fds", "audit_zero", "overdue", "wrong", "handed_over",
    }  # fmt: skip
    ends = {row["end"]: row["requests"] for row in result.rows if "end" in row}
    assert ends["worker killed"] >= 1
    assert ends["ok"] >= 1
