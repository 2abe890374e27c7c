"""What is said of a field that is wrong: its name, what was expected and what came, in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from contracts.errors import RequestError, UnsupportedError

_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?")
_MAX_SHOWN = 60
_MAX_SPELLED, _MAX_SPELLED_WITHIN = 64, 8
OF_SCHEMAS = ("name", "description", "schema", "strict")
"""What a format of type `json_schema` says, nested in a chat and flat in a response."""
_OF_OTHERS = frozenset(
    ("repetition_penalty_range", "frequency_penalty_decay", "reasoning_format", "parse_tool_calls", "models")
)
"""Extras of other servers, which look like fields of ours and are none of them misspelt."""
_LIKENESS = 0.85  # `stops` is like `stop`, `top_a` is not like `top_p`

AnyModel = TypeVar("AnyModel", bound=BaseModel)


def number_in(text: str) -> float:
    """Of a header: digits as JSON has them; NaN for anything else, also for what Python alone takes (`1_000`, `+5`)."""
    return float(text) if _NUMBER.fullmatch(text) else math.nan


def refuse(body: dict[str, Any], inert: dict[str, tuple[Any, ...]], why: str) -> None:
    """Raises UnsupportedError for the first of these fields that has another value than null and those in `inert`."""
    for name, values in inert.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(item) and value == item for item in values):
            raise UnsupportedError(f"{name}: {why}", param=name)


def refuse_misplaced(value: Any, names: Collection[str], where: str, param: str | None = None) -> None:
    """Raises RequestError for the first of these that an object inside of a body has, although it belongs elsewhere.
    `param`: the body's field.
    """
    for name in names if isinstance(value, dict) else ():
        if value.get(name) is not None:
            raise RequestError(
                f"{where}.{name}: expected none in this place", param=where if param is None else param
            )


def refuse_misspelt(body: dict[str, Any], fields: Collection[str], known: Collection[str]) -> None:
    """Raises RequestError for what is not known, here or to other servers, and looks like one of `fields`."""
    for key, meant in _misspelt(body, fields, known, _MAX_SPELLED):
        if key not in _OF_OTHERS:
            raise RequestError(f"{key}: unknown field; did you mean {meant}?", param=key)


def refuse_misspelt_within(value: Any, fields: Collection[str], where: str, param: str | None = None) -> None:
    """As `refuse_misspelt`, for an object inside of a body (anything else passes). `param`: the body's field."""
    if isinstance(value, dict):
        for key, meant in _misspelt(value, fields, fields, _MAX_SPELLED_WITHIN):
            raise RequestError(
                f"{where}.{key}: unknown field; did you mean {meant}?",
                param=where if param is None else param,
            )


def _misspelt(
    body: dict[str, Any], fields: Collection[str], known: Collection[str], limit: int
) -> Iterator[tuple[str, str]]:
    unknown = [
        key for key in islice((key for key in body if key not in known), limit) if len(key) <= _MAX_SHOWN
    ]
    letters = {_letters(name): name for name in fields} if unknown else {}  # most bodies have none
    for key in unknown:
        if same := letters.get(_letters(key)):
            yield key, same
        elif close := get_close_matches(key, fields, 1, _LIKENESS):
            yield key, close[0]


def _letters(name: str) -> str:
    """The same for `response_format`, `responseFormat` and `response_fromat`."""
    return "".join(sorted(name.lower().replace("_", "").replace("-", "")))


def read_model(kind: type[AnyModel], body: dict[str, Any]) -> AnyModel:
    """Raises RequestError naming the first field that is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explained(error) from None


def _explained(error: ValidationError) -> RequestError:
    """The first problem, in one line; values are cut, a caller may have sent megabytes."""
    detail = error.errors(include_url=False, include_context=False)[0]
    path = detail["loc"]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:_MAX_SHOWN]
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    return RequestError(f"{where}: {message} but got {shown(detail['input'])}", param=str(path[0]))


def shown(value: Any) -> str:
    """A value for a message: short whatever it is, and without walking through a large one."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, str):
        value = value[:_MAX_SHOWN]
    return repr(value)[:_MAX_SHOWN]
