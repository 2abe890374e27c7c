"""coordinator/ingress.py: what Serve says in plain text reaches a client in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from coordinator.ingress import PlainErrors, bodies_send, middlewares, take_bodies
from tests.coordinator.http_tools import error_of


def answering(
    status: int, body: bytes, kind: bytes = b"text/plain; charset=utf-8", **headers: str
) -> httpx.AsyncClient:
    """A client of a server that says this, in two messages, behind the middlewares."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        more = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]}
        )
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})

    wrapped: Any = app
    for middleware in middlewares():
        wrapped = middleware.cls(wrapped, *middleware.args, **middleware.kwargs)
    return httpx.AsyncClient(transport=httpx.ASGITransport(wrapped), base_url="http://serve")


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [
        (404, 404, "not_found"),
        (408, 504, "timeout"),
        (429, 503, "overloaded"),
        (500, 500, "internal_error"),
        (503, 503, "overloaded"),
        (400, 400, "invalid_value"),
    ],
)
async def test_a_plain_error_is_said_in_openais_form(status: int, told: int, code: str) -> None:
    async with answering(status, b"Traceback: secret", x_request_id="mine", retry_after="7") as client:
        response = await client.get("/v1/models")
    assert response.status_code == told
    assert error_of(response)["code"] == code
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["content-length"] == str(len(response.content))
    assert response.headers.get("retry-after") == ("7" if code == "overloaded" else None)
    assert response.headers.get("x-should-retry") == ("false" if code == "timeout" else None)


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/models", 404, b"application/json"),
        ("/metrics", 200, b"text/plain"),
        ("/v1/chat/completions", 200, b"text/event-stream"),
        ("/-/healthz", 503, b"text/plain"),
    ],
)
async def test_everything_else_passes_untouched(path: str, status: int, kind: bytes) -> None:
    body = json.dumps({"a": 1}).encode()
    async with answering(status, body, kind, x_other="1") as client:
        response = await client.get(path)
    assert (response.status_code, response.content) == (status, body)
    assert response.headers["x-other"] == "1"


@pytest.mark.parametrize("path", ["/-/routes", "/-/anything", "/-/"])
async def test_what_serve_says_of_its_routes_is_no_route(path: str) -> None:
    """It would answer anybody, with or without a key."""
    async with answering(200, b'{"/":"baton"}', b"application/json") as client:
        response = await client.get(path, headers={"x-request-id": "mine"})
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("is_read", [False, True])
async def test_bodies_with_more_to_come_go_to_the_server_unless_somebody_reads_them(is_read: bool) -> None:
    told: list[Message] = []
    seen: list[Message] = []

    async def server(message: Message) -> None:
        told.append(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if is_read:
            take_bodies(scope)

        async def between(message: Message) -> None:
            seen.append(message)
            await send(message)

        await between({"type": "http.response.start", "status": 200, "headers": []})
        await bodies_send(scope, between)({"type": "http.response.body", "body": b"1", "more_body": True})
        await between({"type": "http.response.body", "body": b"2"})

    async def receive() -> Message:
        raise AssertionError

    await PlainErrors(app)({"type": "http", "path": "/v1/chat/completions"}, receive, server)
    assert [message.get("body") for message in told] == [None, b"1", b"2"]
    assert [message.get("body") for message in seen] == ([None, b"1", b"2"] if is_read else [None, b"2"])


async def test_a_scope_can_be_sent_to_another_process_and_means_nothing_there() -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(pickle.loads(pickle.dumps(scope)))

    async def send(message: Message) -> None:
        raise AssertionError

    async def receive() -> Message:
        raise AssertionError

    await PlainErrors(app)({"type": "http", "path": "/"}, receive, send)
    assert bodies_send(scopes[0], send) is send


async def test_another_loop_than_the_servers_does_not_call_its_send() -> None:
    found: list[bool] = []

    async def send(message: Message) -> None:
        raise AssertionError

    async def server(message: Message) -> None:
        raise AssertionError

    async def app(scope: Scope, receive: Receive, _: Send) -> None:
        async def elsewhere() -> bool:
            return bodies_send(scope, send) is send

        found.append(await asyncio.to_thread(asyncio.run, elsewhere()))

    async def receive() -> Message:
        raise AssertionError

    await PlainErrors(app)({"type": "http", "path": "/"}, receive, server)
    assert found == [True]
