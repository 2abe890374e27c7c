"""What a client's `tools` and `tool_choice` ask for, and what a model's own format makes of it.

    tools, tool_choice ──► Tools ──┬─► the template's `tools`, or a system message for a template that knows none
                                   ├─► a grammar, if a call is required, or must be right once it has begun (`strict`)
                                   └─► a reader of the output

The format is chosen by the model's chat template, which is where a model's authors write down what it was trained on.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from contracts.errors import RequestError, UnsupportedError
from coordinator.call_readers import (
    ARGS,
    CLOSE,
    OPEN,
    PYTHON_TAG,
    TOOL_CALLS,
    HermesReader,
    LlamaReader,
    MistralReader,
)
from coordinator.calls import CallReader
from coordinator.fields import refuse_misplaced, refuse_misspelt_within, shown
from coordinator.json_schema import fault_in, unbounded_in
from engine.text.grammar import inline_json, lark_grammar
from engine.text.tokenizer import TextModel

MAX_TOOLS = 128
MAX_DEPTH = 64  # of a schema
MAX_CALLS = 16  # that a grammar allows in one answer
_FUNCTION = ("name", "description", "parameters", "strict")
_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")

Choice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    source: dict[str, Any]  # as the client wrote it, for the template
    parameters: dict[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """`tools`: those that may be called; one alone if it is named. `shown`: those that the model is told of."""

    choice: Choice
    tools: tuple[Tool, ...]
    shown: tuple[dict[str, Any], ...]
    is_parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def is_strict(self) -> bool:
        """Whether a call of the model's own will has to be right."""
        return any(tool.is_strict for tool in self.tools)


def read_tools(body: dict[str, Any]) -> Tools | None:
    """None: the client has no tools, or wants none called. Raises RequestError naming `tools` or `tool_choice`."""
    tools = _tools(body.get("tools"))
    choice = body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise RequestError(
            f"parallel_tool_calls: expected true or false but got {shown(parallel)}",
            param="parallel_tool_calls",
        )
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice: expected tools beside it", param="tool_choice")
        return None
    kind, name = _choice(choice)
    if kind == "none":
        return None
    callable_ = tuple(tool for tool in tools if name in (None, tool.name))
    if not callable_:
        raise RequestError(
            f"tool_choice: expected one of the tools but got {shown(name)}", param="tool_choice"
        )
    is_parallel = parallel is not False and kind != "named"
    return Tools(kind, callable_, tuple(tool.source for tool in tools), is_parallel)


def _tools(value: Any) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise RequestError(
            f"tools: expected a list of at most {MAX_TOOLS} but got {shown(value)}", param="tools"
        )
    tools = tuple(_tool(item, f"tools[{i}]") for i, item in enumerate(value))
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError("tools: expected different names but two are the same", param="tools")
    return tools


