"""Each format is read exactly; the excerpts that ship are what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.traces import DATA, TraceRequest, find_trace, ideal_hit_ratio, read_trace, scaled

AZURE = (
    "# licence\nTIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 23:59:59.5000000,4808,10\n2023-11-17 00:00:01.2500000,110,27\n"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE, [(0.0, 4808, 10), (1.75, 110, 27)]),
        (
            "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,374,44\n2.0,9,8\n",
            [(0.0, 374, 44), (0.5, 9, 8)],
        ),
        (
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7,54,61,0.1\n5,1,6,5\n",
            [(None, 7, 54), (None, 5, 1)],
        ),
        ("arrival_s,client_id,input_tokens,output_tokens\n0.25,23,270,788\n", [(0.0, 270, 788)]),
        (
            '{"request_id":"b","input_toks":3,"output_toks":4,"arrival_time":9.5}\n'
            '{"request_id":"a","input_toks":1,"output_toks":2,"arrival_time":9.0}\n',
            [(0.0, 1, 2), (0.5, 3, 4)],
        ),
    ],
    ids=["azure", "vidur", "lengths", "servegen", "vllm"],
)
def test_formats(tmp_path: Path, text: str, expected: list[tuple[float | None, int, int]]) -> None:
    found = read_trace(write(tmp_path, text))
    assert [(row.input_tokens, row.output_tokens) for row in found] == [row[1:] for row in expected]
    for row, (time_s, _, _) in zip(found, expected, strict=True):
        assert row.time_s == (None if time_s is None else pytest.approx(time_s, abs=1e-6))


def test_mooncake_keeps_its_blocks(tmp_path: Path) -> None:
    text = '{"timestamp":3000,"input_length":600,"output_length":5,"hash_ids":[0,7]}\n'
    assert read_trace(write(tmp_path, text)) == [TraceRequest(0.0, 600, 5, (0, 7), 512)]


def test_calls_without_an_answer_are_dropped(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, "arrival_s,input_tokens,output_tokens\n0,1,0\n1,2,3\n")) == [
        TraceRequest(0.0, 2, 3)
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("a,b\n1,2\n", "header"),
        ("arrival_s,input_tokens,output_tokens\n0,1,2\n0,x,2\n", "trace:3"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", "trace:2"),
        ('{"timestamp":0}\n', "trace:1"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_trace(write(tmp_path, text))


def test_lengths_scale_and_what_is_too_long_is_left_out() -> None:
    requests = [TraceRequest(0.0, 1600, 160, (1,)), TraceRequest(1.0, 4, 1), TraceRequest(2.0, 90_000, 10)]
    assert scaled(requests, 1 / 16, max_tokens=200) == [
        TraceRequest(0.0, 100, 10, (1,), 32),
        TraceRequest(1.0, 1, 1, (), 32),
    ]


def test_ideal_hits_are_whole_leading_blocks_seen_before() -> None:
    requests = [
        TraceRequest(0.0, 1024, 1, (1, 2)),  # nothing known
        TraceRequest(0.0, 1024, 1, (1, 3)),  # block 1
        TraceRequest(0.0, 700, 1, (1, 2)),  # all of it, 700 tokens
        TraceRequest(0.0, 1024, 1, (9, 2)),  # block 2 stands behind another
    ]
    assert ideal_hit_ratio(requests) == (512 + 700) / (1024 + 1024 + 700 + 1024)


@pytest.mark.parametrize(
    ("name", "count", "mean_input"),
    [
        ("azure_code", 4000, 2032),
        ("azure_conv", 4000, 1152),
        ("mooncake_conversation", 800, 13_000),
        ("servegen_r1", 4000, 1000),
        ("sharegpt_lengths", 300, 857),
    ],
)
def test_excerpts_are_whole(name: str, count: int, mean_input: int) -> None:
    path = find_trace(name)
    requests = read_trace(path)
    assert len(requests) == count
    assert requests[0].time_s == 0.0
    assert sum(row.input_tokens for row in requests) / count == pytest.approx(mean_input, rel=0.15)
    assert path.stat().st_size <= 200_000
    first_line = path.read_text().split("\n", 1)[0]
    assert any(licence in first_line for licence in ("CC-BY-4.0", "Apache-2.0", "MIT"))


def test_an_unknown_trace_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="azure_code, azure_conv"):
        find_trace("azure")
    assert find_trace("azure_code.csv") == DATA / "azure_code.csv"
