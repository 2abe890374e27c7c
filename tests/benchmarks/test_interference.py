"""The interference probe: its verdicts by hand, and one short run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import interference
from benchmarks.interference import Probe, report
from benchmarks.lag import Lag
from benchmarks.records import Record
from benchmarks.result import Check, read_result
from tests.benchmarks.builders import fake_server, make_record

LAG = Lag(1.0, 1.0, 1.0)
PROBE = Probe(duration_s=10.0, warmup_s=2.0)


def steady(times_s: list[float], **changes: object) -> Record:
    return make_record(0.0, times_s, label="steady", **changes)


def long(at_s: float, ttft_s: float) -> Record:
    return make_record(at_s, (at_s + ttft_s,), label="long")


def verdicts(records: list[Record]) -> dict[str, Check]:
    return {check.name: check for check in report(records, PROBE, LAG)[1]}


def test_numbers_of_a_known_run() -> None:
    # a token every 4 ms from 1.0 on: those from 2.0 to 12.0 count, so 2,500 of them
    even = [1.0 + 0.004 * index for index in range(3000)]
    row, checks = report([steady(even), long(1.0, 9.0), long(4.0, 0.5), long(7.0, 0.7)], PROBE, LAG)
    assert row["itl_p50_ms"] == pytest.approx(4.0)
    assert row["itl_max_ms"] == pytest.approx(4.0)
    assert row["itl_p99_over_p50"] == pytest.approx(1.0)
    assert row["tokens_per_s"] == pytest.approx(250.0, rel=0.001)
    assert row["long_ttft_p50_ms"] == pytest.approx(600.0)  # the one of the warm-up does not count
    assert all(check.is_ok for check in checks)
    names = [check.name for check in checks]
    assert names[:4] == ["itl_p99_over_p50", "itl_max_ms", "tokens_per_s", "long_ttft_p50_ms"]
    assert [check.required for check in checks[:4]] == [2.0, 100.0, 200.0, 1200.0]


def test_one_stall_is_the_longest_gap() -> None:
    checks = verdicts([steady([3.0, 3.01, 3.5, 3.51]), long(3.0, 0.1)])
    assert checks["itl_max_ms"].value == pytest.approx(490.0)
    assert not checks["itl_max_ms"].is_ok


def test_a_stall_that_began_in_the_warm_up_counts() -> None:
    assert verdicts([steady([1.9, 2.4, 2.41])])["itl_max_ms"].value == pytest.approx(500.0)


def test_a_stall_that_is_open_at_the_end_counts_as_far_as_it_went() -> None:
    stalled = steady([11.0, 11.01], outcome="cancelled", end_s=12.001)
    assert verdicts([stalled])["itl_max_ms"].value == pytest.approx(990.0)


def test_a_stream_that_ended_has_no_open_gap() -> None:
    assert verdicts([steady([11.0, 11.01])])["itl_max_ms"].value == pytest.approx(10.0)


def test_nothing_measured_fails_every_check() -> None:
    checks = verdicts([])
    assert not any(checks[name].is_ok for name in list(checks)[:4])


def test_a_long_prompt_without_an_answer_fails_the_run() -> None:
    lost = make_record(5.0, (), label="long", outcome="cancelled")
    checks = verdicts([steady([3.0, 3.01]), lost])
    assert checks["failed_requests"].value == 1
    assert not checks["long_ttft_p50_ms"].is_ok


def test_long_prompts_come_every_period() -> None:
    times = Probe(period_s=3.0, duration_s=30.0, warmup_s=6.0).long_times_s()
    assert times[0] == 1.5
    assert len([at_s for at_s in times if at_s >= 6.0]) == 10
    assert times[-1] < 36.0


def test_the_command_measures_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(ttft_s=0.005, gap_s=0.005) as url:
        code = interference.main(
            [url, "--duration-s", "1.5", "--warmup-s", "0.2", "--period-s", "0.5", "--long-tokens", "60",
             "--out", str(tmp_path), "--json", str(tmp_path / "r.json")]
        )  # fmt: skip
    assert code in (0, 1)  # how fast this machine is just now is not what is tested
    assert "itl_p99_over_p50" in capsys.readouterr().out
    result = read_result(tmp_path / "r.json")
    assert result.benchmark == "interference"
    assert result.rows[0]["num_failed"] == 0
    assert result.rows[0]["num_long"] == 3
    assert result.rows[0]["itl_p50_ms"] >= 5.0
    assert (tmp_path / "requests.jsonl").is_file()
