"""Models that other servers serve, under this one's names, keys, limits and guards; and who stands in for whom.

    GatewayScope ─► Upstreams ─► routes            POST /v1/chat/completions, /v1/completions, /v1/responses
                      │ the body's model ─► alias ─► chain: the model, then its fallbacks
                      ├─ ours: the routes             503 and more in the chain ─► next
                      └─ another server's: over HTTP   no connection, 429, 502, 503, 504 and more in the chain ─► next

Only what has not begun is tried elsewhere: from its first byte on an answer is its server's, and if that breaks, the
client is told. The other server may be anything with OpenAI's endpoints, another Baton most likely. What it used comes
from the `usage` of its answer, so a stream is asked for it and the client is spared it if it did not ask. A request's
class is checked here and told there; promises are the other server's to make, so their headers go along as they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contracts.config import BatonConfig
from contracts.config_gateway import GatewayConfig, Upstream
from contracts.errors import (
    BatonError,
    ConfigError,
    DeadlineError,
    Fault,
    OverloadedError,
    RequestError,
    WorkerLostError,
)
from contracts.service import ServiceClass
from coordinator.answer import unless_left
from coordinator.body import read_json
from coordinator.drain import Drain
from coordinator.errors_http import encode_json, error_body
from coordinator.gateway.bodies import encode, replay, route_path
from coordinator.gateway.context import CURRENT, RequestContext
from coordinator.ingress import take_bodies
from coordinator.promises import CLASS_HEADER, ITL_HEADER, TTFT_HEADER, known_tier

# Endpoint: the field that bounds an output, and what a missing one means (None: what the context holds).
_ENDPOINTS: dict[str, tuple[str, int | None]] = {
    "/v1/chat/completions": ("max_completion_tokens", None),
    "/v1/completions": ("max_tokens", 16),
    "/v1/responses": ("max_output_tokens", None),
}
_NOT_NOW = (429, 502, 503, 504)
_CONNECT_TIMEOUT_S = 5.0
_MAX_WHOLE_BYTES = 64 << 20
_PASSED = ("content-type", "cache-control", "x-accel-buffering", "retry-after", "x-should-retry")
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class SlowReaderError(Exception):
    """The client took no byte for slow_reader_timeout_s. Nobody is left to be told."""


class Upstreams:
    """The middleware, inside of GatewayScope."""

    def __init__(
        self, app: ASGIApp, config: BatonConfig, model: str, keys: dict[str, str | None], drain: Drain
    ) -> None:
        self._app = app
        self._settings = config.gateway
        self._coordinator = config.coordinator
        self._max_body_bytes = config.server.max_body_bytes
        self._model = model
        self._drain = drain
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = CURRENT.get()
        path = route_path(scope)
        if scope["type"] != "http" or context is None or scope["method"] != "POST" or path not in _ENDPOINTS:
            await self._app(scope, receive, send)
            return
        body = await read_json(Request(scope, receive), self._max_body_bytes)
        again = replay(encode(body), receive)
        chain = self._chain(body.get("model"))
        if chain == [self._model]:
            await self._app(scope, again, send)
            return
        service_class = context.class_of(known_tier(body.get("service_tier")))
        take_bodies(scope)  # a gate lets those of one answer pass alone
        for name in chain:
            gate = _Gate(send, name, passes_all=name == chain[-1])
            context.answered_by = name
            if name == self._model:
                ours = replay(encode(body | {"model": name}), again)
                await self._app(scope, ours, gate)
            else:
                exchange = _Exchange(
                    self._settings.upstreams[name],
                    name,
                    path,
                    self._keys[name],
                    context,
                    service_class,
                    self._coordinator.slow_reader_timeout_s,
                )
                with self._drain.opened(exchange), suppress(SlowReaderError):  # nobody is left to be told
                    await unless_left(exchange.run(body, self._deadline(context), gate), again)
            if not gate.is_shut:
                return
            context.forget()

    def _chain(self, asked: Any) -> list[str]:
        """Names to try in turn. What nobody serves is for the routes to refuse."""
        name = self._model
        if isinstance(asked, str):
            name = self._settings.aliases.get(asked, asked)
        if name != self._model and name not in self._settings.upstreams:
            return [self._model]
        return list(dict.fromkeys([name, *self._settings.fallbacks.get(name, [])]))

    def _deadline(self, context: RequestContext) -> float:
        own = asyncio.get_running_loop().time() + self._coordinator.request_timeout_s
        return own if context.deadline is None else min(own, context.deadline)


class _Gate:
    """A `Send` that keeps "not now" to itself while somebody else may be asked."""

    def __init__(self, send: Send, name: str, passes_all: bool) -> None:
        self._send = send
        self._name = name
        self.passes_all = passes_all
        self.is_shut = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # Of our own 429s none is a reason to ask another: they are the caller's quota.
            self.is_shut = message["status"] == 503 and not self.passes_all
            message = {**message, "headers": [*message["headers"], (b"x-baton-model", self._name.encode())]}
        if not self.is_shut:
            await self._send(message)


@dataclass(slots=True, eq=False)
class _Exchange:
    """One request to one other server."""

    upstream: Upstream
    name: str
    path: str
    key: str | None
    context: RequestContext
    service_class: ServiceClass
    slow_reader_timeout_s: float
    _failure: BatonError | None = None
    _timeout: asyncio.Timeout | None = None
    _has_begun: bool = False

    def fail(self, error: BatonError) -> None:
        """The server that we are shuts down."""
        self._failure = error
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def run(self, body: dict[str, Any], deadline: float, gate: _Gate) -> None:
        """Raises BatonError before the first byte, if nobody else is to be asked."""
        options = body.get("stream_options")
        usage = _Usage(self.context, isinstance(options, dict) and bool(options.get("include_usage")))
        try:
            async with asyncio.timeout_at(deadline) as self._timeout:
                await self._converse(self._told(body), self._headers(deadline), gate, usage)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            ours = self._failure or self._named(error)
            if not self._has_begun:
                if gate.passes_all or isinstance(ours, DeadlineError):
                    raise ours from error
                gate.is_shut = True
                return
            if not usage.is_stream:
                raise ours from error  # the server closes the connection, which is all that is left to say
            told = b"data: " + encode_json(error_body(ours)) + b"\n\ndata: [DONE]\n\n"
            await self._write(gate, {"type": "http.response.body", "body": told, "more_body": False})
        finally:
            self._timeout = None
            usage.charge()

    async def _converse(
        self, body: dict[str, Any], headers: dict[str, str], gate: _Gate, usage: _Usage
    ) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        url = self.upstream.url.rstrip("/") + self.path
        # NOTE: no environment: a proxy of the operator's shell is none of the server's.
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.post(url, data=encode(body), headers=headers, allow_redirects=False) as response,
        ):
            if response.status in _NOT_NOW and not gate.passes_all:
                gate.is_shut = True
                return
            self._check(response)
            usage.is_stream = response.content_type == "text/event-stream"
            parts = usage.read(response.content.iter_any())
            if not usage.is_stream:
                whole = await _whole(response.content.iter_any())
                usage.take(whole)
                parts = _one(whole)
            passed = [
                (each.encode(), response.headers[each].encode())
                for each in _PASSED
                if each in response.headers
            ]
            await self._write(
                gate, {"type": "http.response.start", "status": response.status, "headers": passed}
            )
            self._has_begun = True
            async for part in parts:
                await self._write(gate, {"type": "http.response.body", "body": part, "more_body": True})
            await self._write(gate, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, gate: _Gate, message: Message) -> None:
        """Raises SlowReaderError for a client that takes nothing."""
        try:
            async with asyncio.timeout(self.slow_reader_timeout_s) as timeout:
                await gate(message)
        except TimeoutError as error:
            if not timeout.expired():
                raise  # the deadline of the whole
            raise SlowReaderError from error

    def _check(self, response: aiohttp.ClientResponse) -> None:
        """Raises what our client must hear in our words: that the set-up is wrong, or that a proxy answered."""
        status, is_json = response.status, response.content_type == "application/json"
        if status in _NOT_NOW and not is_json:
            raise OverloadedError(f"the server of {self.name} cannot take the request now")
        if status in (401, 403) or 300 <= status < 400 or (status >= 400 and not is_json):
            raise Fault(f"the server of {self.name} answered {status} to {self.upstream.url}")

    def _told(self, body: dict[str, Any]) -> dict[str, Any]:
        """The request under the model's name there, within our caller's bounds, apart from other tenants' caches."""
        told = body | {"model": self.upstream.model or self.name}
        context = self.context
        if context.salt_prefix and isinstance(body.get("cache_salt"), str | None):
            source = f"{context.salt_prefix}{body.get('cache_salt') or ''}"
            told["cache_salt"] = hashlib.blake2b(source.encode(), digest_size=32).hexdigest()
        most, (field, default) = context.limits.max_output_tokens, _ENDPOINTS[self.path]
        asked = [body[name] for name in (field, "max_tokens") if body.get(name) is not None]
        if most is not None and not asked:
            told[field] = most if default is None else min(most, default)
        if most is not None and not all(
            type(each) is int for each in asked
        ):  # nobody has compared it with `most`
            raise RequestError(f"{field}: expected a whole number", param=field)
        options = body.get("stream_options") or {}
        if body.get("stream") is True and self.path != "/v1/responses" and isinstance(options, dict):
            told["stream_options"] = {**options, "include_usage": True}
        return told

    def _headers(self, deadline: float) -> dict[str, str]:
        rest_s = max(deadline - asyncio.get_running_loop().time(), 0.001)
        headers = {
            "content-type": "application/json",
            "x-request-id": self.context.request_id,
            "x-request-timeout": f"{rest_s:.3f}",
            CLASS_HEADER: self.service_class,
        }
        given = self.context.headers
        headers |= {name: given[name] for name in (TTFT_HEADER, ITL_HEADER) if name in given}
        return headers | ({"authorization": f"Bearer {self.key}"} if self.key else {})

    def _named(self, error: BaseException) -> BatonError:
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            return DeadlineError("the request was not done at its deadline")
        if self._has_begun:
            return WorkerLostError(f"the server of {self.name} broke off")
        return OverloadedError(f"the server of {self.name} does not answer")


