"""The sweep at start-up: both kinds of step are known before anybody has asked for anything, within its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.runner import StepItem
from policy.step_model import Work
from tests.engine.tiny_models import make_config, make_oracle, write_hf
from tests.local.cluster import local_cluster
from worker.steps import KNOWN_STEPS, StepMeter
from worker.sweep import NUM_RUNS, Limits, sweep


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config()
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", config, make_oracle(config))


LIMITS = Limits(num_blocks=64, block_size=16, max_tokens=1024, max_chunk=2048, max_seqs=64)


@dataclass
class Device:
    """Takes its time by the clock of the test. Of each two runs the first one is disturbed."""

    now_s: float = 0.0
    steps: list[list[StepItem]] = field(default_factory=list)
    step_s: float = 0.0

    def clock(self) -> float:
        return self.now_s

    def execute(self, items: Sequence[StepItem]) -> torch.Tensor:
        work = Work()
        for item in items:
            assert len(item.block_ids) * 16 >= item.start + len(item.token_ids)
            assert set(item.block_ids) <= set(range(LIMITS.num_blocks))
            if len(item.token_ids) == 1:
                work = work._replace(
                    num_decodes=work.num_decodes + 1, decode_context=work.decode_context + item.start
                )
            else:
                work = work.plus_chunk(len(item.token_ids), item.start)
        disturbed_s = 0.1 if len(self.steps) % NUM_RUNS == 0 else 0.0
        self.now_s += disturbed_s + (self.step_s or cost_s(work))
        self.steps.append(list(items))
        return torch.zeros(len(items), 8)


def cost_s(work: Work) -> float:
    return 0.010 + 1e-4 * work.new_tokens + 1e-3 * work.num_decodes + 1e-6 * work.decode_context


def test_both_kinds_of_step_are_known_behind_a_sweep_and_nearly_right() -> None:
    device, meter = Device(), StepMeter()
    meter.swept(sweep(device, LIMITS, sweep_s=100.0, clock=device.clock))
    report = meter.report()
    assert report is not None
    assert report.is_decode_known
    assert report.is_mixed_known
    base_s, decode_s, context_s = report.decode
    assert base_s + 6 * decode_s + 3000 * context_s == pytest.approx(cost_s(Work(0, 0, 6, 3000)), rel=0.1)
    mixed_base_s, token_s, attended_s, _, _ = report.mixed
    predicted_s = mixed_base_s + 500 * token_s + 500 * 500 * attended_s
    assert predicted_s == pytest.approx(cost_s(Work(500, 0, 0, 0)), rel=0.1)


def test_a_sweep_ends_in_time_on_a_slow_device_and_then_says_nothing() -> None:
    device, meter = Device(step_s=1.0), StepMeter()
    meter.swept(sweep(device, LIMITS, sweep_s=3.0, clock=device.clock))
    assert len(device.steps) <= 2 * NUM_RUNS
    assert meter.report() is None


@pytest.mark.parametrize(
    "limits", [Limits(2, 16, 32, 16, 1), Limits(64, 16, 100, 2048, 3), Limits(3, 64, 1, 1, 1)]
)
def test_no_step_is_larger_than_the_engine_takes(limits: Limits) -> None:
    device = Device()
    for sample in sweep(device, limits, sweep_s=100.0, clock=device.clock):
        assert sample.work.new_tokens <= limits.max_chunk
        assert sample.work.num_decodes <= limits.max_seqs
    for items in device.steps:
        assert all(item.start + len(item.token_ids) <= limits.max_tokens for item in items)
        assert all(max(item.block_ids) < limits.num_blocks for item in items)


@pytest.mark.parametrize("has_promises", [True, False])
async def test_with_promises_a_worker_knows_its_steps_before_the_first_request(
    model: Path, has_promises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.sweep.SWEEP_S", 60.0)
    promises = {"slo__ttft_ms": 60_000.0, "slo__itl_ms": 60_000.0} if has_promises else {}
    async with local_cluster(model, engine__num_blocks=64, **promises) as cluster:
        for worker in cluster.workers.values():
            report = worker._steps.report()
            if has_promises:
                assert report is not None
                assert report.is_decode_known
                assert report.is_mixed_known
            else:
                assert report is None


def test_a_sweep_that_saw_little_of_a_kind_leaves_the_rest_to_requests() -> None:
    device, meter = Device(), StepMeter()
    meter.swept(sweep(device, LIMITS, sweep_s=100.0, clock=device.clock)[: 2 * KNOWN_STEPS - 2])
    assert meter.report() is None
