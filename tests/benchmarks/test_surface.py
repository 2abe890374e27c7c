"""What the surface costs, from records and processor times made by hand."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from benchmarks import processes
from benchmarks.client import Call, Target
from benchmarks.records import Record
from benchmarks.surface import Spent, _within, checks, first_byte, grammar, ingress, mean_gap_s


def record(*times_s: float, **fields: Any) -> Record:
    count = len(times_s)
    made = {"sent_s": 0.0, "completion_tokens": count, "chunk_tokens": (1,) * count}
    return Record("r", 0.0, chunk_times_s=times_s, **(made | fields))


def test_the_first_byte_is_what_the_servers_account_leaves() -> None:
    made = [
        record(0.050 + extra_s, stages={"queue": 0.01, "prefill": 0.04}) for extra_s in (0.004, 0.006, 0.1)
    ]
    row = first_byte(made)
    assert row["first_byte_overhead_p50_ms"] == pytest.approx(6.0)
    assert row["first_byte_overhead_max_ms"] == pytest.approx(100.0)
    with pytest.raises(ValueError, match="timings_ms"):
        first_byte([record(0.1)])


def test_what_the_ingress_takes_when_idle_is_no_cost_of_chunks() -> None:
    idle, busy = Spent(5.0, 0.1, 0.05), Spent(10.0, 0.4, 0.15)
    row = ingress(idle, busy, [record(*range(500)), record(*range(500))])
    assert row["coordinator_us_per_chunk"] == pytest.approx(200.0)
    assert row["proxy_us_per_chunk"] == pytest.approx(50.0)
    assert row["ingress_us_per_chunk"] == pytest.approx(250.0)
    assert row["chunks_per_s"] == pytest.approx(100.0)
    assert busy.since(idle) == Spent(5.0, pytest.approx(0.3), pytest.approx(0.1))


def test_chunks_while_not_all_streams_run_do_not_count() -> None:
    late = _within(record(1.0, 2.0, 3.0, 4.0), 2.0, 3.0)
    assert (late.chunk_times_s, late.chunk_tokens) == ((3.0,), (1,))
    assert _within(record(1.0), 2.0, 3.0).chunk_tokens == ()


def test_a_chunk_of_several_tokens_is_no_longer_gap() -> None:
    assert mean_gap_s([record(0.0, 1.0, 2.0), record(0.0, 4.0, completion_tokens=5)]) == pytest.approx(1.0)


def test_the_checks_are_those_of_the_promises() -> None:
    rows = [
        {"first_byte_overhead_p50_ms": 10.0},
        {"ingress_us_per_chunk": 151.0},
        grammar([(1.0, 1.02), (2.0, 2.06), (1.0, 3.0)]),
    ]
    assert [check.is_ok for check in checks(rows)] == [True, False, True]
    assert rows[2]["grammar_itl_ratio"] == pytest.approx(1.03)


def test_a_call_takes_further_fields() -> None:
    body = Call("r", "hi", 4, more={"structured_outputs": {"regex": "a"}}).body(Target("http://x"))
    assert (body["structured_outputs"], body["max_tokens"]) == ({"regex": "a"}, 4)


def test_a_process_is_known_by_its_name_and_its_time() -> None:
    pid, begun_s = os.getpid(), time.process_time()
    while time.process_time() - begun_s < 0.05:
        pass
    assert processes.cpu_seconds(pid) > 0.0
    assert processes.name_of(pid)
    assert pid in processes.all_processes()
