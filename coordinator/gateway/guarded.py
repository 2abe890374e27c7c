"""An answer's bytes through the output guards: JSON answers whole, streams event by event.

    app ─► start, body… ─► GuardedSend ─┬─ application/json: kept until whole, text fields edited
                                        └─ text/event-stream: each choice's text held in a GuardedText

It knows the two documented forms, chat.completion and text_completion. What carries text past these fields (logprobs,
tool calls, other endpoints) is refused beforehand by `check_guardable`, not let through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from starlette.types import Message, Send

from contracts.errors import BatonError, UnsupportedError
from coordinator.errors_http import encode_json, error_body, error_response
from coordinator.gateway.guards import GuardedText, Guards

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal", "text")
# Fields that make an answer show text or token ids elsewhere.
_TELLTALES = (
    "logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids", "tools", "functions",
)  # fmt: skip
_SEPARATOR = b"\n\n"
_DONE = b"data: [DONE]"


class AnswerStopped(Exception):
    """A guard ended the answer, and its client was told. No BatonError: nothing is left for a handler to say."""


def check_guardable(endpoint: str, body: dict[str, Any]) -> None:
    """Raises UnsupportedError for a request whose answer the output guards would not see whole."""
    if endpoint not in _ENDPOINTS:
        raise UnsupportedError(f"{endpoint}: not served while output guards are set")
    for name in _TELLTALES:
        value = body.get(name)
        # NOTE: 0 is no False here: `logprobs: 0` lists every token of a completion.
        if value is not None and value is not False and value != []:
            raise UnsupportedError(f"{name}: not supported while output guards are set", param=name)


class GuardedSend:
    """A `Send` for one response. Raises AnswerStopped once a guard has refused it."""

    def __init__(
        self, send: Send, guards: Guards, tenant: str, on_refused: Callable[[BatonError], None]
    ) -> None:
        self._send = send
        self._guards = guards
        self._tenant = tenant
        self._on_refused = on_refused
        self._start: Message | None = None
        self._kind = ""
        self._rest = b""
        self._texts: dict[tuple[int, str], GuardedText] = {}
        self._heads: dict[tuple[int, str], dict[str, Any]] = {}

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._kind = _kind_of(message) if message["status"] == 200 else ""
            if self._kind != "json":
                await self._send(message)
            self._start = message
        elif message["type"] != "http.response.body" or not self._kind:
            await self._send(message)
        elif self._kind == "json":
            await self._whole(message)
        else:
            await self._stream(message)

    async def _whole(self, message: Message) -> None:
        self._rest += message.get("body", b"")
        if message.get("more_body", False):
            return
        assert self._start is not None, "a body without a start"
        try:
            body = encode_json(await self._edited(json.loads(self._rest)))
        except BatonError as error:
            self._on_refused(error)
            response = error_response(error)
            start = {"type": "http.response.start", "status": error.status, "headers": response.raw_headers}
            await self._send(start)
            await self._send({**message, "body": bytes(response.body)})
            raise AnswerStopped from error
        headers = [
            (name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"
        ]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({**message, "body": body})

    async def _edited(self, answer: Any) -> Any:
        for choice in answer.get("choices", []):
            holder = choice.get("message", choice)
            for name in _TEXT_FIELDS:
                if isinstance(holder.get(name), str):
                    holder[name] = await GuardedText(self._guards, self._tenant).push(holder[name], True)
        return answer

    async def _stream(self, message: Message) -> None:
        *blocks, self._rest = (self._rest + message.get("body", b"")).split(_SEPARATOR)
        out = []
        try:
            for block in blocks:
                out += [each + _SEPARATOR for each in await self._block(block)]
        except BatonError as error:
            self._on_refused(error)
            # What was let through before it, then why there is no more.
            tail = (
                b"".join(out) + b"data: " + encode_json(error_body(error)) + _SEPARATOR + _DONE + _SEPARATOR
            )
            await self._send({**message, "body": tail, "more_body": False})
            raise AnswerStopped from error
        is_over = not message.get("more_body", False)
        body = b"".join(out) + (self._rest if is_over else b"")
        if body or is_over:
            await self._send({**message, "body": body})

    async def _block(self, block: bytes) -> list[bytes]:
        """What is sent in place of one event: itself, nothing, or more."""
        if not block.startswith(b"data: ") or block == _DONE:
            return [block]
        event = json.loads(block[6:])
        if not isinstance(event, dict) or not event.get("choices"):
            return [block]  # usage, an error
        shown: list[bytes] = []
        kept = []
        for choice in event["choices"]:
            is_last = choice.get("finish_reason") is not None
            before, has_text = await self._push(event, choice, is_last)
            shown += before
            if is_last or has_text or "role" in choice.get("delta", {}):
                kept.append(choice)
        if kept:
            shown.append(b"data: " + encode_json({**event, "choices": kept}))
        return shown

    async def _push(
        self, event: dict[str, Any], choice: dict[str, Any], is_last: bool
    ) -> tuple[list[bytes], bool]:
        """Edit the choice's text in place: (events that go before it, whether any text is left in it)."""
        holder = choice.get("delta", choice)
        texts = {name: holder[name] for name in _TEXT_FIELDS if holder.get(name)}
        before = []
        if texts or is_last:
            # Text of another field came first (reasoning), and nothing of it will come any more.
            before = await self._flush(choice["index"], but=texts.keys())
        for name, text in texts.items():
            key = (choice["index"], name)
            guarded = self._texts.setdefault(key, GuardedText(self._guards, self._tenant))
            # For the text that is held: an event like the one that it came in.
            self._heads[key] = {**event, "choices": [{**choice, "finish_reason": None}]}
            holder[name] = await guarded.push(text, is_last)
        return before, any(holder[name] for name in texts)

    async def _flush(self, index: int, but: Collection[str]) -> list[bytes]:
        shown = []
        for (at, name), guarded in self._texts.items():
            if at != index or name in but:
                continue
            text = await guarded.push("", is_last=True)
            if text:
                event = self._heads[at, name]
                [choice] = event["choices"]
                filled = {"delta": {name: text}} if "delta" in choice else {name: text}
                shown.append(b"data: " + encode_json({**event, "choices": [{**choice, **filled}]}))
        return shown


def _kind_of(start: Message) -> str:
    for name, value in start["headers"]:
        if name.lower() == b"content-type":
            if value.startswith(b"text/event-stream"):
                return "stream"
            return "json" if value.startswith(b"application/json") else ""
    return ""
