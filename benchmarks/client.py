"""One streaming request to an OpenAI endpoint, stamped chunk by chunk.

    Call ─► Client.stream(trail) ─► Trail.record() ─► Record

A Trail is filled while the answer comes, so whatever ends the request (an error, the time-out, Ctrl-C) leaves a record
of what had come until then. Each read from the socket is stamped once, before it is parsed: the events of one read
arrived together.

aiohttp on uvloop takes about 9,000 streamed tokens per second of client processor time with one token a read, httpx
about 4,000 (AVX2 core, tests/benchmarks/fake_server.py at 5 ms a token).
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from benchmarks.records import STAGES, Outcome, Record

Endpoint = Literal["chat", "completions"]
Message = dict[str, str]

_PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_MAX_ERROR = 300
_TIMINGS = "include_timings"
_MAX_STAGE_MS = 1e12


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to speak to it. `url` with or without a trailing /v1.

    `is_plain`: only fields of OpenAI's own. Otherwise ignore_eos fixes the length of answers, special tokens are shown
    (one without text would look like a stall), each chunk is asked for its token count and the usage for stage times;
    servers that do not know these fields ignore them.
    """

    url: str
    model: str = ""
    endpoint: Endpoint = "chat"
    api_key: str | None = None
    timeout_s: float = 600.0
    is_plain: bool = False

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent. `prompt`: text, or the messages of a chat. `input_tokens` None: not known beforehand. `more`: other
    fields of the body.
    """

    request_id: str
    prompt: str | list[Message]
    output_tokens: int
    input_tokens: int | None = None
    label: str = ""
    turn: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)

    def body(self, target: Target, wants_timings: bool = False) -> dict[str, Any]:
        """Raises ValueError for messages to the completions endpoint."""
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.endpoint == "chat":
            is_text = isinstance(self.prompt, str)
            body["messages"] = [{"role": "user", "content": self.prompt}] if is_text else self.prompt
        elif isinstance(self.prompt, str):
            body["prompt"] = self.prompt
        else:
            raise ValueError("conversations: expected endpoint=chat but got completions")
        if not target.is_plain:
            body["stream_options"]["continuous_usage_stats"] = True
            body |= {"ignore_eos": True, "skip_special_tokens": False}
        if wants_timings:
            body["stream_options"][_TIMINGS] = True
        return {**body, **self.more}


@dataclass(frozen=True, slots=True)
class RunClock:
    """Seconds since the run's start."""

    zero: float = field(default_factory=time.monotonic)

    def now_s(self) -> float:
        return time.monotonic() - self.zero


