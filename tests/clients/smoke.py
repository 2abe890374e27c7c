"""LangChain and LiteLLM against a server of scripted answers: `make smoke`, or `python -m tests.clients.smoke`.

Both libraries are the extra `.[clients]`; they are imported late, so that a missing one is said by name.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from tests.clients.scripted import script
from tests.coordinator.http_tools import MODEL
from tests.coordinator.test_http_clients import server

QUESTION = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {"title": "Answer", "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


async def langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0)
    whole = await model.ainvoke("hi")
    assert whole.content == "Hello!", whole
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    pieces = [piece async for piece in model.astream("hi")]
    assert "".join(str(piece.content) for piece in pieces) == "Hello!"
    called = await model.bind_tools([TOOL], tool_choice="get_weather").ainvoke("weather?")
    assert [call["args"] for call in called.tool_calls] == [{"city": "Paris"}], called
    shaped = await model.with_structured_output(SCHEMA, method="json_schema").ainvoke("json")
    assert shaped == {"a": 1}, shaped


async def litellm(url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it fetches a list of prices when it is imported
    import litellm as library

    fields: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "api_base": url,
        "api_key": "none",
        "num_retries": 0,
    }
    whole = await library.acompletion(messages=QUESTION, **fields)
    assert whole.choices[0].message.content == "Hello!", whole
    assert whole.usage.completion_tokens > 0
    stream = await library.acompletion(messages=QUESTION, stream=True, **fields)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Hello!"
    asked = [{"role": "user", "content": "weather?"}]
    called = await library.acompletion(messages=asked, tools=[TOOL], tool_choice="required", **fields)
    assert called.choices[0].message.tool_calls[0].function.name == "get_weather", called
    with pytest.raises(library.BadRequestError, match="temperature"):
        await library.acompletion(messages=QUESTION, temperature=9, **fields)


async def main() -> None:
    async with server(script) as (url, _):
        for check in (langchain, litellm):
            await check(url)
            print(f"{check.__name__}: ok")


if __name__ == "__main__":
    asyncio.run(main())
