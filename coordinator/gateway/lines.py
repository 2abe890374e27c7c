"""The lines of a batch's input file: looked through before one is run, then read again one by one.

a file that cannot be a batch (none of its lines is a request, too many, a custom_id twice) ─► errors, nothing runs
a line that is no request among others that are                                             ─► an error of its own
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from coordinator.body import parse_object

MAX_ERRORS = 20
_MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Line:
    """One request. `number` counts from 1, as an editor does. `fault`: why it is none; its `custom_id` may be None."""

    number: int
    custom_id: str | None
    body: dict[str, Any] = field(default_factory=dict)
    fault: RequestError | None = None


@dataclass(frozen=True, slots=True)
class LineRules:
    """What a line must be."""

    endpoint: str
    max_lines: int
    max_line_bytes: int


def check_lines(path: Path, rules: LineRules) -> tuple[int, list[dict[str, Any]]]:
    """(number of lines, what is wrong with the file in OpenAI's form). With errors, nothing is run."""
    seen: set[str] = set()
    faults: list[tuple[int, RequestError]] = []
    num_lines = 0
    for line in read_lines(path, rules):
        num_lines += 1
        if num_lines > rules.max_lines:
            too_many = RequestError(f"expected at most {rules.max_lines} requests in one batch")
            return num_lines, [_told(line.number, too_many)]
        if line.fault is not None:
            faults.append((line.number, line.fault))
        if line.custom_id in seen:
            twice = RequestError(f"custom_id: {line.custom_id[:60]!r} was used before", param="custom_id")
            return num_lines, [_told(line.number, twice)]
        if line.custom_id is not None:
            seen.add(line.custom_id)
    if num_lines == 0:
        return 0, [{"code": "empty_file", "message": "expected a request", "param": None, "line": None}]
    if len(faults) < num_lines:
        return num_lines, []
    return num_lines, [_told(*fault) for fault in faults[:MAX_ERRORS]]


def read_lines(path: Path, rules: LineRules) -> Iterator[Line]:
    """All lines that are not empty; one that is no request has its fault."""
    for number, raw in _raw_lines(path, rules.max_line_bytes):
        yield _read_line(number, raw, rules)


def _read_line(number: int, raw: bytes, rules: LineRules) -> Line:
    custom_id = None
    try:
        if len(raw) > rules.max_line_bytes:
            raise RequestError(f"expected a line of at most {rules.max_line_bytes} bytes")
        value = parse_object(raw)
        custom_id = _custom_id(value)
        return Line(number, custom_id, _body(value, rules))
    except RequestError as error:
        return Line(number, custom_id, fault=error)


def _told(number: int, error: RequestError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "param": error.param, "line": number}


def _custom_id(value: dict[str, Any]) -> str:
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        raise RequestError(f"custom_id: expected text of 1 to {_MAX_ID_CHARS} characters", param="custom_id")
    return custom_id


def _body(value: dict[str, Any], rules: LineRules) -> dict[str, Any]:
    """Raises RequestError naming the field that is wrong."""
    if value.get("method") != "POST":
        raise RequestError("method: expected POST", param="method")
    if value.get("url") != rules.endpoint:
        raise RequestError(f"url: expected {rules.endpoint}, the batch's endpoint", param="url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise RequestError("body: expected an object", param="body")
    if body.get("stream"):
        raise RequestError("body.stream: expected false in a batch", param="body.stream")
    return body


def result_text(
    line_id: str,
    custom_id: str | None,
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
