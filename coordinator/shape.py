"""What an output must look like, and how it is read: `response_format`, `structured_outputs` (and `guided_…`, its
older names), tools, reasoning.

    body ─► Shape: a grammar (empty: none) and a Reading         the grammar is compiled here first: a bad one is a 400

Compiling runs in a process of its own with a bound on size, depth and time; see engine/text/trial.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from contracts.errors import RequestError, UnsupportedError
from coordinator.body import parse_object
from coordinator.fields import OF_SCHEMAS, refuse_misplaced, refuse_misspelt_within, shown
from coordinator.gateway.context import CURRENT
from coordinator.json_schema import unbounded_in
from coordinator.reading import THINK, THINK_END, Reading
from coordinator.schema import ChatParams
from coordinator.tools import MAX_DEPTH, Tools, answer_grammar, call_grammar, format_of, strict_grammar
from engine.text.grammar import (
    choice_grammar,
    ebnf_grammar,
    json_grammar,
    json_in_lark,
    regex_grammar,
)
from engine.text.tokenizer import TextModel
from engine.text.trial import GrammarTrial

MAX_CHOICES = 1900  # different ones: the library follows 2,000 rules at once
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
_VALUES = ("const", "enum", "default", "examples")  # of a schema: no schemas, whatever they look like
_WRITING = (
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)
# Of the others, how JSON is written says nothing.
_WRITES = {
    "json": frozenset(_WRITING),
    "json_object": frozenset(_WRITING) - {"disable_additional_properties"},
}
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}


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
    structures = (
        _response_format(body.get("response_format")),
        _structured(body.get("structured_outputs")),
        _guided(body),
    )
    found = [shape for shape in structures if shape is not None]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise RequestError(f"{second}: expected no {first} beside it", param=second)
    return found[0] if found else PLAIN


def chat_shape(body: dict[str, Any], params: ChatParams, tools: Tools | None, text: TextModel) -> Shape:
    """As `completion_shape`, with tools and reasoning; `begins_in_thought` waits for the prompt. Beside tools that may
    be called, JSON that is asked for is the form of an answer that calls none.
    """
    shape = completion_shape(body)
    reading, is_free = Reading(), not shape.grammar
    if tools is not None:
        form = format_of(text)
        # A call without a mark begins as JSON does, and the library does not go back to tell the two apart.
        answer = None if tools.is_forced or form.mark is None else json_in_lark(shape.grammar)
        if shape.grammar and answer is None:
            what = "tools that have to be called" if tools.is_forced else "tools"
            raise RequestError(f"{shape.param}: expected no {what} beside it", param=shape.param)
        with _named("tools"):
            if answer is not None:
                shape = replace(shape, grammar=answer_grammar(tools, form, text, answer))
            elif tools.is_forced:
                shape, is_free = Shape(call_grammar(tools, form, text), "tools"), False
            elif tools.is_strict:
                shape = Shape(strict_grammar(tools, form, text, (THINK, THINK_END)), "tools")
                is_free = form.mark is not None
        reading = Reading(
            make_reader=lambda: form.reader(tools),
            is_single=not tools.is_parallel,
            is_forced=tools.is_forced,
            reason_of_calls="stop" if tools.choice == "named" else "tool_calls",
            shown_ids=_special(text, form.marks),
        )
    # NOTE: a grammar holds from the first token on, so there is no reasoning before it, unless it begins with any text.
    is_continued = params.continue_final_message or not params.add_generation_prompt
    if text.template is not None and text.template.thinks and is_free and not is_continued:
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


async def with_checked_grammar(shape: Shape, trial: GrammarTrial) -> Shape:
    """The shape with its grammar as workers compile it. While a caller's grammars are tried, so are those of other
    tenants.

    Raises RequestError naming the field if no output could follow the grammar, OverloadedError as the trial does.
    """
    if not shape.grammar:
        return shape
    with _named(shape.param or ""):
        context = CURRENT.get()
        grammar = await trial.check(shape.grammar, "" if context is None else context.caller.tenant)
    return replace(shape, grammar=grammar)


@contextmanager
def _named(param: str) -> Iterator[None]:
    """What is wrong with a grammar, with the field that it came from."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{param}: {error.message}", param=param) from error


def _special(text: TextModel, marks: tuple[str, ...]) -> frozenset[int]:
    ids = {text.token_id(mark) for mark in marks}
    return frozenset(i for i in ids if i is not None)


def _response_format(value: Any) -> Shape | None:
    param = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    refuse_misplaced(value, OF_SCHEMAS if kind == "json_schema" else ("json_schema", *OF_SCHEMAS), param)
    refuse_misspelt_within(value, ("type", "json_schema", *OF_SCHEMAS), param)
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
        refuse_misspelt_within(named, OF_SCHEMAS, f"{param}.json_schema", param)
        for key, kinds, expected in (("strict", bool, "true or false"), ("description", str, "text")):
            if not isinstance(named.get(key), kinds | None):
                raise RequestError(
                    f"{param}.json_schema.{key}: expected {expected} but got {shown(named[key])}", param=param
                )
        schema = named.get("schema")
        if not isinstance(schema, dict):
            raise RequestError(
                f"{param}.json_schema.schema: expected a JSON Schema object but got {shown(schema)}",
                param=param,
            )
        return Shape(_schema(schema, param, _Writing()), param)
    if kind in ("structural_tag", "grammar"):
        raise UnsupportedError(f"response_format: {kind} is not supported by this server", param=param)
    raise RequestError(
        f"response_format: expected type text, json_object or json_schema but got {shown(kind)}", param=param
    )


