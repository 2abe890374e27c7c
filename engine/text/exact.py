"""A JSON Schema put so that the library which enforces it means what the standards say.

llguidance reads patterns as Rust's regexes, where JSON Schema says ECMA-262's, and takes some formats wider than their
RFCs. What is put otherwise:

    pattern, keys of patternProperties    \\s \\S . and classes as in ECMA-262 (`ecma_pattern`)
    format: date, time, date-time         RFC 3339: days that exist, an offset; no leap second, and a year above 0
    format: email, hostname               RFC 5321, RFC 1035: their longest length
    bounds of numbers and counts          the nearest ones within that the library knows (`_bound`)

An output within these is within the standard; what the standard allows and this leaves out (the leap second, a
lower-case `z`, ten digits of a fraction, numbers beyond 2^63) is missed by nobody. Keywords that say nothing are left
out, since the library does not know them all and makers of schemas write them all the same (`uniqueItems: false`).
"""

from __future__ import annotations

import math
import re
from typing import Any

from contracts.errors import RequestError

# ECMA-262, WhiteSpace and LineTerminator: without U+0085, which Unicode calls white space, and with U+FEFF.
_SPACE = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_OUTSIDE = {r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]", ".": r"[^\n\r\u2028\u2029]"}
_WITHIN = {
    r"\s": f"[{_SPACE}]",
    r"\S": f"[^{_SPACE}]",
    **{sign: f"\\{sign}" for sign in "[&~"},  # in Rust they begin a class within, or join two
}
_PART = re.compile(r"\\.|.", re.DOTALL)
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(?:-[a-zA-Z]*)?[:)]")

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY = (
    "(?:"
    + "|".join(
        (
            "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
            "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
            "02-(?:0[1-9]|1[0-9]|2[0-8])",
        )
    )
    + ")"
)
_DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "email": {"format": "email", "pattern": "^[^@]{1,64}@", "maxLength": 254},
    "hostname": {"format": "hostname", "maxLength": 253},
}
_FREE_FORMATS = ("binary", "password", "path", "file-path", "directory-path")  # any text is one
_NOTES = ("default", "examples")
_VALUES = ("const", "enum", *_NOTES)  # of a schema: no schemas, whatever they look like
_BY_NAME = ("properties", "$defs", "definitions", "dependentSchemas")
_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,), "propertyNames": (True, {}, {"type": "string"}), "dependentRequired": ({},),
    "dependentSchemas": ({},), "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {}), "not": (False,),
}  # fmt: skip

_MOST_EXACT = 2**53  # the library counts in doubles
_MOST_BOUND = 2**63 - 1024  # the largest double that is one of its whole numbers too
_MOST_COUNT = 2**31 - 1
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
_MOST, _LEAST = ("maxLength", "maxItems", "maxProperties"), ("minLength", "minItems", "minProperties")
_SHOWN = 60


def exact(schema: Any) -> Any:
    """The schema for llguidance. Raises RequestError for a pattern that means one thing here and another there, and for
    a whole number that a double does not hold, where another one would be enforced.
    """
    if isinstance(schema, list):
        return [exact(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _exact_part(key, value) for key, value in schema.items() if not _says_nothing(key, value)}
    name, others = found.get("format"), found.get("allOf", [])
    if isinstance(name, str) and name in _FORMATS and isinstance(others, list):
        del found["format"]
        found["allOf"] = [*others, _FORMATS[name]]
    return found


def _says_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value in _FREE_FORMATS
    return any(type(value) is type(item) and value == item for item in _SAYS_NOTHING.get(key, ()))


def _exact_part(key: str, value: Any) -> Any:
    if key in _VALUES:
        if key not in _NOTES:
            _check_exact(value)
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _exact_number(key, value)
    if key == "pattern" and isinstance(value, str):
        return ecma_pattern(value)
    if key == "patternProperties" and isinstance(value, dict):
        return {ecma_pattern(pattern): exact(inner) for pattern, inner in value.items()}
    if key in _BY_NAME and isinstance(value, dict):
        return {name: exact(inner) for name, inner in value.items()}
    return exact(value)


def _exact_number(key: str, value: int | float) -> int | float:
    if key in _UPPER and value > -_MOST_BOUND:
        return _bound(value)
    if key in _LOWER and value < _MOST_BOUND:
        return -_bound(-value)
    if key in _MOST:
        return min(value, _MOST_COUNT)
    if key in (*_UPPER, *_LOWER, *_LEAST, "multipleOf"):
        _check_exact(value)
    return value


def _bound(value: int | float) -> int | float:
    """The largest number up to `value` that the library compares with exactly."""
    if isinstance(value, float) or abs(value) <= _MOST_EXACT:
        return min(value, _MOST_BOUND)
    near = float(min(value, _MOST_BOUND))
    return int(near if near <= value else math.nextafter(near, -math.inf))


def _check_exact(value: Any) -> None:
    """Raises RequestError for a whole number within that is none of the library's."""
    level = [value]
    while level:
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, int) and abs(each) > _MOST_EXACT:
                raise RequestError(f"expected whole numbers of at most 2^53 but got {str(each)[:_SHOWN]}")
        level = inner


def ecma_pattern(pattern: str) -> str:
    """An ECMA-262 pattern (with its flag u) in Rust's words.

    Raises RequestError for flags under which it would read otherwise, for a class that is empty in ECMA-262 and not in
    Rust, and for `--` in a class, which Rust takes for a difference.
    """
    for flags in _FLAGS.findall(pattern):
        if set(flags) & set("sxR"):
            raise RequestError(f"pattern: expected none of the flags s, x and R but got {flags[:20]!r}")
    out: list[str] = []
    begun: int | None = None  # where the class that is open begins in `out`
    for part in _PART.findall(pattern):
        if begun is None:
            if part == "[":
                begun = len(out)
            out.append(_OUTSIDE.get(part, part))
            continue
        is_first = out[begun + 1 :] in ([], ["^"])
        if part == "]" and is_first:
            raise RequestError(
                "pattern: expected something within [] (a bracket that is meant itself is \\])"
            )
        if part == "-" and out[-1] == "-":
            raise RequestError("pattern: expected no -- within [] (a dash that is meant itself is \\-)")
        if part == "]":
            begun = None
        out.append(_WITHIN.get(part, part) if begun is not None else part)
    return "".join(out)
