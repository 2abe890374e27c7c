"""A load run against a server that knows the truth: what the client measured is what the server did."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import load
from benchmarks.load import LoadRun, measure
from benchmarks.metrics import Slo, itls_s, tpot_s, ttft_s
from benchmarks.records import Record, read_jsonl
from benchmarks.result import read_result
from benchmarks.runner import StoppedError
from benchmarks.spec import Lengths, LoadSpec, PrefixSpec, TraceSpec, TurnSpec, plan_requests
from tests.benchmarks.builders import fake_server, stamps, wait_until
from tests.benchmarks.fake_server import OVERHEAD

MAX_ERROR_S = 0.005


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server(ttft_s=0.03, gap_s=0.01, chunk_tokens=[1, 1, 2], stalls={"4": 0.05}) as found:
        yield found


def make_spec(url: str, **changes: Any) -> LoadSpec:
    fields: dict[str, Any] = {
        "arrival": "constant",
        "rate": 100.0,
        "num_requests": 20,
        "input_tokens": Lengths(20, 40),
        "output_tokens": Lengths(12, 12),
        **changes,
    }
    return LoadSpec(url, **fields)


def server_times(url: str, run: LoadRun) -> dict[str, dict[str, Any]]:
    found = stamps(url)
    return {record.request_id: found[record.request_id] for record in run.records}


async def test_what_the_client_measures_is_what_the_server_did(url: str) -> None:
    """By the server's own stamps, and by the request that a busy machine disturbed least: an error of the client's own
    would be in all of them.
    """
    run = await measure(make_spec(url, arrival="closed", concurrency=2, seed=11))
    assert run.is_whole
    assert [record.outcome for record in run.records] == ["ok"] * 20
    truth = server_times(url, run)
    ttft_errors, tpot_errors = [], []
    for record in run.records:
        sent_s, stamp = record.sent_s, truth[record.request_id]
        assert sent_s is not None
        # The clock is the machine's for both, but the run's begins at its start: differences are compared.
        first_s, *_, last_s = stamp["chunks_s"]
        ttft_errors.append(record.chunk_times_s[0] - sent_s - (first_s - stamp["received_s"]))
        tpot_errors.append(abs((tpot_s(record) or 0.0) - (last_s - first_s) / 11))
        assert len(record.chunk_times_s) == len(stamp["chunks_s"])
    assert 0 <= min(ttft_errors) < MAX_ERROR_S
    assert min(tpot_errors) < MAX_ERROR_S
    assert run.row["p50_ttft_ms"] == pytest.approx(1000 * statistics.median(map(_ttft, run.records)))


def _ttft(record: Record) -> float:
    value = ttft_s(record)
    assert value is not None
    return value


async def test_a_stall_of_the_server_is_one_long_gap(url: str) -> None:
    run = await measure(make_spec(url, num_requests=5, arrival="closed"))
    # chunks of 1, 1, 2, 1, 1, … tokens: the stall stands before the fifth chunk, so before the sixth token
    stalls = [itls_s(record)[4] for record in run.records]
    assert statistics.median(stalls) == pytest.approx(0.06, abs=0.02)


async def test_lengths_and_counts_are_those_of_the_plan(url: str) -> None:
    spec = make_spec(url, seed=3, output_tokens=Lengths(3, 9))
    run = await measure(spec)
    planned = plan_requests(spec)
    by_id = {record.request_id: record for record in run.records}
    for index, request in enumerate(planned):
        record = by_id[f"r{index}-3"]
        assert record.prompt_tokens == record.asked_input_tokens == request.input_tokens
        assert record.completion_tokens == request.output_tokens
        assert record.scheduled_s == request.time_s
    assert run.row["wrong_input_length"] == run.row["wrong_length"] == 0
    assert run.row["total_output_tokens"] == sum(request.output_tokens for request in planned)


async def test_open_loop_does_not_wait_for_answers(url: str) -> None:
    run = await measure(make_spec(url, rate=1000.0, num_requests=30))
    assert run.row["max_concurrent_requests"] > 10
    assert [round(record.scheduled_s * 1000) for record in sorted(run.records, key=_scheduled)] == list(
        range(30)
    )


def _scheduled(record: Record) -> float:
    return record.scheduled_s


async def test_closed_loop_never_exceeds_its_concurrency(url: str) -> None:
    run = await measure(make_spec(url, arrival="closed", concurrency=3, num_requests=12))
    assert run.row["max_concurrent_requests"] == 3
    assert run.row["completed"] == 12


async def test_same_seed_same_prompts_and_arrivals(url: str) -> None:
    def shape(run: LoadRun) -> list[tuple[float, object]]:
        bodies = server_times(url, run)
        return sorted(
            (r.scheduled_s, bodies[r.request_id]["body"]["messages"][0]["content"]) for r in run.records
        )

    spec = make_spec(url, arrival="poisson", num_requests=6, seed=21)
    first, second = shape(await measure(spec)), shape(await measure(spec))
    assert first == second


async def test_conversations_carry_the_answers_so_far(url: str) -> None:
    spec = make_spec(url, num_requests=1, turns=TurnSpec(3), seed=5)
    run = await measure(spec)
    assert [record.turn for record in run.records] == [0, 1, 2]
    last = stamps(url)["r0-5-2"]["body"]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"] == " word" * 12
    ends = [record.end_s for record in run.records]
    assert all(record.scheduled_s >= (end or 0.0) for record, end in zip(run.records[1:], ends, strict=False))


async def test_prefixes_and_traces_share_text(url: str) -> None:
    spec = make_spec(url, num_requests=4, prefix=PrefixSpec(16), seed=6)
    run = await measure(spec)
    texts = [item["body"]["messages"][0]["content"].split() for item in server_times(url, run).values()]
    assert len({tuple(text[: 16 - OVERHEAD]) for text in texts}) == 1
    assert len({tuple(text) for text in texts}) == 4
    num_planned = sum(request.input_tokens for request in plan_requests(spec))
    assert run.row["ideal_prefix_hit_ratio"] == 3 * 16 / num_planned
    trace = TraceSpec("mooncake_conversation", time_scale=1000.0, length_scale=1 / 64, max_tokens=400)
    run = await measure(make_spec(url, arrival="trace", trace=trace, num_requests=8, seed=7))
    assert run.row["completed"] == 8
    assert run.row["wrong_input_length"] == 0


async def test_warmups_are_sent_but_not_recorded(url: str) -> None:
    run = await measure(make_spec(url, num_requests=2, num_warmups=1, seed=31))
    assert len(run.records) == 2
    assert "warm0-31" in stamps(url)


async def test_stopping_reports_what_was_measured_until_then(url: str) -> None:
    stop = asyncio.Event()
    run = await measure(make_spec(url, rate=0.001, num_requests=3), lambda _: stop.set(), stop)
    assert not run.is_whole
    assert not run.row["is_whole"]
    assert [record.outcome for record in run.records] == ["ok"]  # the second was due in a quarter of an hour


async def test_stopping_before_the_run_leaves_nothing_to_report(url: str) -> None:
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(StoppedError, match="before the run"):
        await measure(make_spec(url, seed=41), stop=stop)
    assert not any(key.endswith("-41") for key in stamps(url))


async def test_refusals_count_as_offered(url: str) -> None:
    run = await measure(make_spec(url, model="reject", num_requests=5, slo=Slo(1.0, 1.0)))
    assert (run.row["offered"], run.row["rejected"], run.row["attainment"]) == (5, 5, 0.0)
    assert [check.is_ok for check in run.checks if check.name == "completed"] == [False]


async def test_a_client_that_is_late_voids_its_run(url: str) -> None:
    """The loop is held for longer than a client may be late."""
    loop = asyncio.get_running_loop()

    def hold(_: int) -> None:
        loop.call_soon(_spin, 0.7)

    run = await measure(make_spec(url, rate=1000.0, num_requests=10), on_start=hold)
    assert run.lag.is_void
    assert run.row["is_void"]
    failed = {check.name for check in run.checks if not check.is_ok}
    assert "client_send_lag_p99_ms" in failed
    assert run.row["p50_ttft_ms"] > 500  # its lateness counts, too


def _spin(seconds: float) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {"arrival": "trace"},
        {"turns": TurnSpec(2), "endpoint": "completions"},
        {"num_requests": 0},
        {"trace": TraceSpec("azure_code"), "prefix": PrefixSpec(3)},
    ],
)
def test_specs_that_contradict_themselves_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make_spec("http://x", **changes)


def test_a_trace_without_times_cannot_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n7,54\n")
    trace = TraceSpec(str(path))
    with pytest.raises(ValueError, match="lengths only"):
        plan_requests(make_spec("http://x", arrival="trace", trace=trace))
    assert [row.time_s for row in plan_requests(make_spec("http://x", trace=trace))] == [0.0]
    with pytest.raises(ValueError, match="at least one request"):
        plan_requests(make_spec("http://x", trace=TraceSpec(str(path), max_tokens=10)))


@pytest.mark.parametrize("text", ["", "0", "5:4", "a", "1:2:3"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid"):
        Lengths.parse(text)


def test_the_command_writes_records_result_and_tables(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = load.main(
        [url, "--arrival", "gamma", "--burstiness", "0.5", "--rate", "100", "--num-requests", "10",
         "--input-tokens", "20:30", "--output-tokens", "4", "--slo-ttft-ms", "10000", "--slo-tpot-ms", "1000",
         "--seed", "9", "--out", str(tmp_path / "out"), "--json", str(tmp_path / "r.json")]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "time to first token" in printed
    assert len(list(read_jsonl(tmp_path / "out" / "requests.jsonl"))) == 10
    result = read_result(tmp_path / "r.json")
    assert (result.benchmark, result.seed, result.rows[0]["attainment"]) == ("load", 9, 1.0)
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == json.loads(
        (tmp_path / "r.json").read_text()
    )


def test_the_command_says_why_requests_failed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "error", "--arrival", "closed", "--num-requests", "3", "--input-tokens", "20"]
    assert load.main([url, *arguments]) == 1
    printed = capsys.readouterr().out
    assert "FAIL completed" in printed
    assert "3 failed: HTTP 500" in printed


def test_ctrl_c_ends_the_command_with_a_report(url: str, tmp_path: Path) -> None:
    arguments = [
        "--rate",
        "5",
        "--num-requests",
        "200",
        "--input-tokens",
        "9",
        "--output-tokens",
        "4",
        "--seed",
        "77",
    ]
    command = [sys.executable, "-m", "benchmarks.load", url, *arguments, "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: any(key.endswith("-77") for key in stamps(url)))
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Stopped before the end" in printed
    assert 1 <= len(list(read_jsonl(tmp_path / "requests.jsonl"))) < 200


def test_the_command_says_in_one_line_why_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert load.main(["http://127.0.0.1:9", "--model", "m"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
