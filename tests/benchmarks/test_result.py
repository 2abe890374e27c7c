"""The one result format."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.result import Check, Result, read_result, text_table


@pytest.mark.parametrize(
    ("value", "op", "required", "is_ok"),
    [
        (2.0, "<=", 2.0, True), (2.1, "<=", 2.0, False), (2.0, "<", 2.0, False), (2.0, ">=", 2.0, True),
        (2.0, ">", 2.0, False), (0, "==", 0, True), (None, "<=", 2.0, False), (math.nan, ">=", 0.0, False),
        (math.inf, ">=", 0.0, False),
    ],
)  # fmt: skip
def test_a_check_holds_as_its_operator_says(
    value: float | None, op: str, required: float, is_ok: bool
) -> None:
    assert Check("x", value, op, required).is_ok == is_ok


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(ValueError, match="=<"):
        Check("x", 1.0, "=<", 2.0)


def test_the_file_has_the_agreed_keys_and_comes_back(tmp_path: Path) -> None:
    checks = [Check("x", math.nan, "<=", 2.0), Check("y", 1.0, "<=", 2.0, "the third")]
    result = Result("load", 7, [{"rate": 1.0, "bad": math.inf}], checks)
    path = tmp_path / "new" / "r.json"
    result.write(path)
    content = json.loads(path.read_text())
    assert list(content) == ["benchmark", "machine", "versions", "seed", "rows", "checks"]
    assert content["rows"] == [{"rate": 1.0, "bad": None}]
    assert content["checks"] == [
        {"name": "x", "value": None, "required": 2.0, "op": "<=", "ok": False},
        {"name": "y", "value": 1.0, "required": 2.0, "op": "<=", "ok": True, "of": "the third"},
    ]
    assert content["machine"]["cores"] >= 1
    assert content["versions"]["python"].startswith("3.")
    assert read_result(path).to_json() == content
    assert not read_result(path).is_ok


def test_a_verdict_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    content = Result("load", 7, [], [Check("x", 1.0, "<=", 2.0)]).to_json()
    content["checks"][0]["value"] = 3.0
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="check x"):
        read_result(path)


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="benchmark result"):
        read_result(path)


def test_table_lines_up() -> None:
    assert text_table([("a", 1.23456, None), ("bcd", 12345.6, 7)], ("", "x", "y")).splitlines() == [
        "          x  y",
        "──────────────",
        "a     1.235  –",
        "bcd  12,346  7",
    ]
