"""`POST /v1/responses`, the part that needs no memory: its body as a chat's, and what an answer repeats of it.

    input, instructions ─► messages      tools, text.format, max_output_tokens ─► the chat's own fields

What would need a store (previous_response_id, conversation, background) is refused; `store` is accepted and never done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from contracts.errors import RequestError, UnsupportedError
from coordinator.fields import (
    OF_SCHEMAS,
    refuse,
    refuse_misplaced,
    refuse_misspelt,
    refuse_misspelt_within,
    shown,
)
from coordinator.prompts import read_message
from coordinator.reading import Reading
from coordinator.schema import REFUSED, ChatParams, Notes

_SAME = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "seed", "stop", "min_p", "top_k", "cache_salt",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "min_tokens",
    "modalities", "stop_token_ids", "structured_outputs", "chat_template_kwargs", "include_reasoning",
    "allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "guided_whitespace_pattern",
    "service_tier", "top_logprobs", "stream_options", *(Notes.model_fields.keys() - {"verbosity"}), *REFUSED,
)  # fmt: skip
# A chat's, and no field here: to drop one would answer something else than was asked.
_FOREIGN: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "echo": (False,), "prompt_logprobs": (), "messages": (), "response_format": (),
    "max_tokens": (), "max_completion_tokens": (), "add_generation_prompt": (True,), "add_special_tokens": (False,),
    "continue_final_message": (False,), "include_timings": (False,), "return_tokens_as_token_ids": (False,),
    "reasoning_effort": (), "verbosity": (), "best_of": (1,),
}  # fmt: skip
_STORED: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (), "conversation": (), "prompt": (), "context_management": (), "background": (False,),
}  # fmt: skip
_UNBUILT: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",), "max_tool_calls": (),
}  # fmt: skip
_OWN = ("input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning", "include")
_FIELDS = frozenset((*_SAME, *_OWN)) - REFUSED.keys() - Notes.model_fields.keys()
_KNOWN = frozenset((*_SAME, *_OWN, *_STORED, *_UNBUILT, *_FOREIGN))
# Of a chat's stream_options; usage comes with every response.
_NOT_STREAMED = ("include_timings", "continuous_usage_stats")
_SUMMARIES = ("auto", "concise", "detailed")
_CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "verbosity": "text",
}
_LOGPROBS = "message.output_text.logprobs"
# The second is for whoever has the reasoning stored elsewhere; nothing is encrypted here.
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
_CALL_TYPES = ("function_call", "function_call_output", "reasoning", "message", None)


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same request as a chat. Raises RequestError, UnsupportedError naming the field as this endpoint does."""
    refuse(body, _STORED, "not supported by this server, which stores nothing")
    refuse(body, _UNBUILT, "not supported by this server")
    refuse(body, _FOREIGN, "no field of /v1/responses")
    refuse_misspelt(body, _FIELDS, _KNOWN)
    chat = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = _messages(body)
    chat["reasoning_effort"] = _effort(body.get("reasoning"))
    chat["verbosity"] = _checked_text(body.get("text")).get("verbosity")
    _check_stream_options(body.get("stream_options"))
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    chat["tools"] = _tools(body.get("tools"))
    chat["tool_choice"] = _tool_choice(body.get("tool_choice"))
    chat["response_format"] = _format(body.get("text"))
    chat["logprobs"] = _wants_logprobs(body)
    return chat


def check_logprobs(params: ChatParams, reading: Reading) -> None:
    """Raises UnsupportedError where tokens would have to be told apart: those of the message, and all others."""
    if params.logprobs and not reading.is_plain:
        raise UnsupportedError(
            f"include: {_LOGPROBS} is not supported beside tools or reasoning", param="include"
        )


@contextmanager
def named_as_responses() -> Iterator[None]:
    """A chat's errors, with the names that this endpoint has for its fields."""
    try:
        yield
    except RequestError as error:
        name = _CHAT_NAMES.get(error.param or "")
        if name is not None:
            error.message = name + error.message.removeprefix(name).removeprefix(str(error.param))
            error.param = name
        raise


