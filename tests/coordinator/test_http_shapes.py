"""Structured output, tools, reasoning and /v1/responses: what reaches the engine, and what the client sees."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from starlette.routing import Route

from contracts.request import Finished, PromptLogprob, Token
from coordinator.http import make_app
from coordinator.schema import _READ_ELSEWHERE
from coordinator.shape import MAX_CHOICES
from engine.text.grammar import Grammars
from tests.coordinator.fake_backend import EOS, FakeBackend, reply
from tests.coordinator.http_tools import (
    MODEL,
    TEXT,
    Service,
    error_of,
    events,
    joined,
    make_config,
    service,
)
from tests.engine.text.builders import CHATML, make_text

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NATIVE = (
    "{% if tools %}{% for t in tools %}{{ '<tool_call>' + (t | tojson) }}{% endfor %}{% endif %}" + CHATML
)
THINKING = make_text(CHATML.replace("assistant\n'", "assistant\n<think>\n'") + "{# </think> #}")


def obeys(grammar: str, output: str) -> bool:
    state = Grammars(TEXT).compile(grammar)
    for byte in output.encode():
        if not state.allowed()[byte]:
            return False
        state.advance(byte)
    return state.may_end


async def sent_grammar(s: Service, **fields: Any) -> str:
    """The grammar that reached the engine."""
    response = await s.chat(**fields)
    assert response.status_code == 200, response.text
    return s.backend.requests[-1].sampling.grammar


# --- structured output ------------------------------------------------------------------------------------------------


async def test_every_form_of_structure_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with service() as s:
        for fields in ({"response_format": named}, {"structured_outputs": {"json": schema}},
                       {"structured_outputs": {"json": json.dumps(schema)}}):  # fmt: skip
            grammar = await sent_grammar(s, **fields)
            assert obeys(grammar, '{"a": 1}')
            assert not obeys(grammar, '{"b": 1}')
        grammar = await sent_grammar(s, response_format={"type": "json_object"})
        assert obeys(grammar, '{"x": [1, null]}')
        assert not obeys(grammar, "[1]")
        assert obeys(await sent_grammar(s, structured_outputs={"regex": "a+"}), "aa")
        assert obeys(await sent_grammar(s, structured_outputs={"choice": ["x", "y z"]}), "y z")
        assert obeys(await sent_grammar(s, structured_outputs={"grammar": 'root ::= "k"'}), "k")
        for fields in ({}, {"response_format": {"type": "text"}}, {"structured_outputs": None}):
            assert await sent_grammar(s, **fields) == ""


async def test_structure_has_its_older_names_too() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with service() as s:
        assert obeys(await sent_grammar(s, guided_json=schema), '{"a": 1}')
        assert obeys(await sent_grammar(s, guided_json=json.dumps(schema)), '{"a": 1}')
        assert obeys(await sent_grammar(s, guided_regex="a+"), "aa")
        assert obeys(await sent_grammar(s, guided_choice=["x", "y z"]), "y z")
        assert obeys(await sent_grammar(s, guided_grammar='root ::= "k"'), "k")
        assert not obeys(await sent_grammar(s, guided_json_object=True), "[1]")
        for twice in ({"guided_json": {}}, {"response_format": {"type": "json_object"}}):
            response = await s.chat(guided_regex="a", **twice)
            assert error_of(response)["param"] == "guided_regex"


async def test_how_json_is_written_can_be_said() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    async with service() as s:
        tight = await sent_grammar(s, structured_outputs={"json": schema, "disable_any_whitespace": True})
        assert obeys(tight, '{"a":{"b":1}}')
        assert not obeys(tight, '{"a": {"b":1}}')
        lines = await sent_grammar(s, guided_json=schema, guided_whitespace_pattern=r"\n?")
        assert obeys(lines, '{\n"a":\n{}}')
        assert not obeys(lines, '{"a": {}}')
        assert obeys(await sent_grammar(s, guided_json=schema), '{"a": {"c": 1}}')
        closed = {"json": schema, "disable_additional_properties": True}
        assert not obeys(await sent_grammar(s, structured_outputs=closed), '{"a": {"c": 1}}')
        assert obeys(await sent_grammar(s, structured_outputs=closed), '{"a": {"b": 1}}')
        closed["json"] = {"const": {"type": "object"}}
        assert obeys(await sent_grammar(s, structured_outputs=closed), '{"type": "object"}')
        closed["json"] = {"type": ["object", "null"], "properties": {"b": {"type": "integer"}}}
        assert not obeys(await sent_grammar(s, structured_outputs=closed), '{"c": 1}')


async def test_completions_have_structure_too() -> None:
    async with service() as s:
        assert (await s.complete(structured_outputs={"choice": ["a"]})).status_code == 200
        assert obeys(s.backend.requests[-1].sampling.grammar, "a")


async def test_the_eos_that_ends_a_grammar_is_no_text_even_if_eos_is_ignored() -> None:
    async with service(lambda _: [ord("a"), EOS, Finished("stop")]) as s:
        fields = {"ignore_eos": True, "skip_special_tokens": False}
        response = await s.complete(structured_outputs={"choice": ["a"]}, **fields)
        assert response.json()["choices"][0]["text"] == "a"
        assert response.json()["usage"]["completion_tokens"] == 2
        response = await s.complete(**fields)
        assert response.json()["choices"][0]["text"] == "a" + TEXT.token_text(EOS)


HOSTILE: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}},
    {"$ref": "http://127.0.0.1:1/schema"},
    {"type": "string", "pattern": "(?!x)y"},
    {"type": "string", "pattern": "[a--b]"},
    {"type": "string", "format": "iri"},
    {"enum": []},
    {"not": {}},
    {"type": 5},
    {"properties": 5},
]


@pytest.mark.parametrize("schema", HOSTILE)
async def test_a_hostile_schema_is_the_callers_fault_and_reaches_nothing(schema: dict[str, Any]) -> None:
    async with service() as s:
        response = await s.chat(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        )
        assert response.status_code == 400, response.text
        assert error_of(response)["param"] == "response_format"
        assert not s.backend.requests


@pytest.mark.parametrize(
    "schema",
    [{"multipleOf": 2**53 + 1}, {"enum": [1, [{"a": -(2**64)}]]}, {"properties": {"a": {"const": 2**63}}}],
)
async def test_a_number_that_cannot_be_enforced_exactly_is_refused(schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    async with service() as s:
        for field, body in {
            "response_format": {
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            },
            "structured_outputs": {"structured_outputs": {"json": schema}},
            "tools": {"tools": [tool], "tool_choice": "required"},
        }.items():
            error = error_of(await s.chat(**body))
            assert (error["param"], "2^53" in error["message"]) == (field, True), error
        assert not s.backend.requests
        assert (await s.chat(tools=[tool])).status_code == 200  # which enforces nothing


async def test_a_pattern_of_a_call_that_would_mean_something_else_is_refused() -> None:
    parameters = {"type": "object", "properties": {"a": {"pattern": "(?s)."}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with service() as s:
        error = error_of(await s.chat(tools=[tool], tool_choice="required"))
        assert (error["param"], error["message"][:15]) == ("tools", "tools: pattern:")
        assert (await s.chat(tools=[tool])).status_code == 200  # told to the model, and not enforced


async def test_a_grammar_that_crashes_its_compiler_is_the_callers_fault() -> None:
    grammar = (
        'start: %json {"type": "integer", "minimum": -9223372036854775808, "maximum": -9223372036854775808}'
    )
    async with service() as s:
        error = error_of(await s.chat(structured_outputs={"grammar": grammar}))
        assert error["param"] == "structured_outputs"
        assert (await s.chat(structured_outputs={"regex": "a+"})).status_code == 200


async def test_a_schema_is_bounded_in_depth_and_size() -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"type": "object", "properties": {"a": deep}}
    wide = {"enum": ["x" * 1000 + str(i) for i in range(300)]}
    async with service() as s:
        for schema in (deep, wide):
            response = await s.chat(structured_outputs={"json": schema})
            assert error_of(response)["param"] == "structured_outputs"


async def test_two_structures_or_a_structure_beside_forced_tools_are_refused() -> None:
    json_object = {"type": "json_object"}
    async with service() as s:
        twice = await s.chat(response_format=json_object, structured_outputs={"regex": "a"})
        assert error_of(twice)["param"] == "structured_outputs"
        beside = await s.chat(response_format=json_object, tools=[WEATHER], tool_choice="required")
        assert error_of(beside)["param"] == "response_format"
        assert (
            await s.chat(response_format=json_object, tools=[WEATHER], tool_choice="none")
        ).status_code == 200


async def test_masks_reach_the_engine() -> None:
    async with service() as s:
        assert (await s.chat(allowed_token_ids=[66, 65, 65], bad_words=["no"])).status_code == 200
        sampling = s.backend.requests[-1].sampling
        assert sampling.allowed_token_ids == (65, 66)
        assert sampling.bad_token_ids == (tuple(b"no"), tuple(b" no"))


# --- echo with logprobs -----------------------------------------------------------------------------------------------


def with_prompt(text: str) -> Any:
    """A script whose first token tells of the prompt, as a prefill worker does."""

    def script(request: Any) -> list[Any]:
        known = tuple(
            PromptLogprob(-0.25 * i, ((65, -0.1),)) if i else PromptLogprob()
            for i in range(len(request.prompt_ids))
        )
        first, *rest = text.encode()
        return [Token(0, first, -0.5, (), known), *rest, EOS]

    return script


async def test_an_echoed_prompt_has_logprobs_like_the_output() -> None:
    async with service(with_prompt("ok")) as s:
        response = await s.complete("héy", echo=True, logprobs=1, max_tokens=9)
        (choice,) = response.json()["choices"]
        found = choice["logprobs"]
        assert choice["text"] == "héyok"
        assert found["token_logprobs"] == [None, -0.25, -0.5, -0.75, -0.5, -0.5, -0.5]
        assert found["top_logprobs"][0] is None
        assert found["top_logprobs"][1]["A"] == -0.1
        assert s.backend.requests[-1].sampling.num_prompt_logprobs == 1
        stream = events(await s.complete("héy", echo=True, logprobs=1, max_tokens=9, stream=True))
        assert joined(stream) == "héyok"
        streamed = [c["logprobs"] for chunk in stream for c in chunk["choices"] if c["logprobs"]]
        assert [t for each in streamed for t in each["token_logprobs"]] == found["token_logprobs"]


async def test_best_of_answers_the_outputs_that_the_model_finds_likeliest() -> None:
    def script(request: Any) -> list[Any]:
        number = int(request.request_id.rpartition("-")[2])
        logprob = (-0.9, -0.1, -0.5)[number % 3]
        return [*(Token(i, 97 + number, logprob) for i in range(2)), Finished("stop", 0)]

    async with service(script) as s:
        answer = (await s.complete(["p", "q"], n=2, best_of=3, seed=1)).json()
        assert [(c["index"], c["text"]) for c in answer["choices"]] == [
            (0, "bb"),
            (1, "cc"),
            (2, "ee"),
            (3, "ff"),
        ]
        assert answer["usage"]["completion_tokens"] == 12  # what was drawn
        assert answer["choices"][0]["logprobs"] is None
        assert {request.sampling.num_logprobs for request in s.backend.requests} == {0}
        assert len({request.sampling.seed for request in s.backend.requests}) == 3  # of either prompt
        listed = (await s.complete("p", best_of=3, logprobs=1)).json()["choices"]
        assert [c["logprobs"]["token_logprobs"] for c in listed] == [[-0.1, -0.1]]
        echoed = (await s.complete(["p", "q"], best_of=2, echo=True)).json()["choices"]
        assert [c["text"][0] for c in echoed] == ["p", "q"]
        one = (await s.complete("p", best_of=3, temperature=0)).json()
        assert len(one["choices"]) == 1


async def test_prompt_logprobs_are_listed_as_vllm_does() -> None:
    async with service(with_prompt("ok")) as s:
        expected = [
            None,
            {
                "65": {"logprob": -0.1, "rank": 1, "decoded_token": "A"},
                str(ord("e")): {"logprob": -0.25, "rank": None, "decoded_token": "e"},
            },
        ]
        (choice,) = (await s.complete("he", prompt_logprobs=1)).json()["choices"]
        assert (choice["prompt_logprobs"], choice["text"], choice["logprobs"]) == (expected, "ok", None)
        own_alone = (await s.complete("he", prompt_logprobs=0)).json()["choices"][0]["prompt_logprobs"]
        assert own_alone == [None, {str(ord("e")): expected[1][str(ord("e"))]}]  # type: ignore[index]
        assert s.backend.requests[-1].sampling.num_prompt_logprobs == 0
        chat = (await s.chat(prompt_logprobs=1)).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
        assert chat["choices"][0]["message"]["content"] == "ok"
        both = (await s.complete("he", prompt_logprobs=5, echo=True, logprobs=0)).json()["choices"][0]
        assert s.backend.requests[-1].sampling.num_prompt_logprobs == 5
        assert both["logprobs"]["top_logprobs"][1] == {"e": -0.25}
        assert both["prompt_logprobs"] == expected
        assert "prompt_logprobs" not in (await s.chat()).json()
        assert error_of(await s.chat(prompt_logprobs=1, stream=True))["param"] == "prompt_logprobs"


async def test_a_prompt_alone_is_judged_without_an_output() -> None:
    async with service(with_prompt("x")) as s:
        response = await s.complete("hey", echo=True, logprobs=0, max_tokens=0, n=2)
        first, second = response.json()["choices"]
        assert first["text"] == second["text"] == "hey"
        assert first["finish_reason"] == "length"
        assert len(first["logprobs"]["tokens"]) == 3
        assert response.json()["usage"]["completion_tokens"] == 0
        assert len(s.backend.requests) == 1


# --- tools ------------------------------------------------------------------------------------------------------------


def calls_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """Put together as clients do: by index, ids and names given once."""
    found: list[dict[str, Any]] = []
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        for delta in choice["delta"].get("tool_calls", []):
            if "id" in delta:
                assert delta["index"] == len(found)
                found.append({"id": delta["id"], **delta["function"]})
            else:
                found[delta["index"]]["arguments"] += delta["function"]["arguments"]
    return found


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
    ],
)
async def test_a_call_is_a_call_streamed_or_not(choice: Any, reason: str) -> None:
    fields = {"tools": [WEATHER, TIME], "tool_choice": choice}
    async with service(reply(CALL)) as s:
        (whole,) = (await s.chat(**fields)).json()["choices"]
        (call,) = whole["message"]["tool_calls"]
        assert whole["finish_reason"] == reason
        assert whole["message"]["content"] is None
        assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        chunks = events(await s.chat(**fields, stream=True))
        (streamed,) = calls_of(chunks)
        assert json.loads(streamed["arguments"]) == {"city": "Paris"}
        assert streamed["id"] != call["id"]
        assert joined(chunks) == ""
        assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == reason


async def test_a_forced_call_is_forced_by_a_grammar() -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    async with service(reply(CALL)) as s:
        required = await sent_grammar(s, tools=[WEATHER, TIME], tool_choice="required")
        time_call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
        assert obeys(required, CALL)
        assert obeys(required, f"{CALL}\n{time_call}")
        assert not obeys(required, "Hello")
        assert not obeys(required, CALL.replace("city", "town"))
        one = {"tools": [WEATHER, TIME], "tool_choice": "required", "parallel_tool_calls": False}
        single = await sent_grammar(s, **one)
        assert obeys(single, CALL)
        assert not obeys(single, f"{CALL}\n{time_call}")
        only = await sent_grammar(s, tools=[WEATHER, TIME], tool_choice=named)
        assert obeys(only, time_call)
        assert not obeys(only, CALL)
        assert await sent_grammar(s, tools=[WEATHER]) == ""


async def test_an_output_that_was_cut_is_cut_whatever_it_called() -> None:
    async with service(reply(CALL)) as s:
        for max_tokens in (5, 30, len(CALL) - 14):
            fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": max_tokens}
            assert (await s.chat(**fields)).json()["choices"][0]["finish_reason"] == "length"
            chunks = events(await s.chat(**fields, stream=True))
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert joined(chunks) == ""


async def test_logprobs_survive_the_reader() -> None:
    async with service(reply(CALL)) as s:
        fields = {"tools": [WEATHER], "logprobs": True}
        whole = (await s.chat(**fields)).json()
        num_tokens = whole["usage"]["completion_tokens"]
        assert len(whole["choices"][0]["logprobs"]["content"]) == num_tokens
        chunks = events(await s.chat(**fields, stream=True))
        entries = [
            e for chunk in chunks for c in chunk["choices"] if c["logprobs"] for e in c["logprobs"]["content"]
        ]
        assert len(entries) == num_tokens


async def test_the_model_is_told_of_its_tools_by_its_template_or_in_text() -> None:
    history = [
        {"role": "user", "content": "w?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "sunny"}]},
    ]
    for text in (TEXT, make_text(NATIVE)):
        async with service(text=text) as s:
            response = await s.client.post(
                "/v1/chat/completions", json={"messages": history, "tools": [WEATHER]}
            )
            assert response.status_code == 200, response.text
            prompt = text.decode(s.backend.requests[-1].prompt_ids)
            assert '"get_weather"' in prompt
            assert "sunny" in prompt
            if text is TEXT:
                assert '{"name": "get_weather", "arguments": {"city": "Rome"}}' in prompt
            plain = await s.chat("hi", tools=[WEATHER], tool_choice="none")
            assert "get_weather" not in text.decode(s.backend.requests[-1].prompt_ids)
            assert plain.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER] * 200}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_tool_refusals_name_their_field(fields: dict[str, Any], param: str) -> None:
    async with service() as s:
        response = await s.chat(**fields)
        assert response.status_code == 400, response.text
        assert error_of(response)["param"] == param
        assert not s.backend.requests


async def test_a_template_whose_calls_are_unknown_refuses_tools() -> None:
    async with service(text=make_text(NATIVE.replace("<tool_call>", "<function="))) as s:
        error = error_of(await s.chat(tools=[WEATHER]))
        assert (error["param"], error["code"]) == ("tools", "unsupported") or "tools" in error["message"]


# --- reasoning --------------------------------------------------------------------------------------------------------


async def test_reasoning_is_apart_and_counted() -> None:
    async with service(reply("hm</think>\n\nYes."), text=THINKING) as s:
        whole = (await s.chat()).json()
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
        assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("hm</think>")}
        chunks = events(await s.chat(stream=True))
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
        assert joined(chunks) == "Yes."
        hidden = (await s.chat(include_reasoning=False)).json()["choices"][0]["message"]
        assert "reasoning_content" not in hidden


async def test_a_structured_output_is_no_reasoning() -> None:
    async with service(reply("aa"), text=THINKING) as s:
        answer = (await s.chat(structured_outputs={"regex": "a+"})).json()
        assert answer["choices"][0]["message"]["content"] == "aa"


# --- responses --------------------------------------------------------------------------------------------------------


async def ask(s: Service, **fields: Any) -> Any:
    return await s.client.post("/v1/responses", json={"model": MODEL, "input": "hi", **fields})


def response_events(raw: str) -> list[dict[str, Any]]:
    found = []
    for number, block in enumerate(raw.strip().split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
    return found


async def test_a_response_is_the_same_streamed_or_not() -> None:
    async with service(reply("Hello!")) as s:
        whole = (await ask(s, instructions="Be brief.", max_output_tokens=20)).json()
        assert (whole["object"], whole["status"], whole["error"]) == ("response", "completed", None)
        assert whole["id"].startswith("resp_")
        assert whole["instructions"] == "Be brief."
        (item,) = whole["output"]
        assert item["content"] == [
            {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
        ]
        assert "Be brief." in TEXT.decode(s.backend.requests[-1].prompt_ids)
        found = response_events((await ask(s, instructions="Be brief.", stream=True)).text)
        kinds = list(dict.fromkeys(each["type"].removeprefix("response.") for each in found))
        assert kinds == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        final = found[-1]["response"]
        assert final["output"][0]["content"] == item["content"]
        assert final["usage"] == whole["usage"]
        assert "".join(e["delta"] for e in found if e["type"].endswith("text.delta")) == "Hello!"


async def test_a_response_lists_its_tokens_streamed_or_not() -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stop": ["!"]}
    async with service(reply("Hé!")) as s:  # é is two tokens, and the stop string is not shown
        (part,) = (await ask(s, **fields)).json()["output"][0]["content"]
        chat = (await s.chat(logprobs=True, top_logprobs=2, stop=["!"])).json()["choices"][0]
        found = response_events((await ask(s, **fields, stream=True)).text)
    assert part["text"] == chat["message"]["content"] == "Hé"
    assert part["logprobs"] == chat["logprobs"]["content"]
    assert [entry["bytes"] for entry in part["logprobs"]] == [[72], [0xC3], [0xA9], [33]]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2] * 4
    assert found[-1]["response"]["output"][0]["content"] == [part]
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    (done,) = (event for event in found if event["type"] == "response.output_text.done")
    assert [entry for event in deltas for entry in event["logprobs"]] == done["logprobs"]
    brief = [{key: entry[key] for key in ("token", "logprob")} for entry in part["logprobs"]]
    assert [{key: entry[key] for key in ("token", "logprob")} for entry in done["logprobs"]] == brief
    assert {key for entry in done["logprobs"] for other in entry["top_logprobs"] for key in other} == {
        "token", "logprob",
    }  # fmt: skip


async def test_logprobs_of_a_response_are_refused_where_tokens_are_no_message() -> None:
    fields = {"include": ["message.output_text.logprobs"]}
    flat = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    async with service() as s, service(text=THINKING) as thinking:
        for response in (await ask(s, **fields, tools=[flat]), await ask(thinking, **fields)):
            assert (response.status_code, error_of(response)["param"]) == (400, "include")
        assert not s.backend.requests


async def test_a_response_that_was_cut_is_incomplete() -> None:
    async with service(reply("Hello!")) as s:
        cut = (await ask(s, max_output_tokens=3)).json()
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert cut["output"][0]["status"] == "incomplete"
        assert (
            response_events((await ask(s, max_output_tokens=3, stream=True)).text)[-1]["type"]
            == "response.incomplete"
        )


async def test_calls_and_reasoning_are_items_of_a_response() -> None:
    flat = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    async with service(reply("hm</think>\n\n" + CALL), text=THINKING) as s:
        whole = (await ask(s, tools=[flat])).json()
        assert [item["type"] for item in whole["output"]] == ["reasoning", "function_call"]
        call = whole["output"][1]
        assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})
        again = [
            {"role": "user", "content": [{"type": "input_text", "text": "w?"}]},
            *whole["output"],
            {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"},
        ]
        assert (await ask(s, input=again, tools=[flat])).status_code == 200
        assert "sunny" in TEXT.decode(s.backend.requests[-1].prompt_ids)
        kinds = [e["type"] for e in response_events((await ask(s, tools=[flat], stream=True)).text)]
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
        assert "response.function_call_arguments.done" in kinds


async def test_a_response_may_have_a_format() -> None:
    async with service(reply("{}")) as s:
        form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
        assert (await ask(s, text={"format": form})).status_code == 200
        assert obeys(s.backend.requests[-1].sampling.grammar, "{}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input"),
        ({"input": "word " * 9000}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"temperature": 5}, "temperature"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"include": [{}]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_response_refusals_name_their_field(fields: dict[str, Any], param: str) -> None:
    async with service() as s:
        response = await ask(s, **fields)
        assert response.status_code == 400, response.text
        assert error_of(response)["param"] == param


async def test_a_backend_error_before_the_first_piece_has_a_status() -> None:
    async with service(lambda _: [RuntimeError("boom")]) as s:
        assert (await ask(s, stream=True)).status_code == 500


async def test_the_openapi_document_describes_every_public_route() -> None:
    async with service() as s:
        found = (await s.client.get("/openapi.json")).json()
        told = {
            (path, method.upper()) for path, operations in found["paths"].items() for method in operations
        }
        app = make_app(make_config(), TEXT, FakeBackend())
        there = {
            (route.path.replace(":path", ""), method)
            for route in app.routes
            if isinstance(route, Route)
            for method in route.methods or ()
            if method != "HEAD" and not route.path.startswith(("/debug/", "/openapi.json", "/docs"))
        }
        assert told == there
        schemas = found["components"]["schemas"]
        read = {"temperature", "stop", *_READ_ELSEWHERE}
        assert read - {"prompt"} <= schemas["Chat"]["properties"].keys()
        only_chats = {"messages", "tools", "tool_choice", "parallel_tool_calls"}
        assert read - only_chats <= schemas["Completion"]["properties"].keys()
        for reference in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(found)):
            assert reference in schemas
        assert "swagger" in (await s.client.get("/docs")).text.lower()


async def test_choices_are_counted_once_each_and_too_many_are_told_before_any_work() -> None:
    async with service() as s:
        few = await s.chat(structured_outputs={"choice": ["a"] * 5000})
        many = await s.chat(
            structured_outputs={"choice": [f"c{number}" for number in range(MAX_CHOICES + 1)]}
        )
        assert few.status_code == 200
        assert (many.status_code, error_of(many)["param"]) == (400, "structured_outputs")
        assert "at most" in error_of(many)["message"]
        assert len(s.backend.requests) == 1