class EventReader:
    """Bytes of a text/event-stream to the payloads of its events; keeps what is not whole yet."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        payloads = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data.clear()
        return payloads


class Trail:
    """The state of one request, from its schedule to its record."""

    def __init__(self, call: Call, scheduled_s: float, is_length_fixed: bool) -> None:
        self.call = call
        self.scheduled_s = scheduled_s
        self.is_length_fixed = is_length_fixed
        self.sent_s: float | None = None
        self.end_s: float | None = None
        self.status: int | None = None
        self.outcome: Outcome = "cancelled"  # until something better is known
        self.error = ""
        self.texts: list[str] = []
        self._times_s: list[float] = []
        self._counts: list[int] = []
        self._num_counted = 0
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self.num_ends = 0  # finish reasons and error events
        self.is_done = False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_finished(self) -> bool:
        return self._finish_reason is not None

    def fail(self, message: str, outcome: Outcome = "error") -> None:
        self.outcome, self.error = outcome, message[:_MAX_ERROR]

    def take(self, payload: bytes, now_s: float) -> None:
        """One event. Raises ValueError for what is no JSON object, or an error event."""
        if payload == b"[DONE]":
            self.is_done = True
            return
        chunk = json.loads(payload)
        if not isinstance(chunk, dict):
            raise ValueError(f"expected an object in the stream but got {str(chunk)[:80]}")
        if chunk.get("error"):
            self.num_ends += 1
            raise ValueError(_error_text(chunk))
        usage = chunk.get("usage")
        if usage:
            self._usage = usage
        choices = chunk.get("choices")
        if not choices:
            return
        choice = choices[0]
        text = choice.get("text") or _delta_text(choice.get("delta"))
        if text:
            self._count(text, now_s, usage)
        if choice.get("finish_reason"):
            self._finish_reason = choice["finish_reason"]
            self.num_ends += 1

    def _count(self, text: str, now_s: float, usage: dict[str, Any] | None) -> None:
        """A chunk with text. Its usage, if any, counts tokens so far; else it is taken for one token."""
        so_far = usage.get("completion_tokens") if usage else None
        num_tokens = self._num_counted + 1 if so_far is None else max(so_far, self._num_counted)
        self.texts.append(text)
        self._times_s.append(now_s)
        # A chunk that brings no new token (text held back, then shown) stays a chunk of none.
        self._counts.append(num_tokens - self._num_counted)
        self._num_counted = num_tokens

    def record(self) -> Record:
        details = self._usage.get("prompt_tokens_details") or {}
        return Record(
            request_id=self.call.request_id,
            scheduled_s=self.scheduled_s,
            sent_s=self.sent_s,
            end_s=self.end_s,
            chunk_times_s=tuple(self._times_s),
            chunk_tokens=tuple(self._counts),
            outcome=self.outcome,
            status=self.status,
            error=self.error,
            finish_reason=self._finish_reason,
            asked_input_tokens=self.call.input_tokens,
            asked_output_tokens=self.call.output_tokens,
            is_length_fixed=self.is_length_fixed,
            prompt_tokens=self._usage.get("prompt_tokens"),
            completion_tokens=self._usage.get("completion_tokens"),
            cached_tokens=details.get("cached_tokens"),
            stages=_stages(self._usage.get("timings_ms")),
            label=self.call.label,
            turn=self.call.turn,
        )


class Client:
    """Connections to one target. An async context; as many connections as there are requests in flight."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._session: aiohttp.ClientSession | None = None
        # Plans repeat their ids, runs may overlap, and some servers take the header for the request's only name.
        self._run_id = uuid.uuid4().hex[:8]
        self._wants_timings = not target.is_plain  # until the server refuses the field

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self.target.api_key}"} if self.target.api_key else {}
        self._session = aiohttp.ClientSession(
            self.target.base_url,
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),  # the time-out is the request's, in `stream`
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def stream(self, trail: Trail, clock: RunClock) -> None:
        """Sends the call and fills the trail. Raises nothing but CancelledError: a failure is the record's content."""
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._exchange(trail, clock)
        except TimeoutError:
            trail.fail(f"no end after {self.target.timeout_s:g} s", "timeout")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            trail.fail(f"{type(error).__name__}: {error}")
        finally:
            trail.end_s = clock.now_s()

    async def _exchange(self, trail: Trail, clock: RunClock) -> None:
        wants_timings = self._wants_timings
        refusal = await self._ask(trail, clock, wants_timings)
        if wants_timings and trail.status in (400, 422) and _TIMINGS in (refusal or ""):
            # Asked without from now on. The lost round trip falls on a run's first requests, which are its warm-up.
            self._wants_timings = False
            refusal = await self._ask(trail, clock, False)
        if refusal is not None:
            trail.fail(f"HTTP {trail.status}: {refusal[:_MAX_ERROR]}")
        elif trail.is_finished:
            trail.outcome = "ok"
        else:
            trail.fail("expected a finish_reason but the stream just ended")

    async def _ask(self, trail: Trail, clock: RunClock, wants_timings: bool) -> str | None:
        """None once the stream is read into the trail, or the body of a refusal."""
        assert self._session is not None, "the client is an async context"
        body = trail.call.body(self.target, wants_timings)
        headers = {"X-Request-Id": f"{self._run_id}-{trail.call.request_id}"}
        trail.sent_s = clock.now_s()
        async with self._session.post(_PATHS[self.target.endpoint], json=body, headers=headers) as answer:
            trail.status = answer.status
            if answer.status != 200:
                return await answer.text()
            reader = EventReader()
            async for data in answer.content.iter_any():
                now_s = clock.now_s()
                for payload in reader.feed(data):
                    trail.take(payload, now_s)
                if trail.is_done:
                    break
        return None

    async def post(self, path: str, body: dict[str, Any], timeout_s: float = 30.0) -> tuple[int, Any]:
        """(status, JSON or None). Raises aiohttp.ClientError or TimeoutError if nobody answers."""
        assert self._session is not None, "the client is an async context"
        async with asyncio.timeout(timeout_s), self._session.post(path, json=body) as answer:
            return answer.status, _json_or_none(await answer.read())

    async def get(self, path: str, timeout_s: float = 30.0) -> tuple[int, bytes]:
        """(status, body). Raises aiohttp.ClientError or TimeoutError if nobody answers."""
        assert self._session is not None, "the client is an async context"
        async with asyncio.timeout(timeout_s), self._session.get(path) as answer:
            return answer.status, await answer.read()


async def named_model(target: Target) -> str:
    """The target's model, or else the first one served. Asks in any case, so that a run does not start towards nobody.

    Raises aiohttp.ClientError or TimeoutError if nobody answers, ValueError if no model is named anywhere.
    """
    async with Client(target) as client:
        status, content = await client.get("/v1/models")
    if target.model:
        return target.model
    try:
        listed: Any = json.loads(content)
        return str(listed["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"expected a list of models from /v1/models but got HTTP {status}") from error


def _delta_text(delta: dict[str, Any] | None) -> str:
    """Reasoning is output too: its first token is the first token."""
    if not delta:
        return ""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _stages(timings_ms: object) -> dict[str, float] | None:
    """What is a duration of a known stage, in seconds; None for no such account. Servers may send anything here."""
    if not isinstance(timings_ms, dict):
        return None
    known = {name: timings_ms.get(name) for name in STAGES}
    return {
        name: value / 1000.0
        for name, value in known.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MAX_STAGE_MS
    } or None


def _error_text(chunk: dict[str, Any]) -> str:
    error = chunk["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
