"""Step costs come back out of request times, recorded runs are reproduced, and a live cluster becomes a model of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import validate
from benchmarks.live_model import Glances, Pace, model_of
from benchmarks.metrics import Slo
from benchmarks.records import Record
from benchmarks.sim.baselines import BudgetChunker, RoundRobin
from benchmarks.sim.cluster import Setup
from benchmarks.sim.devices import Device
from benchmarks.sim.fit import Timeline, fit_device, read_timelines
from benchmarks.sim.replay import compared, replayed
from benchmarks.traces import DATA

TRUE = Device("true", 0.010, 50e-6, 0.0, 0.010, 100e-6, 50e-9, 0.0, 1, 1_000_000, 1e12, 64, 100e-6)


def test_step_costs_come_back_out_of_request_times() -> None:
    arrivals = [
        Timeline(0.15 * n, 200 + 37 * (n % 11) ** 2, 20 + 13 * (n % 17), 0.0, 0.0, 0.0) for n in range(120)
    ]
    setup = Setup(TRUE, 1, Slo(None, None), noise=0.0)
    requests = replayed(arrivals, setup, (RoundRobin(), lambda _: BudgetChunker(1024)))
    seen = [
        Timeline(
            r.arrived_s, r.prompt_tokens, r.output_tokens, r.arrived_s, r.first_token_s or 0.0, r.end_s or 0.0
        )
        for r in requests
    ]
    found = fit_device(seen, len(seen), TRUE)

    def busy_s(device: Device) -> float:
        return device.step_s(500, 0, 20, 20 * 600)

    assert found.prefill_base_s == pytest.approx(TRUE.prefill_base_s, rel=0.1)
    assert found.token_s == pytest.approx(TRUE.token_s, rel=0.2)
    assert busy_s(found) == pytest.approx(busy_s(TRUE), rel=0.05)


def test_nothing_to_learn_from_is_said() -> None:
    with pytest.raises(ValueError, match="answers of 8 tokens"):
        fit_device([Timeline(0.0, 10, 2, 0.0, 1.0, 1.1)], 1, TRUE)


def test_recorded_runs_are_reproduced() -> None:
    result = validate.recorded()
    assert result.is_ok
    assert len(result.checks) == 2 * 4
    assert len(result.rows) == len(validate.RECORDINGS) * 2


def test_a_recording_is_by_arrival_and_whole() -> None:
    for recording in validate.RECORDINGS:
        timelines = read_timelines(DATA / "vllm" / f"{recording.name}.csv")
        assert len(timelines) == 300
        assert all(t.arrived_s <= t.scheduled_s < t.first_s <= t.last_s for t in timelines)


def test_a_file_of_something_else_is_no_recording() -> None:
    with pytest.raises(ValueError, match="expected recorded requests"):
        read_timelines(DATA / "azure_code.csv")


def test_ratios_are_simulated_over_measured() -> None:
    timelines = [Timeline(0.0, 10, 11, 0.0, 1.0, 2.0)]
    requests = replayed(
        timelines, Setup(TRUE, 1, Slo(None, None), noise=0.0), (RoundRobin(), lambda _: BudgetChunker(512))
    )
    ttft, gap = compared("x", timelines, requests)
    assert ttft["p50_ratio"] == pytest.approx(0.0125, rel=0.01)  # 10 ms, 10 tokens of 50 µs, 2 ms of overhead
    assert gap["p50_ratio"] == pytest.approx(0.101, rel=0.01)


def worker(role: str, knows: str, slowness: float = 1.0) -> dict[str, Any]:
    steps = {
        "decode": [0.020 * slowness, 0.001 * slowness, 1e-6],
        "mixed": [0.030, 0.002, 0.0, 0.003, 1e-6],
        "error": 0.04,
        "margin": 1.1,
        "is_decode_known": knows == "decode",
        "is_mixed_known": knows == "mixed",
    }
    return {"role": role, "steps": steps, "peers": [{"gigabytes_per_s": 2.0}]}


def seen(*slowness: float) -> Glances:
    """A glance a second, of a pair."""
    pairs = [[worker("prefill", "mixed"), worker("decode", "decode", slow)] for slow in slowness]
    return Glances([(float(at), pair) for at, pair in enumerate(pairs)])


def lone(ttft: float, gap: float) -> Record:
    """100 prompt tokens, 11 of an answer."""
    times = tuple(ttft + gap * n for n in range(11))
    return Record(
        "r", 0.0, chunk_times_s=times, chunk_tokens=(1,) * 11, prompt_tokens=100, completion_tokens=11
    )


def test_a_live_cluster_becomes_a_model_of_it() -> None:
    sums = {"baton_handoff_bytes_total": 46_000.0 * 500, "baton_prompt_tokens_total": 500.0}
    blocks = [{"total": 100}, {"total": 90}]
    model = model_of(seen(1.0), seen(1.0), blocks, sums, [lone(0.250, 0.0271055)])
    device = model.device
    assert model.layout.homes == ("prefill", "mixed")  # as placement takes a mixed pair
    assert (device.kv_tokens, device.kv_bytes_per_token, device.link_bytes_per_s) == (1440, 46_000, 2e9)
    assert device.host_s == pytest.approx(0.006)  # 20 + 1 + 0.1 ms are explained
    assert model.overhead_s == pytest.approx(0.250 - 0.230 - 0.006)
    assert model.noise == pytest.approx(0.05)
    assert model.step_model().margin == pytest.approx(1.1)
    assert math.isfinite(model.row()["prompt_token_us"])


def test_steps_are_what_they_were_all_along_and_lone_requests_what_they_were_before() -> None:
    blocks = [{"total": 100}, {"total": 90}]
    model = model_of(seen(2.0), seen(1.0, 1.0, 1.0, 3.0), blocks, {}, [lone(0.250, 0.0482)])
    assert model.device.decode_base_s == pytest.approx(0.030)
    assert model.device.host_s == pytest.approx(0.0061, rel=0.02)  # of 42 ms at that time, not of 31
    assert [model.pace(time_s) for time_s in (-1.0, 0.5, 2.9, 3.0, 9.0)] == pytest.approx(
        [2 / 3, 2 / 3, 2 / 3, 2.0, 2.0]
    )


def test_steps_of_a_slow_time_take_longer() -> None:
    def gap_s(pace: Pace | None) -> float:
        setup = Setup(TRUE, 1, Slo(None, None), noise=0.0, pace=pace)
        timelines = [Timeline(0.0, 10, 101, 0.0, 1.0, 2.0), Timeline(10.0, 10, 101, 10.0, 11.0, 12.0)]
        first, second = replayed(timelines, setup, (RoundRobin(), lambda _: BudgetChunker(512)))
        assert first.tpot_s is not None
        assert second.tpot_s is not None
        return second.tpot_s / first.tpot_s

    assert gap_s(None) == pytest.approx(1.0)
    assert gap_s(Pace((0.0, 9.0), (1.0, 2.0))) == pytest.approx(2.0)


def test_a_cluster_that_has_not_learnt_yet_is_no_model() -> None:
    unknown = Glances([(0.0, [worker("prefill", "mixed")])])
    with pytest.raises(ValueError, match="run longer"):
        model_of(unknown, unknown, [{"total": 100}], {}, [lone(0.25, 0.03)])
