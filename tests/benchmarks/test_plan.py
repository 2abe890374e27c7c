"""The planner's answer keeps the promise, one worker fewer does not, and questions without an answer say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plan
from benchmarks.result import read_result

QUICK = ["--requests", "300", "--seeds", "0", "--model", "llama-3-70b"]


def ask(*options: str) -> list[str]:
    return [*QUICK, *options]


def test_the_answer_keeps_the_promise_and_one_worker_fewer_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert plan.main(ask("--rate", "30", "--json", str(file))) == 0
    rows = {row["workers"]: row for row in read_result(file).rows}
    (answer,) = (row for row in rows.values() if row["is_answer"])
    least = answer["workers"]
    assert least > 2
    assert answer["attainment"] >= 0.9 > rows[least - 1]["attainment"]
    assert (answer["gpus"], answer["goodput_90"] >= 30) == (4 * least, True)
    assert f"{least} workers ({4 * least} GPUs)" in capsys.readouterr().out


def test_no_answer_within_the_limit_says_what_the_limit_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(ask("--rate", "30", "--max-workers", "1")) == 1
    printed = capsys.readouterr().out
    assert "not with 1 worker, which" in printed
    assert "FAIL workers" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt-5"], "--model: expected one whose steps were measured (llama-3-8b, llama-3-70b)"),
        (["--rate", "0"], "--rate: expected a number above 0 but got 0"),
        (["--slo-ttft-ms", "-1"], "--slo-ttft-ms: expected a number above 0"),
        (["--share", "1"], "--share: expected a number between 0 and 1"),
        (["--trace", "nobody"], "trace: expected a file or one of"),
        (["--requests", "5"], "--requests: expected 100 at least (10 s of them)"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(ask("--rate", "1", *options)) == 2
    assert message in capsys.readouterr().err
