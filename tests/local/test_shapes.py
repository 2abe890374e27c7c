"""A grammar and the prompt's logprobs on their way through both workers: invariant 1 for what is more than tokens."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.errors import RequestError
from contracts.request import Finished, PromptLogprob, Token
from engine.text.grammar import json_grammar, regex_grammar
from engine.text.tokenizer import load_text
from tests.coordinator.streams import Stream
from tests.local.cluster import LocalCluster, greedy, local_cluster
from tests.local.test_parity import SHORT

PROMPT: list[int] = SHORT[0]["prompt_ids"]
GRAMMAR = json_grammar(
    {
        "type": "object",
        "properties": {"kind": {"enum": ["long-winded", "short"]}, "size": {"enum": [1, 2, 3]}},
        "required": ["kind", "size"],
        "additionalProperties": False,
    }
)


async def tokens_of(cluster: LocalCluster, name: str, max_tokens: int, **sampling: object) -> list[Token]:
    found = [
        event async for event in Stream(cluster.backend, greedy(name, PROMPT, max_tokens, **sampling), 120.0)
    ]
    assert isinstance(found[-1], Finished)
    return [event for event in found if isinstance(event, Token)]


async def structured(cluster: LocalCluster, name: str, known: tuple[int, ...] = ()) -> list[int]:
    request = replace(greedy(name, PROMPT, 40, grammar=GRAMMAR), output_ids=known)
    ids, _ = await cluster.run(request)
    return ids


async def prompt_logprobs(cluster: LocalCluster, name: str) -> tuple[PromptLogprob, ...]:
    first, second = await tokens_of(cluster, name, 2, num_prompt_logprobs=1, num_logprobs=0)
    assert second.prompt == ()
    return first.prompt


@pytest.fixture(scope="module")
def colocated(embedded_model_path: Path) -> tuple[list[int], tuple[PromptLogprob, ...]]:
    async def run() -> tuple[list[int], tuple[PromptLogprob, ...]]:
        async with local_cluster(embedded_model_path, num_prefills=0) as cluster:
            return await structured(cluster, "c"), await prompt_logprobs(cluster, "p")

    return asyncio.run(run())


async def test_a_grammar_and_prompt_logprobs_travel(
    embedded_model_path: Path, colocated: tuple[list[int], tuple[PromptLogprob, ...]]
) -> None:
    expected, known_logprobs = colocated
    text = load_text(embedded_model_path)
    async with local_cluster(embedded_model_path, engine__max_chunk_tokens=16) as cluster:
        several = await asyncio.gather(*(structured(cluster, f"d{i}") for i in range(3)))
        assert several == [expected] * 3
        assert json.loads(text.decode(expected))["kind"] in ("long-winded", "short")
        assert expected[-1] in text.eos_ids
        # Whoever continues an output stands where it stopped, also in the middle of a word.
        for cut in (1, 4, len(expected) - 1):
            assert await structured(cluster, f"k{cut}", tuple(expected[:cut])) == expected[cut:]
        for name in ("first", "again"):  # the second time the prompt's blocks could be cached
            found = await prompt_logprobs(cluster, name)
            assert len(found) == len(PROMPT)
            assert found[0] == PromptLogprob()
            for one, other in zip(found[1:], known_logprobs[1:], strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
                assert one.top[0][1] == pytest.approx(other.top[0][1], abs=1e-3)


async def test_what_is_no_grammar_ends_its_request_alone(embedded_model_path: Path) -> None:
    async with local_cluster(embedded_model_path) as cluster:
        with pytest.raises(RequestError):
            await tokens_of(cluster, "bad", 4, grammar=regex_grammar("("))
        assert len(await tokens_of(cluster, "good", 4, grammar=regex_grammar("a{9}"))) == 4
