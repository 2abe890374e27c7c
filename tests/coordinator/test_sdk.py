"""The official Python package over a real socket: parse and stream helpers, tools, structured output, responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from contracts.errors import WorkerLostError
from tests.coordinator.fake_backend import Script, reply
from tests.coordinator.http_tools import MODEL
from tests.coordinator.test_http_clients import MESSAGES, server

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Answer(BaseModel):
    kind: Literal["x", "y"]
    number: int


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10.0)


async def test_parse_gives_a_model_and_says_when_it_was_cut() -> None:
    async with server(reply('{"kind": "x", "number": 3}')) as (url, backend), client(url) as api:
        parsed = await api.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer)
        assert parsed.choices[0].message.parsed == Answer(kind="x", number=3)
        assert backend.requests[-1].sampling.grammar
        with pytest.raises(openai.LengthFinishReasonError):
            await api.chat.completions.parse(
                model=MODEL, messages=MESSAGES, response_format=Answer, max_tokens=5
            )


async def test_the_stream_helper_agrees_with_the_whole_answer_on_calls() -> None:
    async with server(reply(CALL)) as (url, _), client(url) as api:
        fields: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
        whole = await api.chat.completions.create(**fields)
        async with api.chat.completions.stream(**fields) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
        (one,), (other,) = (
            whole.choices[0].message.tool_calls or [],
            final.choices[0].message.tool_calls or [],
        )
        assert one.function.name == other.function.name == "get_weather"
        assert json.loads(one.function.arguments) == json.loads(other.function.arguments) == {"city": "Paris"}


async def test_a_turn_of_tools_goes_round() -> None:
    async with server(reply(CALL)) as (url, backend), client(url) as api:
        first = await api.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
        message = first.choices[0].message
        assert message.tool_calls
        history = [
            *MESSAGES,
            message.model_dump(),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
        ]
        await api.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
        assert len(backend.requests) == 2


async def test_several_choices_stream_through_the_helper() -> None:
    async with server(reply("Hello!")) as (url, _), client(url) as api:
        async with api.chat.completions.stream(model=MODEL, messages=MESSAGES, n=3) as stream:
            final = await stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["Hello!"] * 3


def ask_in_a_thread(url: str) -> tuple[str, str, list[str]]:
    """The client that is not async: a chat, a completion, a stream."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=10.0) as api:
        chat = api.chat.completions.create(model=MODEL, messages=MESSAGES)
        text = api.completions.create(model=MODEL, prompt="hi", logprobs=1)
        stream = api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    return chat.choices[0].message.content or "", text.choices[0].text, parts


async def test_the_client_that_is_not_async() -> None:
    async with server(reply("Hello!")) as (url, _):
        chat, text, parts = await asyncio.to_thread(ask_in_a_thread, url)
        assert chat == text == "".join(parts) == "Hello!"


async def test_responses_whole_streamed_and_parsed() -> None:
    async with server(reply('{"kind": "y", "number": 1}')) as (url, _), client(url) as api:
        whole = await api.responses.create(model=MODEL, input="hi")
        assert whole.output_text == '{"kind": "y", "number": 1}'
        assert whole.usage is not None
        async with api.responses.stream(model=MODEL, input="hi") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text
        assert kinds[-1] == "response.completed"
        parsed = await api.responses.parse(model=MODEL, input="hi", text_format=Answer)
        assert parsed.output_parsed == Answer(kind="y", number=1)


def broken(gate: asyncio.Event) -> Script:
    return lambda request: [72, gate, WorkerLostError("lost")]


async def test_a_response_that_breaks_ends_as_failed() -> None:
    gate = asyncio.Event()
    async with server(broken(gate)) as (url, _), client(url) as api:
        kinds = []
        async for event in await api.responses.create(model=MODEL, input="hi", stream=True):
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                gate.set()
        assert kinds[-1] == "response.failed"
        assert event.response.error is not None  # type: ignore[union-attr]
        assert event.response.status == "failed"  # type: ignore[union-attr]
