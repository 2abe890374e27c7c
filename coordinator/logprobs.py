"""How a logprob and its token are written, the list of a prompt's, and the best outputs by theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from contracts.request import PromptLogprob, Token
from coordinator.job import Job
from engine.text.tokenizer import TextModel

_LOWEST_LOGPROB = -9999.0


def finite(logprob: float | None) -> float:
    """JSON has no infinity: what is impossible reads -9999."""
    if logprob is None or math.isnan(logprob):
        return _LOWEST_LOGPROB
    return min(max(logprob, _LOWEST_LOGPROB), 0.0)


def best_of(outputs: dict[int, Sequence[Token]], num_drawn: int, num_kept: int) -> list[int]:
    """Of every `num_drawn` outputs in a row, the `num_kept` with the highest logprob per token, the best first."""
    found: list[int] = []
    for first in range(0, len(outputs), num_drawn):
        drawn = range(first, first + num_drawn)
        found += sorted(drawn, key=lambda index: -_mean(outputs[index]))[:num_kept]
    return found


def _mean(tokens: Sequence[Token]) -> float:
    return sum(finite(token.logprob) for token in tokens) / len(tokens) if tokens else 0.0


class TokenNames:
    """How a token is written in logprobs: its text, or `token_id:N` if the client wants ids."""

    def __init__(self, job: Job, text: TextModel) -> None:
        self.text = text
        self._as_ids = job.params.return_tokens_as_token_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.text.token_text(token_id)

    def entry(self, token: Token) -> dict[str, Any]:
        """A drawn token and the best ones, as chats and responses list it."""
        return {
            **self._named(token.token_id, token.logprob),
            "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in token.top],
        }

    def _named(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": finite(logprob),
            "bytes": list(self.text.token_bytes(token_id)),
        }


class PromptListing:
    """`prompt_logprobs` as vLLM writes it: for each token of the prompt the best ones and itself, by id.

        [null, {"504": {"logprob": -1.5, "rank": 2, "decoded_token": " is"}, …}, …]

    `rank` counts from 1; null for a token that is not among the best ones that were asked for.
    """

    def __init__(self, job: Job, text: TextModel) -> None:
        self._job = job
        self._text = text

    def listed(self, index: int, found: Sequence[PromptLogprob]) -> dict[str, Any]:
        """{} if the client did not ask; null if the engine did not say."""
        count = self._job.params.prompt_logprobs
        if count is None:
            return {}
        if not found:
            return {"prompt_logprobs": None}
        ids = self._job.prompt_of(index).ids
        entries = [
            None if each.logprob is None else self._entry(token_id, each, count)
            for token_id, each in zip(ids, found, strict=True)
        ]
        return {"prompt_logprobs": entries}

    def _entry(self, token_id: int, found: PromptLogprob, count: int) -> dict[str, Any]:
        entry = {
            str(each_id): self._named(each_id, logprob, rank)
            for rank, (each_id, logprob) in enumerate(found.top[:count], 1)
        }
        entry.setdefault(str(token_id), self._named(token_id, found.logprob, None))
        return entry

    def _named(self, token_id: int, logprob: float | None, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self._text.token_text(token_id)}
