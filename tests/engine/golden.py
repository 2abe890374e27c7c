"""Greedy tokens that an independent implementation computed in float32, and ours to compare with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.kv import KvSlab
from engine.model import Model
from engine.quantization import Quantization
from engine.runner import Runner, StepItem
from engine.weights import load_model

BLOCK_SIZE = 16
NUM_BLOCKS = 400
MIN_MARGIN = 0.02
"""Below this gap between the best two logits, float32 rounding may decide."""


@dataclass(frozen=True)
class Case:
    prompt_ids: list[int]
    output_ids: list[int]
    margins: list[float]

    @property
    def num_certain(self) -> int:
        """Tokens before the first near-tie."""
        return next((i for i, margin in enumerate(self.margins) if margin < MIN_MARGIN), len(self.output_ids))


def read_cases(path: Path) -> list[Case]:
    cases = json.loads(path.read_text())["cases"]
    return [Case(case["prompt_ids"], case["output_ids"], case["margins"]) for case in cases]


def greedy(runner: Runner, cases: list[Case], num_tokens: int) -> list[list[int]]:
    """All cases in one batch."""
    tables: list[list[int]] = []
    for case in cases:
        first = tables[-1][-1] + 1 if tables else 0
        tables.append(list(range(first, first + -(-(len(case.prompt_ids) + num_tokens) // BLOCK_SIZE))))
    logits = runner.execute([StepItem(c.prompt_ids, 0, t, True) for c, t in zip(cases, tables, strict=True)])
    outputs = [[int(token)] for token in logits.argmax(-1)]
    for step in range(num_tokens - 1):
        pairs = zip(cases, tables, outputs, strict=True)
        logits = runner.execute([StepItem([o[-1]], len(c.prompt_ids) + step, t, True) for c, t, o in pairs])
        for output, token in zip(outputs, logits.argmax(-1), strict=True):
            output.append(int(token))
    return outputs


def make_runner(path: Path, dtype: torch.dtype, quantization: Quantization = "none") -> Runner:
    model = load_model(path, dtype, quantization=quantization)
    return Runner(Model(model), KvSlab.allocate(model.spec, NUM_BLOCKS, BLOCK_SIZE, dtype), num_threads=1)
