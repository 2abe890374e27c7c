"""Recorded decode steps, with a recorder that runs the function again on the same memory: what a graph on a GPU does.

So nothing but the static inputs can have told a step what to compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import cuda_graphs
from engine.cuda_graphs import CudaRecorder
from engine.graphs import DecodeGraphs, buckets_up_to
from engine.model import Model
from engine.runner import Runner, StepItem
from engine.weights import LoadedModel, load_model
from tests.engine.recorder import MAX_LEN, NUM_BLOCKS, Rerun, make_runners, make_slab
from tests.engine.tiny_models import PROMPT, family_config, make_oracle, write_hf

LENGTHS = (1, 30, 4, 17, 9)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    config = family_config(request.param)
    return load_model(write_hf(tmp_path_factory.mktemp("tiny"), config, make_oracle(config)), torch.float32)


def table(index: int) -> list[int]:
    """Disjoint, unordered blocks for sequence `index` of up to 48 tokens."""
    return [12 * index + 5 * i % 12 for i in range(12)]


def prompts() -> list[StepItem]:
    return [StepItem(PROMPT[i : i + n], 0, table(i), False) for i, n in enumerate(LENGTHS)]


def decodes(num_seqs: int, step: int = 0, want_logits: bool = True) -> list[StepItem]:
    return [
        StepItem([11 * i + step], n + step, table(i), want_logits) for i, n in enumerate(LENGTHS[:num_seqs])
    ]


def assert_same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_buckets_grow_by_halves() -> None:
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(2) == (1, 2)
    assert buckets_up_to(5) == (1, 2, 3, 4, 5)
    assert buckets_up_to(40) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)
    assert buckets_up_to(64)[-3:] == (32, 48, 64)


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5])
def test_a_recorded_step_is_the_step(model: LoadedModel, num_seqs: int) -> None:
    """Logits, and the slab: padding writes nothing that anyone holds."""
    recorder = Rerun()
    (ours, our_slab), (plain, plain_slab) = make_runners(model, (2, 5), recorder)
    for runner in (ours, plain):
        runner.execute(prompts())
    for step in range(3):
        logits = ours.execute(decodes(num_seqs, step))
        assert logits.shape == (num_seqs, model.spec.vocab_size)
        assert_same(logits, plain.execute(decodes(num_seqs, step)))
    assert recorder.num_replays == 3
    assert_same(our_slab.data, plain_slab.data)
    assert not our_slab.data[NUM_BLOCKS - 4 :].any()


def test_what_a_larger_step_left_behind_changes_nothing(model: LoadedModel) -> None:
    (ours, _), (plain, _) = make_runners(model, (5,), Rerun())
    for runner in (ours, plain):
        runner.execute(prompts())
        runner.execute(decodes(5))
    few = [decodes(5, 1)[2], decodes(5, 1)[0]]
    assert_same(ours.execute(few), plain.execute(few))


def test_logits_are_those_that_are_wanted(model: LoadedModel) -> None:
    (ours, _), (plain, _) = make_runners(model, (5,), Rerun())
    for runner in (ours, plain):
        runner.execute(prompts())
    mixed = [item for i, item in enumerate(decodes(4)) if i % 2] + decodes(5, want_logits=False)[::2]
    assert_same(ours.execute(mixed), plain.execute(mixed))
    assert ours.execute(decodes(2, 1, want_logits=False)).shape == (0, model.spec.vocab_size)


def test_all_else_is_computed_as_usual(model: LoadedModel) -> None:
    recorder = Rerun()
    (ours, _), (plain, _) = make_runners(model, (2,), recorder)
    blocks = [*range(40, 60)]
    for runner in (ours, plain):
        runner.execute([*prompts(), StepItem(PROMPT[:MAX_LEN], 0, blocks, False)])
    steps = [
        decodes(3),  # more than the largest bucket
        [StepItem([5], MAX_LEN, blocks, True)],  # longer than a table
        [*decodes(1, 1), StepItem(PROMPT[:5], 0, [63, 62], True)],  # a chunk beside it
    ]
    for step in steps:
        assert_same(ours.execute(step), plain.execute(step))
    assert recorder.num_replays == 0


def test_each_bucket_is_reported_the_largest_first(model: LoadedModel) -> None:
    slab, told = make_slab(model), []
    runner = Runner(Model(model), slab, graphs=DecodeGraphs(Model(model), slab, (1, 2, 4), MAX_LEN, Rerun()))
    runner.warm_up(lambda *report: told.append(report))
    assert [(num_seqs, num_bytes) for num_seqs, _, num_bytes in told] == [(4, 1000), (2, 1000), (1, 1000)]
    assert all(seconds > 0 for _, seconds, _ in told)
    assert not slab.data.any()


def test_a_device_that_cannot_record_computes_as_usual(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Rerun(fails_at=2)
    with caplog.at_level(logging.WARNING):
        (ours, _), (plain, _) = make_runners(model, (1, 5), recorder)
    assert [record.getMessage() for record in caplog.records] == [
        "decode runs without graphs: 1 sequences: operation not permitted when stream is capturing"
    ]
    for runner in (ours, plain):
        runner.execute(prompts())
    assert_same(ours.execute(decodes(5)), plain.execute(decodes(5)))
    assert recorder.num_replays == 0


# --- the part that speaks to CUDA -------------------------------------------------------------------------------------


class FakeCuda:
    """Notes in which order torch.cuda is asked for what."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def Stream(self, device: torch.device) -> Any:
        return self._stream("side", device)

    def current_stream(self, device: torch.device) -> Any:
        return self._stream("main", device)

    def _stream(self, name: str, device: torch.device) -> Any:
        stream = type("S", (), {"name": name, "device": device})()
        stream.wait_stream = lambda other: self.told.append(f"{name} waits for {other.name}")
        return stream

    def graph_pool_handle(self) -> str:
        return "pool"

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.told.append(f"on {stream.name}")
        yield

    def CUDAGraph(self) -> Any:
        return type("G", (), {"replay": lambda _: self.told.append("replay")})()

    @contextmanager
    def graph(self, graph: Any, pool: str, stream: Any, capture_error_mode: str) -> Any:
        self.told.append(f"record on {stream.name} from {pool}, {capture_error_mode}")
        yield
        self.told.append("recorded")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 30, 100


def test_a_gpu_runs_before_it_records_and_then_only_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, result = FakeCuda(), torch.zeros(1)
    monkeypatch.setattr(cuda_graphs.torch, "cuda", fake)
    recorder = CudaRecorder(torch.device("cuda"))

    def compute() -> Tensor:
        fake.told.append("compute")
        return result

    replay: Callable[[], Tensor] = recorder.record(compute)
    assert replay() is replay() is result
    assert recorder.used_bytes() == 70
    assert fake.told == [
        "side waits for main", "on side", "compute", "compute", "main waits for side",
        "record on side from pool, thread_local", "compute", "recorded", "replay", "replay",
    ]  # fmt: skip
