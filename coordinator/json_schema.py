"""Whether something is a JSON Schema at all: what a model is told of a tool must be one, enforced or not.

Only the form of the keywords that carry meaning for tools is looked at; unknown ones are allowed, as in JSON Schema.
Whether a schema can be enforced is for the grammar to say (engine/text/grammar.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from engine.text.grammar import MAX_SOURCE_BYTES

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = (
    "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else", "unevaluatedProperties",
)  # fmt: skip
_SHOWN = 60


def fault_in(schema: Any, max_depth: int) -> str | None:
    """What is wrong, and where (`properties.city.type: expected …`); None for a schema."""
    level: list[tuple[str, Any]] = [("", schema)]
    for _ in range(max_depth):
        inner: list[tuple[str, Any]] = []
        for where, part in level:
            if isinstance(part, bool):
                continue
            if not isinstance(part, dict):
                return f"{where or 'it'}: expected a schema but got {str(part)[:_SHOWN]!r}"
            for keyword, (is_right, expected) in _FORMS.items():
                if keyword in part and not is_right(part[keyword]):
                    return f"{where}{keyword}: expected {expected} but got {str(part[keyword])[:_SHOWN]!r}"
            inner += ((f"{where}{name}.", each) for name, each in _inside(part))
        if not inner:
            return None
        level = inner
    return f"expected a schema of at most {max_depth} levels"


def unbounded_in(schema: Any, max_depth: int) -> str | None:
    """What is wrong with a schema that is too deep, or too long to be enforced; to be asked before anything else walks
    through it, since that takes seconds for one of megabytes. None: nothing.
    """
    if _is_deeper(schema, max_depth):
        return f"expected a schema of at most {max_depth} levels"
    num_bytes = len(json.dumps(schema))
    if num_bytes > MAX_SOURCE_BYTES:
        return f"expected a schema of at most {MAX_SOURCE_BYTES} bytes but got {num_bytes}"
    return None


def _inside(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _BY_NAME:
        for name, inner in schema.get(keyword, {}).items():
            yield f"{keyword}.{name[:_SHOWN]}", inner
    for keyword in (*_LISTS, "items"):
        for inner in schema[keyword] if isinstance(schema.get(keyword), list) else ():
            yield keyword, inner
    for keyword in (*_SINGLE, "items"):
        if keyword in schema and not isinstance(schema[keyword], list):
            yield keyword, schema[keyword]


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(_TYPES)}"),
    "required": (_is_text_list, "a list of names"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "pattern": (lambda value: isinstance(value, str), "text"),
    "$ref": (lambda value: isinstance(value, str), "text"),
    **{name: (lambda value: isinstance(value, dict), "an object of schemas") for name in _BY_NAME},
    **{name: (lambda value: isinstance(value, list) and bool(value), "a list of schemas") for name in _LISTS},
}


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
