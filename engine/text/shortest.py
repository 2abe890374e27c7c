r"""How long an output must be at least, read off a grammar's source before anything is compiled.

    ((a{100}){100}){100} ─► 1,000,000 characters: no output gets there, and the library would unfold it all

A lower bound, in characters, and cheap: what is not understood counts nothing, since the compiler judges it anyway.
Ranges (`{0,50000}`) cost the library little; it is what has to come that it unfolds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from contracts.errors import RequestError

MAX_SHORTEST = 20_000
_NUM_ROUNDS = 64  # rules that double each other so often are beyond every bound
_BOUND = 1 << 40  # sums end here: a number of thousands of digits is no help
_REGEX = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\.|\[(?:\\.|\[:\^?\w+:\]|[^\]\\])+\]|\((?:\?[a-zA-Z-]*[:)]|\?P?<\w+>)?|"
    r"\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|.",
    re.DOTALL,
)
_LARK = re.compile(
    r"//[^\n]*|(?P<json>%json\s*(?={))|(?P<text>\"(?:\\.|[^\"\\\n])*\")i?|/(?P<regex>(?:\\.|[^/\\\n])+)/[a-z]*|"
    r"(?P<special><[^>\n]*>)|\{\s*(?P<least>\d+)\s*(?:,\s*(?P<most>\d*)\s*)?\}|"
    r"(?P<rule>^[ \t]*[?!]?(?P<name>\w+)(?:\[[^\]\n]*\])?(?:\.\d+)?\s*:)|(?P<ref>\w+)|[()\[\]|?*+]",
    re.MULTILINE,
)


def check_shortest(source: str) -> None:
    """Raises RequestError for a grammar whose every output is longer than MAX_SHORTEST characters."""
    found = shortest(source)
    if found > MAX_SHORTEST:
        shown = str(found) if found < _BOUND else "far more"
        raise RequestError(
            f"expected a grammar with an output of at most {MAX_SHORTEST} characters but its shortest has {shown}"
        )


def shortest(source: str) -> int:
    """Characters of the shortest output of a source that grammar.py made, or fewer."""
    if not source.startswith('{"grammars"'):
        return _of_lark(source)
    parts = json.loads(source)["grammars"]
    return max(
        _of_schema(part["json_schema"])
        if part.get("lark_grammar") is None
        else _of_lark(part["lark_grammar"])
        for part in parts
    )


class _Sum:
    """Of a sequence of atoms with alternatives and groups, as both notations have them."""

    def __init__(self) -> None:
        self._groups: list[tuple[list[int], int, int]] = []  # (earlier alternatives, this one, its last atom)
        self._done: list[int] = []
        self._sum = self._last = 0

    def atom(self, size: int) -> None:
        self._sum, self._last = min(self._sum + self._last, _BOUND), size

    def repeat(self, least: int) -> None:
        self._last = min(self._last * least, _BOUND)

    def alternative(self) -> None:
        self._done.append(self._sum + self._last)
        self._sum = self._last = 0

    def open(self) -> None:
        self.atom(0)
        self._groups.append((self._done, self._sum, 0))
        self._done, self._sum, self._last = [], 0, 0

    def close(self) -> None:
        size = self.total()
        if self._groups:
            self._done, self._sum, _ = self._groups.pop()
            self._last = size

    def total(self) -> int:
        return min([*self._done, self._sum + self._last])


def _of_regex(pattern: str) -> int:
    found, behind_count = _Sum(), False
    for part in _REGEX.finditer(pattern):
        text = part[0]
        if part["least"] is not None or text in ("?", "*", "+"):
            if not behind_count:  # else it says only how greedy the count before it is
                found.repeat(
                    {"?": 0, "*": 0, "+": 1}[text] if part["least"] is None else _number(part["least"])
                )
            behind_count = not behind_count
            continue
        behind_count = False
        match text[0], text[-1]:
            case "(", last if last != ")":
                found.open()
            case ")", _:
                found.close()
            case "|", _:
                found.alternative()
            case (("^" | "$" | "("), _):
                found.atom(0)
            case _:
                found.atom(0 if text in (r"\b", r"\B", r"\A", r"\z") else 1)
    return found.total()


def _of_lark(text: str) -> int:
    """Rules may use each other before they are told, and themselves: their sizes grow from 0 until they stay."""
    tokens = list(_lark_tokens(text))
    sizes: dict[str, int] = {}
    for _ in range(_NUM_ROUNDS):
        grown = _lark_sizes(tokens, sizes)
        if grown == sizes or sizes.get("start", 0) > MAX_SHORTEST:
            break
        sizes = grown
    return sizes.get("start", 0)


def _lark_tokens(text: str) -> Iterator[tuple[str, str | int]]:
    """(kind, its text or size)."""
    decoder, position = json.JSONDecoder(), 0
    while (part := _LARK.search(text, position)) is not None:
        position = part.end()
        if part["json"] is not None:
            try:
                schema, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                continue
            yield "atom", _of_schema(schema)
        elif part["text"] is not None:
            yield "atom", len(re.sub(r"\\.", "x", part["text"])) - 2
        elif part["regex"] is not None:
            yield "atom", _of_regex(part["regex"])
        elif part["special"] is not None:
            yield "atom", 0
        elif part["least"] is not None:
            yield "repeat", _number(part["least"])
        elif part["rule"] is not None:
            yield "rule", part["name"]
        elif part["ref"] is not None:
            yield "ref", part["ref"]
        elif not part[0].startswith("//"):
            yield part[0], 0


def _lark_sizes(tokens: list[tuple[str, str | int]], sizes: dict[str, int]) -> dict[str, int]:
    grown: dict[str, int] = {}
    name, found = "", _Sum()
    for kind, what in tokens:
        match kind, what:
            case "rule", str(what):
                grown[name], name, found = found.total(), what, _Sum()
            case "ref", str(what):
                found.atom(sizes.get(what, 0))
            case "atom", int(what):
                found.atom(what)
            case "repeat", int(what):
                found.repeat(what)
            case (("?" | "*"), _):
                found.repeat(0)
            case (("(" | "["), _):
                found.open()
            case ((")" | "]"), _):
                found.close()
                if kind == "]":
                    found.repeat(0)
            case "|", _:
                found.alternative()
    grown[name] = found.total()
    return grown


def _of_schema(schema: Any) -> int:
    if not isinstance(schema, dict):
        return 0
    least = 0
    for keyword in ("anyOf", "oneOf"):
        if isinstance(inner := schema.get(keyword), list) and inner:
            least = max(least, min(map(_of_schema, inner)))
    if isinstance(inner := schema.get("allOf"), list):
        least = max([least, *map(_of_schema, inner)])
    kind = schema.get("type")
    if kind == "string":
        pattern = schema.get("pattern")
        least = max(least, _count(schema, "minLength"), _of_regex(pattern) if isinstance(pattern, str) else 0)
    elif kind == "array":
        least = max(least, min(_count(schema, "minItems") * max(1, _of_schema(schema.get("items"))), _BOUND))
    elif kind == "object" and isinstance(properties := schema.get("properties"), dict):
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        least = max(least, sum(_of_schema(properties.get(name)) for name in names if isinstance(name, str)))
    return least


def _count(schema: dict[str, Any], keyword: str) -> int:
    value = schema.get(keyword)
    return min(value, _BOUND) if isinstance(value, int) and value > 0 else 0


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 13 else _BOUND
