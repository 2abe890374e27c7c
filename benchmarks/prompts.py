"""Prompts of an exact number of tokens, as the model counts them: template and special tokens included.

    words that are one token each, whatever stands before them    found out once, with the tokenizer
    prompt = first word + as many of them as are missing          checked against the tokenizer, corrected

The tokenizer is the server's (`/tokenize`, in vLLM's form, which is Baton's too, or llama.cpp's), a local one, or, for
an endpoint that has none, a guess of one token a word, which the records then show to be wrong.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from benchmarks.client import Client, Endpoint
from benchmarks.traces import DATA

_FIRST = "The"
_MAX_CORRECTIONS = 8


class Counter(Protocol):
    """Counts the tokens of a prompt as the endpoint would see it."""

    name: str

    async def count(self, text: str) -> int: ...


class ServerCounter:
    """The server's own `/tokenize`. Raises ValueError if it stops answering."""

    def __init__(self, client: Client, name: str) -> None:
        self.name = name
        self._client = client

    async def count(self, text: str) -> int:
        num_tokens = await self.try_count(text)
        if num_tokens is None:
            raise ValueError("expected /tokenize to count a prompt but it did not")
        return num_tokens

    async def try_count(self, text: str) -> int | None:
        target = self._client.target
        chat = {"model": target.model, "messages": [{"role": "user", "content": text}]}
        body: dict[str, Any] = chat if target.endpoint == "chat" else {"model": target.model, "prompt": text}
        try:
            if self.name == "llama.cpp":
                if target.endpoint == "chat":
                    _, answer = await self._client.post("/apply-template", chat)
                    text = answer["prompt"]
                body = {"content": text, "add_special": True, "parse_special": True}
            status, answer = await self._client.post("/tokenize", body)
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError):
            return None
        tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        return len(tokens) if isinstance(tokens, list) else None


class LocalCounter:
    """A tokenizer read from a Hugging Face directory or a GGUF file."""

    name = "local"

    def __init__(self, path: Path, endpoint: Endpoint) -> None:
        from engine.text.tokenizer import load_text  # only who asks for it pays for it

        self._text = load_text(path)
        self._endpoint = endpoint

    async def count(self, text: str) -> int:
        if self._endpoint == "chat":
            rendered = self._text.render([{"role": "user", "content": text}])
            return len(self._text.encode(rendered, add_special_tokens=False))
        return len(self._text.encode(text))


class GuessCounter:
    name = "guess"

    async def count(self, text: str) -> int:
        return len(text.split())


async def make_counter(client: Client, tokenizer: Path | None = None) -> Counter:
    """The local tokenizer if one is given, else the server's, else a guess."""
    if tokenizer is not None:
        return LocalCounter(tokenizer, client.target.endpoint)
    for name in ("vllm", "llama.cpp"):
        counter = ServerCounter(client, name)
        if await counter.try_count(_FIRST):
            return counter
    return GuessCounter()


@dataclass(frozen=True, slots=True)
class Prompt:
    """`num_tokens`: as the model counts; differs from what was asked only where a template alone is longer."""

    text: str
    num_tokens: int


class PromptBuilder:
    """Builds prompts for one endpoint. `overhead`: tokens that are there before the first word."""

    def __init__(self, counter: Counter, words: Sequence[str], overhead: int) -> None:
        self.counter = counter
        self.words = tuple(words)
        self.overhead = overhead

    @classmethod
    async def create(cls, counter: Counter) -> PromptBuilder:
        """Raises ValueError if the tokenizer has no word of one token, e.g. one of bytes or characters."""
        base = await counter.count(_FIRST)
        words = await _single_token_words(counter, base, candidates())
        if len(words) < 32:
            raise ValueError(
                f"expected a vocabulary with common English words but only {len(words)} are one token"
            )
        return cls(counter, words, base - 1)

    def draw(self, rng: random.Random, num_words: int) -> list[str]:
        return rng.choices(self.words, k=num_words)

    async def exact(self, num_tokens: int, rng: random.Random) -> Prompt:
        """Random text of `num_tokens` tokens."""
        return await self.finish(self.draw(rng, max(0, num_tokens - self.overhead - 1)), num_tokens, rng)

    async def shared(
        self, num_tokens: int, block_ids: Sequence[int], block_tokens: int, rng: random.Random, seed: int
    ) -> Prompt:
        """Text whose block i is a function of (seed, block_ids[i]): equal ids in front give equal tokens in front.

        The template's tokens and the first word take their place from the first block, the same for all. Tokens past
        the last id are random.
        """
        words: list[str] = []
        for block_id in block_ids:
            words += self.draw(random.Random(f"{seed}/{block_id}"), block_tokens)
        words = words[self.overhead + 1 :]
        num_words = max(0, num_tokens - self.overhead - 1)
        words += self.draw(rng, max(0, num_words - len(words)))
        return await self.finish(words[:num_words], num_tokens, rng)

    async def finish(self, words: list[str], num_tokens: int, rng: random.Random) -> Prompt:
        """The text of these words, corrected at its end until the tokenizer agrees.

        Raises ValueError if it does not after some attempts.
        """
        for _ in range(_MAX_CORRECTIONS):
            text = " ".join([_FIRST, *words])
            count = await self.counter.count(text)
            if count == num_tokens or (not words and count > num_tokens):
                return Prompt(text, count)
            if count > num_tokens:
                words = words[: max(0, len(words) - (count - num_tokens))]
            else:
                words = words + self.draw(rng, num_tokens - count)
        raise ValueError(f"expected a prompt of {num_tokens} tokens but the tokenizer counts {count}")


def candidates() -> list[str]:
    """Common English words, most of them one token each in a byte-pair vocabulary, with the space before them."""
    return (DATA / "words.txt").read_text(encoding="utf-8").split()


async def _single_token_words(counter: Counter, base: int, words: list[str]) -> list[str]:
    """Those that add exactly one token each. Halves the list where the count does not fit, so few calls are needed."""
    if not words:
        return []
    count = await counter.count(" ".join([_FIRST, *words]))
    if count == base + len(words):
        return words
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return [
        *await _single_token_words(counter, base, words[:middle]),
        *await _single_token_words(counter, base, words[middle:]),
    ]
