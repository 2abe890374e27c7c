"""What only GPUs do, through whole workers, by plain torch: float8 KV on its way, tokens drawn where the logits are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.request import GenerateRequest
from engine.kernels import reference
from engine.kv import FP8
from tests.engine.tiny_models import PROMPT, family_config, make_oracle, write_hf
from tests.local.cluster import greedy, local_cluster

GREEDY = [greedy(f"g{i}", PROMPT[i : 40 + 7 * i], 10, ignore_eos=True) for i in range(4)]
SAMPLED = [
    greedy(f"s{i}", PROMPT[i : 30 + i], 10, ignore_eos=True, temperature=0.9, seed=i, **extra)
    for i, extra in enumerate(({}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}, {"presence_penalty": 0.5}))
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = family_config("qwen2")
    return write_hf(tmp_path / "tiny", config, make_oracle(config))


async def answers(model: Path, requests: list[GenerateRequest], **sections: Any) -> list[list[int]]:
    async with local_cluster(model, engine__num_blocks=64, **sections) as cluster:
        found = [tokens for tokens, _ in await asyncio.gather(*(cluster.run(r) for r in requests))]
        handed = sum(worker._desk.num_handoffs for worker in cluster.workers.values())
    assert handed == (len(requests) if "prefill-0" in cluster.workers else 0)
    return found


async def test_float8_kv_that_was_handed_over_answers_as_if_it_had_stayed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.select_kernels", lambda device: reference)
    exact = await answers(model, GREEDY, num_prefills=0)
    monkeypatch.setattr("worker.loading.resolve_kv_dtype", lambda name, dtype, device: FP8)
    stayed = await answers(model, GREEDY, num_prefills=0)
    assert stayed != exact, "expected float8 to show in some token"
    assert await answers(model, GREEDY) == stayed


async def test_tokens_drawn_on_the_device_are_those_of_the_host(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await answers(model, SAMPLED)
    num_drawn: list[int] = []

    def draw(logits: torch.Tensor, limits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        num_drawn.append(len(logits))
        return reference.sample(logits, limits, uniforms)

    monkeypatch.setattr("worker.worker.select_draw", lambda device: draw)
    assert await answers(model, SAMPLED) == expected
    assert sum(num_drawn) == 4 * 10 + 2, "all but the one with a penalty, and a warm-up of each worker"
