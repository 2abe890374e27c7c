"""Stop strings beside tools: text ends at one, a call never does."""

from __future__ import annotations

from typing import Any

import pytest

from engine.text.tokenizer import TextModel
from tests.coordinator.fake_backend import EOS, Script, reply
from tests.coordinator.http_tools import error_of, events, joined, service
from tests.coordinator.test_http_shapes import NATIVE, TIME, WEATHER, calls_of
from tests.engine.text.builders import make_text

HERMES = make_text(NATIVE)
LLAMA = make_text(NATIVE.replace("<tool_call>", "<|python_tag|>"), specials=("<|python_tag|>",))
MISTRAL = make_text(NATIVE.replace("<tool_call>", "[TOOL_CALLS]"))
MISTRAL_ARGS = make_text(NATIVE.replace("<tool_call>", "[TOOL_CALLS]"), specials=("[TOOL_CALLS]", "[ARGS]"))
ARGUMENTS = '{"city": "Paris END"}'
CALLS = [
    (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'),
    (LLAMA, f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'),
    (MISTRAL_ARGS, f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"),
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
# Of a mark, of a name, of a key, of a value, of JSON itself, of what is behind a call.
STOPS = ["<", "[TOOL", "get_", '"', "city", "END", "}", "\n", "{", " "]


def written(text: TextModel, output: str) -> Script:
    return lambda _: [*text.encode(output, add_special_tokens=False), EOS]


async def answers(s: Any, **fields: Any) -> list[tuple[list[dict[str, Any]], str, str]]:
    """(calls without their ids, text, finish reason), whole and streamed."""
    choice = (await s.chat(**fields)).json()["choices"][0]
    message = choice["message"]
    whole = [call["function"] for call in message.get("tool_calls", [])]
    chunks = events(await s.chat(stream=True, **fields))
    streamed = [{key: call[key] for key in ("name", "arguments")} for call in calls_of(chunks)]
    return [
        (whole, message["content"] or "", choice["finish_reason"]),
        (streamed, joined(chunks), chunks[-1]["choices"][0]["finish_reason"]),
    ]


@pytest.mark.parametrize(("text", "output"), CALLS)
@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
async def test_a_call_that_is_enforced_is_whole_whatever_stops_are_given(
    text: TextModel, output: str, choice: Any, reason: str
) -> None:
    async with service(written(text, output), text=text) as s:
        for stop in STOPS:
            fields = {"tools": [WEATHER, TIME], "tool_choice": choice, "stop": stop}
            expected = ([{"name": "get_weather", "arguments": ARGUMENTS}], "", reason)
            assert await answers(s, **fields) == [expected] * 2, stop


async def test_nor_does_a_stop_token_end_it() -> None:
    text, output = CALLS[0]
    async with service(written(text, output), text=text) as s:
        fields = {"tools": [WEATHER], "tool_choice": "required", "stop_token_ids": [ord("E")]}
        expected = ([{"name": "get_weather", "arguments": ARGUMENTS}], "", "tool_calls")
        assert await answers(s, **fields) == [expected] * 2
        response = await s.chat(**fields | {"stop_token_ids": [1 << 30]})
        assert error_of(response)["param"] == "stop_token_ids"


@pytest.mark.parametrize(("text", "output"), CALLS)
@pytest.mark.parametrize("strict", [False, True])
async def test_a_call_of_the_models_own_will_is_whole_too(text: TextModel, output: str, strict: bool) -> None:
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": strict}}  # type: ignore[dict-item]
    async with service(written(text, output), text=text) as s:
        for stop in ("weather", '"', "city", "END", "}"):
            expected = ([{"name": "get_weather", "arguments": ARGUMENTS}], "", "tool_calls")
            assert await answers(s, tools=[tool], stop=stop) == [expected] * 2, stop


async def test_text_beside_tools_ends_at_a_stop() -> None:
    text, call = CALLS[0]
    for output, calls in (("One two END three", 0), (f"{call} two END three", 1), ("One two END" + call, 0)):
        async with service(written(text, output), text=text) as s:
            for found, said, reason in await answers(s, tools=[WEATHER], stop="END"):
                assert (len(found), said.split()) == (calls, ["One", "two"][calls:]), output
                assert reason == ("tool_calls" if calls else "stop")


async def test_what_only_looks_like_a_call_is_text_again_afterwards() -> None:
    async with service(reply("<tool_call>no call, and END of it"), text=HERMES) as s:
        for found, said, reason in await answers(s, tools=[WEATHER], stop="END"):
            assert (found, said, reason) == ([], "<tool_call>no call, and ", "stop")


async def test_a_stop_within_text_that_follows_a_grammar_is_obeyed_and_told() -> None:
    """It is text for the reader of the answer, and the client asked for both."""
    async with service(reply('{"a": "x END"}')) as s:
        choice = (await s.chat(response_format={"type": "json_object"}, stop="END")).json()["choices"][0]
        told = (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"])
        assert told == ('{"a": "x ', "stop", "END")
