"""Bodies that are read more than once on their way in, and the path that routes are found by."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Message, Receive, Scope

from contracts.errors import RequestError


def route_path(scope: Scope) -> str:
    """The path that routes are found by: without the prefix that Serve or a proxy has mounted the application under."""
    path: str = scope.get("path", "")
    return path.removeprefix(scope.get("root_path", ""))


def encode(body: dict[str, Any]) -> bytes:
    """Raises RequestError for what a guard made and JSON cannot hold."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError as error:
        raise RequestError("expected JSON but it is nested too deeply") from error


def replay(body: bytes, receive: Receive) -> Receive:
    """`body` once, then whatever `receive` says: that the client has left."""
    is_given = False

    async def receive_again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
