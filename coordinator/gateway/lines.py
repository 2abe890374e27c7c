"""The lines of a batch's input file: checked all before one is run, then read again one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import BatonError, RequestError
from coordinator.body import parse_object

MAX_ERRORS = 20
_MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Line:
    """One request. `number` counts from 1, as an editor does."""

    number: int
    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LineRules:
    """What a line must be."""

    endpoint: str
    max_lines: int
    max_line_bytes: int


def check_lines(path: Path, rules: LineRules) -> tuple[int, list[dict[str, Any]]]:
    """(number of requests, the first errors in OpenAI's form). With errors, nothing is run."""
    seen: set[str] = set()
    errors: list[dict[str, Any]] = []
    num_lines = 0
    for number, raw in _raw_lines(path, rules.max_line_bytes):
        num_lines += 1
        try:
            if num_lines > rules.max_lines:
                raise RequestError(f"expected at most {rules.max_lines} requests in one batch")
            line = parse_line(number, raw, rules)
            if line.custom_id in seen:
                raise RequestError(f"custom_id: {line.custom_id[:60]!r} was used before", param="custom_id")
            seen.add(line.custom_id)
        except BatonError as error:
            errors.append(
                {"code": error.code, "message": error.message, "param": error.param, "line": number}
            )
            if num_lines > rules.max_lines or len(errors) == MAX_ERRORS:
                break
    if num_lines == 0:
        errors.append({"code": "empty_file", "message": "expected a request", "param": None, "line": None})
    return num_lines, errors


def read_lines(path: Path, rules: LineRules) -> Iterator[Line]:
    """The requests of a file that `check_lines` found no error in. Raises RequestError if it has one now."""
    for number, raw in _raw_lines(path, rules.max_line_bytes):
        yield parse_line(number, raw, rules)


def parse_line(number: int, raw: bytes, rules: LineRules) -> Line:
    """Raises RequestError naming the field that is wrong."""
    if len(raw) > rules.max_line_bytes:
        raise RequestError(f"expected a line of at most {rules.max_line_bytes} bytes")
    value = parse_object(raw)
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        raise RequestError(f"custom_id: expected text of 1 to {_MAX_ID_CHARS} characters", param="custom_id")
    if value.get("method") != "POST":
        raise RequestError("method: expected POST", param="method")
    if value.get("url") != rules.endpoint:
        raise RequestError(f"url: expected {rules.endpoint}, the batch's endpoint", param="url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise RequestError("body: expected an object", param="body")
    if body.get("stream"):
        raise RequestError("body.stream: expected false in a batch", param="body.stream")
    return Line(number, custom_id, body)


def result_text(
    line_id: str,
    custom_id: str,
    response: dict[str, Any] | None,
    error: dict[str, str] | None = None,
) -> str:
    """A line of the output or error file."""
    content = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _raw_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number, line without its end), empty ones left out; of a line that is too long, the first bytes."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(max_bytes + 2):
            number += 1
            if not raw.endswith(b"\n") and len(raw) > max_bytes:
                while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
                    pass
            stripped = raw.strip(b"\r\n\t ")
            if stripped:
                yield number, raw if len(stripped) > max_bytes else stripped
