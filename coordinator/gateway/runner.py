"""Batches at work: each tenant's oldest one, line by line, beside the requests of callers who wait.

    wake │ every few seconds ─► own the folder? ─► unfinished batches ─► one task for each tenant's oldest
    task:  check all lines ─► run those without a result, each through the whole application ─► output files

A line is a request like any other (same limits of output, guards, ledger) without its tenant's quotas; the gate makes
it give way. "Not now" (503, 429) is tried again until the batch expires, a failure of ours a few times. After a
restart a batch goes on with the lines that have no result yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Scope

from coordinator.drain import Drain
from coordinator.errors_http import encode_json, error_body
from coordinator.gateway.context import CALLER, Caller
from coordinator.gateway.gate import Gate
from coordinator.gateway.lines import Line, LineRules, check_lines, read_lines, result_text
from coordinator.gateway.records import BatchRecord, LineResult
from coordinator.gateway.threads import Threads
from coordinator.metrics import Metrics

if TYPE_CHECKING:
    from coordinator.gateway.store import JobStore

logger = logging.getLogger(__name__)

# For batches that another replica took in, and for a folder whose owner has died.
_LOOK_EVERY_S = 5.0
_MAX_ATTEMPTS = 3
_RETRY_S = 1.0
_MAX_RETRY_S = 30.0
_LINES_AT_ONCE = 64
_NOT_NOW = (429, 503)
# How a batch may end before its lines do -> (code, message) of a line that has no answer.
_GIVEN_UP = {
    "expired": ("batch_expired", "the batch's completion window was over"),
    "cancelled": ("batch_cancelled", "the batch was cancelled"),
}


class Runner:
    """Started by the first `wake`; `close` leaves every batch where it is."""

    def __init__(
        self,
        app: ASGIApp,
        store: JobStore,
        threads: Threads,
        gate: Gate,
        rules: LineRules,
        drain: Drain,
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._store = store
        self._threads = threads
        self._gate = gate
        self._rules = rules
        self._drain = drain
        self._metrics = metrics
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}

    def wake(self) -> None:
        """There may be something to do."""
        self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="batch-runner")

    def cancel(self, batch_id: str) -> None:
        """The batch is `cancelling`: its lines end now, not when they are done."""
        if batch_id in self._cancelled:
            self._cancelled[batch_id].set()
        self.wake()

    async def close(self) -> None:
        tasks = [*self._running.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._start_what_can()
            except Exception:  # the disk, most likely: it may be back at the next look
                logger.exception("batches could not be looked up")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._news.wait()

    async def _start_what_can(self) -> None:
        if self._drain.is_draining or not await self._threads.run(self._store.try_own):
            return
        for batch in await self._threads.run(self._store.unfinished):
            if batch.status == "cancelling" and batch.id in self._cancelled:
                self._cancelled[batch.id].set()  # asked for at another replica
            elif batch.status == "cancelling" and batch.tenant in self._running:
                await self._threads.run(self._end_early, batch, "cancelled")  # it only waited for its turn
            if batch.tenant not in self._running:
                task = asyncio.create_task(self._work(batch), name=f"batch-{batch.id}")
                self._running[batch.tenant] = task

    async def _work(self, batch: BatchRecord) -> None:
        self._cancelled[batch.id] = asyncio.Event()
        is_whole = False
        try:
            await self._advance(batch)
            is_whole = True
        except (
            FileNotFoundError
        ):  # somebody has tidied up the folder; it must not hold up the tenant's others
            errors = json.dumps([{"code": "file_missing", "message": "the input file is gone"}])
            try:
                await self._threads.run(
                    self._store.finish, batch, "failed", errors
                )  # with the lines that are done
                is_whole = True
            except FileNotFoundError:  # nor is there a folder to write them into
                states = ["validating", "in_progress"]
                is_whole = await self._threads.run(
                    self._store.move, batch.id, states, "failed", errors=errors
                )
        except Exception:  # the task's outer edge; the batch is tried again at the next look
            logger.exception("batch %s stopped", batch.id)
        finally:
            del self._cancelled[batch.id], self._running[batch.tenant]
            if is_whole and not self._drain.is_draining:
                self._news.set()

    async def _advance(self, batch: BatchRecord) -> None:
        """From whatever state it is in to its end, or to where the drain stops it."""
        store, path = self._store, self._store.path_of(batch.input_file_id)
        rules = replace(self._rules, endpoint=batch.endpoint)
        if batch.status == "validating":
            num_lines, errors = await self._threads.run(check_lines, path, rules)
            if errors:
                await self._threads.run(
                    store.move, batch.id, ["validating"], "failed", errors=json.dumps(errors)
                )
            else:
                await self._threads.run(
                    store.move, batch.id, ["validating"], "in_progress", num_total=num_lines
                )
            batch = await self._threads.run(store.batch, None, batch.id)
        if batch.status == "in_progress":
            if not await self._run_lines(batch, rules):
                return
            await self._threads.run(store.move, batch.id, ["in_progress"], "finalizing")
            batch = await self._threads.run(store.batch, None, batch.id)
        if batch.status == "finalizing":
            if batch.num_completed + batch.num_failed < batch.num_total:
                await self._threads.run(self._end_early, batch, "expired")
            else:
                await self._threads.run(store.finish, batch, "completed")
        elif batch.status == "cancelling":
            await self._threads.run(self._end_early, batch, "cancelled")

    async def _run_lines(self, batch: BatchRecord, rules: LineRules) -> bool:
        """All lines without a result. True when there is none left, or no time, or the batch was cancelled."""
        done = await self._threads.run(self._store.done_lines, batch.id)
        lines = read_lines(self._store.path_of(batch.input_file_id), rules)
        cancelled = self._cancelled[batch.id]
        tasks: set[asyncio.Task[None]] = set()
        stop = asyncio.create_task(cancelled.wait())
        try:
            while some := await self._threads.run(_some, lines):
                for line in some:
                    if line.number in done:
                        continue
                    await self._room(tasks, stop)
                    if cancelled.is_set() or _is_late(batch):
                        return True
                    if not self._drain.is_draining:  # else only those at work go on
                        tasks.add(asyncio.create_task(self._run_line(batch, line)))
            while tasks and not cancelled.is_set():
                finished, _ = await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
                _collect(tasks, finished)
            return not self._drain.is_draining
        finally:
            for task in (stop, *tasks):
                task.cancel()
            await asyncio.gather(stop, *tasks, return_exceptions=True)

    def _end_early(self, batch: BatchRecord, status: str) -> None:
        """End the batch as `status`, with a result for each line that has none. Blocks."""
        code, message = _GIVEN_UP[status]
        error = {"code": code, "message": message}
        rules = replace(self._rules, endpoint=batch.endpoint)
        done, num_lines, late = self._store.done_lines(batch.id), 0, []
        with contextlib.suppress(
            FileNotFoundError
        ):  # somebody has tidied up the folder: its lines are not known
            lines = read_lines(self._store.path_of(batch.input_file_id), rules)
            for line in islice(lines, rules.max_lines):  # nobody may have counted them yet
                num_lines += 1
                if line.number not in done:
                    text = result_text(_line_id(), line.custom_id, None, error)
                    late.append(LineResult(line.number, True, text))
        self._store.add_late(batch.id, late, batch.num_total or num_lines)
        self._store.finish(batch, status)

    async def _room(self, tasks: set[asyncio.Task[None]], stop: asyncio.Task[Any]) -> None:
        """Returns when one more line may wait at the gate, or the batch was cancelled."""
        while len(tasks) >= self._gate.max_lines and not stop.done():
            finished, _ = await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
            _collect(tasks, finished)

    async def _run_line(self, batch: BatchRecord, line: Line) -> None:
        """Until it has a result; without one if the batch ran out of time or the server stops."""
        line_id = _line_id()
        if line.fault is not None:
            await self._keep(batch, line, line_id, line.fault.status, encode_json(error_body(line.fault)))
            return
        num_failures = 0
        while not self._drain.is_draining:
            async with self._gate.line():
                status, headers, body = await self._call(batch, line, line_id)
            if status in _NOT_NOW:
                if _is_late(batch):
                    return
                await asyncio.sleep(_pause_s(headers))
                continue
            num_failures += status >= 500
            if status >= 500 and num_failures < _MAX_ATTEMPTS:
                continue
            await self._keep(batch, line, line_id, status, body)
            return

    async def _keep(self, batch: BatchRecord, line: Line, line_id: str, status: int, body: bytes) -> None:
        response = {"status_code": status, "request_id": line_id, "body": json.loads(body)}
        is_error = status >= 400
        result = LineResult(line.number, is_error, result_text(line_id, line.custom_id, response))
        now = await self._threads.run_through(self._store.add_result, batch.id, result)
        self._metrics.batch_line("failed" if is_error else "completed")
        if now == "cancelling":
            self._cancelled[batch.id].set()

    async def _call(self, batch: BatchRecord, line: Line, line_id: str) -> tuple[int, dict[str, str], bytes]:
        caller = Caller(batch.tenant, batch.key_id, is_batch=True)
        body = json.dumps(line.body, ensure_ascii=False).encode()
        return await call(self._app, batch.endpoint, body, line_id, caller)


async def call(
    app: ASGIApp, path: str, body: bytes, request_id: str, caller: Caller
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a POST to `app`, inside the process."""
    headers = [
        (b"host", b"batch"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        CALLER: caller,
    }
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, found, parts = 500, {}, []

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()  # a client that never leaves; whoever waits here is cancelled
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, found
        if message["type"] == "http.response.start":
            status = message["status"]
            found = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, found, b"".join(parts)


def _some(lines: Iterator[Line]) -> list[Line]:
    return list(islice(lines, _LINES_AT_ONCE))


def _collect(tasks: set[asyncio.Task[None]], finished: set[asyncio.Task[Any]]) -> None:
    """Raises what a line's own code raised: the batch stops with it."""
    for task in finished & tasks:
        tasks.discard(task)
        task.result()


def _line_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def _is_late(batch: BatchRecord) -> bool:
    return time.time() >= batch.expires_at


def _pause_s(headers: dict[str, str]) -> float:
    value = headers.get("retry-after", "")
    return min(float(value), _MAX_RETRY_S) if value.isdecimal() else _RETRY_S
