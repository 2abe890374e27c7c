"""What the model reads: a client's messages or prompt, in any of their forms, as token ids.

messages ─► checked, flattened ─► template ─► ids (no second BOS: the template writes it)
prompt   ─► str: ids with the tokenizer's special tokens │ ids: as they are
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from contracts.errors import ContextLengthError, RequestError, UnsupportedError
from coordinator.fields import shown
from coordinator.schema import ChatParams, CompletionParams
from coordinator.tools import Tools, told_in_text
from engine.text.tokenizer import TextModel

MAX_MESSAGES = 10_000
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_REFUSED = {"function_call": "not supported; use tool_calls", "audio": "only text is supported"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """`echo_text` stands before the output if the client asked for it. `tail`: the end of a rendered chat."""

    ids: tuple[int, ...]
    echo_text: str = ""
    tail: str = ""


_TAIL_CHARS = 64


def chat_prompt(
    text: TextModel,
    messages: list[dict[str, Any]],
    params: ChatParams,
    max_tokens: int,
    tools: Tools | None = None,
) -> Prompt:
    """Raises RequestError from the template, ContextLengthError before tokenising what cannot fit."""
    if text.template is None:
        raise UnsupportedError(
            "messages: this model has no chat template; use /v1/completions", param="messages"
        )
    is_native = text.template.uses_tools
    rendered = text.render(
        messages if is_native else told_in_text(messages, tools),
        add_generation_prompt=params.add_generation_prompt,
        continue_final_message=params.continue_final_message,
        tools=list(tools.shown) if tools is not None and is_native else None,
        kwargs=params.chat_template_kwargs,
    )
    echoes = params.echo and messages[-1]["role"] == "assistant"
    ids = _encode(text, rendered, params.add_special_tokens, max_tokens, "messages")
    return Prompt(ids, messages[-1]["content"] if echoes else "", rendered[-_TAIL_CHARS:])


def completion_prompts(
    text: TextModel, prompts: list[str] | list[list[int]], params: CompletionParams, max_tokens: int
) -> list[Prompt]:
    """One Prompt for each, in order. Raises ContextLengthError before tokenising what cannot fit."""
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = _encode(text, prompt, params.add_special_tokens, max_tokens, "prompt")
            echo_text = prompt
        else:
            ids = tuple(prompt)
            echo_text = text.decode(ids, params.skip_special_tokens) if params.echo else ""
        if not ids:
            raise RequestError("prompt: expected at least one token but got none", param="prompt")
        found.append(Prompt(ids, echo_text if params.echo else ""))
    return found


def _encode(text: TextModel, source: str, add_special: bool, max_tokens: int, param: str) -> tuple[int, ...]:
    # Each token covers a bounded number of bytes, so absurd lengths are refused without the work.
    least = len(source.encode()) // text.max_token_bytes
    if least > max_tokens:
        raise ContextLengthError(
            f"expected at most {max_tokens} tokens but the prompt has more than {least}", param=param
        )
    return tuple(text.encode(source, add_special_tokens=add_special))


def read_prompts(
    body: dict[str, Any], vocab_size: int, max_prompts: int, max_tokens: int
) -> list[str] | list[list[int]]:
    """`prompt`: a string, strings, token ids, or lists of token ids.

    Raises RequestError for anything else.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _bad_prompt(prompt)
    if isinstance(prompt[0], int):
        prompt = [prompt]
    if len(prompt) > max_prompts:
        raise RequestError(
            f"prompt: expected at most {max_prompts} prompts but got {len(prompt)}", param="prompt"
        )
    kind = type(prompt[0])
    if kind not in (str, list) or not all(type(item) is kind and item for item in prompt):
        raise _bad_prompt(next((item for item in prompt if type(item) is not kind or not item), prompt))
    if kind is list:
        for ids in prompt:
            _check_ids(ids, vocab_size, max_tokens)
    return prompt


def _check_ids(ids: list[Any], vocab_size: int, max_tokens: int) -> None:
    if len(ids) > max_tokens:
        raise ContextLengthError(
            f"expected at most {max_tokens} tokens but the prompt has {len(ids)}", param="prompt"
        )
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"prompt: expected token ids from 0 to {vocab_size - 1} but got {shown(token_id)}",
                param="prompt",
            )


def _bad_prompt(value: Any) -> RequestError:
    return RequestError(
        f"prompt: expected text, a list of texts, token ids or lists of token ids, none empty, but got {shown(value)}",
        param="prompt",
    )


def read_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages as plain dicts with string content, ready for a template.

    `developer` becomes `system`; text parts are joined with a line end; arguments of past tool calls become
    objects. Raises RequestError for a wrong form, UnsupportedError for parts that are not text.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            f"messages: expected a list of messages but got {shown(messages)}", param="messages"
        )
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages: expected at most {MAX_MESSAGES} but got {len(messages)}", param="messages"
        )
    return [read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def read_message(message: Any, where: str) -> dict[str, Any]:
    """One message, as `read_messages`; `where` it stands is what an error begins with."""
    if not isinstance(message, dict):
        raise RequestError(f"{where}: expected an object but got {shown(message)}", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"{where}.role: expected one of {', '.join(_ROLES)} but got {shown(role)}", param="messages"
        )
    result: dict[str, Any] = {"role": "system" if role == "developer" else role}
    for key, why in _REFUSED.items():
        if message.get(key) is not None:
            raise UnsupportedError(f"{where}.{key}: {why}", param="messages")
    for key in ("name", "tool_call_id", "reasoning_content", "refusal"):
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{where}.{key}: expected text but got {shown(value)}", param="messages")
        if value is not None:
            result[key] = value
    for key in ("prefix", "partial"):
        if message.get(key) not in (None, False):
            raise UnsupportedError(
                f"{where}.{key}: not supported; use continue_final_message", param="messages"
            )
    calls = _tool_calls(message.get("tool_calls"), where)
    if calls and role != "assistant":
        raise RequestError(
            f"{where}.tool_calls: expected those of an assistant but the role is {role}", param="messages"
        )
    if calls:
        result["tool_calls"] = calls
    refusal = result.pop("refusal", None)
    content = refusal if message.get("content") is None else message["content"]
    if content is None and role not in ("assistant", "tool", "function"):
        raise RequestError(f"{where}.content: expected text but got none", param="messages")
    result["content"] = "" if content is None else _content(content, where)
    return result


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content: expected text or a list of parts but got {shown(content)}", param="messages"
        )
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where}: expected a part with a type but got {shown(part)}", param="messages")
    if kind not in _TEXT_PARTS:
        raise UnsupportedError(
            f"{where}: only text parts are supported but got {shown(kind)}", param="messages"
        )
    value = part.get(_TEXT_PARTS[kind])
    if not isinstance(value, str):
        raise RequestError(f"{where}.text: expected text but got {shown(value)}", param="messages")
    return value


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls of an earlier turn.

    Malformed arguments become {}: a model wrote them, and the turn must go on.
    """
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls: expected a list but got {shown(calls)}", param="messages")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.tool_calls[{i}]: expected a function with a name", param="messages")
        if call.get("type") not in (None, "function") or not isinstance(call.get("id"), str | None):
            raise RequestError(
                f"{where}.tool_calls[{i}]: expected text as id, and function as type", param="messages"
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {}
        found.append(
            {
                "id": call.get("id") or "",
                "type": "function",
                "function": {
                    "name": function["name"],
                    "arguments": arguments if isinstance(arguments, dict) else {},
                },
            }
        )
    return found
