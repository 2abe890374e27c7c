"""What a body may say: ranges, names of refused fields, JSON in the strict sense.

Nothing reaches the backend.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.errors import RequestError
from coordinator.body import parse_object
from tests.coordinator.fake_backend import FakeBackend
from tests.coordinator.http_tools import MODEL, error_of, make_config, service

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.01),
    ("temperature", "hot"),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("n", 0),
    ("n", -1),
    ("n", 1.5),
    ("n", 1000000),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", "abc"),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logit_bias", {"99999999": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"x": 5}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", [1]),
    ("stop_token_ids", [99999999]),
    ("allowed_token_ids", [99999999]),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", []),
    ("bad_words", [""]),
    ("bad_words", "x"),
    ("structured_outputs", {}),
    ("structured_outputs", {"json": {}, "whitespace_pattern": 5}),
    ("structured_outputs", {"json": {}, "whitespace_pattern": "("}),
    ("structured_outputs", {"json": {}, "disable_any_whitespace": "no"}),
    ("structured_outputs", {"json_object": 1}),
    ("guided_json", 5),
    ("guided_json", {"type": "hiccup"}),
    ("guided_regex", "("),
    ("guided_regex", ["a"]),
    ("guided_choice", "a"),
    ("guided_choice", []),
    ("guided_grammar", "root ::= ((("),
    ("guided_whitespace_pattern", " "),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"regex": "("}),
    ("structured_outputs", {"json": ""}),
    ("structured_outputs", {"json": 5}),
    ("structured_outputs", {"choice": []}),
    ("structured_outputs", {"choice": [1]}),
    ("structured_outputs", {"grammar": "root ::= ((("}),
    ("response_format", "json_object"),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": "{}"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hiccup"}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}}),
    ("stop_token_ids", [-1]),
    ("seed", 1 << 63),
    ("seed", -(1 << 63) - 1),
    ("min_tokens", 100),
    ("min_tokens", -1),
    ("top_k", -2),
    ("min_p", 1.5),
    ("repetition_penalty", 0),
    ("stop", ""),
    ("stop", ["a"] * 5),
    ("stop", [1]),
    ("stop", ["x" * 1001]),
    ("stream", "maybe"),
    ("stream_options", {"include_usage": True}),
    ("cache_salt", "a/b"),
    ("logprobs", "yes please"),
]

# JSON has types: what a lenient reader would turn into a number or a flag is a slip of the client's.
NUMBERS = [
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "n", "min_tokens", "max_tokens",
]  # fmt: skip
FLAGS = [
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "return_tokens_as_token_ids", "stream", "echo",
    "include_timings",
]  # fmt: skip
WRONG_TYPE: list[tuple[str, Any]] = [
    *((field, value) for field in NUMBERS for value in (True, False, "1", [1], {})),
    *((field, 1.0) for field in ("top_k", "seed", "n", "min_tokens", "max_tokens")),
    *((field, value) for field in FLAGS for value in (0, 1, 1.0, "true", "", [])),
    ("model", 1),
    ("model", True),
    ("cache_salt", 1),
    ("stop", 5),
    ("stop", {"a": 1}),
    ("stop", [True]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", 1),
    ("logit_bias", {"1": True}),
    ("logit_bias", {"1": "5"}),
    ("stream_options", True),
    ("stream_options", {"include_usage": 1}),
    ("stream_options", {"include_usage": "true"}),
    ("stream_options", {"include_usage": True, "continuous_usage_stats": 1}),
    ("stream_options", {"include_usage": True, "include_timings": 1}),
]

NOT_BUILT: list[tuple[str, Any]] = [
    ("structured_outputs", {"structural_tag": "x"}),
    ("response_format", {"type": "structural_tag"}),
    ("functions", [{"name": "f"}]),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("prediction", {"type": "content", "content": "x"}),
    ("use_beam_search", True),
    ("chat_template", "{{ x }}"),
    ("truncate_prompt_tokens", -1),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
async def test_a_value_out_of_range_is_400_and_names_its_field(field: str, value: Any) -> None:
    async with service() as s:
        fields = {"max_tokens": 16, field: value}
        for response in (await s.chat(**fields), await s.complete(**fields)):
            assert response.status_code == 400, response.text
            error = error_of(response)
            assert (error["param"], error["type"]) == (field, "invalid_request_error")
        assert not s.backend.requests


@pytest.mark.parametrize(("field", "value"), WRONG_TYPE)
async def test_a_value_of_the_wrong_type_is_400_and_names_its_field(field: str, value: Any) -> None:
    async with service() as s:
        fields = {"stream": field == "stream_options", field: value}
        for response in (await s.chat(**fields), await s.complete(**fields)):
            assert response.status_code == 400, response.text
            error = error_of(response)
            assert (error["param"], error["type"]) == (field, "invalid_request_error")
        assert not s.backend.requests


async def test_a_whole_number_may_stand_for_a_decimal_one() -> None:
    async with service() as s:
        fields = {"temperature": 1, "top_p": 1, "presence_penalty": 2, "logit_bias": {"1": -100}}
        for response in (await s.chat(**fields), await s.complete(**fields)):
            assert response.status_code == 200, response.text


@pytest.mark.parametrize(("field", "value"), NOT_BUILT)
async def test_a_field_that_is_not_built_is_refused_by_name(field: str, value: Any) -> None:
    async with service() as s:
        for response in (await s.chat(**{field: value}), await s.complete(**{field: value})):
            assert response.status_code == 400
            assert (error_of(response)["param"], error_of(response)["code"]) == (field, "unsupported")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": "3", "logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"continue_final_message": 0}, "continue_final_message"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": True}]}, "messages"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ],
)
async def test_chat_refusals_name_their_field(fields: dict[str, Any], param: str) -> None:
    async with service() as s:
        response = await s.client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **fields}
        )
        assert response.status_code == 400
        assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[258]]}, "prompt"),
        ({"prompt": ["a"] * 200}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"suffix": " end"}, "suffix"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 200}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"best_of": "1"}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": "1"}, "logprobs"),
        ({"add_special_tokens": 1}, "add_special_tokens"),
        ({"prompt": True}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
async def test_completion_refusals_name_their_field(fields: dict[str, Any], param: str) -> None:
    async with service() as s:
        response = await s.complete(**{"prompt": "hi", **fields})
        assert response.status_code == 400
        assert error_of(response)["param"] == param


async def test_null_means_absent_and_extras_are_ignored() -> None:
    names = "stop n seed top_p tools tool_choice logit_bias logprobs top_logprobs response_format stream "
    names += "stream_options user presence_penalty frequency_penalty max_tokens max_completion_tokens"
    nulls = dict.fromkeys(names.split())
    extras = {"foo_unknown": 1, "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    extras |= {"parallel_tool_calls": True, "prompt_cache_key": "k", "reasoning_effort": "low", "tools": []}
    extras |= {"response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"]}
    async with service() as s:
        assert (await s.chat(**nulls)).status_code == 200
        assert (await s.chat(**extras)).status_code == 200
        assert (await s.chat(seed=-1, top_k=-1, top_logprobs=0, logprobs=True)).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": ',
        b"",
        b"[1,2]",
        b"null",
        b"42",
        b'"str"',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"temperature": NaN, "messages": [{"role":"user","content":"hi"}]}',
        b'{"temperature": 1e999, "messages": [{"role":"user","content":"hi"}]}',
        b'{"top_p": -Infinity, "messages": [{"role":"user","content":"hi"}]}',
        b'{"messages":[{"role":"user","content":"a\\ud800b"}]}',
        b'{"n": ' + b"9" * 6000 + b"}",
    ],
)
async def test_what_is_no_json_object_is_400_in_openai_form(raw: bytes) -> None:
    async with service() as s:
        for path in ("/v1/chat/completions", "/v1/completions"):
            response = await s.client.post(path, content=raw, headers={"content-type": "application/json"})
            assert response.status_code == 400, raw[:50]
            error_of(response)
        assert (await s.chat()).status_code == 200


def test_a_whole_surrogate_pair_is_text() -> None:
    assert parse_object(b'{"a":"\\ud83d\\ude00"}') == {"a": "😀"}
    with pytest.raises(RequestError):
        parse_object(b'{"\\ude00":1}')


@pytest.mark.parametrize(
    "kind", [None, "", "application/json", "Application/JSON; charset=utf-8", "application/problem+json"]
)
async def test_a_body_without_a_name_is_json(kind: str | None) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    headers = {} if kind is None else {"content-type": kind}
    async with service() as s:
        response = await s.client.post("/v1/chat/completions", content=body.encode(), headers=headers)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "Multipart/Mixed",
        "image/png",
        "application/xml",
    ],
)
async def test_what_says_that_it_is_no_json_is_refused_as_such(kind: str) -> None:
    async with service() as s:
        response = await s.client.post("/v1/completions", content=b"{}", headers={"content-type": kind})
        assert response.status_code == 400
        assert "content-type" in error_of(response)["message"]


async def test_a_body_over_the_cap_is_413_declared_or_not() -> None:
    async def parts() -> Any:
        for _ in range(3):
            yield b" " * 1000

    async with service(config=make_config(server={"max_body_bytes": 2048})) as s:
        kind = {"content-type": "application/json"}
        for content in (b" " * 3000, parts()):
            response = await s.client.post("/v1/completions", content=content, headers=kind)
            assert response.status_code == 413
            assert error_of(response)["code"] == "request_too_large"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "n", "stop", "stop_token_ids", "seed", "logit_bias", "logprobs", "top_logprobs", "stream", "stream_options",
    "echo", "min_tokens", "tools", "tool_choice", "response_format", "cache_salt", "chat_template_kwargs", "user",
    "modalities", "continue_final_message", "add_generation_prompt", "best_of", "suffix", "presence_penalty",
]  # fmt: skip
GOOD_MESSAGES = [{"role": "user", "content": "hi"}]


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    st.booleans(),
)
async def test_no_body_makes_a_5xx(fields: dict[str, Any], path: str, is_valid_otherwise: bool) -> None:
    body = (
        {"messages": GOOD_MESSAGES, "prompt": "x", "max_tokens": 3} if is_valid_otherwise else {}
    ) | fields
    async with service() as s:
        raw = json.dumps(body).encode()
        response = await s.client.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            error_of(response)


@settings(max_examples=100)
@given(st.binary(max_size=60))
async def test_no_bytes_make_a_5xx(raw: bytes) -> None:
    async with service() as s:
        response = await s.client.post(
            "/v1/completions", content=raw, headers={"content-type": "application/json"}
        )
        assert response.status_code in (200, 400)


@pytest.mark.parametrize("arguments", ["null", "", "[1]", '"x"', "{bad", '{"a": 1}', None, {"a": 1}])
async def test_malformed_tool_history_never_fails_the_turn(arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "ok"}]},
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "user", "content": "go on"},
    ]
    async with service() as s:
        response = await s.client.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 200, response.text


async def send(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": GOOD_MESSAGES, **fields}
    )


async def test_sampling_reaches_the_backend_as_asked() -> None:
    async with service() as s:
        await send(
            s.client,
            temperature=0.001,
            top_p=0,
            top_k=-1,
            seed=-7,
            logit_bias={"5": 1.5, "3": -100},
            min_tokens=2,
            max_tokens=3,
            stop_token_ids=[9, 9],
            presence_penalty=1,
            cache_salt="tenant",
        )
        request = last_request(s.backend)
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.01, 1.0, 1, -7)
        assert sampling.logit_bias == ((3, -100.0), (5, 1.5))
        assert (sampling.min_tokens, sampling.max_tokens, sampling.stop_token_ids) == (2, 3, (9,))
        assert request.salt == "tenant"


def last_request(backend: FakeBackend) -> Any:
    return backend.requests[-1]


async def test_unseeded_requests_draw_different_seeds() -> None:
    async with service() as s:
        await send(s.client)
        await send(s.client)
        assert len({request.sampling.seed for request in s.backend.requests}) == 2


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("stops", "stop"),
        ("logprob", "logprobs"),
        ("sotp", "stop"),
        ("tolos", "tools"),
        ("maxTokens", "max_tokens"),
        ("toolChoice", "tool_choice"),
        ("response_fromat", "response_format"),
        ("structured_outptus", "structured_outputs"),
        ("guided_regx", "guided_regex"),
    ],
)
async def test_a_misspelt_field_is_told(field: str, meant: str) -> None:
    async with service() as s:
        response = await s.chat(**{field: 1})
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["message"]) == (field, f"{field}: unknown field; did you mean {meant}?")


async def test_what_clients_add_of_their_own_is_ignored() -> None:
    async with service() as s:
        extras = {
            "user": "me",
            "metadata": {},
            "store": False,
            "service_tier": "auto",
            "top_a": 0.1,
            "foo_bar": 1,
        }
        assert (await s.chat(**extras)).status_code == 200


async def test_a_role_that_nobody_knows_is_refused() -> None:
    async with service() as s:
        body = {"messages": [{"role": "usr", "content": "hi"}]}
        response = await s.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert "messages[0].role: expected" in error_of(response)["message"]
