"""Every metric against a case worked by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.metrics import (
    Attainment,
    Slo,
    Window,
    attainment,
    chunk_gaps_s,
    e2e_s,
    itls_s,
    latency_values_s,
    peak_concurrency,
    peak_tokens_per_s,
    percentile,
    spread_ms,
    summarize,
    tokens_between,
    tpot_s,
    ttft_s,
    ttst_s,
    worst_gap_s,
)
from tests.benchmarks.builders import make_record

# Scheduled at 1.0; tokens at 1.5, 1.75, 2.25, 3.0.
FOUR = make_record(1.0, (1.5, 1.75, 2.25, 3.0), sent_s=1.1, end_s=3.25)
# One chunk of 2 tokens at 0.5, one of 3 at 1.5.
CHUNKED = make_record(0.0, (0.5, 1.5), (2, 3))
SINGLE = make_record(0.0, (0.4,))
NONE = make_record(0.0, (), end_s=0.3)
ERROR = make_record(0.0, (), outcome="error", status=500, completion_tokens=None, end_s=0.2)
CUT = make_record(0.0, (0.5, 0.6), outcome="cancelled", completion_tokens=None, end_s=0.7)


def test_four_tokens_of_one_chunk_each() -> None:
    assert ttft_s(FOUR) == 0.5  # from the schedule, not from the sending
    assert ttst_s(FOUR) == 0.25
    assert tpot_s(FOUR) == 0.5  # (3.0 − 1.5) / 3
    assert itls_s(FOUR) == [0.25, 0.5, 0.75]
    assert chunk_gaps_s(FOUR) == [0.25, 0.5, 0.75]
    assert e2e_s(FOUR) == 2.25
    assert worst_gap_s(FOUR) == 0.75
    assert FOUR.send_lag_s == pytest.approx(0.1)


def test_tokens_of_one_chunk_arrive_together() -> None:
    assert ttst_s(CHUNKED) == 0.0
    assert itls_s(CHUNKED) == [0.0, 1.0, 0.0, 0.0]
    assert chunk_gaps_s(CHUNKED) == [1.0]
    assert tpot_s(CHUNKED) == 0.25  # 5 tokens: 1.0 / 4, whatever the number of chunks


def test_tpot_counts_tokens_of_the_usage_not_of_the_chunks() -> None:
    assert tpot_s(make_record(0.0, (1.0, 2.0), completion_tokens=11)) == 0.1


def test_a_chunk_without_a_new_token_is_no_token() -> None:
    record = make_record(0.0, (1.0, 2.0, 3.0), (1, 0, 1))
    assert itls_s(record) == [2.0]
    assert record.num_output_tokens == 2


def test_a_single_token_has_no_gaps() -> None:
    assert ttft_s(SINGLE) == 0.4
    assert (ttst_s(SINGLE), tpot_s(SINGLE), worst_gap_s(SINGLE)) == (None, None, None)
    assert itls_s(SINGLE) == []


@pytest.mark.parametrize("record", [NONE, ERROR])
def test_no_token_has_no_latency_but_an_end(record: object) -> None:
    assert (ttft_s(record), ttst_s(record), tpot_s(record)) == (None, None, None)  # type: ignore[arg-type]
    assert e2e_s(record) in (0.3, 0.2)  # type: ignore[arg-type]


def test_an_unsent_request_has_neither_end_nor_lag() -> None:
    record = make_record(1.0, outcome="cancelled", sent_s=None, end_s=None)
    assert (e2e_s(record), record.send_lag_s) == (None, None)


def test_gaps_belong_to_the_window_they_end_in() -> None:
    assert itls_s(FOUR, 1.75, 2.25) == [0.25]
    assert itls_s(FOUR, 2.0, 3.5) == [0.5, 0.75]


def test_worst_gaps_are_a_tenth_of_them_rounded_up() -> None:
    # gaps 1, 2, …, 20: the worst two are 20 and 19
    times = [0.0]
    for gap in range(1, 21):
        times.append(times[-1] + gap)
    assert worst_gap_s(make_record(0.0, times)) == 19.5
    # 21 gaps: the worst three
    times.append(times[-1] + 21)
    assert worst_gap_s(make_record(0.0, times)) == 20.0


def test_percentile_is_linear_between_ranks() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 90) == pytest.approx(4.6)
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


def test_spread_of_known_values() -> None:
    spread = spread_ms("itl", [0.001, 0.002, 0.003, 0.006], (50, 99))
    assert spread == pytest.approx(
        {
            "mean_itl_ms": 3.0,
            "median_itl_ms": 2.5,
            "std_itl_ms": math.sqrt(3.5),  # of the population: (4 + 1 + 0 + 9) / 4
            "max_itl_ms": 6.0,
            "p50_itl_ms": 2.5,
            "p99_itl_ms": 5.91,
        }
    )
    assert set(spread_ms("itl", [], (50,)).values()) == {None}


def test_gaps_are_pooled_over_complete_requests_only() -> None:
    values = latency_values_s([FOUR, CHUNKED, SINGLE, NONE, ERROR, CUT])
    assert sorted(values["itl"]) == [0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    assert values["ttft"] == [0.5, 0.5, 0.4]
    assert values["tpot"] == [0.5, 0.25]
    assert values["e2el"] == [2.25, 1.5, 0.4, 0.3]


def test_attainment_is_over_what_was_offered() -> None:
    slo = Slo(ttft_s=0.45, tpot_s=0.3)
    # FOUR: neither; CHUNKED: TPOT only; SINGLE: both, a single token passes TPOT; NONE, ERROR, CUT: nothing
    found = attainment([FOUR, CHUNKED, SINGLE, NONE, ERROR, CUT], slo)
    assert found == Attainment(num_offered=6, num_both=1, num_ttft=1, num_tpot=2)
    assert (found.both, found.ttft, found.tpot) == (1 / 6, 1 / 6, 1 / 3)
    assert attainment([], slo).both is None


def test_a_promise_is_kept_at_its_bound_and_an_absent_one_always() -> None:
    assert attainment([FOUR], Slo(0.5, 0.5)).num_both == 1
    assert attainment([FOUR], Slo(0.499, 0.5)).num_both == 0
    assert attainment([FOUR], Slo(None, 0.5)).num_both == 1
    assert attainment([FOUR], Slo(0.5, None)).num_both == 1


def test_an_answer_of_another_length_is_not_attained() -> None:
    short = make_record(0.0, (0.1,), is_length_fixed=True, asked_output_tokens=2)
    assert attainment([short], Slo(1.0, 1.0)).num_both == 0
    assert summarize([short])["wrong_length"] == 1


def test_tokens_count_when_they_arrive() -> None:
    assert tokens_between([FOUR, CHUNKED], 1.5, 2.25) == 5  # 1.5 and 1.75 of one, three at 1.5 of the other
    assert peak_tokens_per_s([FOUR, CHUNKED]) == 5  # second 1 holds all of these


def test_concurrency_peaks_where_requests_overlap() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)]  # the third starts as the first ends
    records = [make_record(start, (), sent_s=start, end_s=end) for start, end in spans]
    assert peak_concurrency(records) == 2


def test_summary_counts_and_throughput() -> None:
    rejected = make_record(2.0, outcome="error", status=503, completion_tokens=None, end_s=2.1)
    late = make_record(3.0, outcome="timeout", completion_tokens=None, end_s=5.0)
    done = [
        make_record(0.0, (1.0, 2.0), prompt_tokens=10, cached_tokens=5, asked_input_tokens=10),
        make_record(1.0, (2.0, 3.0, 4.0), prompt_tokens=30, cached_tokens=5, asked_input_tokens=31),
    ]
    row = summarize([*done, rejected, late, CUT], num_workers=2)
    counts = ("offered", "completed", "failed", "rejected", "timed_out", "cancelled", "wrong_input_length")
    assert [row[name] for name in counts] == [5, 2, 3, 1, 1, 1, 1]
    assert row["duration"] == 5.0  # first arrival to last end, failed ones included
    assert row["total_input_tokens"] == 40
    assert row["total_output_tokens"] == 5
    assert row["request_throughput"] == 0.4
    assert row["output_throughput"] == 1.0
    assert row["output_throughput_per_worker"] == 0.5
    assert row["total_token_throughput"] == 9.0
    assert row["steady_output_throughput"] == 5 / 3  # until the last arrival at 3.0: 0.5, 0.6, 1.0, 2.0, 2.0
    assert row["prefix_hit_tokens"] == 10
    assert row["prefix_hit_ratio"] == 0.25
    assert row["mean_ttft_ms"] == 1000.0
    assert "attainment" not in row


def test_summary_with_a_promise() -> None:
    row = summarize([FOUR, SINGLE], Slo(0.45, None))
    assert (row["attainment"], row["attainment_ttft"], row["attainment_tpot"]) == (0.5, 0.5, 1.0)
    assert row["request_goodput"] == 1 / 3.25
    assert (row["slo_ttft_ms"], row["slo_tpot_ms"]) == (450.0, None)


def test_summary_of_nothing_measures_nothing() -> None:
    row = summarize([], Slo(1.0, 1.0))
    assert row["offered"] == 0
    assert row["p99_ttft_ms"] is None
    assert row["output_throughput"] is None
    assert row["attainment"] is None


def test_ramp_and_drain_are_cut_by_arrival() -> None:
    records = [make_record(at_s, (at_s + 10.0,)) for at_s in (0.0, 1.0, 2.0, 3.0, 4.0)]
    window = Window.trimmed(records, ramp_s=1.0, drain_s=1.0)
    assert [record.scheduled_s for record in records if window.holds(record)] == [1.0, 2.0]
    assert summarize(records, window=window)["offered"] == 2
    assert all(Window.trimmed(records, 0.0, 0.0).holds(record) for record in records)
