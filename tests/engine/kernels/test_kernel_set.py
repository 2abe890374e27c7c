"""The GPU kernel set inside the model: what it is given there, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kernels.triton import kernel_set
from engine.weights import load_model
from tests.engine.tiny_models import (
    BLOCKS,
    PROMPT,
    family_config,
    make_oracle,
    make_runner,
    oracle_logits,
    run_prompt,
    write_hf,
)


@pytest.mark.parametrize(("family", "dtype"), [("gemma3", torch.float32), ("llama", torch.bfloat16)])
def test_a_prompt_and_a_decode_give_the_logits_of_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = family_config(family)
    oracle = make_oracle(config)
    monkeypatch.setattr("engine.model.select_kernels", lambda device: kernel_set)
    runner = make_runner(load_model(write_hf(tmp_path, config, oracle), dtype), dtype=dtype)
    expected = oracle_logits(oracle, PROMPT[:40])[-1]
    logits = run_prompt(runner, PROMPT[:40], 39, BLOCKS)  # a chunk of 39, then one token
    if dtype == torch.float32:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    else:
        assert (logits - expected).norm() < 0.03 * expected.norm()
