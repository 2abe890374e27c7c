"""Answers that were given and may be given again: by Idempotency-Key, or because the same must come out.

    first request ─► begin ─► runs, recorded ─► whole and 200: kept until its time or its room is over
    second        ─► begin ─► the kept answer │ ConflictError while the first one runs

In memory, bounded in bytes, per ingress replica; the oldest go first. A stream is kept as the bytes that were sent.
What failed or was cut short is not kept: then the second request just runs.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Send

from contracts.errors import ConflictError, RequestError

_OVERHEAD_BYTES = 512
# Of the store's room: one answer that is larger is not kept.
_LARGEST_SHARE = 8
_MARK = b"x-baton-replay"
_FAILED = (b'data: {"error"', b"event: error", b"event: response.failed")


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A response as it was sent."""

    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    async def send(self, send: Send, mark: bytes) -> None:
        """Again, with `x-baton-replay: <mark>`."""
        kept = (each for each in self.headers if each[0] != _MARK)  # it may have been one itself
        headers = [*kept, (_MARK, mark)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


@dataclass(frozen=True, slots=True)
class _Entry:
    fingerprint: bytes
    expires_at: float
    answer: KeptAnswer

    @property
    def num_bytes(self) -> int:
        return len(self.answer.body) + _OVERHEAD_BYTES


class AnswerStore:
    """Kept answers by (tenant, key). Pure: the caller brings the time."""

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._running: dict[tuple[str, str], bytes] = {}
        self._num_bytes = 0

    @property
    def largest_bytes(self) -> int:
        return self._max_bytes // _LARGEST_SHARE

    def find(self, key: tuple[str, str], fingerprint: bytes, now: float) -> KeptAnswer | None:
        """Raises RequestError if the key was used for another request."""
        self._drop_old(now)
        entry = self._entries.get(key)
        if entry is None:
            return None
        _check_same(entry.fingerprint, fingerprint)
        return entry.answer

    def begin(self, key: tuple[str, str], fingerprint: bytes) -> None:
        """The caller runs the request and calls `end`. Raises ConflictError, RequestError as `find`."""
        if key in self._running:
            _check_same(self._running[key], fingerprint)
            raise ConflictError("expected the request with this Idempotency-Key to be over; it still runs")
        self._running[key] = fingerprint

    def end(self, key: tuple[str, str], fingerprint: bytes, answer: KeptAnswer | None, now: float) -> None:
        """`answer` None: nothing to keep."""
        self._running.pop(key, None)
        if answer is None:
            return
        self._remove(key)
        entry = _Entry(fingerprint, now + self._ttl_s, answer)
        if entry.num_bytes > self._max_bytes:
            return
        self._entries[key] = entry
        self._num_bytes += entry.num_bytes
        while self._num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def _drop_old(self, now: float) -> None:
        """All live equally long, so the oldest end first."""
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires_at > now:
                return
            self._remove(key)

    def _remove(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes


class Recorder:
    """A `Send` that also remembers what it sent, up to `max_bytes`."""

    def __init__(self, send: Send, max_bytes: int) -> None:
        self._send = send
        self._max_bytes = max_bytes
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        self._parts: list[bytes] = []
        self._size = 0
        self._is_good = False
        self._is_whole = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_good = message["status"] == 200
            # Before it is sent: whoever sends it adds this response's own (id, limits).
            self._headers = tuple(message["headers"])
        await self._send(message)
        if message["type"] == "http.response.body" and self._is_good:
            self._keep(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)

    @property
    def answer(self) -> KeptAnswer | None:
        """What was sent, if it was a success, whole and not too long."""
        if not (self._is_good and self._is_whole):
            return None
        body = b"".join(self._parts)
        return None if any(mark in body for mark in _FAILED) else KeptAnswer(self._headers, body)

    def _keep(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._max_bytes:
            self._is_good = False
            self._parts.clear()
        else:
            self._parts.append(body)


def fingerprint_of(path: str, body: dict[str, Any], beside: Sequence[Any]) -> bytes:
    """Equal for equal requests, whatever the order of their keys. `beside`: what else decides, as JSON."""
    source = f"{path}\n{json.dumps(beside)}\n{json.dumps(body, sort_keys=True)}"
    return hashlib.sha256(source.encode()).digest()


def is_deterministic(body: dict[str, Any]) -> bool:
    """Whether the same answer comes out again: the best token always, or draws from a given seed.

    Not where the answer tells how long it took.
    """
    options = body.get("stream_options")
    tells_time = body.get("include_timings") or (isinstance(options, dict) and options.get("include_timings"))
    temperature, seed = body.get("temperature"), body.get("seed")
    is_greedy = type(temperature) in (int, float) and temperature == 0
    return not tells_time and (is_greedy or type(seed) is int)


def _check_same(known: bytes, fingerprint: bytes) -> None:
    # Neither 409 nor 422: clients send a 409 again, and this one fails again.
    if known != fingerprint:
        raise RequestError(
            "Idempotency-Key: expected the request that it was first used for but got another one"
        )
