"""The gateway around the edge: each request's caller, limits, deadline, guards and kept answers.

    RequestScope ─► CORS ─► GatewayScope ─► routes
                             │ who asks ─► 401, 403
                             │ generation: quota ─► 429 │ body: caps, input guards ─► 400 │ kept answer ─► replay
                             └ the answer: output guards ─► recorder ─► x-ratelimit-* ─► client; then the ledger

With the default configuration a request passes after one look at its headers: no key, no limit, and its body unread.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contracts.config import BatonConfig, cache_dir
from contracts.errors import BatonError, PermissionDenied, RequestError
from coordinator.body import read_json
from coordinator.drain import Drain
from coordinator.fields import number_in
from coordinator.gateway.answers import (
    AnswerStore,
    KeptAnswer,
    Recorder,
    fingerprint_of,
    is_deterministic,
)
from coordinator.gateway.bodies import encode, replay, route_path
from coordinator.gateway.context import CALLER, CURRENT, Caller, RequestContext
from coordinator.gateway.gate import Gate
from coordinator.gateway.guarded import AnswerStopped, GuardedSend, check_guardable
from coordinator.gateway.guards import GuardedRequest, Guards
from coordinator.gateway.jobs import ENDPOINTS, Jobs
from coordinator.gateway.keys import Keys
from coordinator.gateway.limits import Quotas
from coordinator.gateway.records import Usage, UsageKey
from coordinator.ingress import take_bodies
from coordinator.metrics import Metrics
from coordinator.promises import SERVICE_HEADERS

if TYPE_CHECKING:
    from coordinator.gateway.usage import Ledger

REQUEST_ID = "baton.request_id"

_OPEN = ("/health", "/ready", "/metrics", "/version")
_BATCH = ("/v1/files", "/v1/batches")
_MAX_TIMEOUT_S = 86_400.0
_CLIENT_LEFT = 499
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_EXPOSED = ["x-request-id", "retry-after", "x-should-retry", "x-baton-replay", "x-baton-model"] + [
    f"x-ratelimit-{what}-{unit}"
    for what in ("limit", "remaining", "reset")
    for unit in ("requests", "tokens")
]

OnError = Callable[[Request, Exception], Awaitable[Response]]


class Gateway:
    """What requests share. `running` takes up the batches that are there; leaving it, or `close`, ends the tasks."""

    def __init__(self, config: BatonConfig, model: str, metrics: Metrics, drain: Drain) -> None:
        """Raises ConfigError for keys, hooks or a URL that cannot be used."""
        settings = config.gateway
        self.settings = settings
        self.max_body_bytes = config.server.max_body_bytes
        self.model = model
        self.metrics = metrics
        self.keys = Keys(Path(settings.keys_file).expanduser()) if settings.keys_file else None
        self.quotas = Quotas(settings)
        self.guards = Guards(
            settings.input_guards,
            settings.output_guards,
            settings.guard_window_chars,
            settings.guard_timeout_s,
        )
        self.idempotent = AnswerStore(settings.stored_answer_bytes, settings.idempotency_ttl_s)
        self.cached = AnswerStore(settings.stored_answer_bytes, settings.response_cache_ttl_s)
        self.ledger = self._open_ledger(state_dir(config))
        self.gate = Gate(settings.batch_concurrency, gives_way=not config.slo.is_set)
        self._config = config
        self._drain = drain
        self.jobs = Jobs(config, state_dir(config), self.gate, drain, metrics)

    def install(self, app: Any, on_error: OnError) -> None:
        """Put the gateway around the routes of `app`, a Starlette application."""
        if self.settings.upstreams or self.settings.fallbacks:
            self._install_upstreams(app)
        app.add_middleware(GatewayScope, gateway=self, on_error=on_error)
        if self.settings.cors_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self.settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=_EXPOSED,
            )

    def _install_upstreams(self, app: Any) -> None:
        """NOTE: the import is here, not above: it brings an HTTP client, which a server of one model need not load."""
        from coordinator.gateway.upstreams import Upstreams, read_keys

        keys = read_keys(self.settings, self.model)
        app.add_middleware(Upstreams, config=self._config, model=self.model, keys=keys, drain=self._drain)

    @asynccontextmanager
    async def running(self, app: ASGIApp) -> AsyncIterator[None]:
        """For as long as `app` serves."""
        await self.jobs.resume(app)
        try:
            yield
        finally:
            await self.close()

    async def close(self) -> None:
        await self.jobs.close()
        if self.ledger is not None:
            await self.ledger.close()

    def caller_of(self, scope: Scope) -> Caller:
        """Raises AuthenticationError, PermissionDenied."""
        caller: Caller | None = scope.get(CALLER)
        if caller is None:
            if self.keys is None:
                caller = Caller()
            else:
                caller = self.keys.caller(Headers(scope=scope).get("authorization"))
        needed = "batch" if is_below(route_path(scope), _BATCH) else "inference"
        if needed not in caller.scopes:
            raise PermissionDenied(
                f"expected a key with the scope {needed!r} but it has {list(caller.scopes)}"
            )
        return caller

    @contextmanager
    def opened(self, context: RequestContext, now: float) -> Iterator[None]:
        """One generation request is open within. Raises RateLimitError."""
        if context.caller.is_batch:
            yield
            return
        with context.quota.opened(now), self.gate.caller():
            yield

    def count(self, context: RequestContext, endpoint: str, status: int, is_replay: bool) -> None:
        if self.ledger is None:
            return
        caller = context.caller
        label = f"{endpoint} (batch)" if caller.is_batch else endpoint
        usage = Usage(
            requests=1,
            failed=int(status >= 400),
            replayed=int(is_replay),
            prompt_tokens=context.num_prompt_tokens,
            cached_tokens=context.num_cached_tokens,
            output_tokens=context.num_output_tokens,
        )
        model = context.answered_by or self.model
        self.ledger.add(UsageKey(caller.tenant, caller.key_id, model, label), usage)

    def _open_ledger(self, folder: Path) -> Ledger | None:
        """NOTE: the import is here, not above: it brings SQLAlchemy, which a server without a ledger need not load."""
        url = self.settings.usage_url
        if url is None:
            if self.keys is None:
                return None
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            url = f"sqlite:///{folder / 'usage.db'}"
        from coordinator.gateway.usage import Ledger

        return Ledger(url, self.settings.usage_flush_s, self.metrics.usage_unwritten)


class GatewayScope:
    """The middleware. Pure ASGI, like RequestScope, and inside of it."""

    def __init__(self, app: ASGIApp, gateway: Gateway, on_error: OnError) -> None:
        self._app = app
        self._gateway = gateway
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        if scope["type"] != "http" or path in _OPEN or is_below(path, ("/debug",)):
            await self._app(scope, receive, send)
            return
        try:
            scope[CALLER] = caller = self._gateway.caller_of(scope)
        except BatonError as error:  # answered in here, so that CORS headers get around it
            await (await self._on_error(Request(scope), error))(scope, receive, send)
            return
        # By their names: what clients make up shall not become lines of the ledger.
        if scope["method"] != "POST" or path not in ENDPOINTS:
            await self._app(scope, receive, send)
            return
        await _Exchange(self._gateway, self._app, self._on_error, scope, caller).run(receive, send)


class _Exchange:
    """One generation request and its response."""

    def __init__(
        self, gateway: Gateway, app: ASGIApp, on_error: OnError, scope: Scope, caller: Caller
    ) -> None:
        now = asyncio.get_running_loop().time()
        settings = gateway.settings
        self._gateway = gateway
        self._app = app
        self._on_error = on_error
        self._scope = scope
        self._endpoint = route_path(scope)
        self._context = RequestContext(
            caller,
            settings.limits_of(caller.tenant),
            gateway.quotas.of(caller.tenant, now),
            scope.get(REQUEST_ID, ""),
            salt_prefix=f"{caller.tenant}/" if gateway.keys is not None else "",
            headers=Headers(scope=scope),
        )
        self._status = 0
        self._is_replay = False

    async def run(self, receive: Receive, send: Send) -> None:
        now = asyncio.get_running_loop().time()
        quota = self._context.quota

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
                MutableHeaders(scope=message).update(quota.headers(asyncio.get_running_loop().time()))
            await send(message)

        token = CURRENT.set(self._context)
        try:
            self._context.deadline = self._deadline(now)
            with self._gateway.opened(self._context, now):
                await self._answer(receive, send_with_limits)
        except AnswerStopped:
            pass
        except BatonError as error:
            if self._status:
                raise
            response = await self._on_error(Request(self._scope), error)
            await response(self._scope, receive, send_with_limits)
        finally:
            CURRENT.reset(token)
            status = self._status or _CLIENT_LEFT
            self._gateway.count(self._context, self._endpoint, status, self._is_replay)

    def _deadline(self, now: float) -> float | None:
        """None: the server's own alone. Nobody waits for the lines of a batch, and they wait for everybody."""
        if self._context.caller.is_batch:
            return None
        asked = Headers(scope=self._scope).get("x-request-timeout")
        limits = [self._gateway.settings.max_request_timeout_s]
        if asked is not None:
            limits.append(read_timeout(asked))
        known = [limit for limit in limits if limit is not None]
        return now + min(known) if known else None

    async def _answer(self, receive: Receive, send: Send) -> None:
        gateway, settings = self._gateway, self._gateway.settings
        key = Headers(scope=self._scope).get("idempotency-key")
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            raise RequestError("Idempotency-Key: expected 1 to 255 visible ASCII characters")
        reads = key is not None or settings.response_cache or gateway.guards.has_input
        if not reads and not gateway.guards.has_output and self._context.limits.max_output_tokens is None:
            await self._app(self._scope, receive, send)
            return
        take_bodies(self._scope)  # guards and stores read them
        body = await read_json(Request(self._scope, receive), gateway.max_body_bytes)
        again = replay(encode(body), receive)
        if key is not None:
            fingerprint = self._fingerprint(body)
            await self._once(gateway.idempotent, key, fingerprint, self._fresh(body, again), send)
        else:
            await self._fresh(body, again)(send)

    def _fresh(self, body: dict[str, Any], receive: Receive) -> Callable[[Send], Awaitable[None]]:
        """The request without its idempotency key."""

        async def run(send: Send) -> None:
            nonlocal body, receive
            guards = self._gateway.guards
            check_lengths(body, self._context.limits.max_output_tokens)
            if guards.has_input:
                given = GuardedRequest(self._context.caller.tenant, self._endpoint, body)
                changed = await guards.input(given)
                if changed is not body:
                    body, receive = changed, replay(encode(changed), receive)
            if guards.has_output:
                check_guardable(self._endpoint, body)
                send = GuardedSend(send, guards, self._context.caller.tenant, self._on_refused)

            async def call(to: Send) -> None:
                await self._app(self._scope, receive, to)

            if self._gateway.settings.response_cache and is_deterministic(body):
                fingerprint = self._fingerprint(body)
                await self._cached(fingerprint, call, send)
            else:
                await call(send)

        return run

    def _fingerprint(self, body: dict[str, Any]) -> bytes:
        """With the headers that the routes read: what came of a request says nothing of one that they refuse."""
        context = self._context
        asked = [context.headers.get(name) for name in SERVICE_HEADERS]
        return fingerprint_of(self._endpoint, body, [*asked, context.caller.is_batch])

    async def _once(
        self,
        store: AnswerStore,
        key: str,
        fingerprint: bytes,
        run: Callable[[Send], Awaitable[None]],
        send: Send,
    ) -> None:
        """Answer from `store`, or run and keep the answer."""
        slot, clock = (self._context.caller.tenant, key), asyncio.get_running_loop().time
        kept = store.find(slot, fingerprint, clock())
        if kept is not None:
            await self._replay(kept, send, b"idempotency")
            return
        store.begin(slot, fingerprint)
        recorder = Recorder(send, store.largest_bytes)
        answer: KeptAnswer | None = None
        try:
            await run(recorder)
            answer = recorder.answer
        finally:
            store.end(slot, fingerprint, answer, clock())

    async def _cached(self, fingerprint: bytes, run: Callable[[Send], Awaitable[None]], send: Send) -> None:
        """As `_once`, but two at once both run: waiting for each other would help nobody."""
        store, clock = self._gateway.cached, asyncio.get_running_loop().time
        slot = (self._context.caller.tenant, fingerprint.hex())
        kept = store.find(slot, fingerprint, clock())
        if kept is not None:
            await self._replay(kept, send, b"cache")
            return
        recorder = Recorder(send, store.largest_bytes)
        await run(recorder)
        store.end(slot, fingerprint, recorder.answer, clock())

    async def _replay(self, kept: KeptAnswer, send: Send, mark: bytes) -> None:
        self._is_replay = True
        await kept.send(send, mark)

    def _on_refused(self, error: BatonError) -> None:
        self._gateway.metrics.guarded(error.code)


def state_dir(config: BatonConfig) -> Path:
    """Where this server keeps what outlives it. Not made here."""
    given = config.gateway.state_dir
    return Path(given).expanduser() if given else cache_dir() / "state" / str(config.server.port)


def is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def read_timeout(text: str) -> float:
    """Seconds of `x-request-timeout`. Raises RequestError."""
    seconds = number_in(text)
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        raise RequestError(
            f"x-request-timeout: expected seconds, above 0 and at most {_MAX_TIMEOUT_S:g}, but got {text[:40]!r}"
        )
    return seconds


def check_lengths(body: dict[str, Any], most: int | None) -> None:
    """Raises RequestError if more output is asked for than the tenant may have."""
    for name in _LENGTHS:
        asked = body.get(name)
        if most is not None and type(asked) is int and asked > most:
            raise RequestError(f"{name}: expected at most {most} for this key but got {asked}", param=name)
