"""Every field is what it should be, or a 400 that names it: also those that change nothing, and those within others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.gateway.gateway_tools import gateway_service
from tests.coordinator.http_tools import error_of, service

Json = dict[str, Any]
GOOD: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
CHAT, TEXT, RESPONSE = GOOD
SCHEMA = {"name": "x", "schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

IN_ALL: list[tuple[str, Any]] = [
    *(("user", value) for value in (5, True, ["u"], {})),
    *(("store", value) for value in (0, 1, "true", [], {})),
    *(
        ("metadata", value)
        for value in (5, "x", [], {"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"k" * 65: "v"})
    ),
    *(("metadata", value) for value in ({"a": "v" * 513}, {str(i): "" for i in range(17)})),
    *(("safety_identifier", value) for value in (5, False, ["s"])),
    *(("prompt_cache_key", value) for value in (5, False, {})),
    *(
        (name, value)
        for name in ("request_id", "session_id", "rid", "guided_decoding_backend")
        for value in (5, True, ["r"], {})
    ),
    *(("stream_interval", value) for value in (0, -1, True, 1.5, "2", [])),
    *(("kv_transfer_params", value) for value in (5, "x", False, [])),
    *(("truncation_side", value) for value in ("up", 5, True)),
    *(("prompt_cache_retention", value) for value in ("for ever", 5, True)),
    *(
        ("stream_options", value)
        for value in (5, [], "x", {"include_obfuscation": 1}, {"include_usge": True})
    ),
    *(
        (name, value)
        for name in ("guided_json", "guided_regex", "guided_choice")
        for value in (0, False, 5, 0.0)
    ),
    ("guided_json_object", 0),
    ("guided_json_object", 1),
    *(("structured_outputs", {"json": {}, key: 0}) for key in ("disable_any_whitespace", "disable_fallback")),
    ("structured_outputs", {"json": {}, "disable_additional_properties": 1}),
    ("structured_outputs", {"json": {}, "regex": False}),
    ("structured_outputs", {"json_object": 1}),
]
IN_ONE: list[tuple[str, str, Any]] = [
    *((CHAT, "verbosity", value) for value in ("loud", 5, True)),
    *((CHAT, "response_format", {"type": "json_schema", "json_schema": SCHEMA | more}) for more in (
        {"description": 5}, {"strict": 1}, {"shema": {}}, {"stric": True}, {"name": 5}, {"schema": None})),
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    (TEXT, "response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    *((CHAT, "tools", [{"type": "function", "function": {"name": "f", **more}}]) for more in (
        {"paramters": {}}, {"stric": True}, {"description": 5}, {"strict": 1})),
    *((CHAT, "tools", value) for value in (0, False, "", {})),
    *((path, name, value) for path in (CHAT, RESPONSE) for name, values in (
        ("parallel_tool_calls", (1, "true", [])), ("tool_choice", (5, True, [], "any", {}))) for value in values),
    *((TEXT, name, value) for name, values in (
        ("tools", (0, "", {})), ("tool_choice", (5, True, {})), ("parallel_tool_calls", (1, "true", [])),
        ("reasoning_effort", (5, "much")), ("include_reasoning", (1, "x")), ("add_generation_prompt", (1, "x")),
        ("chat_template_kwargs", (5, [])), ("messages", ([], "x"))) for value in values),
    *((path, name, value) for path in (CHAT, TEXT) for name, values in (
        ("truncation", (5, "auto")), ("background", (1, "x")), ("include", (5, ["x"]))) for value in values),
    *((RESPONSE, "verbosity", value) for value in ("loud", 5)),
    *((CHAT, "messages", [USER, {"role": "assistant", "content": "x", **more}]) for more in (
        {"tool_calls": 0}, {"tool_calls": ""}, {"tool_calls": {}}, {"tool_calls": [CALL | {"id": 5}]},
        {"tool_calls": [CALL | {"type": 5}]}, {"function_call": {"name": "f", "arguments": "{}"}},
        {"refusal": 5}, {"audio": {"id": "a"}}, {"reasoning_content": 5}, {"name": 5})),
    *((RESPONSE, "text", value) for value in (
        5, "x", [], {"verbosity": "loud"}, {"verbosity": 5}, {"format": 5}, {"format": {}}, {"formt": {}},
        {"format": {"type": 5}}, {"format": {"type": "json_schema", **SCHEMA, "description": 5}},
        {"format": {"type": "json_schema", "name": "x"}}, {"format": {"type": "json_schema", **SCHEMA, "stric": True}},
    )),
    *((RESPONSE, "reasoning", value) for value in (
        5, "low", [], {"effort": 5}, {"effort": "much"}, {"summary": 5}, {"summary": "long"}, {"efort": "low"},
        {"generate_summary": 5})),
    *((RESPONSE, "stream_options", {name: True}) for name in ("include_timings", "continuous_usage_stats")),
    *((RESPONSE, "include", value) for value in (0, "", {}, False)),
    *((RESPONSE, "tools", value) for value in (0, "", {}, [{"type": "function", "name": "f", "paramters": {}}])),
    *((RESPONSE, "tool_choice", value) for value in (0, False, "", [], {})),
    *((RESPONSE, "top_logprobs", value) for value in ("", [], False)),
    *((RESPONSE, "instructions", value) for value in (0, False, [], {})),
    *((RESPONSE, "input", [{"type": "function_call_output", **more}]) for more in (
        {"call_id": 5, "output": "x"}, {"call_id": "c"}, {"call_id": "c", "output": 5})),
    *((RESPONSE, "input", [{"type": "function_call", **more}]) for more in (
        {"call_id": 5, "name": "f", "arguments": "{}"}, {"call_id": "c", "name": 5, "arguments": "{}"})),
]  # fmt: skip


async def refused(path: str, field: str, value: Any) -> None:
    async with service() as s:
        body = GOOD[path] | {field: value} | ({"stream": True} if field == "stream_options" else {})
        response = await s.client.post(path, json=body)
        assert response.status_code == 400, (path, response.text)
        assert error_of(response)["param"] == field, response.text
        assert error_of(response)["message"].startswith(field), response.text
        assert not s.backend.requests


@pytest.mark.parametrize(("field", "value"), IN_ALL)
async def test_a_field_of_all_endpoints_has_its_type(field: str, value: Any) -> None:
    for path in GOOD:
        await refused(path, field, value)


@pytest.mark.parametrize(("path", "field", "value"), IN_ONE)
async def test_a_field_of_one_endpoint_has_its_type(path: str, field: str, value: Any) -> None:
    await refused(path, field, value)


RIGHT: list[tuple[str, Any]] = [
    ("user", "u"), ("store", True), ("metadata", {}), ("metadata", {str(i): "v" * 512 for i in range(16)}),
    ("safety_identifier", "s"), ("prompt_cache_key", "k"), ("stream_options", {"include_obfuscation": False}),
    ("guided_json_object", False), ("structured_outputs", {"json": {}, "json_object": False, "regex": None}),
    ("structured_outputs", {"json": {}, "disable_any_whitespace": False}), ("tools", []),
    *((name, None) for name in ("user", "store", "metadata", "stream_options", "guided_json", "safety_identifier")),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), RIGHT)
async def test_what_is_right_is_taken_everywhere(field: str, value: Any) -> None:
    async with service() as s:
        for path, body in GOOD.items():
            response = await s.client.post(path, json=body | {field: value, "stream": True})
            assert response.status_code == 200, (path, response.text)


async def test_what_a_response_repeats_is_what_was_sent() -> None:
    sent = {
        "text": {"verbosity": "low"},
        "metadata": {"a": "b"},
        "user": "u",
        "reasoning": {"summary": "auto"},
    }
    async with service() as s:
        answer = (await s.client.post(RESPONSE, json=GOOD[RESPONSE] | sent)).json()
        expected = sent | {"text": {"format": {"type": "text"}, "verbosity": "low"}}
        assert {name: answer[name] for name in sent} == expected


async def test_an_item_that_is_wrong_is_named_by_its_own_place() -> None:
    calls = [{"type": "function_call", "call_id": str(i), "name": "f", "arguments": "{}"} for i in range(2)]
    async with service() as s:
        body = {"instructions": "x", "input": [*calls, {"type": "reasoning"}, {"role": "user", "content": 5}]}
        error = error_of(await s.client.post(RESPONSE, json=body))
        assert error["message"].startswith("input[3].content: expected")


async def test_a_refusal_of_an_earlier_turn_is_what_was_said() -> None:
    said = {
        "role": "assistant",
        "content": None,
        "refusal": "I will not.",
        "audio": None,
        "function_call": None,
    }
    async with service() as s:
        response = await s.client.post(CHAT, json={"messages": [USER, said, USER]})
        assert response.status_code == 200
        assert b"I will not." in bytes(i for i in s.backend.requests[-1].prompt_ids if i < 256)


BATCH: Json = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in ("input_file_id", "endpoint", "completion_window") for value in (5, [], {}, None)),
        *(("metadata", value) for field, value in IN_ALL if field == "metadata"),
        ("endpoint", "/v1/embeddings"), ("completion_window", "48h"), ("output_expires_after", {"seconds": 3600}),
    ],
)  # fmt: skip
async def test_a_field_of_a_batch_has_its_type(field: str, value: Any, tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path) as s:
        response = await s.client.post("/v1/batches", json=BATCH | {field: value})
        assert (response.status_code, error_of(response)["param"]) == (400, field)
        misspelt = await s.client.post("/v1/batches", json=BATCH | {"metadat": {"a": "b"}})
        assert (misspelt.status_code, error_of(misspelt)["param"]) == (400, "metadat")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limit=-1", "limit"),
        ("after=file-nobodys", "after"),
        ("order=up", "order"),
    ],
)
async def test_a_query_of_a_list_is_right_or_named(query: str, param: str, tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path) as s:
        for path in ("/v1/files", "/v1/batches") if param != "order" else ("/v1/files",):
            response = await s.client.get(f"{path}?{query}")
            assert (response.status_code, error_of(response)["param"]) == (400, param), path
