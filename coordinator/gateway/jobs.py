"""`/v1/files` and `/v1/batches`: OpenAI's forms over the store, and the runner that works on it.

Nothing is on disk before the first of these requests; at start, what an earlier process left is taken up.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from contracts.config import BatonConfig
from contracts.errors import PayloadTooLarge, PermissionDenied, RequestError, UnsupportedError
from coordinator.body import read_json
from coordinator.drain import Drain
from coordinator.errors_http import json_response
from coordinator.fields import read_model, refuse, refuse_misspelt
from coordinator.gateway.context import CALLER, Caller
from coordinator.gateway.gate import Gate
from coordinator.gateway.lines import LineRules
from coordinator.gateway.records import COMPLETION_WINDOW_S, BatchRecord, FileRecord, new_id
from coordinator.gateway.runner import Runner
from coordinator.gateway.threads import Threads
from coordinator.metrics import Metrics
from coordinator.schema import Metadata

if TYPE_CHECKING:
    from coordinator.gateway.store import JobStore

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
ENDPOINTS: tuple[str, ...] = get_args(Endpoint)
_UPLOAD_TIMEOUT_S = 600.0
_CHUNK_BYTES = 1 << 16
_MULTIPART_BYTES = 1 << 16  # what surrounds the file in an upload
_MAX_LIST = 100

Result = TypeVar("Result")
Record = TypeVar("Record", FileRecord, BatchRecord)


class Jobs:
    """The routes, with the store behind them, opened when first needed."""

    def __init__(self, config: BatonConfig, folder: Path, gate: Gate, drain: Drain, metrics: Metrics) -> None:
        self._config = config
        self._folder = folder
        self._gate = gate
        self._drain = drain
        self._metrics = metrics
        self._threads = Threads("jobs")
        self._opening: asyncio.Task[JobStore] | None = None
        self._runner: Runner | None = None

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.list_files, methods=["GET"]),
            Route("/v1/files/{file_id}", self.show_file, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete_file, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
            Route("/v1/batches", self.create_batch, methods=["POST"]),
            Route("/v1/batches", self.list_batches, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self.show_batch, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel_batch, methods=["POST"]),
        ]

    async def resume(self, app: ASGIApp) -> None:
        """At start: go on with the batches that are there."""
        if (self._folder / "jobs.db").exists():
            await self._open(app)

    async def close(self) -> None:
        """Returns when nothing is written any more, also by requests that were cancelled."""
        opened = await asyncio.gather(*([self._opening] if self._opening else []), return_exceptions=True)
        if self._runner is not None:
            await self._runner.close()
        await self._threads.close()
        for store in opened:
            if not isinstance(store, BaseException):
                store.close()

    async def upload(self, request: Request) -> Response:
        _check_origin(request, self._config.gateway.cors_origins)
        store = await self._ready(request)
        settings = self._config.gateway
        bounded = Request(request.scope, _bounded(request, settings.max_file_bytes + _MULTIPART_BYTES))
        try:
            async with asyncio.timeout(_UPLOAD_TIMEOUT_S), bounded.form(max_files=1, max_fields=8) as form:
                purpose, file = form.get("purpose"), form.get("file")
                if purpose != "batch":
                    raise UnsupportedError("purpose: only 'batch' is supported", param="purpose")
                if any(name.startswith("expires_after") for name in form):
                    raise UnsupportedError("expires_after: not supported", param="expires_after")
                if not isinstance(file, UploadFile):
                    raise RequestError("file: expected a file (multipart/form-data)", param="file")
                if (file.size or 0) > settings.max_file_bytes:
                    raise PayloadTooLarge(
                        f"file: expected at most {settings.max_file_bytes} bytes", param="file"
                    )
                name, source = _clean(file.filename), file.file
                record = await self._threads.run(
                    store.add_file, _tenant(request), name, source, settings.max_files_bytes
                )
        except TimeoutError as error:
            raise RequestError(f"expected the whole file within {_UPLOAD_TIMEOUT_S:g} s") from error
        return json_response(record.as_json())

    async def list_files(self, request: Request) -> Response:
        store = await self._ready(request)
        limit, after = _page(request)
        order, purpose = request.query_params.get("order", "desc"), request.query_params.get("purpose")
        if order not in ("asc", "desc"):
            raise RequestError(f"order: expected asc or desc but got {order[:20]!r}", param="order")
        work = partial(store.files, limit=limit, after=after, purpose=purpose, is_rising=order == "asc")
        return _listed(await self._threads.run(work, _tenant(request)), limit)

    async def show_file(self, request: Request) -> Response:
        return json_response((await self._file(request)).as_json())

    async def delete_file(self, request: Request) -> Response:
        store, file_id = await self._ready(request), request.path_params["file_id"]
        await self._threads.run(store.delete_file, _tenant(request), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        record = await self._file(request)
        path = (await self._ready(request)).path_of(record.id)
        headers = {"content-length": str(record.num_bytes)}
        return StreamingResponse(_chunks(path), headers=headers, media_type="application/octet-stream")

    async def create_batch(self, request: Request) -> Response:
        self._drain.check()
        store, caller = await self._ready(request), cast(Caller, request.scope[CALLER])
        asked = _read_batch(await read_json(request, self._config.server.max_body_bytes))
        source = await self._threads.run(store.file, caller.tenant, asked.input_file_id)
        if source.purpose != "batch":
            raise RequestError("input_file_id: expected a file of purpose 'batch'", param="input_file_id")
        now = int(time.time())
        batch = BatchRecord(
            id=new_id("batch_"),
            tenant=caller.tenant,
            key_id=caller.key_id,
            endpoint=asked.endpoint,
            input_file_id=source.id,
            metadata=json.dumps(asked.metadata),
            status="validating",
            created_at=now,
            expires_at=now + COMPLETION_WINDOW_S,
        )
        await self._threads.run(store.add_batch, batch)
        self._wake()
        return json_response(batch.as_json())

    async def list_batches(self, request: Request) -> Response:
        store = await self._ready(request)
        limit, after = _page(request)
        return _listed(await self._threads.run(store.batches, _tenant(request), limit, after), limit)

    async def show_batch(self, request: Request) -> Response:
        store = await self._ready(request)
        found = await self._threads.run(store.batch, _tenant(request), request.path_params["batch_id"])
        return json_response(found.as_json())

    async def cancel_batch(self, request: Request) -> Response:
        """A batch that is over, or being written out, is answered with 400."""
        store, batch_id = await self._ready(request), request.path_params["batch_id"]
        batch = await self._threads.run(store.batch, _tenant(request), batch_id)
        is_moved = await self._threads.run(store.move, batch.id, ["validating", "in_progress"], "cancelling")
        batch = await self._threads.run(store.batch, batch.tenant, batch.id)
        if not is_moved and batch.status not in ("cancelling", "cancelled"):
            raise RequestError(f"expected a batch that is not over but this one is {batch.status}")
        if self._runner is not None:
            self._runner.cancel(batch.id)
        return json_response(batch.as_json())

    async def _file(self, request: Request) -> FileRecord:
        store = await self._ready(request)
        return await self._threads.run(store.file, _tenant(request), request.path_params["file_id"])

    async def _ready(self, request: Request) -> JobStore:
        return await self._open(request.app)

    async def _open(self, app: ASGIApp) -> JobStore:
        """The store, opened once, whatever becomes of the request that needed it first."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._start(app), name="open-jobs")
        return await asyncio.shield(self._opening)

    async def _start(self, app: ASGIApp) -> JobStore:
        store = await self._threads.run(_open_store, self._folder)
        gateway, server = self._config.gateway, self._config.server
        rules = LineRules("", gateway.batch_max_requests, server.max_body_bytes)
        self._runner = Runner(app, store, self._threads, self._gate, rules, self._drain, self._metrics)
        self._runner.wake()
        return store

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()