def _tool(item: Any, where: str) -> Tool:
    if not isinstance(item, dict):
        raise RequestError(f"{where}: expected an object but got {shown(item)}", param="tools")
    if item.get("type", "function") != "function":
        raise UnsupportedError(f"{where}.type: only function is supported", param="tools")
    function = item.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function: expected an object but got {shown(function)}", param="tools")
    is_lax = item.get("strict") is False  # which is no wish, wherever it stands
    refuse_misplaced(item, _FUNCTION[:-1] if is_lax else _FUNCTION, where, "tools")
    refuse_misspelt_within(function, _FUNCTION, f"{where}.function", "tools")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name: expected letters, digits, _ and - but got {shown(name)}", param="tools"
        )
    if not isinstance(description, str | None):
        raise RequestError(
            f"{where}.function.description: expected text but got {shown(description)}", param="tools"
        )
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(
            f"{where}.function.strict: expected true or false but got {shown(function['strict'])}",
            param="tools",
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise RequestError(
            f"{where}.function.parameters: expected a JSON Schema of an object but got {shown(parameters)}",
            param="tools",
        )
    fault = unbounded_in(parameters, MAX_DEPTH) or fault_in(parameters, MAX_DEPTH)
    if fault is not None:
        raise RequestError(f"{where}.function.parameters: {fault}", param="tools")
    shape = {"type": "object", "properties": {}, **parameters}
    source = {"type": "function", "function": {**function, "parameters": shape}}
    return Tool(name, source, {**shape}, function.get("strict") is True)


def _choice(value: Any) -> tuple[Choice, str | None]:
    if value is None:
        return "auto", None
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value, None  # type: ignore[return-value]
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            refuse_misplaced(value, ("name",), "tool_choice")
            return "named", name
    if isinstance(value, dict) and value.get("type") in ("allowed_tools", "custom"):
        raise UnsupportedError(f"tool_choice: {value['type']} is not supported", param="tool_choice")
    raise RequestError(
        f"tool_choice: expected none, auto, required or a function's name but got {shown(value)}",
        param="tool_choice",
    )


class ToolFormat(Protocol):
    """How one family writes calls. `marks`: special tokens that its reader must see. `mark`: what calls begin with,
    after whatever text; None: a call is the whole output, and begins with its brace.
    """

    @property
    def marks(self) -> tuple[str, ...]: ...

    @property
    def mark(self) -> str | None: ...

    def reader(self, tools: Tools) -> CallReader: ...

    def rules(self, tools: Tools, text: TextModel) -> tuple[str, str, str]:
        """Lark: what comes between `mark` and the first call, between two, and behind the last."""

    def call(self, name: str, text: TextModel) -> tuple[str, str]:
        """Lark: what stands before and behind a call's arguments."""


class Hermes:
    marks = (OPEN, CLOSE)
    mark = OPEN

    def reader(self, tools: Tools) -> CallReader:
        return HermesReader()

    def rules(self, tools: Tools, text: TextModel) -> tuple[str, str, str]:
        return "", f'"\\n" {literal(OPEN, text)}', ""

    def call(self, name: str, text: TextModel) -> tuple[str, str]:
        return json.dumps(f'\n{{"name": "{name}", "arguments": '), f'"}}\\n" {literal(CLOSE, text)}'


class Llama3:
    marks = (PYTHON_TAG,)
    mark = None

    def reader(self, tools: Tools) -> CallReader:
        return LlamaReader(tools.names)

    def rules(self, tools: Tools, text: TextModel) -> tuple[str, str, str]:
        return "", '"; "', ""

    def call(self, name: str, text: TextModel) -> tuple[str, str]:
        return json.dumps(f'{{"name": "{name}", "parameters": '), '"}"'


class Mistral:
    marks = (TOOL_CALLS, ARGS)
    mark = TOOL_CALLS

    def reader(self, tools: Tools) -> CallReader:
        return MistralReader()

    def rules(self, tools: Tools, text: TextModel) -> tuple[str, str, str]:
        if text.token_id(ARGS) is not None:
            return "", literal(TOOL_CALLS, text), ""
        return '"["', '", "', '"]"'

    def call(self, name: str, text: TextModel) -> tuple[str, str]:
        if text.token_id(ARGS) is not None:
            return f"{json.dumps(name)} {literal(ARGS, text)}", ""
        return json.dumps(f'{{"name": "{name}", "arguments": '), '"}"'


def literal(mark: str, text: TextModel) -> str:
    """A mark in Lark: by id where it is a special token, which no text may spell, else by its letters."""
    return f"<[{text.token_id(mark)}]>" if _is_special(mark, text) else json.dumps(mark)


def _is_special(mark: str, text: TextModel) -> bool:
    return text.token_id(mark) in text.special_ids


def format_of(text: TextModel) -> ToolFormat:
    """By the model's template. Raises UnsupportedError for a template whose calls are of no known form."""
    template = text.template
    source = template.source if template is not None and template.uses_tools else OPEN
    if TOOL_CALLS in source:
        return Mistral()
    if OPEN in source and "<function=" not in source:
        return Hermes()
    if PYTHON_TAG in source or '{"name": function name, "parameters"' in source:
        return Llama3()
    raise UnsupportedError("tools: the form of this model's calls is not known", param="tools")


def call_grammar(tools: Tools, form: ToolFormat, text: TextModel) -> str:
    """An output that is one call, or up to MAX_CALLS if they may be parallel, and nothing else."""
    mark = literal(form.mark, text) if form.mark else ""
    return lark_grammar("\n".join([f"start: {mark} calls", *_call_rules(tools, form, text)]))


def answer_grammar(tools: Tools, form: ToolFormat, text: TextModel, answer: str) -> str:
    """An output that is calls, as in `call_grammar`, or an answer, for a format with a mark. `answer`: Lark, see
    `json_in_lark`.
    """
    assert form.mark is not None
    lines = [
        f"start: {literal(form.mark, text)} calls | answer",
        f"answer: {answer}",
        *_call_rules(tools, form, text),
    ]
    return lark_grammar("\n".join(lines))


def strict_grammar(tools: Tools, form: ToolFormat, text: TextModel, kept: tuple[str, ...] = ()) -> str:
    """Any text; but what begins as a call is one of these calls, with the arguments of its schema where it is strict.

    `kept`: marks that may stand in the text, although as special tokens they are no text.
    """
    rules = _call_rules(tools, form, text)
    if form.mark is None:
        tag = f"{literal(PYTHON_TAG, text)}?" if _is_special(PYTHON_TAG, text) else ""
        free = r"TEXT: /[ \t\r\n]*[^{ \t\r\n](.|\n)*/"
        return lark_grammar("\n".join([f"start: {tag} calls | TEXT?", free, *rules]))
    marks = [literal(mark, text) for mark in kept if _is_special(mark, text)]
    marked = "".join(f" | TEXT {mark}" for mark in marks)
    # A mark that is text would be swallowed by the text before it, if that were not lazy; a special token ends it.
    name = "open" if _is_special(form.mark, text) else "open[lazy]"
    lines = [
        f"start: (step{marked})* TEXT",
        "step: open calls",
        f"{name}: TEXT {literal(form.mark, text)}",
        r"TEXT: /(.|\n)*/",
    ]
    return lark_grammar("\n".join([*lines, *rules]))


def _call_rules(tools: Tools, form: ToolFormat, text: TextModel) -> list[str]:
    """Lark: `calls` is what follows the first mark."""
    first, between, last = form.rules(tools, text)
    more = f"({between} call){{0,{MAX_CALLS - 1}}}" if tools.is_parallel else ""
    names = " | ".join(f"call_{i}" for i in range(len(tools.tools)))
    lines = [f"calls: {first} call {more} {last}", f"call: {names}"]
    for i, tool in enumerate(tools.tools):
        before, behind = form.call(tool.name, text)
        schema = tool.parameters if tools.is_forced or tool.is_strict else {"type": "object"}
        lines += [f"call_{i}: {before} arguments_{i} {behind}", f"arguments_{i}: {inline_json(schema)}"]
    return lines


_PREFACE = """You have these functions, one JSON description in each line:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON between tags, a pair of tags for each call:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def told_in_text(messages: list[dict[str, Any]], tools: Tools | None) -> list[dict[str, Any]]:
    """For a template that knows no tools: they and their calls written into messages, in the Hermes form."""
    found = [_told(message) for message in messages]
    if tools is None:
        return found
    preface = _PREFACE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools.shown))
    if found and found[0]["role"] == "system":
        return [{**found[0], "content": f"{found[0]['content']}\n\n{preface}"}, *found[1:]]
    return [{"role": "system", "content": preface}, *found]


def _told(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
    content = "\n".join([message["content"], *lines] if message["content"] else lines)
    return {"role": message["role"], "content": content}
