"""Reading a request's body: bounded, timed, and JSON in the strict sense.

Python's reader takes NaN, infinities by overflow, and half a surrogate pair; each has turned into a 500
somewhere. They are refused here, so nothing behind this file meets them.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import Request

from contracts.errors import PayloadTooLarge, RequestError

BODY_TIMEOUT_S = 60.0
"""For a whole body to arrive; the client's connection may be slow, but not for ever."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> dict[str, Any]:
    """The body as an object. A body that does not say what it is, is JSON.

    NOTE: form data and plain text are refused although `curl -d` and careless tools call JSON so: a web page may send
    these to any address without being asked for leave.

    Raises PayloadTooLarge, RequestError; starlette's ClientDisconnect if the client leaves.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and not kind.endswith("json"):
        raise RequestError(
            f"content-type: expected application/json but got {kind[:60]!r} "
            "(with curl: -H 'Content-Type: application/json')"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise RequestError("content-encoding: expected an uncompressed body")
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, max_bytes)
    except TimeoutError as error:
        raise RequestError(f"expected the whole body within {timeout_s:g} s") from error
    return parse_object(raw)


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > max_bytes:
        raise PayloadTooLarge(f"expected a body of at most {max_bytes} bytes but got {declared}")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise PayloadTooLarge(f"expected a body of at most {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises RequestError for anything but one JSON object whose text UTF-8 can hold."""
    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=_finite)
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise RequestError("expected JSON but it is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise RequestError("expected text but got half of a surrogate pair (\\ud800..\\udfff)") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"expected UTF-8 but byte {error.start} is none") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"expected JSON but: {error.msg} at character {error.pos}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise RequestError(f"expected JSON but: {str(error)[:100]}") from error
    if not isinstance(value, dict):
        raise RequestError(f"expected a JSON object but got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"expected JSON but got {name}, which is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise RequestError(f"expected a finite number but got {digits[:40]}")
    return value