def _open_store(folder: Path) -> JobStore:
    """NOTE: the import is here, not above: it brings SQLAlchemy, which a server without batches need not load."""
    from coordinator.gateway.store import JobStore

    return JobStore(folder)


def _tenant(request: Request) -> str:
    return cast(Caller, request.scope[CALLER]).tenant


def _check_origin(request: Request, allowed: list[str]) -> None:
    """A form may be sent by any web page, without being asked for leave: the browser only says whose page it was."""
    origin = request.headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    if origin.partition("://")[2] != request.headers.get("host"):
        raise PermissionDenied("expected an upload from a program, or from a page of gateway.cors_origins")


def _bounded(request: Request, max_bytes: int) -> Callable[[], Any]:
    """The request's `receive`, up to `max_bytes` of body. Raises PayloadTooLarge."""
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > max_bytes:
            raise PayloadTooLarge(f"expected an upload of at most {max_bytes} bytes")
        return message

    return receive


def _clean(filename: str | None) -> str:
    """For showing only; no path is ever made of it."""
    name = (filename or "upload.jsonl").replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in name if c.isprintable())[:255] or "upload.jsonl"


class BatchParams(BaseModel):
    """`POST /v1/batches`."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


def _read_batch(body: dict[str, Any]) -> BatchParams:
    """Raises RequestError naming the field that is wrong."""
    refuse(body, {"output_expires_after": ()}, "not supported")
    refuse_misspelt(body, BatchParams.model_fields, {*BatchParams.model_fields, "output_expires_after"})
    return read_model(BatchParams, body)


def _page(request: Request) -> tuple[int, str | None]:
    text = request.query_params.get("limit", "20")
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) > 0):
        raise RequestError(f"limit: expected a number above 0 but got {text[:20]!r}", param="limit")
    return min(int(text), _MAX_LIST), request.query_params.get("after") or None


def _listed(records: list[Record], limit: int) -> Response:
    data = [record.as_json() for record in records[:limit]]
    return json_response(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(records) > limit,
        }
    )


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk
