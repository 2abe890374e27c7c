"""The whole forward pass of tiny random models against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels import reference
from engine.model import Model
from engine.weights import load_model
from tests.engine.tiny_models import (
    BLOCKS,
    LLAMA3_ROPE,
    PROMPT,
    make_config,
    make_oracle,
    make_runner,
    oracle_logits,
    run_prompt,
    write_gguf,
    write_hf,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi-head": {"num_key_value_heads": 6},
    "multi-query": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500.0}},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = make_config(**changes)
    oracle = make_oracle(config)
    runner = make_runner(load_model(write_hf(tmp_path, config, oracle), torch.float32))
    expected = oracle_logits(oracle, PROMPT)
    for num_tokens in (1, 40, 90):
        logits = run_prompt(runner, PROMPT[:num_tokens], 90, BLOCKS)
        torch.testing.assert_close(logits, expected[num_tokens - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "biases", "tied", "llama3 rope"])
def test_gguf_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    oracle = make_oracle(make_config(**VARIANTS[name]))
    runner = make_runner(load_model(write_gguf(tmp_path / "x.gguf", oracle), torch.float32))
    logits = run_prompt(runner, PROMPT, 90, BLOCKS)
    torch.testing.assert_close(logits, oracle_logits(oracle, PROMPT)[-1], rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    config = make_config()
    oracle = make_oracle(config)
    runner = make_runner(load_model(write_hf(tmp_path, config, oracle), torch.bfloat16), dtype=torch.bfloat16)
    expected = oracle_logits(oracle, PROMPT)[-1]
    logits = run_prompt(runner, PROMPT, 90, BLOCKS)
    assert logits.dtype == torch.float32
    assert (logits - expected).norm() < 0.03 * expected.norm()


def test_plain_torch_kernels_give_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(attention_bias=True)
    oracle = make_oracle(config)
    monkeypatch.setattr("engine.model.select_kernels", lambda device: reference)
    runner = make_runner(load_model(write_hf(tmp_path, config, oracle), torch.float32))
    expected = oracle_logits(oracle, PROMPT)
    torch.testing.assert_close(run_prompt(runner, PROMPT, 7, BLOCKS), expected[-1], rtol=1e-4, atol=1e-4)


def test_two_models_may_share_loaded_weights(tmp_path: Path) -> None:
    config = make_config()
    loaded = load_model(write_hf(tmp_path, config, make_oracle(config)), torch.float32)
    first, second = (run_prompt(make_runner(loaded), PROMPT, 90, BLOCKS) for _ in range(2))
    assert torch.equal(first, second)
    assert Model(loaded).spec == loaded.spec
