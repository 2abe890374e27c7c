"""What Serve's own proxy and its replicas answer themselves, in OpenAI's form instead of plain text.

    Serve calls `middlewares` where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH says coordinator.ingress.middlewares

    client ◄── PlainErrors ◄── Serve: "Path '/x' not found.", "Request timed out" …      said anew
                          ◄── the application's answers                                  untouched

Serve's text says something of the inside, and no OpenAI client reads it. Of Serve's own pages (`/-/…`) one is left, by
which proxies find out who is healthy; the list of routes would be shown to anybody, without a key.

A chunk would pass ten layers (ours, Starlette's, Serve's), none of which looks at anything but an answer's start
and its end. So this outermost one leaves the server's own `send` in the scope, and bodies with more to come go there:

    start, last body   app ─► … ─► PlainErrors ─► server
    bodies between     app ─► BODIES ───────────► server      unless somebody on the way reads bodies: `take_bodies`
"""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contracts.errors import BatonError, DeadlineError, Fault, NotFoundError, OverloadedError, RequestError
from coordinator.errors_http import error_response
from coordinator.uvicorn_forms import framed, say_in_openais_form

_SERVES_OWN, _SERVES_HEALTH = "/-/", "/-/healthz"
_BODIES = "baton.bodies"
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class _Bodies:
    """A server's `send` in a scope. Serve's own proxy pickles scopes for another process, where there is none."""

    send: Send
    loop: asyncio.AbstractEventLoop

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def bodies_send(scope: Scope, send: Send) -> Send:
    """Where to send bodies that have more to come, once the answer's start has gone through `send`.

    NOTE: where Serve runs the application in another loop, a start is on its way through a queue, and the server's own
    `send` is not ours to call.
    """
    bodies: _Bodies | None = scope.get(_BODIES)
    return send if bodies is None or bodies.loop is not asyncio.get_running_loop() else bodies.send


def take_bodies(scope: Scope) -> None:
    """For whoever wraps a `send` and reads bodies: from now on all of them come through it."""
    scope.pop(_BODIES, None)


def middlewares() -> list[Middleware]:
    """For Serve, which puts them around every HTTP server of its own, in the server's process."""
    say_in_openais_form()
    return [Middleware(PlainErrors)]


def request_id_of(scope: Scope) -> str:
    """The client's own if it is sane, else a new one.

    For the client's logs only: the engine has ids of its own.
    """
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value.decode("latin-1")):
            return str(value.decode("latin-1"))
    return f"req_{secrets.token_hex(12)}"


class PlainErrors:
    """Pure ASGI: an answer that is no plain-text error passes message by message."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        path = scope["path"].removeprefix(scope.get("root_path", "")) if is_http else ""
        if not is_http or path == _SERVES_HEALTH:
            await self._app(scope, receive, send)
            return
        send = framed(scope, send)
        if path.startswith(_SERVES_OWN):
            await _say(404, Headers({"x-request-id": request_id_of(scope)}), scope, receive, send)
            return
        held: Message | None = None

        async def send_read(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start" and _is_plain_error(message):
                held = message
            elif held is None:
                await send(message)
            elif not message.get("more_body", False):
                await _say(held["status"], Headers(raw=held["headers"]), scope, receive, send)

        scope[_BODIES] = _Bodies(send, asyncio.get_running_loop())
        await self._app(scope, receive, send_read)


def _is_plain_error(start: Message) -> bool:
    if start["status"] < 400:
        return False
    return Headers(raw=start["headers"]).get("content-type", "").startswith("text/plain")


async def _say(status: int, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
    """The error instead of the text; the request id and the wait that Serve asks for stay."""
    error = _error_of(status, scope, headers.get("retry-after"))
    response = error_response(error)
    if request_id := headers.get("x-request-id"):
        response.headers["x-request-id"] = request_id
    await response(scope, receive, send)


def _error_of(status: int, scope: Scope, retry_after: str | None) -> BatonError:
    """NOTE: Serve's 408 is our time-out, and clients send a 408 again at once: it is said as a 504."""
    match status:
        case 404:
            return NotFoundError(f"no such route: {scope['method']} {scope['path'][:200]}")
        case 408 | 504:
            return DeadlineError("no answer came in time")
        case 429 | 502 | 503:
            wait_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
            return OverloadedError("no process of this server can take the request now", retry_after_s=wait_s)
    return RequestError("expected an HTTP request") if status < 500 else Fault(f"Serve answered {status}")
