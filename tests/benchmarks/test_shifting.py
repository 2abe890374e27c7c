"""The shifting mix: its arithmetic by hand, and one short run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import shifting
from benchmarks.lag import Lag
from benchmarks.metrics import Slo
from benchmarks.records import Record
from benchmarks.result import Check, read_result
from benchmarks.shifting import Half, Shift, recovered_s, report, times_s
from tests.benchmarks.builders import fake_server, make_record

LAG = Lag(1.0, 1.0, 1.0)
SHIFT = Shift(Half("prompts", 2.0, 100, 4), Half("answers", 1.0, 10, 40), Slo(1.0, 0.1), half_s=20.0)


def request(at_s: float, is_kept: bool = True) -> Record:
    """One a second; late by its first token if it is not kept."""
    first_s = at_s + (0.5 if is_kept else 5.0)
    return make_record(at_s, (first_s, first_s + 0.05))


def run(late: set[int], seconds: int = 40) -> list[Record]:
    return [request(float(second), second not in late) for second in range(seconds)]


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        (set(), 0.0),
        (set(range(15)), 0.0),  # what was late before the shift is not asked
        ({20, 21, 22}, 5.0),
        ({20, 21, 22, 31, 32}, 15.0),  # the lucky window in between is none
        ({20, 21, 22, 26, 27, 33}, 15.0),
        (set(range(20, 35)), 15.0),
        (set(range(20, 40)), None),
        ({39}, 0.0),  # one of all that came after the shift
        ({37, 38, 39}, None),
    ],
)
def test_recovery_is_where_the_promises_are_kept_from_then_on(late: set[int], expected: float | None) -> None:
    assert recovered_s(run(late), SHIFT) == expected


def test_one_late_request_of_many_is_within_the_target() -> None:
    shift = Shift(SHIFT.prompts, SHIFT.answers, SHIFT.slo, half_s=20.0, target=0.8)
    assert recovered_s(run({22, 33}), shift) == 0.0


def test_windows_are_those_of_the_arrival_and_the_last_row_is_of_all() -> None:
    rows, checks = report(run({3, 21}), SHIFT, LAG)
    assert [row.get("start_s") for row in rows] == [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, None]
    assert [row["attained"] for row in rows[:-1]] == [0.8, 1.0, 1.0, 1.0, 0.8, 1.0, 1.0, 1.0]
    assert {row["half"] for row in rows[:4]} == {"prompts"}
    assert rows[-1]["attained_before"] == pytest.approx(0.95)
    assert rows[-1]["recovered_s"] == 5.0
    named = {check.name: check for check in checks}
    assert named["recovered_s"] == Check("recovered_s", 5.0, "<=", 15.0)
    assert named["failed_requests"].is_ok


def test_what_never_recovers_or_fails_is_no_success() -> None:
    lost = make_record(21.0, (), outcome="error", status=503)
    checks = {check.name: check for check in report([*run(set(range(20, 40))), lost], SHIFT, LAG)[1]}
    assert not checks["recovered_s"].is_ok
    assert checks["failed_requests"].value == 1


def test_both_halves_are_offered_at_their_rates_in_order() -> None:
    offered = times_s(SHIFT)
    assert [at_s for at_s, _ in offered] == sorted(at_s for at_s, _ in offered)
    before = [half.name for at_s, half in offered if at_s < 20.0]
    assert set(before) == {"prompts"}
    assert len(before) == 40
    assert len(offered) - len(before) == 20


def test_a_half_shorter_than_a_window_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["http://x", "--slo-ttft-ms", "1", "--slo-tpot-ms", "1", "--half-s", "2"]
    assert shifting.main(args) == 2
    assert "half_s >= window_s" in capsys.readouterr().err


def test_the_command_measures_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(ttft_s=0.005, gap_s=0.002) as url:
        code = shifting.main(
            [url, "--slo-ttft-ms", "5000", "--slo-tpot-ms", "5000", "--half-s", "0.6", "--window-s", "0.2",
             "--prompt-rate", "20", "--prompt-tokens", "30", "--answer-rate", "20",
             "--out", str(tmp_path), "--json", str(tmp_path / "r.json")]
        )  # fmt: skip
    assert code in (0, 1)  # how fast this machine is just now is not what is tested
    assert "recovered_s" in capsys.readouterr().out
    result = read_result(tmp_path / "r.json")
    assert result.benchmark == "shifting"
    assert (len(result.rows), result.rows[-1]["offered"]) == (7, 24)
    assert (tmp_path / "requests.jsonl").is_file()
