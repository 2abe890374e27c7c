"""A model's chat template: messages in, prompt text out, inside a sandbox.

The template comes with the model and is trusted no further than a text file: no attribute of Python objects,
no mutation of what it is given. Templates are written for Hugging Face's environment, which this one
imitates: `raise_exception`, `strftime_now`, `tojson` that keeps Unicode, `break`/`continue`, `{% generation
%}`.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contracts.errors import ConfigError, RequestError

# What a template can raise besides TemplateError, being a program over a client's data.
_RUNTIME_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_END_OF_FINAL = "\x00final\x00"
_PROBE = "Zq7probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_MAX_MESSAGE = 500


class ChatTemplate:
    """One compiled template.

    `wants_parts`: it reads content as a list of parts, not as a string. `uses_tools`: it tells the model of tools.
    `thinks`: it knows of reasoning between `<think>` and `</think>`.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = special_tokens
        self.wants_parts = False
        try:
            self._template = env.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        self.wants_parts = not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])
        self.uses_tools = "tools" in source and self._shows("hi", [_PROBE_TOOL])
        self.thinks = "</think>" in source

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. With `continue_final_message` it ends right behind the last message's text.

        Raises RequestError(param="messages") with the template's own words.
        """
        if continue_final_message:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END_OF_FINAL}]
        if self.wants_parts:
            messages = [
                {**m, "content": [{"type": "text", "text": m["content"]}]}
                if isinstance(m["content"], str)
                else m
                for m in messages
            ]
        try:
            text = self._template.render(
                {
                    **self._special_tokens,
                    **(kwargs or {}),
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (TemplateError, *_RUNTIME_ERRORS) as error:
            reason = str(error)[:_MAX_MESSAGE] or type(error).__name__
            raise RequestError(
                f"the chat template refused the messages: {reason}", param="messages"
            ) from error
        if not continue_final_message:
            return text
        head, mark, _ = text.rpartition(_END_OF_FINAL)
        if not mark:
            raise RequestError(
                "continue_final_message: the chat template does not show the last message", param="messages"
            )
        return head

    def _shows(self, content: Any, tools: list[dict[str, Any]] | None = None) -> bool:
        """A functional test: the text of a user's message, or a tool's name, must appear in the prompt."""
        if self.wants_parts and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        messages = [{"role": "user", "content": content}]
        try:
            return _PROBE in self._template.render(
                {**self._special_tokens, "messages": messages, "tools": tools, "add_generation_prompt": True}
            )
        except (TemplateError, *_RUNTIME_ERRORS):
            return False


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the interface of jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
