"""What a schema lets through is what its standards say: RFC 3339, RFC 5321, ECMA-262."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest

from contracts.errors import RequestError
from engine.text.exact import ecma_pattern, exact
from engine.text.grammar import Grammars, inline_json, json_grammar, lark_grammar
from tests.engine.text.builders import make_text

GRAMMARS = Grammars(make_text())


def lets(grammar: str, value: Any) -> bool:
    state = GRAMMARS.compile(grammar)
    for byte in json.dumps(value, ensure_ascii=False).encode():
        if not state.allowed()[byte]:
            return False
        state.advance(byte)
    return state.may_end


def both(schema: dict[str, Any], value: Any) -> bool:
    """As an answer, and as the arguments of a call."""
    found = {lets(json_grammar(schema), value), lets(lark_grammar(f"start: {inline_json(schema)}"), value)}
    (is_let,) = found
    return is_let


FORMATS: list[tuple[str, list[str], list[str]]] = [
    (
        "time",
        ["10:20:30Z", "23:59:59+23:59", "00:00:00-00:00", "10:20:30.5Z", "10:20:30.123456789+01:00"],
        ["10:20:30", "25:00:00Z", "10:60:00Z", "10:20:60Z", "10:20:30+24:00", "10:20:30 Z", "10:20Z", "10:20:30.Z"],
    ),
    (
        "date-time",
        ["2024-02-29T10:20:30Z", "1999-12-31T23:59:59.5+05:30"],
        ["2023-02-29T10:20:30Z", "2024-01-01T10:20:30", "2024-01-01 10:20:30Z", "2024-01-01T10:20:60Z", "2024-01-01"],
    ),
    ("date", ["2024-02-29", "2000-02-29"], ["1900-02-29", "0000-01-01", "2024-04-31", "2024-13-01", "24-1-1"]),
    ("email", ["a@b.c", "a.b+c@d.example"], ["a" * 65 + "@b.c", "a@" + ".".join(["b" * 60] * 5), "a@", "a b@c"]),
    ("hostname", ["a.example", "a" * 63], ["a" * 64, ".".join(["b" * 60] * 5), "-a"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "good", "bad"), FORMATS)
def test_a_format_is_its_rfcs(name: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "format": name}
    assert [value for value in good if not both(schema, value)] == []
    assert [value for value in bad if both(schema, value)] == []


def test_each_day_that_exists_and_no_other_is_a_date() -> None:
    grammar = json_grammar({"type": "string", "format": "date"})
    for year in (1, 4, 99, 100, 400, 999, 1900, 2000, 2023, 2024, 2100, 9999):
        for month, day in ((2, 28), (2, 29), (2, 30), (4, 30), (4, 31), (12, 31), (12, 32), (0, 1), (1, 0)):
            try:
                exists = bool(date(year, month, day))
            except ValueError:
                exists = False
            assert lets(grammar, f"{year:04}-{month:02}-{day:02}") is exists, (year, month, day)


def test_a_format_stands_beside_other_rules_and_says_nothing_of_other_types() -> None:
    schema = {"type": "string", "format": "time", "pattern": "^1", "allOf": [{"maxLength": 9}]}
    assert [both(schema, v) for v in ("10:20:30Z", "20:20:30Z", "10:20:30.5Z")] == [True, False, False]
    assert both({"format": "date"}, 5)
    assert both({"type": ["string", "null"], "format": "date"}, None)
    inner = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "date"}},
        "required": ["format"],
    }
    assert [both(inner, {"format": v}) for v in ("2024-01-01", "2024-02-30")] == [True, False]


# Pattern, what it lets through, and what it does not.
PATTERNS: list[tuple[str, list[str], list[str]]] = [
    (r"^\s$", [" ", "\t", "\v", "\ufeff", "\u2028", "\u1680", "\u3000"], ["\u0085", "\u200b", "\u180e", "\x1c", "a"]),
    (r"^\S$", ["\u0085", "a", "\u200b"], ["\ufeff", " ", "\n"]),
    (r"^[\s]$", ["\ufeff", " "], ["\u0085", "a"]),
    (r"^[^\s]$", ["\u0085", "a"], ["\ufeff", " "]),
    (r"^[\S\n]$", ["a", "\n", "\u0085"], ["\ufeff", " "]),
    (r"^[\s-z]$", ["-", "z", " "], ["a", "y"]),
    (r"^.$", ["a", "\u0085", "😀", " "], ["\n", "\r", "\u2028", "\u2029"]),
    (r"^[.]$", ["."], ["a"]),
    (r"^\.$", ["."], ["a"]),
    (r"^\\s$", ["\\s"], [" "]),
    (r"^\d\w$", ["1a", "2_"], ["٣a", "1é"]),
    (r"^[[a]$", ["[", "a"], ["b"]),
    (r"^[[a]]$", ["[]", "a]"], ["a", "[", "]"]),
    (r"^[a&&b]$", ["a", "&", "b"], ["c"]),
    (r"^[a~~b]$", ["a", "~", "b"], ["c"]),
    (r"^[[:alpha:]]$", ["a]", ":]", "[]"], ["b", "a"]),
    (r"^[\]\[\-]$", ["]", "[", "-"], ["a"]),
    (r"^[^\]]$", ["a", "["], ["]"]),
    (r"^[a-]$", ["a", "-"], ["b"]),
    (r"^(?i:a)$", ["a", "A"], ["b"]),
    (r"^(a|.)b$", ["ab", "xb"], ["\rb"]),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS)
def test_a_pattern_is_ecmas(pattern: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [value for value in good if not both(schema, value)] == []
    assert [value for value in bad if both(schema, value)] == []


@pytest.mark.parametrize(
    "pattern", [r"[]a]", r"[^]", r"[+--]", r"[a--b]", r"(?s).", r"(?x) a", r"(?is:.)", r"(?i-s:.)(?s:.)"]
)
def test_a_pattern_that_would_mean_something_else_is_refused(pattern: str) -> None:
    for schema in (
        {"pattern": pattern},
        {"patternProperties": {pattern: True}},
        {"anyOf": [{"pattern": pattern}]},
    ):
        with pytest.raises(RequestError, match="pattern: expected"):
            exact(schema)


def test_names_of_keys_that_match_a_pattern_are_ecmas_too() -> None:
    schema = {
        "type": "object",
        "patternProperties": {r"^a\s$": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert [both(schema, {key: 1}) for key in ("a ", "a\ufeff", "a\u0085")] == [True, True, False]


BOUNDS: list[tuple[dict[str, Any], list[float], list[float]]] = [
    ({"maximum": 2**63 - 1, "minimum": -(2**63)}, [0, 2**63 - 1024, -(2**63) + 1024], [2**63, -(2**63) - 1]),
    ({"maximum": 2**64 - 1, "minimum": 0}, [0, 2**53 + 1, 2**62 + 1], [-1, 2**64]),
    ({"maximum": 2**53 + 1}, [2**53], [2**53 + 2]),
    ({"minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
    ({"exclusiveMaximum": 2**53 + 1, "exclusiveMinimum": -(2**53) - 1}, [2**53 - 1, 0], [2**53 + 2, -(2**53) - 2]),
    ({"maximum": 1.7976931348623157e308, "minimum": 0}, [0, 10**15], [-1]),
    ({"maximum": 9, "minimum": -9}, [9, -9], [10, -10]),
]  # fmt: skip


@pytest.mark.parametrize(("bounds", "good", "bad"), BOUNDS)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_beyond_the_librarys_numbers_are_kept_from_within(
    bounds: dict[str, Any], good: list[float], bad: list[float], kind: str
) -> None:
    schema = {"type": kind, **bounds}
    assert [value for value in good if not both(schema, value)] == []
    assert [value for value in bad if both(schema, value)] == []


def test_counts_beyond_the_librarys_are_no_limit() -> None:
    for schema, value in (
        ({"type": "string", "maxLength": 2**32}, "a"),
        ({"type": "array", "maxItems": 2**63}, [1]),
        ({"type": "object", "maxProperties": 2**63}, {}),
    ):
        assert both(schema, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1}, {"enum": [1, [{"a": -(2**64)}]]}, {"multipleOf": 2**53 + 1}, {"minLength": 2**64},
        {"items": {"minimum": 2**64}}, {"properties": {"a": {"maximum": -(2**64)}}},
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_enforced_exactly_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="2\\^53"):
        exact(schema)


@pytest.mark.parametrize(
    "part",
    [
        {"uniqueItems": False}, {"propertyNames": {"type": "string"}}, {"propertyNames": {}}, {"propertyNames": True},
        {"dependentRequired": {}}, {"dependentSchemas": {}}, {"unevaluatedProperties": True}, {"not": False},
        {"unevaluatedItems": {}}, {"default": 2**64, "examples": [2**64]}, {"x-order": 2**64},
        *({"format": name} for name in ("binary", "password", "path", "file-path", "directory-path")),
    ],
)  # fmt: skip
def test_what_says_nothing_is_in_nobodys_way(part: dict[str, Any]) -> None:
    for kind, good, bad in (("string", "a", 1), ("array", ["a", "a"], {}), ("object", {"a": 1}, [])):
        assert [both({"type": kind, **part}, value) for value in (good, bad)] == [True, False]


def test_what_says_something_is_not_dropped() -> None:
    for part in ({"uniqueItems": True}, {"propertyNames": {"minLength": 2}}, {"unevaluatedItems": False},
                 {"not": {}}, {"format": "iri"}, {"exclusiveMaximum": True}):  # fmt: skip
        assert exact(part) == part


def test_values_and_names_within_a_schema_stay_as_they_are() -> None:
    for schema in (
        {"const": {"pattern": r"\s", "format": "time"}},
        {"enum": [{"format": "date"}]},
        {"properties": {"pattern": {"type": "string"}, "format": {"const": "."}}},
        {"type": "string", "format": "uuid"},
        {"format": "date", "allOf": 5},  # no schema, which is for the library to say
        {"format": 5, "pattern": 5, "patternProperties": 5, "properties": 5},
        True,
    ):
        assert exact(schema) == schema


def test_a_pattern_without_such_signs_stays_as_it_is() -> None:
    for pattern in (r"^[a-z0-9_]+(\.[a-z]{2,})*$", r"\p{L}\u0041\x41", r"a|b", r"\[\]"):
        assert ecma_pattern(pattern) == pattern
