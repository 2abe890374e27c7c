"""The GPU benchmark without a GPU: it says so; what it times and compares runs under Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from benchmarks import gpu_exact, gpu_kernels, gpu_model
from benchmarks.gpu_cases import Shape, Step, cases
from benchmarks.gpu_exact import error_of, exact_attention
from engine.kernels import reference
from engine.spec import AttentionRule
from tests.engine.recorder import Rerun

CPU = torch.device("cpu")
TINY = Shape(hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, inner=96, vocab=50, dtype=torch.float32)


def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_kernels.main([]) == 2
    assert capsys.readouterr().err == "cannot measure: expected a CUDA GPU but torch sees none\n"


def test_every_requirement_is_of_a_case() -> None:
    names = [case.name for case in cases(CPU, 32)]
    assert len(set(names)) == len(names)
    assert set(gpu_kernels.SHARES) <= set(names)


def test_a_step_reads_each_weight_and_the_whole_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    step = Step(TINY, CPU, num_layers=1, num_seqs=2, context=20)
    matrices = [*step._layers[0], step._head]
    slab_of_contexts = step._slab.numel() * 20 // 32  # two blocks of 16 hold 20 tokens
    assert Step.num_bytes(TINY, 1, 2, 20) == 4 * (sum(m.numel() for m in matrices) + slab_of_contexts)
    assert step.run().shape == (2,)
    # The layer in plain torch gives the logits that the tokens are drawn from.
    qkv, out, gate_up, down = step._layers[0]
    rule, table = TINY.rule, step._table
    normed = reference.rms_norm(step._hidden, step._norm, 1e-5)
    q = reference.rope_write(
        F.linear(normed, qkv).view(2, -1, 16), step._rotation, step._slab[:, 0], step._at
    )
    mixed = reference.paged_attention(q, step._slab[:, 0], table, step._lens, rule)
    hidden, normed = reference.add_rms_norm(
        step._hidden, F.linear(mixed.view(2, -1), out), step._norm, 1e-5, torch.float32
    )
    inner = reference.swiglu(F.linear(normed, gate_up))
    _, normed = reference.add_rms_norm(hidden, F.linear(inner, down), step._norm, 1e-5, torch.float32)
    drawn = reference.sample(F.linear(normed, step._head), step._limits, step._uniforms)
    assert torch.equal(step.run(), drawn)


@pytest.mark.parametrize("rule", [AttentionRule(0.2), AttentionRule(0.2, window=7, cap=2.0)])
def test_exact_attention_is_attention(rule: AttentionRule) -> None:
    layer, q = torch.randn(3, 2, 2, 16, 16), torch.randn(5, 4, 16)
    kv = layer.double().permute(0, 3, 1, 2, 4).flatten(0, 1)
    got = reference.prefill_attention(q, layer, torch.arange(3), 40, rule)
    assert error_of(got, exact_attention(q, kv, 45, rule)) < 1e-5


def test_plain_torch_is_within_every_limit_of_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("norm", "gated", "rope_write", "sampling"):
        monkeypatch.setattr(gpu_exact, name, reference)
    for name in ("paged_attention", "prefill_attention", "grouped_linear"):
        monkeypatch.setattr(gpu_exact, name, getattr(reference, name))
    monkeypatch.setattr(gpu_exact, "HEAD_DIMS", (64,))
    errors = gpu_exact.errors(CPU)
    assert len(errors) > 25
    assert not {name: error for name, (error, limit) in errors.items() if not error <= limit}


def test_what_is_no_number_is_within_no_limit() -> None:
    error = error_of(torch.tensor([1.0, torch.nan]), torch.ones(2, dtype=torch.float64))
    assert not error <= 1e9


def test_the_engine_of_plain_torch_is_within_every_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.select_kernels", lambda device: reference)
    errors = dict(gpu_model.errors(CPU, Rerun))
    assert len(errors) == 12
    assert not {name: error for name, (error, limit) in errors.items() if not error <= limit}


def test_a_step_that_could_not_be_recorded_is_within_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.select_kernels", lambda device: reference)
    name, (error, limit) = list(itertools.islice(gpu_model.errors(CPU, lambda: Rerun(fails_at=2)), 2))[1]
    assert name == "model bfloat16, recorded"
    assert not error <= limit


def test_steps_of_the_engine_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.select_kernels", lambda device: reference)
    monkeypatch.setattr(
        gpu_model, "LARGE", gpu_model.replace(gpu_model.SMALL, layers=gpu_model.SMALL.layers[:1])
    )
    monkeypatch.setattr(gpu_model, "CONTEXT", 64)
    rows = list(gpu_model.step_times(CPU, 1, Rerun))
    assert [name for name, _, _ in rows] == [
        f"engine decode step 8B, {how}" for how in ("recorded", "as usual")
    ]
    assert all(time_s > 0 for _, time_s, _ in rows)
    matrices = 256 * (12 * 64 + 8 * 64 + 3 * 512 + 1000) + 3 * 256
    assert {num_bytes for _, _, num_bytes in rows} == {2 * (matrices + 16 * 64 * 2 * 2 * 64)}
