"""The one place where an error becomes what a client sees: an OpenAI body, a status, retry headers.

A `Fault` says nothing of the inside; its text goes to the log with the request id. No message repeats a
client's value in full: values may be huge, and may hold text that cannot be encoded.
"""

from __future__ import annotations

import json
import logging
import math
from json.encoder import encode_basestring
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from contracts.errors import (
    BatonError,
    DeadlineError,
    Fault,
    MethodError,
    NotFoundError,
    RequestError,
    TryAgain,
)

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 2000
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
# Clients ignore longer waits, and resend at once after shorter ones.
_MIN_RETRY_S, _MAX_RETRY_S = 1, 120


def as_baton_error(error: BaseException) -> BatonError:
    """`error` itself if it is ours, else an internal error that keeps it as its cause."""
    if isinstance(error, BatonError):
        return error
    fault = Fault(f"{type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault


def error_body(error: BatonError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, all four keys always there."""
    if isinstance(error, Fault) or type(error) is BatonError:
        message, code = "internal error", "internal_error"
    else:
        message, code = error.message[:_MAX_MESSAGE], error.code
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": code}}


def error_headers(error: BatonError) -> dict[str, str]:
    """`Retry-After` where trying again makes sense; `x-should-retry: false` where it costs a whole
    time-out.
    """
    headers: dict[str, str] = {}
    if isinstance(error, DeadlineError):
        headers["x-should-retry"] = "false"
    elif isinstance(error, TryAgain):
        wait_s = math.ceil(error.retry_after_s) if error.retry_after_s is not None else _MIN_RETRY_S
        headers["Retry-After"] = str(min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S))
    return headers


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Compact JSON; text that UTF-8 cannot hold is replaced, never an exception."""
    return Response(encode_json(content), status, headers=headers, media_type="application/json")


def encode_text(text: str) -> bytes:
    """As `encode_json`, without its questions."""
    return encode_basestring(text).encode("utf-8", "replace")


def encode_json(content: Any) -> bytes:
    return _ENCODER.encode(content).encode("utf-8", "replace")


def error_response(error: BatonError) -> Response:
    return json_response(error_body(error), error.status, error_headers(error))


def log_fault(error: BatonError, request_id: str) -> None:
    """Faults are for us to find; everything else is in the metrics."""
    if isinstance(error, Fault) or type(error) is BatonError:
        logger.error("request %s failed: %s", request_id, error, exc_info=error.__cause__ or error)


def from_http_exception(request: Request, error: HTTPException) -> BatonError:
    """The framework's own refusals (unknown route, wrong method) as ours."""
    if error.status_code == 404:
        # Not `request.url`, which is made of the host that the client names.
        return NotFoundError(f"no such route: {request.method} {request.scope['path'][:200]}")
    if error.status_code == 405:
        return MethodError(f"method {request.method} is not allowed here")
    if error.status_code < 500:
        return RequestError(str(error.detail))
    return Fault(str(error.detail))
