"""How a configuration that is wrong is told to whoever wrote it: pydantic's findings in the project's words."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

# How pydantic's findings are told; their context fills the gap.
_EXPECTED = {
    "greater_than_equal": "≥ {ge}",
    "greater_than": "> {gt}",
    "less_than_equal": "≤ {le}",
    "literal_error": "{expected}",
    "dict_type": "a mapping of names to amounts",
}


def explain(detail: Any, sections: Mapping[str, Sequence[str]]) -> str:
    """One finding of pydantic in our words: the key, what was expected, what came. `sections`: all known keys."""
    where = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    kind = detail["type"]
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind == "extra_forbidden":
        return f"{where}: unknown key{_suggestion(detail['loc'], sections)}"
    if kind == "model_type" and where:
        keys = (f"{where}.{key}" for key in sections.get(where, ()))
        expected = f"a section ({', '.join(keys)})"
    elif kind in _EXPECTED:
        bounds = {name: f"{value}".removesuffix(".0") for name, value in detail.get("ctx", {}).items()}
        expected = _EXPECTED[kind].format(**bounds)
    else:
        expected = detail["msg"].removeprefix("Input should be ")
    return f"{where or 'config'}: expected {expected} but got {repr(detail['input'])[:80]}"


def _suggestion(loc: Sequence[int | str], sections: Mapping[str, Sequence[str]]) -> str:
    """The known key that was probably meant: of the same section, else of the same name elsewhere; else all there are."""
    *parents, leaf = map(str, loc)
    siblings = sections.get(parents[0], []) if parents else list(sections)
    if close := difflib.get_close_matches(leaf, siblings, 1):
        return f"; did you mean {'.'.join([*parents, close[0]])}?"
    elsewhere = [(key, name) for name, keys in sections.items() for key in keys]
    if close := difflib.get_close_matches(leaf, [key for key, _ in elsewhere], 1):
        return f"; did you mean {' or '.join(f'{name}.{key}' for key, name in elsewhere if key == close[0])}?"
    if len(parents) > 1:  # within a section's own mapping
        return ""
    known = ", ".join(siblings)
    return f"; {parents[0]} has {known}" if parents else f"; the sections are {known}"