class _Usage:
    """Reads what an answer used while it passes, and charges it at the end."""

    def __init__(self, context: RequestContext, is_wanted: bool) -> None:
        self._context = context
        self._is_wanted = is_wanted
        self._found: dict[str, Any] = {}
        self.is_stream = False

    async def read(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """A stream's own bytes, event by event, without the chunk of usage that only we asked for."""
        rest = b""
        async for part in parts:
            rest, begin, kept = rest + part, 0, []
            for end in _EVENT_END.finditer(rest):
                event, begin = rest[begin : end.end()], end.end()
                if self._is_kept(event):
                    kept.append(event)
            rest = rest[begin:]
            if kept:
                yield b"".join(kept)
        if rest:
            yield rest

    def charge(self) -> None:
        """Into the ledger and the tenant's bucket, once."""
        found, self._found = self._found, {}
        context = self._context
        num_prompt = _count(found, "prompt_tokens", "input_tokens")
        num_output = _count(found, "completion_tokens", "output_tokens")
        details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
        context.num_prompt_tokens += num_prompt
        context.num_output_tokens += num_output
        context.num_cached_tokens += _count(details if isinstance(details, dict) else {}, "cached_tokens")
        if not context.caller.is_batch:
            context.quota.take_output(num_prompt + num_output)

    def _is_kept(self, event: bytes) -> bool:
        if b'"usage"' not in event:
            return True
        _, mark, data = event.partition(b"data:")
        answer = self.take(data) if mark else {}
        return self._is_wanted or answer.get("choices") != [] or not isinstance(answer.get("usage"), dict)

    def take(self, data: bytes) -> dict[str, Any]:
        """The JSON, {} if it is none; its usage is what the answer used."""
        try:
            answer = json.loads(data)
        except ValueError:
            return {}
        if not isinstance(answer, dict):
            return {}
        inner = answer.get("response")
        usage = answer.get("usage") or (inner.get("usage") if isinstance(inner, dict) else None)
        if isinstance(usage, dict):
            self._found = usage
        return answer


def read_keys(settings: GatewayConfig, model: str) -> dict[str, str | None]:
    """The key to each other server. Raises ConfigError for a key file that cannot be read, for a model that has two
    servers, and for a fallback that has none.
    """
    if model in settings.upstreams:
        raise ConfigError(f"gateway.upstreams: expected other models than {model!r}, which is served here")
    known = {model, *settings.upstreams}
    for name, others in settings.fallbacks.items():
        for each in (name, *others):
            if each not in known:
                raise ConfigError(f"gateway.fallbacks: expected one of {sorted(known)} but got {each!r}")
    return {name: _key_of(name, upstream) for name, upstream in settings.upstreams.items()}


def _key_of(name: str, upstream: Upstream) -> str | None:
    if upstream.key_file is None:
        return None
    try:
        return Path(upstream.key_file).expanduser().read_text().strip() or None
    except OSError as error:
        raise ConfigError(f"gateway.upstreams.{name}.key_file: {error}") from error


def _count(found: dict[str, Any], *names: str) -> int:
    """The first of these that is a count; other servers may say anything."""
    values: Iterable[Any] = (found.get(name) for name in names)
    return next((value for value in values if type(value) is int and value >= 0), 0)


async def _whole(parts: AsyncIterator[bytes]) -> bytes:
    """Raises OverloadedError for what no answer is that long."""
    found = bytearray()
    async for part in parts:
        found += part
        if len(found) > _MAX_WHOLE_BYTES:
            raise OverloadedError(f"expected an answer of at most {_MAX_WHOLE_BYTES} bytes")
    return bytes(found)


async def _one(part: bytes) -> AsyncIterator[bytes]:
    yield part
