"""What uvicorn says and does on its own account, where no application is asked: mended from inside its process.

    bytes that are no HTTP ─► its parser ─► 400, in plain text        here in OpenAI's form
    an answer without a length, to a client of HTTP/1.0 ─► chunks     here the end of the connection is its end

NOTE: both use uvicorn's own names of things; a uvicorn with others does as it always did, and the tests fail.
"""

from __future__ import annotations

import secrets
from typing import Any

from starlette.types import Message, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from contracts.errors import RequestError
from coordinator.errors_http import encode_json, error_body

_NO_HTTP = RequestError("expected an HTTP request")


def say_in_openais_form() -> None:
    """From now on, for every HTTP server of this process."""
    if hasattr(AutoHTTPProtocol, "send_400_response"):
        AutoHTTPProtocol.send_400_response = _send_400


def framed(scope: Scope, send: Send) -> Send:
    """The server's own `send`; for a client that knows no chunks, one that sends none."""
    cycle: Any = getattr(send, "__self__", None)
    if scope.get("http_version") != "1.0" or not hasattr(cycle, "chunked_encoding"):
        return send
    is_open_ended = False

    async def send_plain(message: Message) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            is_open_ended = all(name.lower() != b"content-length" for name, _ in message["headers"])
        if is_open_ended:  # as if each piece were the rest of an answer whose length was told
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain


def _send_400(protocol: Any, _message: str) -> None:
    """In place of uvicorn's, which would write into an answer that has begun."""
    cycle = protocol.cycle
    if cycle is None or not cycle.response_started or cycle.response_complete:
        body = encode_json(error_body(_NO_HTTP))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\nx-request-id: req_{secrets.token_hex(12)}\r\n\r\n"
        )
        protocol.transport.write(head.encode() + body)
    protocol.transport.close()
