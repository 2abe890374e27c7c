"""The two JSON forms of an answer: `chat.completion(.chunk)` and `text_completion`.

A form turns pieces of one choice into that choice's JSON; what surrounds it (id, model, usage) is the same
for both and lives in `Envelope`. Key order and null keys follow what clients were measured to need. Of a stream's
chunks all that is known beforehand is encoded beforehand: most of them bring one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

from contracts.request import Timings, Token
from coordinator.calls import Argued, Called, Part, Said, Thought
from coordinator.errors_http import encode_json, encode_text
from coordinator.job import Job, OutputPlan
from coordinator.logprobs import PromptListing, TokenNames, finite
from coordinator.outputs import End, Piece
from coordinator.reading import MessageReader
from engine.text.tokenizer import TextModel

Json = dict[str, Any]

# What is around the text in a choice that brings text alone, of a chat and of a completion: before, with the index,
# and behind.
_SAID = b'{"index":%d,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'
_WRITTEN = b'{"index":%d,"text":', b',"logprobs":null,"finish_reason":null}'


class Form(Protocol):
    """One job's choices as JSON.

    Stateful: offsets grow as pieces pass. `whole` and streaming are not mixed.
    """

    around: tuple[bytes, bytes] | None
    """Before and behind the text of a piece, where all of a piece is its text; `deltas` says the same of it."""

    def opening(self, index: int) -> list[bytes]:
        """What a stream says of a choice before its text, if anything."""

    def deltas(self, index: int, piece: Piece) -> list[bytes]:
        """A piece's choice, in as many chunks as it takes, without finish reason."""

    def closing(self, index: int, end: End) -> list[bytes]:
        """The choice's last chunks; the very last has the reason."""

    def whole(self, index: int, piece: Piece, end: End) -> Json:
        """The choice of an answer that is not streamed."""

    def beside(self) -> Json:
        """What an answer that is not streamed says beside its choices; after `whole`."""


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
            **job.mirror,
        }
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"} if is_chat else self._head
        self._counts_always = job.params.has_continuous_usage
        self._before = b"data: " + encode_json(self._chunk_head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if job.params.includes_usage else b"]}\n\n"

    def around(self, form: Form) -> list[tuple[bytes, bytes]]:
        """Of each choice, what is before and behind a piece's text in its event; empty if that depends on the piece."""
        if form.around is None or self._counts_always:
            return []
        before, behind = form.around
        return [
            (self._before + before % index, behind + self._after) for index in range(self._job.num_choices)
        ]

    def chunk(self, choice: bytes, num_tokens: int) -> bytes:
        """One choice's chunk as an event; `usage` is there exactly when the client asked for it."""
        if self._counts_always:
            return b'%b%b],"usage":%b}\n\n' % (self._before, choice, encode_json(self._counts(num_tokens)))
        return self._before + choice + self._after

    def usage_chunk(self, ends: dict[int, End]) -> Json:
        return {**self._chunk_head, "choices": [], "usage": self.usage(ends)}

    def whole(self, choices: list[Json], ends: dict[int, End]) -> Json:
        return {**self._head, "choices": choices, "usage": self.usage(ends)}

    def usage(self, ends: dict[int, End]) -> Json:
        """Prompt tokens once per prompt, output tokens of all choices; cached tokens if every prompt's are
        known. `timings_ms` only if asked for: clients are strict.
        """
        usage = self._counts(sum(end.num_tokens for end in ends.values()))
        if self._job.reading.thinks:
            num_thought_tokens = sum(end.num_thought_tokens for end in ends.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": num_thought_tokens}
        num_cached = self._num_cached(ends)
        usage["prompt_tokens_details"] = None if num_cached is None else {"cached_tokens": num_cached}
        if self._job.params.includes_timings:
            usage["timings_ms"] = _timings_ms([end.timings for end in ends.values()])
        return usage

    def _num_cached(self, ends: dict[int, End]) -> int | None:
        """Prompt tokens that nobody had to read. Of a prompt's outputs all but one may find what that one has read."""
        each = self._job.params.num_outputs
        hits = [
            [count for k in range(each) if (count := ends[p * each + k].num_cached_tokens) is not None]
            for p in range(len(self._job.prompts))
        ]
        return sum(map(min, hits)) if all(hits) else None

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

    With tools or reasoning each choice has a reader, and a piece becomes a delta for each of its parts.
    """

    def __init__(self, job: Job, text: TextModel) -> None:
        self._names = TokenNames(job, text)
        self._wants_logprobs = job.params.num_logprobs is not None
        self._reading = job.reading
        self._readers: dict[int, MessageReader] = {}
        self._prompt = PromptListing(job, text)
        self._beside: Json = {}
        self.around = _SAID if self._reading.is_plain and not self._wants_logprobs else None

    def opening(self, index: int) -> list[bytes]:
        return [encode_json(_chat_chunk(index, {"role": "assistant", "content": ""}))]

    def deltas(self, index: int, piece: Piece) -> list[bytes]:
        wants_tokens = self._wants_logprobs and bool(piece.tokens)
        if self._reading.is_plain and not wants_tokens:
            return _with_text(_SAID, index, piece.text)
        deltas = [_delta(part) for part in self._parts(index, piece)]
        if wants_tokens and not deltas:
            deltas = [{"content": ""}]
        chunks = [_chat_chunk(index, delta) for delta in deltas]
        if chunks and wants_tokens:
            chunks[0]["logprobs"] = self._logprobs(piece.tokens)
        return list(map(encode_json, chunks))

    def closing(self, index: int, end: End) -> list[bytes]:
        last = {**_chat_chunk(index, {}), **_reason(end)}
        if self._reading.is_plain:
            return [encode_json(last)]
        reader = self._reader(index)
        chunks = [_chat_chunk(index, _delta(part)) for part in reader.flush()]
        return list(map(encode_json, [*chunks, {**last, "finish_reason": self._finish_reason(reader, end)}]))

    def whole(self, index: int, piece: Piece, end: End) -> Json:
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        reason = _reason(end)
        self._beside |= self._prompt.listed(index, piece.prompt)
        if not self._reading.is_plain:
            reader = self._reader(index)
            message |= gathered(reader.push(piece.text) + reader.flush())
            reason["finish_reason"] = self._finish_reason(reader, end)
        return {"index": index, "message": message, "logprobs": self._logprobs(piece.tokens), **reason}

    def beside(self) -> Json:
        return self._beside

    def _parts(self, index: int, piece: Piece) -> list[Part]:
        if self._reading.is_plain:
            return [Said(piece.text)]
        return self._reader(index).push(piece.text)

    def _reader(self, index: int) -> MessageReader:
        if index not in self._readers:
            self._readers[index] = MessageReader(self._reading)
        return self._readers[index]

    def _finish_reason(self, reader: MessageReader, end: End) -> str:
        """An output that was cut is cut, whatever it called before."""
        return self._reading.reason_of_calls if end.reason == "stop" and reader.has_called else end.reason

    def _logprobs(self, tokens: list[Token]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {"content": [self._names.entry(token) for token in tokens], "refusal": None}


class CompletionForm:
    """Text chunks, then an empty one with the reason.

    Offsets of logprobs follow the tokens, not held-back text.
    """

    def __init__(self, job: Job, text: TextModel) -> None:
        self._names = TokenNames(job, text)
        self._wants_logprobs = job.params.num_logprobs is not None
        self._offsets: dict[int, int] = {}
        self._job = job
        self._prompt = PromptListing(job, text)
        self.around = None if self._wants_logprobs else _WRITTEN

    def opening(self, index: int) -> list[bytes]:
        return []

    def deltas(self, index: int, piece: Piece) -> list[bytes]:
        if self._wants_logprobs and bool(piece.tokens or piece.prompt):
            return [encode_json(self._choice(index, piece))]
        return _with_text(_WRITTEN, index, piece.text)

    def closing(self, index: int, end: End) -> list[bytes]:
        return [encode_json({"index": index, "text": "", "logprobs": None, **_reason(end)})]

    def whole(self, index: int, piece: Piece, end: End) -> Json:
        return {**self._choice(index, piece), **_reason(end), **self._prompt.listed(index, piece.prompt)}

    def beside(self) -> Json:
        return {}

    def _choice(self, index: int, piece: Piece) -> Json:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(index, piece) if self._wants_logprobs else None,
            "finish_reason": None,
        }

    def _logprobs(self, index: int, piece: Piece) -> Json:
        """The echoed prompt's tokens first; the very first has nothing before it, so nothing is known of it."""
        entries = [*self._prompt_entries(index, piece), *map(_entry_of, piece.tokens)]
        offset = self._offsets.get(index, 0)
        offsets = []
        for token_id, _, _ in entries:
            offsets.append(offset)
            offset += self._length(index, token_id, is_first=not offset)
        self._offsets[index] = offset
        return {
            "tokens": [self._names.name(token_id) for token_id, _, _ in entries],
            "token_logprobs": [None if top is None else finite(logprob) for _, logprob, top in entries],
            "top_logprobs": [
                None if top is None else self._top(token_id, logprob, top)
                for token_id, logprob, top in entries
            ],
            "text_offset": offsets,
        }

    def _prompt_entries(self, index: int, piece: Piece) -> list[_Entry]:
        if not piece.prompt or not self._job.params.echo:
            return []
        prompt, count = self._job.prompt_of(index), self._job.params.num_logprobs
        return [
            (token_id, found.logprob, None if found.logprob is None else found.top[:count])
            for token_id, found in zip(prompt.ids, piece.prompt, strict=True)
        ]

    def _length(self, index: int, token_id: int, is_first: bool) -> int:
        """Characters of the text that are this token's; a BOS that the tokenizer added has none."""
        text = self._names.text
        piece = text.token_text(token_id)
        if is_first and token_id == text.bos_id and self._job.params.echo:
            echo = self._job.prompt_of(index).echo_text
            return len(piece) if echo.startswith(piece) else 0
        return len(piece)

    def _top(
        self, token_id: int, logprob: float | None, top: tuple[tuple[int, float], ...]
    ) -> dict[str, float]:
        """The best ones and the drawn one. Ids that read alike share a key: the better one keeps it."""
        found: dict[str, float] = {}
        for each_id, each in (*top, (token_id, logprob)):
            found.setdefault(self._names.name(each_id), finite(each))
        return found


_Entry = tuple[int, float | None, tuple[tuple[int, float], ...] | None]


def _entry_of(token: Token) -> _Entry:
    return token.token_id, token.logprob, token.top


def make_form(job: Job, text: TextModel) -> Form:
    return CompletionForm(job, text) if job.endpoint == "completions" else ChatForm(job, text)


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


def _with_text(around: tuple[bytes, bytes], index: int, text: str) -> list[bytes]:
    return [around[0] % index + encode_text(text) + around[1]] if text else []


def _chat_chunk(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _delta(part: Part) -> Json:
    """The first delta of a call has all that names it; later ones only more of its arguments."""
    match part:
        case Said(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case Called(index, call_id, name):
            return {"tool_calls": [{"index": index, **_call(call_id, name, "")}]}
        case Argued(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def gathered(parts: Iterable[Part]) -> Json:
    """What a whole message says of its parts; `content` is null if it only calls or reasons."""
    texts: dict[str, str] = {}
    calls: list[Json] = []
    for part in parts:
        match part:
            case Said(text):
                texts["content"] = texts.get("content", "") + text
            case Thought(text):
                texts["reasoning_content"] = texts.get("reasoning_content", "") + text
            case Called(_, call_id, name):
                calls.append(_call(call_id, name, ""))
            case Argued(index, text):
                calls[index]["function"]["arguments"] += text
    if "content" not in texts and not calls and "reasoning_content" not in texts:
        texts["content"] = ""
    return {"content": None, **texts, **({"tool_calls": calls} if calls else {})}


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _reason(end: End) -> Json:
    reason: Json = {"finish_reason": end.reason}
    if end.stop_reason is not None:
        reason["stop_reason"] = end.stop_reason
    return reason


def spread(pieces: Mapping[OutputPlan, Piece]) -> list[tuple[int, Piece]]:
    """(choice index, piece) for every choice that an output answers, by index."""
    found = [(index, piece) for plan, piece in pieces.items() for index in plan.indices]
    if len(found) > 1:
        found.sort(key=itemgetter(0))
    return found