def _structured(value: Any) -> Shape | None:
    """vLLM's field: exactly one kind, and how JSON is written."""
    param = "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{param}: expected an object but got {shown(value)}", param=param)
    given = _given(value, "json_object", *_WRITING)
    for key in given:
        if key not in (*_STRUCTURES, *_WRITING):
            raise UnsupportedError(f"{param}.{shown(key)}: not supported by this server", param=param)
    kinds = [key for key in given if key in _STRUCTURES]
    if len(kinds) != 1:
        raise RequestError(
            f"{param}: expected exactly one of {', '.join(_STRUCTURES)} but got {len(kinds)}", param=param
        )
    (kind,) = kinds
    refuse_misplaced(given, sorted({*_WRITING[1:]} - _WRITES.get(kind, frozenset())), param)
    writing = _writing(given, param)
    return Shape(_structure(kind, given[kind], _Field(f"{param}.{kind}", param), writing), param)


def _guided(body: dict[str, Any]) -> Shape | None:
    """The same by vLLM's older names, which many clients still send."""
    given = list(_given({name: body.get(name) for name in _GUIDED}, "guided_json_object"))
    whitespace = body.get("guided_whitespace_pattern")
    if not given:
        if whitespace is not None:
            param = "guided_whitespace_pattern"
            raise RequestError(f"{param}: expected guided_json beside it", param=param)
        return None
    if len(given) > 1:
        raise RequestError(f"{given[1]}: expected no {given[0]} beside it", param=given[1])
    (name,) = given
    if whitespace is not None and _GUIDED[name] not in _WRITES:
        raise RequestError(
            f"guided_whitespace_pattern: expected guided_json beside it but got {name}",
            param="guided_whitespace_pattern",
        )
    writing = _writing({"whitespace_pattern": whitespace}, "guided_whitespace_pattern")
    return Shape(_structure(_GUIDED[name], body[name], _Field(name, name), writing), name)


@dataclass(frozen=True, slots=True)
class _Writing:
    """How JSON is written: a regex of its white space (None: our own), whether objects have only the keys they name."""

    whitespace: str | None = None
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class _Field:
    """Where a value stands in the body: in words, and as an error's `param`."""

    name: str
    param: str

    def expected(self, what: str, value: Any) -> RequestError:
        return RequestError(f"{self.name}: expected {what} but got {shown(value)}", param=self.param)


def _given(value: dict[str, Any], *flags: str) -> dict[str, Any]:
    """What is there: not null, and no flag that is off."""
    return {
        key: item for key, item in value.items() if item is not None and not (item is False and key in flags)
    }


def _writing(given: dict[str, Any], param: str) -> _Writing:
    for key in ("disable_any_whitespace", "disable_additional_properties", "disable_fallback"):
        if given.get(key, True) is not True:
            raise RequestError(f"{param}.{key}: expected true or false", param=param)
    whitespace = given.get("whitespace_pattern")
    if not isinstance(whitespace, str | None):
        raise RequestError(f"{param}: expected a pattern but got {shown(whitespace)}", param=param)
    if given.get("disable_any_whitespace"):
        refuse_misplaced(given, ("whitespace_pattern",), param)
        whitespace = ""
    return _Writing(whitespace, bool(given.get("disable_additional_properties")))


def _structure(kind: str, value: Any, field: _Field, writing: _Writing) -> str:
    if kind == "json_object":
        if value is not True:
            raise field.expected("true or false", value)
        return json_grammar({"type": "object"}, writing.whitespace)
    if kind == "json":
        return _schema(value, field.param, writing)
    if kind == "choice":
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(item, str) and item for item in value)
        ):
            raise field.expected("a list of texts", value)
        choices = list(dict.fromkeys(value))
        if len(choices) > MAX_CHOICES:
            raise RequestError(
                f"{field.name}: expected at most {MAX_CHOICES} different texts but got {len(choices)}",
                param=field.param,
            )
        return choice_grammar(choices)
    if not isinstance(value, str) or not value:
        raise field.expected("text", value)
    if kind == "regex":
        return regex_grammar(value)
    return ebnf_grammar(value)


def _schema(value: Any, param: str, writing: _Writing) -> str:
    if isinstance(value, str):
        with _named(param):
            value = parse_object(value.encode())
    if not isinstance(value, dict):
        raise RequestError(f"{param}: expected a JSON Schema object but got {shown(value)}", param=param)
    if (fault := unbounded_in(value, MAX_DEPTH)) is not None:
        raise RequestError(f"{param}: {fault}", param=param)
    with _named(param):
        return json_grammar(_closed(value) if writing.is_closed else value, writing.whitespace)


def _closed(schema: Any) -> Any:
    """The schema with objects that may have only the keys they name, where it does not say otherwise."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: value if key in _VALUES else _closed(value) for key, value in schema.items()}
    kinds = schema.get("type")
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return {"additionalProperties": False, **inner} if is_object else inner
