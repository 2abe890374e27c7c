"""Prompts are exactly as long as asked, by whoever counts, and share what they should."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.client import Client, Target
from benchmarks.prompts import LocalCounter, PromptBuilder, candidates, make_counter
from tests.benchmarks.builders import fake_server
from tests.benchmarks.fake_server import OVERHEAD, count_tokens


class FakeCounter:
    """Words of up to eight letters are one token; `overhead` more for the template."""

    name = "fake"

    def __init__(self, overhead: int = OVERHEAD) -> None:
        self.overhead = overhead
        self.num_calls = 0

    async def count(self, text: str) -> int:
        self.num_calls += 1
        return self.overhead + count_tokens(text)


class MergingCounter(FakeCounter):
    """A tokenizer that makes one token of two equal words: counts of parts do not add up."""

    async def count(self, text: str) -> int:
        words = text.split()
        merged = sum(left == right for left, right in pairwise(words))
        return await super().count(text) - merged


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server() as found:
        yield found


async def test_only_words_of_one_token_are_used_and_found_in_few_calls() -> None:
    counter = FakeCounter()
    builder = await PromptBuilder.create(counter)
    assert set(builder.words) == {word for word in candidates() if len(word) <= 8}
    assert builder.overhead == OVERHEAD
    assert counter.num_calls < len(candidates())


@pytest.mark.parametrize("counter", [FakeCounter(), FakeCounter(0), MergingCounter()])
@pytest.mark.parametrize("num_tokens", [6, 7, 64, 500])
async def test_prompts_are_exact(counter: FakeCounter, num_tokens: int) -> None:
    prompt = await (await PromptBuilder.create(counter)).exact(num_tokens, random.Random(1))
    assert prompt.num_tokens == num_tokens
    assert await counter.count(prompt.text) == num_tokens


async def test_a_prompt_shorter_than_its_template_says_so() -> None:
    prompt = await (await PromptBuilder.create(FakeCounter())).exact(2, random.Random(1))
    assert prompt.num_tokens == OVERHEAD + 1


async def test_a_tokenizer_of_characters_is_refused() -> None:
    class CharacterCounter(FakeCounter):
        async def count(self, text: str) -> int:
            return len(text)

    with pytest.raises(ValueError, match="one token"):
        await PromptBuilder.create(CharacterCounter())


async def test_equal_blocks_in_front_are_equal_text_in_front() -> None:
    builder = await PromptBuilder.create(FakeCounter())
    first = await builder.shared(100, (1, 2, 3), 32, random.Random(1), seed=0)
    second = await builder.shared(90, (1, 2, 4), 32, random.Random(2), seed=0)
    assert (first.num_tokens, second.num_tokens) == (100, 90)
    words = first.text.split(), second.text.split()
    num_shared = 64 - OVERHEAD  # two blocks, of which the template took its part
    assert words[0][:num_shared] == words[1][:num_shared]
    assert words[0][num_shared:][:8] != words[1][num_shared:][:8]
    other = await builder.shared(100, (1, 2, 3), 32, random.Random(1), seed=1)
    assert other.text.split()[1:9] != words[0][1:9]


async def test_the_server_counts_if_it_can(url: str) -> None:
    for endpoint, overhead in (("chat", OVERHEAD), ("completions", 1)):
        async with Client(Target(url, "normal", endpoint)) as client:  # type: ignore[arg-type]
            counter = await make_counter(client)
            assert counter.name == "vllm"
            assert (await PromptBuilder.create(counter)).overhead == overhead


async def test_without_a_tokenizer_words_are_guessed() -> None:
    with fake_server(tokenize=False) as url:
        async with Client(Target(url, "normal")) as client:
            assert (await make_counter(client)).name == "guess"


async def test_a_local_tokenizer_counts_template_and_text(embedded_model_path: Path) -> None:
    counter = LocalCounter(embedded_model_path, "chat")
    builder = await PromptBuilder.create(counter)
    assert len(builder.words) > 250
    for num_tokens in (64, 1500):
        prompt = await builder.exact(num_tokens, random.Random(3))
        assert await counter.count(prompt.text) == prompt.num_tokens == num_tokens
    assert (await PromptBuilder.create(LocalCounter(embedded_model_path, "completions"))).overhead == 0