def mirror(body: dict[str, Any]) -> dict[str, Any]:
    """What an answer says of its request."""
    text = {key: value for key, value in (body.get("text") or {}).items() if value is not None}
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "store": False,
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    instructions, source = body.get("instructions"), body.get("input")
    if not isinstance(instructions, str | None):
        raise RequestError(f"instructions: expected text but got {shown(instructions)}", param="instructions")
    messages = [] if not instructions else [{"role": "system", "content": instructions}]
    if isinstance(source, str) and source:
        return [*messages, {"role": "user", "content": source}]
    if not isinstance(source, list) or not source:
        raise RequestError(f"input: expected text or a list of items but got {shown(source)}", param="input")
    for i, item in enumerate(source):
        _add(messages, item, f"input[{i}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    kind = item.get("type") if isinstance(item, dict) else item
    if not isinstance(item, dict) or kind not in _CALL_TYPES:
        raise UnsupportedError(
            f"{where}: expected a message, a function_call or its output but got {shown(kind)}", param="input"
        )
    if kind == "reasoning":
        return
    call_id = item.get("call_id")
    for key, value in (("call_id", call_id), ("name", item.get("name"))):
        if not isinstance(value, str | None):
            raise RequestError(f"{where}.{key}: expected text but got {shown(value)}", param="input")
    if kind == "function_call":
        call = {"id": call_id, "type": "function", "function": _picked(item, "name", "arguments")}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    elif kind == "function_call_output":
        if item.get("output") is None:
            raise RequestError(
                f"{where}.output: expected text or a list of parts but got none", param="input"
            )
        message = {"role": "tool", "content": item["output"], "tool_call_id": call_id}
    else:
        message = _picked(item, "role", "content")
    with named_as_responses():  # it is read again as a chat's, which knows nothing of places in the input
        read_message(message, where)
    if kind == "function_call" and messages and messages[-1].get("tool_calls"):
        messages[-1]["tool_calls"] += message["tool_calls"]  # calls of one turn are one message
    else:
        messages.append(message)


def _picked(item: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: item.get(name) for name in names}


def _tools(value: Any) -> Any:
    """Functions are flat here, and nested in a chat."""
    if not isinstance(value, list):
        return value
    found = []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise UnsupportedError(
                f"tools[{i}]: only function is supported but got {shown(kind)}", param="tools"
            )
        refuse_misplaced(tool, ("function",), f"tools[{i}]", "tools")
        function = {key: item for key, item in tool.items() if key != "type" and item is not None}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "function":
        refuse_misplaced(value, ("function",), "tool_choice")
        return {"type": "function", "function": _picked(value, "name")}
    return value


def _effort(value: Any) -> Any:
    if not isinstance(value, dict | None):
        raise RequestError(f"reasoning: expected an object but got {shown(value)}", param="reasoning")
    given = value or {}
    refuse_misspelt_within(given, ("effort", "summary", "generate_summary"), "reasoning")
    for name in ("summary", "generate_summary"):
        if given.get(name) not in (None, *_SUMMARIES):
            raise RequestError(
                f"reasoning.{name}: expected one of {', '.join(_SUMMARIES)} but got {shown(given[name])}",
                param="reasoning",
            )
    return given.get("effort")


def _checked_text(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise RequestError(f"text: expected an object but got {shown(value)}", param="text")
    refuse_misspelt_within(value, ("format", "verbosity"), "text")
    return value or {}


def _check_stream_options(value: Any) -> None:
    for name in _NOT_STREAMED if isinstance(value, dict) else ():
        if value.get(name):
            raise UnsupportedError(
                f"stream_options.{name}: no field of /v1/responses", param="stream_options"
            )


def _format(value: Any) -> Any:
    kind = _checked_text(value).get("format")
    if kind is None:
        return None
    if not isinstance(kind, dict):
        raise RequestError(f"text.format: expected an object but got {shown(kind)}", param="text")
    if kind.get("type") == "json_schema":
        refuse_misplaced(kind, ("json_schema",), "text.format", "text")
        if not isinstance(schema := kind.get("schema"), dict):
            raise RequestError(
                f"text.format.schema: expected a JSON Schema object but got {shown(schema)}", param="text"
            )
        named = {key: value for key, value in kind.items() if key != "type"}
        return {"type": "json_schema", "json_schema": named}
    refuse_misplaced(kind, ("json_schema", *OF_SCHEMAS), "text.format", "text")
    refuse_misspelt_within(kind, ("type", *OF_SCHEMAS), "text.format", "text")
    return {"type": kind.get("type")}


def _wants_logprobs(body: dict[str, Any]) -> bool:
    included = [] if body.get("include") is None else body["include"]
    if not isinstance(included, list):
        raise RequestError(f"include: expected a list but got {shown(included)}", param="include")
    for name in included:
        if name not in _INCLUDED:
            raise UnsupportedError(
                f"include: expected {' or '.join(_INCLUDED)} but got {shown(name)}", param="include"
            )
    if body.get("top_logprobs") and _LOGPROBS not in included:
        raise RequestError(f"top_logprobs: expected {_LOGPROBS} in include beside it", param="top_logprobs")
    return _LOGPROBS in included
