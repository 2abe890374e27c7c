"""Records survive the disk; what is no record is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.records import Record, from_json, read_jsonl, write_jsonl
from tests.benchmarks.builders import make_record


def test_jsonl_gives_back_what_was_written(tmp_path: Path) -> None:
    records = [
        make_record(0.5, (1.0, 1.25), (1, 3), label="steady", cached_tokens=3, finish_reason="length"),
        make_record(0.75, (1.0,), stages={"queue": 0.125, "prefill": 0.25, "decode": 0.0}),
        make_record(
            1.0, outcome="error", status=503, error="full: «später»", completion_tokens=None, end_s=None
        ),
    ]
    path = tmp_path / "deep" / "requests.jsonl"
    write_jsonl(path, records)
    assert list(read_jsonl(path)) == records
    assert [file.name for file in path.parent.iterdir()] == ["requests.jsonl"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"request_id": "a"}, "scheduled_s"),
        ({"request_id": "a", "scheduled_s": 0.0, "speed": 3}, "speed"),
        ({"request_id": "a", "scheduled_s": 0.0, "outcome": "fine"}, "outcome"),
        ({"request_id": "a", "scheduled_s": 0.0, "chunk_times_s": [1.0]}, "chunk_tokens"),
        ({"request_id": "a", "scheduled_s": 0.0, "stages": {"lunch": 1.0}}, "stages"),
        ({"request_id": "a", "scheduled_s": 0.0, "stages": {"queue": "1"}}, "stages"),
        ({"request_id": "a", "scheduled_s": 0.0, "stages": [1.0]}, "stages"),
    ],
)
def test_what_is_no_record_is_refused(content: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(content)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"request_id": "a", "scheduled_s": 0.0}\n\n{"request_id"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"r\.jsonl:3"):
        list(read_jsonl(path))


def test_usage_counts_before_chunks() -> None:
    assert Record("a", 0.0, chunk_times_s=(1.0,), chunk_tokens=(2,)).num_output_tokens == 2
    assert Record("a", 0.0, chunk_tokens=(2,), completion_tokens=5).num_output_tokens == 5
    assert Record("a", 0.0, asked_input_tokens=7).num_input_tokens == 7


@pytest.mark.parametrize(("status", "is_rejected"), [(429, True), (503, True), (500, False), (None, False)])
def test_refused_for_load_is_not_broken(status: int | None, is_rejected: bool) -> None:
    assert make_record(outcome="error", status=status).is_rejected == is_rejected
