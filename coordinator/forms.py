"""The two JSON forms of an answer: `chat.completion(.chunk)` and `text_completion`.

A form turns pieces of one choice into that choice's JSON; what surrounds it (id, model, usage) is the same
for both and lives in `Envelope`. Key order and null keys follow what clients were measured to need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from contracts.request import Timings, Token
from coordinator.job import Job
from coordinator.outputs import End, Piece
from engine.text.tokenizer import TextModel

_LOWEST_LOGPROB = -9999.0

Json = dict[str, Any]


class Form(Protocol):
    """One job's choices as JSON.

    Stateful: offsets grow as pieces pass. `whole` and streaming are not mixed.
    """

    def opening(self, index: int) -> Json | None:
        """What a stream says of a choice before its text, if anything."""

    def delta(self, index: int, piece: Piece) -> Json:
        """A chunk's choice with text; without finish reason."""

    def closing(self, index: int, end: End) -> Json:
        """The last chunk's choice."""

    def whole(self, index: int, piece: Piece, end: End) -> Json:
        """The choice of an answer that is not streamed."""


class Envelope:
    """What is equal in all chunks of an answer."""

    def __init__(self, job: Job, text: TextModel) -> None:
        self._job = job
        is_chat = job.endpoint == "chat"
        self._head: Json = {
            "id": job.completion_id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": job.created,
            "model": job.model,
            "system_fingerprint": f"fp_{text.fingerprint[:12]}",
        }
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"} if is_chat else self._head

    def chunk(self, choice: Json, num_tokens: int = 0) -> Json:
        """One choice's chunk; `usage` is there exactly when the client asked for it."""
        chunk = {**self._chunk_head, "choices": [choice]}
        params = self._job.params
        if params.has_continuous_usage:
            chunk["usage"] = self._counts(num_tokens)
        elif params.includes_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self, ends: dict[int, End]) -> Json:
        return {**self._chunk_head, "choices": [], "usage": self.usage(ends)}

    def whole(self, choices: list[Json], ends: dict[int, End]) -> Json:
        return {**self._head, "choices": choices, "usage": self.usage(ends)}

    def usage(self, ends: dict[int, End]) -> Json:
        """Prompt tokens once per prompt, output tokens of all choices; cached tokens if every prompt's are
        known. `timings_ms` only if asked for: clients are strict.
        """
        usage = self._counts(sum(end.num_tokens for end in ends.values()))
        firsts = [ends[p * self._job.params.n].num_cached_tokens for p in range(len(self._job.prompts))]
        known = [count for count in firsts if count is not None]
        usage["prompt_tokens_details"] = {"cached_tokens": sum(known)} if len(known) == len(firsts) else None
        if self._job.params.includes_timings:
            usage["timings_ms"] = _timings_ms([end.timings for end in ends.values()])
        return usage

    def _counts(self, num_output_tokens: int) -> Json:
        num_prompt_tokens = self._job.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
        }


class ChatForm:
    """Role chunk first, then text, then an empty delta with the reason: some clients stop reading at the
    reason.
    """

    def __init__(self, job: Job, text: TextModel) -> None:
        self._names = _TokenNames(job, text)
        self._wants_logprobs = job.params.num_logprobs is not None

    def opening(self, index: int) -> Json | None:
        return _chat_chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, piece: Piece) -> Json:
        return _chat_chunk(index, {"content": piece.text}, self._logprobs(piece.tokens))

    def closing(self, index: int, end: End) -> Json:
        return {**_chat_chunk(index, {}), **_reason(end)}

    def whole(self, index: int, piece: Piece, end: End) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(piece.tokens),
            **_reason(end),
        }

    def _logprobs(self, tokens: list[Token]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: Token) -> Json:
        return {
            **self._named(token.token_id, token.logprob),
            "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in token.top],
        }

    def _named(self, token_id: int, logprob: float | None) -> Json:
        return {
            "token": self._names.name(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._names.text.token_bytes(token_id)),
        }


class CompletionForm:
    """Text chunks, then an empty one with the reason.

    Offsets of logprobs follow the tokens, not held-back text.
    """

    def __init__(self, job: Job, text: TextModel) -> None:
        self._names = _TokenNames(job, text)
        self._wants_logprobs = job.params.num_logprobs is not None
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, index: int, piece: Piece) -> Json:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(index, piece.tokens),
            "finish_reason": None,
        }

    def closing(self, index: int, end: End) -> Json:
        return {"index": index, "text": "", "logprobs": None, **_reason(end)}

    def whole(self, index: int, piece: Piece, end: End) -> Json:
        return {**self.delta(index, piece), **_reason(end)}

    def _logprobs(self, index: int, tokens: list[Token]) -> Json | None:
        if not self._wants_logprobs:
            return None
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._names.text.token_text(token.token_id))
        self._offsets[index] = offset
        return {
            "tokens": [self._names.name(token.token_id) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float]:
        """The best ones and the drawn one. Ids that read alike share a key: the better one keeps it."""
        found: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            found.setdefault(self._names.name(token_id), finite(logprob))
        return found


class _TokenNames:
    """How a token is written in logprobs: its text, or `token_id:N` if the client wants ids."""

    def __init__(self, job: Job, text: TextModel) -> None:
        self.text = text
        self._as_ids = job.params.return_tokens_as_token_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.text.token_text(token_id)


def make_form(job: Job, text: TextModel) -> Form:
    return ChatForm(job, text) if job.endpoint == "chat" else CompletionForm(job, text)


def finite(logprob: float | None) -> float:
    """JSON has no infinity: what is impossible reads -9999."""
    if logprob is None or math.isnan(logprob):
        return _LOWEST_LOGPROB
    return min(max(logprob, _LOWEST_LOGPROB), 0.0)


def _timings_ms(found: Sequence[Timings | None]) -> Json | None:
    """Of the output that took longest, since stages of several do not add up; None if any is not known."""
    known = [timings for timings in found if timings is not None]
    if not known or len(known) < len(found):
        return None
    longest = max(known, key=lambda timings: timings.total_s)
    return {
        "queue": round(1000 * longest.queue_s, 3),
        "prefill": round(1000 * longest.prefill_s, 3),
        "handoff": None if longest.handoff_s is None else round(1000 * longest.handoff_s, 3),
        "decode": round(1000 * longest.decode_s, 3),
        "attempts": longest.num_attempts,
    }


def _chat_chunk(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _reason(end: End) -> Json:
    reason: Json = {"finish_reason": end.reason}
    if end.stop_reason is not None:
        reason["stop_reason"] = end.stop_reason
    return reason


def spread(pieces: Iterable[tuple[tuple[int, ...], Piece]]) -> list[tuple[int, Piece]]:
    """(choice index, piece) for every choice that an output answers, by index."""
    return sorted(((i, piece) for indices, piece in pieces for i in indices), key=lambda pair: pair[0])
