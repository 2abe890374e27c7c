"""What an output must look like, and how it is read: `response_format`, `structured_outputs`, tools, reasoning.

    body ─► Shape: a grammar (empty: none) and a Reading         the grammar is compiled here first: a bad one is a 400

Compiling runs on a thread with a bound on size, depth and time; see engine/text/grammar.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from contracts.errors import RequestError, UnsupportedError
from coordinator.body import parse_object
from coordinator.reading import THINK, THINK_END, Reading
from coordinator.schema import ChatParams, shown
from coordinator.tools import Tools, call_grammar, format_of
from engine.text.grammar import (
    LazyGrammars,
    choice_grammar,
    ebnf_grammar,
    json_grammar,
    regex_grammar,
)
from engine.text.tokenizer import TextModel

MAX_DEPTH = 64
MAX_CHOICES = 10_000
COMPILE_TIMEOUT_S = 5.0
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
_HINTS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class Shape:
    """`param`: the field that `grammar` came from. `mirror`: what the answer repeats of the request."""

    grammar: str = ""
    param: str | None = None
    reading: Reading = Reading()  # noqa: RUF009 - immutable
    mirror: dict[str, Any] = field(default_factory=dict)


PLAIN = Shape()


def completion_shape(body: dict[str, Any]) -> Shape:
    """Raises RequestError naming the field that is wrong, UnsupportedError for a form that is not built."""
    structures = [_response_format(body.get("response_format")), _structured(body.get("structured_outputs"))]
    found = [shape for shape in structures if shape is not None]
    if len(found) > 1:
        raise RequestError(
            "structured_outputs: expected no response_format beside it", param="structured_outputs"
        )
    return found[0] if found else PLAIN


def chat_shape(body: dict[str, Any], params: ChatParams, tools: Tools | None, text: TextModel) -> Shape:
    """As `completion_shape`, with tools and reasoning; `begins_in_thought` waits for the prompt."""
    shape = completion_shape(body)
    reading = Reading()
    if tools is not None:
        if shape.grammar:
            raise RequestError(f"{shape.param}: expected no tools beside it", param=shape.param)
        form = format_of(text)
        if tools.is_forced:
            shape = Shape(call_grammar(tools, form, text), "tools")
        reading = Reading(
            make_reader=lambda: form.reader(tools),
            is_single=not tools.is_parallel,
            is_forced=tools.is_forced,
            reason_of_calls="stop" if tools.choice == "named" else "tool_calls",
            shown_ids=_special(text, form.marks),
        )
    # NOTE: a grammar holds from the first token on, so there is no reasoning to be read before it.
    is_continued = params.continue_final_message or not params.add_generation_prompt
    if text.template is not None and text.template.thinks and not shape.grammar and not is_continued:
        reading = replace(
            reading,
            thinks=True,
            shows_thoughts=params.include_reasoning,
            shown_ids=reading.shown_ids | _special(text, (THINK, THINK_END)),
        )
    return replace(shape, reading=reading)


def behind_prompt(shape: Shape, tail: str) -> Shape:
    """Some templates open the reasoning themselves, at the prompt's end."""
    if not (shape.reading.thinks and tail.rstrip().endswith(THINK)):
        return shape
    return replace(shape, reading=replace(shape.reading, begins_in_thought=True))


async def check_grammar(shape: Shape, grammars: LazyGrammars) -> None:
    """Raises RequestError naming the field if no output could follow the grammar."""
    if not shape.grammar:
        return
    try:
        async with asyncio.timeout(COMPILE_TIMEOUT_S):
            await asyncio.to_thread(grammars.behind, shape.grammar, ())
    except TimeoutError as error:
        raise RequestError(
            f"{shape.param}: expected a grammar that compiles within {COMPILE_TIMEOUT_S:g} s",
            param=shape.param,
        ) from error
    except RequestError as error:
        raise RequestError(f"{shape.param}: {error.message}", param=shape.param) from error


def _special(text: TextModel, marks: tuple[str, ...]) -> frozenset[int]:
    ids = {text.token_id(mark) for mark in marks}
    return frozenset(i for i in ids if i is not None)


def _response_format(value: Any) -> Shape | None:
    param = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Shape(json_grammar({"type": "object"}), param)
    if kind == "json_schema":
        named = value.get("json_schema")
        if not isinstance(named, dict) or not isinstance(named.get("name"), str):
            raise RequestError(
                f"response_format.json_schema: expected a name and a schema but got {shown(named)}",
                param=param,
            )
        return Shape(_schema(named.get("schema", {}), param), param)
    if kind in ("structural_tag", "grammar"):
        raise UnsupportedError(f"response_format: {kind} is not supported by this server", param=param)
    raise RequestError(
        f"response_format: expected type text, json_object or json_schema but got {shown(kind)}", param=param
    )


def _structured(value: Any) -> Shape | None:
    """vLLM's field: exactly one kind."""
    param = "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{param}: expected an object but got {shown(value)}", param=param)
    given = {key: item for key, item in value.items() if item not in (None, False)}
    for key in given:
        if key not in (*_STRUCTURES, *_HINTS):
            raise UnsupportedError(f"{param}.{shown(key)}: not supported by this server", param=param)
    kinds = [key for key in given if key in _STRUCTURES]
    if len(kinds) != 1:
        raise RequestError(
            f"{param}: expected exactly one of {', '.join(_STRUCTURES)} but got {len(kinds)}", param=param
        )
    return Shape(_structure(kinds[0], given[kinds[0]], param), param)


def _structure(kind: str, value: Any, param: str) -> str:
    if kind == "json_object":
        return json_grammar({"type": "object"})
    if kind == "json":
        return _schema(value, param)
    if kind == "choice":
        is_list = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
        if not is_list or not all(isinstance(item, str) and item for item in value):
            raise RequestError(
                f"{param}.choice: expected a list of texts but got {shown(value)}", param=param
            )
        return choice_grammar(value)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param}.{kind}: expected text but got {shown(value)}", param=param)
    if kind == "regex":
        return regex_grammar(value)
    try:
        return ebnf_grammar(value)
    except RequestError as error:
        raise RequestError(f"{param}.{error.message}", param=param) from error


def _schema(value: Any, param: str) -> str:
    if isinstance(value, str):
        try:
            value = parse_object(value.encode())
        except RequestError as error:
            raise RequestError(f"{param}: {error.message}", param=param) from error
    if not isinstance(value, dict):
        raise RequestError(f"{param}: expected a JSON Schema object but got {shown(value)}", param=param)
    if _is_deeper(value, MAX_DEPTH):
        raise RequestError(f"{param}: expected a schema of at most {MAX_DEPTH} levels", param=param)
    return json_grammar(value)


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
