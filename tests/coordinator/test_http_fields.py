"""Every field of the world's three endpoints: it changes something that can be seen, or it is refused by name.

What changes nothing is listed with the reason why that is no loss. A field that nobody listed is a field that is
silently dropped, so a new one belongs in here first.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from contracts.request import PromptLogprob, Token
from coordinator.schema import REFUSED, ChatParams, CompletionParams, Notes
from tests.coordinator.fake_backend import EOS
from tests.coordinator.http_tools import TEXT, Service, error_of, service
from tests.engine.text.builders import CHATML, make_text

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TOOLS: Json = {"tools": [TOOL], "tool_choice": "required"}
CONTINUED: Json = {
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
}
# Shows what a template is told.
TOLD = make_text(CHATML + "{{ enable_thinking }}{{ reasoning_effort }}{{ x }}")
START = 256  # <|im_start|>
BEGUN = make_text(adds_start=True)
THINKING = make_text(CHATML.replace("assistant\n'", "assistant\n<think>\n'") + "{# </think> #}")

# field: (value, what must stand beside it)
WORKS_IN_BOTH: dict[str, tuple[Any, Json]] = {
    "max_tokens": (3, {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "n": (2, {}),
    "stop": ("l", {}),
    "presence_penalty": (1, {}),
    "frequency_penalty": (1, {}),
    "logit_bias": ({"65": 1}, {}),
    "seed": (5, {}),
    "service_tier": ("flex", {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "response_format": ({"type": "json_object"}, {}),
    "top_k": (4, {}),
    "min_p": (0.1, {}),
    "repetition_penalty": (1.1, {}),
    "stop_token_ids": ([66], {}),
    "include_stop_str_in_output": (True, {"stop": "l"}),
    "ignore_eos": (True, {}),
    "min_tokens": (2, {}),
    "skip_special_tokens": (False, {}),
    "prompt_logprobs": (1, {}),
    "allowed_token_ids": ([65], {}),
    "bad_words": (["a"], {}),
    "structured_outputs": ({"regex": "a"}, {}),
    "guided_json": (SCHEMA, {}),
    "guided_regex": ("a", {}),
    "guided_choice": (["a"], {}),
    "guided_grammar": ('root ::= "a"', {}),
    "guided_json_object": (True, {}),
    "guided_whitespace_pattern": (" ", {"guided_json": SCHEMA}),
    "return_tokens_as_token_ids": (True, {}),
    "cache_salt": ("s", {}),
    "include_timings": (True, {}),
}
WORKS: dict[str, dict[str, tuple[Any, Json]]] = {
    "/v1/chat/completions": WORKS_IN_BOTH
    | {
        "model": ("other", {}),
        "messages": ([{"role": "user", "content": "other"}], {}),
        "max_completion_tokens": (3, {}),
        "logprobs": (True, {}),
        "top_logprobs": (2, {"logprobs": True}),
        "return_tokens_as_token_ids": (True, {"logprobs": True}),
        "tools": ([TOOL], {}),
        "tool_choice": ("required", {"tools": [TOOL]}),
        "parallel_tool_calls": (False, TOOLS),
        "echo": (True, CONTINUED),
        "add_generation_prompt": (False, {}),
        "continue_final_message": (True, CONTINUED | {"continue_final_message": False}),
        "add_special_tokens": (True, {}),
        "chat_template_kwargs": ({"x": 1}, {}),
        "reasoning_effort": ("none", {}),
        "include_reasoning": (False, {}),
    },
    "/v1/completions": WORKS_IN_BOTH
    | {
        "model": ("other", {}),
        "prompt": ("other", {}),
        "logprobs": (2, {}),
        "return_tokens_as_token_ids": (True, {"logprobs": 1}),
        "echo": (True, {}),
        "best_of": (2, {}),
        "add_special_tokens": (False, {}),
    },
}
REFUSED_VALUES: Json = {
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "audio": {"voice": "x"},
    "modalities": ["audio"],
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "length_penalty": 2.0,
    "use_beam_search": True,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "logprob_token_ids": [1],
    "documents": [{"text": "x"}],
    "chat_template": "x",
    "mm_processor_kwargs": {"a": 1},
    "return_token_ids": True,
    "vllm_xargs": {"a": 1},
    "repetition_detection": {"max_pattern_size": 2},
    "thinking_token_budget": 5,
    "priority": 5,
    "regex": "a",
    "ebnf": "a",
    "json_schema": "{}",
    "grammar": "a",
    "stop_regex": ["a"],
    "no_stop_trim": True,
    "separate_reasoning": False,
    "input_ids": [1],
    "input_embeds": [[0.5]],
    "prompt_embeds": "x",
    "lora_path": "x",
    "logits_processors": ["x"],
    "custom_logit_processor": "x",
    "return_hidden_states": True,
    "suffix": "x",
}
INERT: dict[str, tuple[Any, str]] = {
    "user": ("u", "a name for the operator's records"),
    "metadata": ({"a": "b"}, "the client's own notes"),
    "store": (True, "nothing is stored, and the answer is the same"),
    "prompt_cache_key": ("k", "a hint where to look for a prefix, which is found without it"),
    "safety_identifier": ("s", "a name for the operator's records"),
    "verbosity": ("low", "a wish that models are not trained for here"),
    "truncation_side": ("left", "says something only beside truncate_prompt_tokens, which is refused"),
    "priority": (0, "0 asks for nothing"),
    "request_id": ("r", "the client's own; the engine has ids of its own"),
    "session_id": ("s", "a hint where to place"),
    "rid": ("r", "the client's own"),
    "prompt_cache_retention": (
        "24h",
        "how long a prefix should be kept, and the cache keeps what it has room for",
    ),
    "stream_interval": (2, "how text is cut into chunks, not which text"),
    "kv_transfer_params": ({"a": 1}, "a client's field must never reach the KV layer"),
    "guided_decoding_backend": ("xgrammar", "how a grammar is enforced, not which"),
}


def told(request: Any) -> list[Token | int]:
    """Tokens that show whatever may be asked for."""
    prompt = tuple(
        PromptLogprob(-0.5, ((65, -0.1),)) if i else PromptLogprob() for i in range(len(request.prompt_ids))
    )
    count = request.sampling.num_logprobs
    top = () if count is None else ((72, -0.5), (65, -1.0))[:count]
    first = Token(
        0, 72, None if count is None else -0.5, top, prompt if request.sampling.num_prompt_logprobs else ()
    )
    rest = [Token(i, byte, first.logprob, top) for i, byte in enumerate(b"ello</think> l", 1)]
    rest.append(Token(len(rest) + 1, START, first.logprob, top))
    return [first, *rest, EOS]


async def seen(s: Service, path: str, body: Json) -> Any:
    """All that a client or an engine could tell two requests apart by."""
    before = len(s.backend.requests)
    response = await s.client.post(path, json=body)
    requests = [
        (
            r.prompt_ids,
            r.salt,
            str(r.sampling).replace(f"seed={r.sampling.seed}", "" if "seed" not in body else "seed"),
        )
        for r in s.backend.requests[before:]
    ]
    text = response.text
    if response.headers["content-type"].startswith("application/json"):
        answer = response.json()
        text = json.dumps({k: v for k, v in answer.items() if k not in ("id", "created")})
    return (
        response.status_code,
        requests,
        text
        if not body.get("stream")
        else sorted(
            {key for line in text.splitlines() if line.startswith("data: {") for key in json.loads(line[6:])}
        ),
    )


def good(path: str) -> Json:
    return {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}


CASES = [(path, field, *case) for path, fields in WORKS.items() for field, case in fields.items()]


@pytest.mark.parametrize(("path", "field", "value", "beside"), CASES)
async def test_a_field_of_the_list_does_something(path: str, field: str, value: Any, beside: Json) -> None:
    texts = {"include_reasoning": THINKING, "reasoning_effort": TOLD, "chat_template_kwargs": TOLD}
    text = (texts | {"add_special_tokens": BEGUN}).get(field, TEXT)
    async with service(told, text=text) as s:
        body = good(path) | beside
        plain = await seen(s, path, body)
        changed = await seen(s, path, body | {field: value})
        assert plain[0] == 200, plain
        assert changed[0] == (404 if field == "model" else 200), changed
        assert changed != plain


@pytest.mark.parametrize(("field", "value"), REFUSED_VALUES.items())
async def test_a_field_that_is_not_built_is_refused_by_name_everywhere(field: str, value: Any) -> None:
    async with service() as s:
        for path in (*WORKS, "/v1/responses"):
            body = good(path) if path in WORKS else {"input": "hi"}
            response = await s.client.post(path, json=body | {field: value})
            assert (response.status_code, error_of(response)["param"]) == (400, field), path
        assert not s.backend.requests


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, (value, _) in INERT.items()])
async def test_what_asks_for_nothing_is_taken_and_changes_nothing(field: str, value: Any) -> None:
    async with service(told) as s:
        for path in WORKS:
            assert await seen(s, path, good(path)) == await seen(s, path, good(path) | {field: value})


def test_no_known_field_is_missing_from_the_list() -> None:
    for path, kind in (("/v1/chat/completions", ChatParams), ("/v1/completions", CompletionParams)):
        assert (
            kind.model_fields.keys() - Notes.model_fields.keys() <= WORKS[path].keys() | REFUSED_VALUES.keys()
        )
    assert Notes.model_fields.keys() <= INERT.keys()
    assert REFUSED.keys() <= REFUSED_VALUES.keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("logprobs", True), ("echo", True), ("prompt_logprobs", 1), ("messages", []), ("max_tokens", 4),
        ("response_format", {"type": "json_object"}), ("max_completion_tokens", 4), ("top_logprobs", 2),
        ("continue_final_message", True), ("previous_response_id", "r"), ("background", True), ("truncation", "auto"),
        ("reasoning_effort", "low"), ("best_of", 2), ("verbosity", "low"),
    ],
)  # fmt: skip
async def test_responses_refuse_what_they_would_have_to_drop(field: str, value: Any) -> None:
    async with service() as s:
        response = await s.client.post("/v1/responses", json={"input": "hi", field: value})
        assert (response.status_code, error_of(response)["param"]) == (400, field)
        assert not s.backend.requests


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5), ("top_p", 0.5), ("top_k", 3), ("min_p", 0.1), ("seed", 4), ("stop", "l"),
        ("presence_penalty", 1), ("frequency_penalty", 1), ("repetition_penalty", 1.1), ("logit_bias", {"65": 1}),
        ("ignore_eos", True), ("min_tokens", 2), ("stop_token_ids", [66]), ("allowed_token_ids", [65]),
        ("max_output_tokens", 3), ("instructions", "x"), ("tools", [{"type": "function", "name": "f"}]),
        ("text", {"format": {"type": "json_object"}}), ("structured_outputs", {"regex": "a"}), ("cache_salt", "s"),
        ("bad_words", ["a"]), ("guided_regex", "a"),
        ("reasoning", {"effort": "none"}), ("chat_template_kwargs", {"x": 1}), ("stream", True),
    ],
)  # fmt: skip
async def test_responses_do_what_their_fields_say(field: str, value: Any) -> None:
    async with service(told, text=TOLD) as s:
        plain = await seen(s, "/v1/responses", {"input": "hi"})
        changed = await seen(s, "/v1/responses", {"input": "hi", field: value})
        assert (plain[0], changed[0]) == (200, 200)
        assert plain[1:] != changed[1:]


@pytest.mark.parametrize(
    ("path", "field", "value", "inert"),
    [
        ("/v1/chat/completions", "best_of", 2, 1),
        ("/v1/completions", "max_completion_tokens", 4, None),
        ("/v1/completions", "top_logprobs", 2, 0),
        ("/v1/completions", "tools", [TOOL], []),
        ("/v1/completions", "tool_choice", "required", "auto"),
        ("/v1/completions", "continue_final_message", True, False),
        ("/v1/completions", "reasoning_effort", "low", None),
        ("/v1/completions", "tool_choice", {"type": "function", "function": {"name": "f"}}, "none"),
        ("/v1/completions", "parallel_tool_calls", "no", False),
        ("/v1/completions", "chat_template_kwargs", {"x": 1}, {}),
        ("/v1/completions", "add_generation_prompt", False, True),
        ("/v1/completions", "include_reasoning", False, True),
        ("/v1/completions", "messages", [{"role": "user", "content": "hi"}], None),
        ("/v1/chat/completions", "prompt", "hi", None),
        *(
            (path, field, value, None)
            for path in ("/v1/chat/completions", "/v1/completions")
            for field, value in (
                ("input", "hi"),
                ("instructions", "x"),
                ("max_output_tokens", 4),
                ("text", {"format": {"type": "text"}}),
                ("reasoning", {"effort": "low"}),
                ("previous_response_id", "r"),
                ("conversation", "c"),
                ("max_tool_calls", 1),
            )
        ),
    ],
)
async def test_a_field_of_the_other_endpoint_is_not_dropped(
    path: str, field: str, value: Any, inert: Any
) -> None:
    async with service() as s:
        response = await s.client.post(path, json=good(path) | {field: value})
        assert (response.status_code, error_of(response)["param"]) == (400, field)
        assert not s.backend.requests
        assert (await s.client.post(path, json=good(path) | {field: inert})).status_code == 200


async def test_stream_options_that_ask_for_nothing_need_no_stream() -> None:
    async with service() as s:
        for path in WORKS:
            assert (await s.client.post(path, json=good(path) | {"stream_options": {}})).status_code == 200


async def test_a_misspelt_field_of_a_response_is_not_passed_over() -> None:
    async with service() as s:
        for field, meant in (("max_output_token", "max_output_tokens"), ("temprature", "temperature")):
            response = await s.client.post("/v1/responses", json={"input": "hi", field: 4})
            assert (response.status_code, error_of(response)["param"]) == (400, field)
            assert f"did you mean {meant}?" in error_of(response)["message"]


async def test_a_limit_of_chats_that_says_what_a_completions_own_says_is_no_loss() -> None:
    async with service() as s:
        for limit in (3, 1.5, "3", 0):
            both = await s.complete(max_tokens=limit, max_completion_tokens=limit)
            own = await s.complete(max_tokens=limit)
            assert (both.status_code, both.json().get("usage")) == (own.status_code, own.json().get("usage"))
        for limits in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 4}):
            error = error_of(await s.complete(**limits))
            assert error["param"] == "max_completion_tokens"


async def test_other_servers_extras_are_no_misspelt_fields() -> None:
    extras = {
        "repetition_penalty_range": 0,
        "frequency_penalty_decay": 0.9,
        "reasoning_format": "auto",
        "parse_tool_calls": True,
        "models": ["a"],
    }
    async with service() as s:
        for path in WORKS:
            assert (await s.client.post(path, json=good(path) | extras)).status_code == 200
