"""The JSON of `/v1/responses`: an object with output items, or the events that build one.

    created ─► in_progress ─► per item: output_item.added ─► its parts ─► output_item.done ─► completed │ incomplete
                                                                                             └► failed

Every event has a line `event:` that equals its type, and a `sequence_number` that grows by one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from contracts.errors import BatonError
from coordinator.calls import Argued, Called, Part, Said, Thought
from coordinator.errors_http import encode_json, error_body
from coordinator.forms import Json
from coordinator.job import Job, OutputPlan
from coordinator.logprobs import TokenNames
from coordinator.outputs import End, Piece
from coordinator.reading import MessageReader
from engine.text.tokenizer import TextModel

_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_CONTENT = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseWriter:
    """One answer, streamed or whole."""

    def __init__(self, job: Job, text: TextModel) -> None:
        self._job = job
        self._names = TokenNames(job, text) if job.params.num_logprobs is not None else None
        self._reader = MessageReader(job.reading)
        self._output: list[Json] = []
        self._is_open = False
        self._number = 0
        self._end: End | None = None

    def opening(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def events(self, pieces: dict[OutputPlan, Piece]) -> Iterator[bytes]:
        for piece in pieces.values():
            if self._names is not None and piece.tokens:
                # There is nothing but a message: check_logprobs.
                listed = [self._names.entry(token) for token in piece.tokens]
                yield from self._add("message", piece.text, listed)
            else:
                yield from self._parts(self._reader.push(piece.text))
            if piece.end is not None:
                self._end = piece.end
                yield from self._parts(self._reader.flush())

    def closing(self) -> Iterator[bytes]:
        assert self._end is not None
        if not self._output:
            yield from self._begin("message")
        yield from self._finish(self._status)
        yield self._event(self._status, response=self._response(self._status))

    def failed(self, error: BatonError) -> bytes:
        told = error_body(error)["error"]
        response = self._response("failed")
        return self._event("failed", response={**response, "error": _picked(told, "code", "message")})

    def whole(self, gathered: dict[OutputPlan, Piece]) -> Json:
        for events in (self.events(gathered), self.closing()):
            for _ in events:
                pass  # building the events builds the output
        return self._response(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._end is not None and self._end.reason == "length" else "completed"

    def _parts(self, parts: Iterable[Part]) -> Iterator[bytes]:
        for part in parts:
            match part:
                case Said(text):
                    yield from self._add("message", text)
                case Thought(text):
                    yield from self._add("reasoning", text)
                case Called(_, call_id, name):
                    yield from self._finish("completed")
                    call = {"call_id": call_id, "name": name, "arguments": ""}
                    yield from self._begin("function_call", call)
                case Argued(_, text):
                    self._output[-1]["arguments"] += text
                    yield self._item_event("function_call_arguments.delta", delta=text)

    def _add(self, kind: str, text: str, logprobs: Sequence[Json] = ()) -> Iterator[bytes]:
        if not self._is_open or self._output[-1]["type"] != kind:
            yield from self._finish("completed")
            yield from self._begin(kind)
        part = self._output[-1]["content"][0]
        part["text"] += text
        extra: Json = {}
        if kind == "message":
            part["logprobs"] += logprobs
            extra["logprobs"] = _briefly(logprobs)
        yield self._item_event(f"{_CONTENT[kind]}.delta", content_index=0, delta=text, **extra)

    def _begin(self, kind: str, fields: Json | None = None) -> Iterator[bytes]:
        item: Json = {
            "id": f"{_PREFIXES[kind]}{secrets.token_hex(16)}",
            "type": kind,
            "status": "in_progress",
        }
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        item |= fields or {}
        self._output.append(item)
        self._is_open = True
        yield self._event("output_item.added", output_index=len(self._output) - 1, item=item)
        if kind in _CONTENT:
            part: Json = {"type": _CONTENT[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            yield self._item_event("content_part.added", content_index=0, part=part)
            item["content"] = [part]

    def _finish(self, status: str) -> Iterator[bytes]:
        """Close the item that is open."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = _picked(item, "arguments", "name")
            yield self._item_event("function_call_arguments.done", **done)
        else:
            (part,) = item["content"]
            extra: Json = {"logprobs": _briefly(part["logprobs"])} if item["type"] == "message" else {}
            yield self._item_event(f"{part['type']}.done", content_index=0, text=part["text"], **extra)
            yield self._item_event("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        index = len(self._output) - 1
        return self._event(kind, item_id=self._output[index]["id"], output_index=index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        content = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {name}\ndata: ".encode() + encode_json(content) + b"\n\n"

    def _response(self, status: str) -> Json:
        is_cut = status == "incomplete"
        return {
            "id": self._job.completion_id,
            "object": "response",
            "created_at": self._job.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._job.model,
            **self._job.mirror,
            "output": self._output if status != "in_progress" else [],
            "usage": self._usage() if self._end is not None and status != "in_progress" else None,
        }

    def _usage(self) -> Json:
        assert self._end is not None
        num_input, num_output = self._job.num_prompt_tokens, self._end.num_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._end.num_cached_tokens or 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": self._end.num_thought_tokens},
            "total_tokens": num_input + num_output,
        }


def _picked(fields: Json, *names: str) -> Json:
    return {name: fields[name] for name in names}


def _briefly(logprobs: Sequence[Json]) -> list[Json]:
    """As events of text list them: without the bytes."""
    return [
        {
            **_picked(entry, "token", "logprob"),
            "top_logprobs": [_picked(other, "token", "logprob") for other in entry["top_logprobs"]],
        }
        for entry in logprobs
    ]
