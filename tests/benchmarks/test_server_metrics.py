"""What a server's own counters tell about a run."""

from __future__ import annotations

import pytest

from benchmarks.server_metrics import Snapshot, changes, parse

TEXT = """# HELP baton_worker_ready 1 if the worker is ready.
# TYPE baton_worker_ready gauge
baton_worker_ready{{worker_id="p",role="prefill"}} 1.0
baton_worker_ready{{worker_id="d",role="decode"}} 1.0
baton_worker_ready{{worker_id="x",role="decode"}} 0.0
baton_handoff_bytes_total {bytes}
baton_handoff_exposed_seconds_bucket{{le="0.01"}} {low}
baton_handoff_exposed_seconds_bucket{{le="0.02"}} {all}
baton_handoff_exposed_seconds_bucket{{le="+Inf"}} {all}
baton_handoff_exposed_seconds_count {all}
baton_handoff_exposed_seconds_sum {sum}
baton_worker_preemptions_total{{worker_id="a\\"b",role="decode"}} 1
baton_worker_preemptions_total{{worker_id="c",role="decode"}} 2
nonsense
"""


def text(num_bytes: int, low: int, every: int, seconds: float) -> str:
    return TEXT.format(bytes=num_bytes, low=low, all=every, sum=seconds)


def test_a_run_is_what_changed() -> None:
    found = changes(parse(text(1000, 5, 5, 0.02)), parse(text(5000, 10, 15, 0.14)))
    assert found["num_workers"] == 2
    assert found["kv_bytes"] == 4000
    assert found["kv_handoffs"] == 10
    assert found["kv_transfer_ms_mean"] == pytest.approx(12.0)
    assert found["kv_transfer_ms_p50"] == pytest.approx(10.0)  # five of ten are in the first bucket
    assert found["kv_transfer_ms_p99"] == pytest.approx(10.0 + 10.0 * 4.9 / 5)
    assert found["preemptions"] == 0


def test_sums_go_over_labels() -> None:
    assert parse(text(0, 0, 0, 0.0)).sums["baton_worker_preemptions_total"] == 3.0


def test_beyond_the_last_bucket_its_bound_is_what_is_known() -> None:
    before = parse(text(0, 0, 0, 0.0))
    name = "baton_handoff_exposed_seconds"
    counts = f'{name}_bucket{{le="0.5"}} 0\n{name}_bucket{{le="+Inf"}} 2\n{name}_count 2\n'
    after = parse(f"baton_worker_ready 1\n{counts}")
    assert changes(before, after)["kv_transfer_ms_p50"] == 500.0


def test_a_server_that_reports_nothing_gives_no_keys() -> None:
    assert changes(None, None) == {}
    assert changes(Snapshot(), parse("vllm:requests 3\n")) == {}
