"""Invariant 1: the same answer however a request travels. Real weights, real sockets, golden prompts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.local.cluster import LocalCluster, greedy, local_cluster

DATA = json.loads((Path(__file__).parent.parent / "data" / "smollm2_greedy.json").read_text())
SHORT = [case for case in DATA["cases"] if len(case["prompt_ids"]) < 100]
NUM_TOKENS = 12


def safe_length(case: dict[str, Any]) -> int:
    """Steps before the first one whose margin is too small to be decided in float32."""
    margins = case["margins"][:NUM_TOKENS]
    return next((i for i, margin in enumerate(margins) if margin < 0.02), len(margins))


async def answers(cluster: LocalCluster, cases: list[dict[str, Any]], name: str) -> list[list[int]]:
    runs = [
        cluster.run(greedy(f"{name}-{i}", case["prompt_ids"], NUM_TOKENS)) for i, case in enumerate(cases)
    ]
    return [ids for ids, _ in await asyncio.gather(*runs)]


def assert_golden(cases: list[dict[str, Any]], got: list[list[int]]) -> None:
    for case, ids in zip(cases, got, strict=True):
        length = safe_length(case)
        assert ids[:length] == case["output_ids"][:length], case["prompt_ids"]


@pytest.fixture(scope="module")
def colocated(embedded_model_path: Path) -> list[list[int]]:
    """What one engine answers to the first eight prompts, one request at a time."""

    async def run() -> list[list[int]]:
        async with local_cluster(embedded_model_path, num_prefills=0) as cluster:
            return [(await answers(cluster, [case], f"c{i}"))[0] for i, case in enumerate(SHORT[:8])]

    return asyncio.run(run())


async def test_one_engine_gives_the_golden_answers(colocated: list[list[int]]) -> None:
    assert_golden(SHORT[:8], colocated)


@pytest.mark.parametrize("max_chunk_tokens", [16, 64, 2048])
async def test_disaggregated_equals_colocated(
    embedded_model_path: Path, colocated: list[list[int]], max_chunk_tokens: int
) -> None:
    """1 and 8 at once, without and with a prefix hit (the second round finds its prompts cached on both sides)."""
    async with local_cluster(embedded_model_path, engine__max_chunk_tokens=max_chunk_tokens) as cluster:
        alone = [(await answers(cluster, [case], f"a{i}"))[0] for i, case in enumerate(SHORT[:2])]
        assert alone == colocated[:2]
        assert await answers(cluster, SHORT[:8], "together") == colocated
        assert await answers(cluster, SHORT[:8], "cached") == colocated
        _, end = await cluster.run(greedy("hit", SHORT[0]["prompt_ids"], 2))
        assert end.num_cached_tokens == len(SHORT[0]["prompt_ids"]) // 16 * 16


async def test_a_long_prompt_travels_in_chunks(embedded_model_path: Path) -> None:
    case = max(DATA["cases"], key=lambda case: len(case["prompt_ids"]))
    async with local_cluster(embedded_model_path, engine__max_chunk_tokens=256) as cluster:
        assert_golden([case], await answers(cluster, [case], "long"))


async def test_a_request_goes_on_from_tokens_already_sent(
    embedded_model_path: Path, colocated: list[list[int]]
) -> None:
    async with local_cluster(embedded_model_path) as cluster:
        whole = greedy("whole", SHORT[0]["prompt_ids"], NUM_TOKENS)
        resumed = replace(whole, request_id="resumed", output_ids=tuple(colocated[0][:5]))
        ids, end = await cluster.run(resumed)
        assert (ids, end.reason) == (colocated[0][5:], "length")


async def test_sampled_answers_depend_on_the_seed_alone(embedded_model_path: Path) -> None:
    """Alone or in a batch, disaggregated or resumed: the draw is keyed by (seed, position)."""
    sampling = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5}

    def sampled(name: str, seed: int) -> Any:
        return greedy(name, SHORT[0]["prompt_ids"], NUM_TOKENS, seed=seed, **sampling)

    async with local_cluster(embedded_model_path) as cluster:
        first, _ = await cluster.run(sampled("s1", 7))
        others = [cluster.run(sampled(f"o{seed}", seed)) for seed in range(6)]
        again, *rest = await asyncio.gather(cluster.run(sampled("s2", 7)), *others)
        assert again[0] == first
        assert len({tuple(ids) for ids, _ in rest}) > 1
        resumed = replace(sampled("s3", 7), output_ids=tuple(first[:4]))
        assert (await cluster.run(resumed))[0] == first[4:]
