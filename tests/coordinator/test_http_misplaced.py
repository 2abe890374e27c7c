"""What would have to be dropped within a field, because it stands in the wrong place or against another, is a 400."""

from __future__ import annotations

from typing import Any

import pytest

from tests.coordinator.http_tools import error_of, service

Json = dict[str, Any]
CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER: Json = {"role": "user", "content": "hi"}
GOOD: dict[str, Json] = {CHAT: {"messages": [USER]}, TEXT: {"prompt": "hi"}, RESPONSE: {"input": "hi"}}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED: Json = {"name": "x", "schema": SCHEMA}
FUNCTION: Json = {"type": "function", "function": {"name": "f"}}
FLAT: Json = {"type": "function", "name": "f"}
CALL: Json = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

WRONG: list[tuple[str, str, Json]] = [
    *((path, "response_format", {"response_format": value}) for path in (CHAT, TEXT) for value in (
        {"type": "json_object", "json_schema": NAMED}, {"type": "json_object", "schema": SCHEMA},
        {"type": "text", "json_schema": NAMED}, {"type": "json_schema", "json_schema": NAMED, "schema": SCHEMA},
        {"type": "json_schema", "json_schema": NAMED, "strict": True}, {"type": "json_object", "shema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}})),
    *((RESPONSE, "text", {"text": {"format": value}}) for value in (
        {"type": "json_object", "schema": SCHEMA}, {"type": "text", "schema": SCHEMA},
        {"type": "json_schema", **NAMED, "json_schema": {}}, {"type": "json_object", "strict": True},
        {"type": "json_object", "shema": SCHEMA}, {"type": "json_schema", "name": "x", "schema": "{}"})),
    *((CHAT, "tools", {"tools": [FUNCTION | more]}) for more in (
        {"strict": True}, {"name": "g"}, {"parameters": SCHEMA}, {"description": "x"})),
    (RESPONSE, "tools", {"tools": [FLAT | {"function": {"name": "g"}}]}),
    (CHAT, "tool_choice", {"tools": [FUNCTION], "tool_choice": FUNCTION | {"name": "g"}}),
    (RESPONSE, "tool_choice", {"tools": [FLAT], "tool_choice": FLAT | {"function": {"name": "g"}}}),
    *((path, "structured_outputs", {"structured_outputs": value}) for path in GOOD for value in (
        {"regex": "a", "whitespace_pattern": " "}, {"choice": ["a"], "disable_any_whitespace": True},
        {"grammar": 'root ::= "a"', "disable_additional_properties": True},
        {"json_object": True, "disable_additional_properties": True},
        {"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": " "})),
    *((path, "guided_whitespace_pattern", {"guided_regex": "a", "guided_whitespace_pattern": " "}) for path in GOOD),
    *((CHAT, "messages", {"messages": [message, USER]}) for message in (
        USER | {"tool_calls": [CALL]}, {"role": "system", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant", "content": "x", "prefix": True}, {"role": "assistant", "content": "x", "partial": True})),
    *((path, "logit_bias", {"logit_bias": value}) for path in GOOD for value in (
        {"65": 1, "065": 2}, {"065": 1}, {"00": 1})),
    (TEXT, "min_tokens", {"min_tokens": 17}), (TEXT, "min_tokens", {"prompt": ["a", "b"], "min_tokens": 17}),
    (CHAT, "min_tokens", {"min_tokens": 5000}), (RESPONSE, "min_tokens", {"min_tokens": 5000}),
]  # fmt: skip
RIGHT: list[tuple[str, Json]] = [
    (CHAT, {"response_format": {"type": "json_object", "json_schema": None, "strict": None}}),
    (CHAT, {"response_format": {"type": "text", "schema": None, "x": 1}}),
    (RESPONSE, {"text": {"format": {"type": "json_object", "schema": None}}}),
    (CHAT, {"tools": [FUNCTION | {"strict": None, "x": 1}]}), (CHAT, {"tools": [FUNCTION | {"strict": False}]}),
    (RESPONSE, {"tools": [FLAT | {"function": None}]}),
    (CHAT, {"structured_outputs": {"regex": "a", "whitespace_pattern": None, "disable_any_whitespace": False}}),
    (CHAT, {"structured_outputs": {"json_object": True, "whitespace_pattern": " "}}),
    (CHAT, {"guided_json_object": True, "guided_whitespace_pattern": " "}),
    (CHAT, {"messages": [USER | {"tool_calls": []}, {"role": "assistant", "content": "x", "prefix": False}, USER]}),
    (CHAT, {"logit_bias": {"0": 1, "65": 2}}),
    (TEXT, {"min_tokens": 16}), (TEXT, {"min_tokens": 17, "max_tokens": 17}), (CHAT, {"min_tokens": 100}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "param", "asked"), WRONG)
async def test_what_would_have_to_be_dropped_is_refused(path: str, param: str, asked: Json) -> None:
    async with service() as s:
        response = await s.client.post(path, json=GOOD[path] | asked)
        assert (response.status_code, error_of(response)["param"]) == (400, param), response.text
        assert error_of(response)["message"].startswith(param), response.text
        assert not s.backend.requests


@pytest.mark.parametrize(("path", "asked"), RIGHT)
async def test_what_asks_for_nothing_is_in_nobodys_way(path: str, asked: Json) -> None:
    async with service() as s:
        response = await s.client.post(path, json=GOOD[path] | asked)
        assert response.status_code == 200, response.text
