"""The embedded model's greedy tokens against those that an independent implementation computed in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.quantization import resolve_quantization
from tests.engine.golden import greedy, make_runner, read_cases

GOLDEN = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"
NUM_COMPARED = 16
NUM_QUANTIZED = 32


@pytest.mark.slow
def test_float32_is_exact_up_to_the_first_near_tie(embedded_model_path: Path) -> None:
    cases = read_cases(GOLDEN)
    assert len(cases) == 21
    num_certain = max(case.num_certain for case in cases)
    outputs = greedy(make_runner(embedded_model_path, torch.float32), cases, num_certain)
    for case, output in zip(cases, outputs, strict=True):
        assert output[: case.num_certain] == case.output_ids[: case.num_certain]


@pytest.mark.slow
def test_quantized_weights_are_exact_up_to_the_first_near_tie(embedded_model_path: Path) -> None:
    cases = read_cases(GOLDEN)
    quantization = resolve_quantization("auto", torch.device("cpu"))
    outputs = greedy(make_runner(embedded_model_path, torch.float32, quantization), cases, NUM_QUANTIZED)
    for case, output in zip(cases, outputs, strict=True):
        num_certain = min(case.num_certain, NUM_QUANTIZED)
        assert output[:num_certain] == case.output_ids[:num_certain]


@pytest.mark.slow
def test_bfloat16_agrees_in_95_of_100_tokens(embedded_model_path: Path) -> None:
    cases = read_cases(GOLDEN)
    outputs = greedy(make_runner(embedded_model_path, torch.bfloat16), cases, NUM_COMPARED)
    expected = [case.output_ids[:NUM_COMPARED] for case in cases]
    pairs = [pair for o, e in zip(outputs, expected, strict=True) for pair in zip(o, e, strict=False)]
    assert sum(ours == theirs for ours, theirs in pairs) >= 0.95 * len(pairs)
