"""An answer on its way to a client, streamed or whole, and the client's right to leave at any time.

    Answer ─► peek ───────► BatonError: a real HTTP status
               │  first piece, or peek_timeout_s of silence
               ▼
              200 ─► role chunks ─► chunks │ `: keep-alive` ─► [usage] ─► [DONE]
                          └► error event, [DONE]; no finish_reason for what is broken

The client's leaving is watched on `receive()` from the first moment on, not found out at the next write:
during a long prefill nothing is written. Leaving closes every backend stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from contracts.config import CoordinatorConfig
from contracts.errors import BatonError
from coordinator.alarm import Patience
from coordinator.drain import Drain
from coordinator.errors_http import encode_json, encode_text, error_body, json_response, log_fault
from coordinator.forms import Envelope, Form, Json, make_form, spread
from coordinator.ingress import bodies_send
from coordinator.job import Job, OutputPlan
from coordinator.logprobs import best_of
from coordinator.metrics import Metrics
from coordinator.outputs import End, Outputs, Piece
from coordinator.response_form import ResponseWriter
from engine.text.tokenizer import TextModel

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """A response that generates while it is sent. Raises BatonError only before its first byte."""

    def __init__(
        self,
        job: Job,
        text: TextModel,
        outputs: Outputs,
        metrics: Metrics,
        config: CoordinatorConfig,
        drain: Drain,
    ) -> None:
        super().__init__()
        self._job = job
        self._text = text
        self._outputs = outputs
        self._metrics = metrics
        self._config = config
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        patience, patience_s = Patience(), self._config.slow_reader_timeout_s

        def watched(send: Send) -> Send:
            async def write(message: Message) -> None:
                patience.alarm.set(time.monotonic() + patience_s)
                await send(message)
                patience.alarm.off()

            return write

        self._metrics.running(self._job.endpoint, +1)
        try:
            async with patience:
                with self._drain.opened(self._outputs):
                    async with self._outputs:
                        is_stream = self._job.params.stream
                        if is_stream:
                            work = self._stream(watched(send), watched(bodies_send(scope, send)))
                        else:
                            work = self._whole(scope, receive, watched(send))
                        await unless_left(work, receive)
        except TimeoutError:
            if not patience.is_over:
                raise
            self._metrics.error(self._job.endpoint, "slow_reader")
            logger.info("request %s: the client stopped reading", self._job.completion_id)
        finally:
            self._metrics.running(self._job.endpoint, -1)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        gathered: dict[OutputPlan, Piece] = {}
        while (pieces := await self._outputs.take(None)) is not None:
            for plan, piece in pieces.items():
                gathered.setdefault(plan, Piece()).append(piece)
        await json_response(self._writer().whole(gathered))(scope, receive, send)

    def _writer(self) -> Writer:
        if self._job.endpoint == "responses":
            return ResponseWriter(self._job, self._text)
        return CompletionWriter(self._job, self._text)

    async def _stream(self, send: Send, send_body: Send) -> None:
        """`send_body`: for bodies with more to come."""
        pieces = await self._outputs.take(self._config.peek_timeout_s)
        self._outputs.raise_if_failed()  # until here an error has a status
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
        writer = self._writer()
        pending = b"".join(writer.opening())
        try:
            while pieces is not None:
                events = b"".join(writer.events(pieces)) if pieces else _KEEP_ALIVE
                if pending or events:
                    await send_body(
                        {"type": "http.response.body", "body": pending + events, "more_body": True}
                    )
                pending = b""
                pieces = await self._outputs.take(self._config.keep_alive_s)
            tail = b"".join(writer.closing())
        except BatonError as error:
            log_fault(error, self._job.completion_id)
            self._metrics.error(self._job.endpoint, error.code)
            tail = writer.failed(error)
        await send({"type": "http.response.body", "body": pending + tail, "more_body": False})


class Writer(Protocol):
    """An endpoint's form of one answer: whole, or as server-sent events."""

    def opening(self) -> Iterator[bytes]: ...

    def events(self, pieces: dict[OutputPlan, Piece]) -> Iterator[bytes]: ...

    def closing(self) -> Iterator[bytes]: ...

    def failed(self, error: BatonError) -> bytes:
        """The end of a stream that broke."""

    def whole(self, gathered: dict[OutputPlan, Piece]) -> Json:
        """Of complete outputs."""


class CompletionWriter:
    """Chats and completions: events in an order that clients were measured to need."""

    def __init__(self, job: Job, text: TextModel) -> None:
        self._job = job
        self._form: Form = make_form(job, text)
        self._envelope = Envelope(job, text)
        self._around = self._envelope.around(self._form)
        self._ends: dict[int, End] = {}

    def opening(self) -> Iterator[bytes]:
        """Role chunks of all choices, by index, before any text: a client may index a list with them."""
        for index in range(self._job.num_choices):
            for choice in self._form.opening(index):
                yield self._envelope.chunk(choice, 0)

    def events(self, pieces: dict[OutputPlan, Piece]) -> Iterator[bytes]:
        for index, piece in spread(pieces):
            if self._around:
                if text := piece.text:
                    before, behind = self._around[index]
                    yield before + encode_text(text) + behind
            else:
                for choice in self._form.deltas(index, piece):
                    yield self._envelope.chunk(choice, piece.num_tokens)
            if piece.end is not None:
                self._ends[index] = piece.end
                for choice in self._form.closing(index, piece.end):
                    yield self._envelope.chunk(choice, piece.end.num_tokens)

    def closing(self) -> Iterator[bytes]:
        if self._job.params.includes_usage:
            yield event(self._envelope.usage_chunk(self._ends))
        yield _DONE

    def failed(self, error: BatonError) -> bytes:
        return event(error_body(error)) + _DONE

    def whole(self, gathered: dict[OutputPlan, Piece]) -> Json:
        pieces = dict(spread(gathered))
        for index, piece in pieces.items():
            assert piece.end is not None, "an output ended without its end"
            self._ends[index] = piece.end
        params, kept = self._job.params, list(pieces)
        if params.num_outputs > params.n:
            kept = best_of({i: piece.tokens for i, piece in pieces.items()}, params.num_outputs, params.n)
        choices = [
            {**self._form.whole(index, pieces[index], self._ends[index]), "index": number}
            for number, index in enumerate(kept)
        ]
        return self._envelope.whole(choices, self._ends) | self._form.beside()


def event(content: object) -> bytes:
    return b"data: " + encode_json(content) + b"\n\n"


async def unless_left(work: Awaitable[None], receive: Receive) -> bool:
    """Runs `work` to its end, or cancels it as soon as the client is gone. False if it was cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_client_left(receive), name="disconnect-watcher")
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if task.cancelled():
        return False
    task.result()
    return True


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
