"""`strict` tools with `tool_choice: auto`: any text may come, but a call that has begun ends as a right one. The same
where the text must be JSON. And what parameters must be, strict or not.
"""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.tools import answer_grammar, format_of, read_tools, strict_grammar
from engine.text.grammar import Grammars, json_grammar, json_in_lark
from engine.text.tokenizer import TextModel
from tests.coordinator.fake_backend import reply
from tests.coordinator.http_tools import error_of, events, joined, service
from tests.engine.text.builders import CHATML, make_text

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": SCHEMA}}
TELLING = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
HERMES = make_text(TELLING + "{# <tool_call> #}")
HERMES_TOKENS = make_text(TELLING + "{# <tool_call> #}", specials=("<tool_call>", "</tool_call>"))
LLAMA = make_text(TELLING + "{# <|python_tag|> #}", specials=("<|python_tag|>",))
MISTRAL = make_text(TELLING + "{# [TOOL_CALLS] #}", specials=("[TOOL_CALLS]",))
MISTRAL_ARGS = make_text(TELLING + "{# [TOOL_CALLS] #}", specials=("[TOOL_CALLS]", "[ARGS]"))
THINKING = make_text(TELLING + "{# <tool_call> </think> #}", specials=("<think>", "</think>"))


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD, BAD = '{"city": "Paris"}', '{"town": '
CASES: list[tuple[TextModel, str, bool]] = [
    *(
        (text, output, is_good)
        for text in (HERMES, HERMES_TOKENS)
        for output, is_good in [
            ("Just text, with <b> and a brace {.", True),
            ("", True),
            ("Let me see.\n" + hermes("get_weather", GOOD), True),
            (hermes("get_weather", GOOD) + "\n" + hermes("get_time", '{"any": 1}') + "done", True),
            (hermes("get_weather", BAD), False),
            (hermes("unknown", GOOD), False),
            ("Let me see. <tool_call>", False),  # it may not end there
        ]
    ),
    (LLAMA, "It is {sunny}.", True),
    (LLAMA, '{"name": "get_weather", "parameters": {"city": "Paris"}}', True),
    (LLAMA, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', True),
    (LLAMA, '{"name": "get_weather", "parameters": {"town": ', False),
    (LLAMA, ' {"some": "json"}', False),
    (MISTRAL, "It is sunny.", True),
    (MISTRAL, 'Well.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', True),
    (MISTRAL, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"town": ', False),
    (MISTRAL_ARGS, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', True),
    (MISTRAL_ARGS, '[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Q"}', True),
    (MISTRAL_ARGS, '[TOOL_CALLS]get_weather[ARGS]{"town": ', False),
    (THINKING, "<think>\nA call.</think>" + hermes("get_weather", GOOD), True),
    (THINKING, "<think>\nA call.</think>" + hermes("get_weather", BAD), False),
]


@pytest.mark.parametrize(("text", "output", "is_good"), CASES)
def test_what_begins_as_a_call_ends_as_one(text: TextModel, output: str, is_good: bool) -> None:
    tools = read_tools({"tools": [WEATHER, TIME]})
    assert tools is not None
    grammar = strict_grammar(tools, format_of(text), text, ("<think>", "</think>"))
    assert follows(text, grammar, output) is is_good


def follows(text: TextModel, grammar: str, output: str) -> bool:
    state = Grammars(text).compile(grammar)
    for token_id in text.encode(output, add_special_tokens=False):
        if not state.allowed()[token_id]:
            return False
        state.advance(token_id)
    return state.may_end


ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"$ref": "#/$defs/flag"}},
    "required": ["ok"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
ANSWERS: list[tuple[TextModel, str, bool]] = [
    *((text, output, is_good) for text in (HERMES, HERMES_TOKENS, MISTRAL, MISTRAL_ARGS) for output, is_good in (
        ('{"ok": true}', True), ('{"ok": 5', False), ("", False), ("It is", False), ('{"ok": true} ', False))),
    *((text, output, is_good) for text in (HERMES, HERMES_TOKENS) for output, is_good in (
        (hermes("get_weather", GOOD), True), (hermes("get_time", '{"any": 1}'), True),
        (hermes("get_weather", BAD), False), (hermes("get_weather", GOOD) + '{"ok"', False))),
    (MISTRAL, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', True),
    (MISTRAL_ARGS, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', True),
]  # fmt: skip


@pytest.mark.parametrize(("text", "output", "is_good"), ANSWERS)
def test_an_output_is_a_call_or_the_json_that_was_asked_for(
    text: TextModel, output: str, is_good: bool
) -> None:
    tools, answer = read_tools({"tools": [WEATHER, TIME]}), json_in_lark(json_grammar(ANSWER))
    assert tools is not None
    assert answer is not None
    assert follows(text, answer_grammar(tools, format_of(text), text, answer), output) is is_good


FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest.mark.parametrize("output", ['{"ok": true}', hermes("get_weather", GOOD)])
async def test_a_format_beside_tools_is_that_of_an_answer_without_calls(output: str) -> None:
    content, reason = (None, "tool_calls") if "<tool_call>" in output else (output, "stop")
    async with service(reply(output), text=HERMES) as s:
        for asked in ({"response_format": FORMAT}, {"structured_outputs": {"json": ANSWER}}):
            choice = (await s.chat(tools=[WEATHER, TIME], **asked)).json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)
            grammar = s.backend.requests[-1].sampling.grammar
            assert follows(HERMES, grammar, output)
            assert not follows(HERMES, grammar, "any text")
            chunks = events(await s.chat(tools=[WEATHER, TIME], stream=True, **asked))
            assert (joined(chunks), chunks[-1]["choices"][0]["finish_reason"]) == (content or "", reason)
        flat = {"type": "function", **WEATHER["function"]}
        asked = {
            "input": "hi",
            "tools": [flat],
            "text": {"format": {**FORMAT["json_schema"], "type": "json_schema"}},
        }
        (item,) = (await s.client.post("/v1/responses", json=asked)).json()["output"]
        assert item["type"] == ("message" if content else "function_call")


async def test_a_format_that_no_answer_would_have_is_refused_beside_tools() -> None:
    async with service(text=HERMES) as s:
        for asked in (
            {"response_format": FORMAT, "tool_choice": "required"},
            {"response_format": {"type": "json_object"}, "tool_choice": "required"},
            {"structured_outputs": {"regex": "a"}},
            {"guided_grammar": 'root ::= "a"'},
        ):
            response = await s.chat(tools=[WEATHER], **asked)
            assert (response.status_code, error_of(response)["param"]) == (400, next(iter(asked)))
        assert not s.backend.requests
    async with service(text=LLAMA) as s:
        assert error_of(await s.chat(tools=[WEATHER], response_format=FORMAT))["param"] == "response_format"


async def test_only_strict_tools_cost_a_grammar() -> None:
    async with service(reply("ok"), text=HERMES) as s:
        assert (await s.chat(tools=[TIME])).status_code == 200
        assert not s.backend.requests[-1].sampling.grammar
        assert (await s.chat(tools=[TIME, WEATHER])).status_code == 200
        assert follows(HERMES, s.backend.requests[-1].sampling.grammar, "any text")
        assert (await s.chat(tools=[WEATHER], tool_choice="none")).status_code == 200
        assert not s.backend.requests[-1].sampling.grammar


async def test_a_model_that_reasons_still_does_beside_strict_tools() -> None:
    async with service(reply("<think>\nhm</think>fine"), text=THINKING) as s:
        message = (await s.chat(tools=[WEATHER])).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("\nhm", "fine")


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "hiccup"}, {"properties": 5}, {"properties": {"a": 5}}, {"properties": {"a": {"type": "hiccup"}}},
        {"required": "a"}, {"required": [1]}, {"properties": {"a": {"enum": 5}}}, {"anyOf": []}, {"allOf": {}},
        {"properties": {"a": {"type": ["string", "hiccup"]}}}, {"properties": {"a": {"items": 5}}}, {"$defs": []},
        {"properties": {"a": {"items": [{"type": []}]}}}, {"additionalProperties": "no"}, {"type": None}, {"$ref": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_parameters_that_are_no_schema_are_refused_whether_enforced_or_not(
    parameters: Any, choice: str
) -> None:
    async with service(text=HERMES) as s:
        function = {"name": "f", "parameters": parameters}
        response = await s.chat(tools=[{"type": "function", "function": function}], tool_choice=choice)
        assert (response.status_code, error_of(response)["param"]) == (400, "tools")
        assert not s.backend.requests


async def test_parameters_may_say_what_no_grammar_can_enforce_where_none_is_asked_for() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(70):
        deep = {"type": "object", "properties": {"a": deep}}
    odd = {
        "type": "object",
        "properties": {
            "a": {"not": {"type": "string"}, "x-unknown": 5},
            "type": {"type": ["string", "null"], "pattern": "(?=x)"},
            "b": True,
            "properties": {"$ref": "#/$defs/b", "enum": [1, None]},
            "c": {"type": "array", "items": [{"type": "integer"}, False]},
        },
        "$defs": {"b": {"anyOf": [{"const": 1}, {"type": "null"}]}},
        "required": ["a"],
    }
    async with service(reply("ok"), text=HERMES) as s:
        for parameters, status in ((odd, 200), ({}, 200), (None, 200), (deep, 400)):
            function = {"name": "f", "parameters": parameters}
            assert (await s.chat(tools=[{"type": "function", "function": function}])).status_code == status


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f", "strict": "yes"},
        {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"type": 5}}}},
    ],
)
async def test_a_strict_tool_that_cannot_be_enforced_is_refused(function: dict[str, Any]) -> None:
    async with service(text=HERMES) as s:
        response = await s.chat(tools=[{"type": "function", "function": function}])
        assert (response.status_code, error_of(response)["param"]) == (400, "tools")
        assert not s.backend.requests
