"""A coordinator that is being stopped: every open request finishes in time or ends with exactly one error."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from contracts.errors import BatonError
from coordinator.drain import SHUTTING_DOWN, Drain
from tests.coordinator.fake_backend import FakeBackend
from tests.coordinator.http_tools import MODEL, error_of, make_config, service
from tests.coordinator.test_http_clients import MESSAGES, SOON_S, async_client, call, server


def chat(stream: bool) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "stream": stream}


async def until_open(drain: Drain, count: int) -> None:
    async with asyncio.timeout(SOON_S):
        while drain.num_open < count:
            await asyncio.sleep(0)


async def test_what_ends_in_time_ends_well() -> None:
    gate, drain = asyncio.Event(), Drain()
    async with service(lambda request: [72, gate, 105, 257], drain=drain) as s:
        asked = [asyncio.create_task(s.chat(stream=stream)) for stream in (False, True)]
        await until_open(drain, 2)
        draining = asyncio.create_task(drain.drain(SOON_S))
        await asyncio.sleep(0)
        assert drain.is_draining
        gate.set()
        whole, streamed = [await task for task in asked]
        assert whole.json()["choices"][0]["message"]["content"] == "Hi"
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert "error" not in streamed.text
        assert await draining == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_byte_the_end_is_a_503(stream: bool) -> None:
    forever, drain = asyncio.Event(), Drain()
    async with service(lambda request: [forever], drain=drain) as s:
        asked = asyncio.create_task(s.chat(stream=stream, n=2, temperature=1))
        await until_open(drain, 1)
        assert await drain.drain(0.0) == 1
        response = await asked
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert error_of(response)["message"] == SHUTTING_DOWN
        assert len(s.backend.ended) == 2


async def test_an_open_stream_ends_with_one_error_event_on_a_real_connection() -> None:
    forever, drain = asyncio.Event(), Drain()
    async with (
        server(lambda request: [72, 105, forever], drain=drain) as (url, backend),
        httpx.AsyncClient() as client,
        client.stream("POST", f"{url}/chat/completions", json=chat(stream=True)) as response,
    ):
        blocks: list[str] = []
        async for line in response.aiter_lines():
            blocks += [line] if line else []
            if '"content":"i"' in line or '"content":"Hi"' in line:
                assert await drain.drain(0.0) == 1
        assert not backend.running
    assert [block for block in blocks if "error" in block] == [blocks[-2]]
    assert SHUTTING_DOWN in blocks[-2]
    assert blocks[-1] == "data: [DONE]"
    assert '"finish_reason":"' not in "".join(blocks)


async def test_the_official_client_raises_after_the_text_it_got() -> None:
    forever, drain = asyncio.Event(), Drain()
    async with (
        server(lambda request: [72, forever], drain=drain) as (url, _),
        async_client(url) as client,
    ):
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        seen = ""

        async def read() -> None:
            nonlocal seen
            async for chunk in stream:
                seen += chunk.choices[0].delta.content or ""
                if seen:
                    await drain.drain(0.0)

        with pytest.raises(Exception, match=SHUTTING_DOWN):
            await read()
        assert seen == "H"


async def test_newcomers_are_refused_and_the_replica_says_so() -> None:
    drain = Drain()
    async with service(drain=drain) as s:
        assert await drain.drain(0.0) == 0
        for response in (await s.chat(), await s.chat(stream=True), await s.complete()):
            assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
        assert not s.backend.requests
        ready = await s.client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, SHUTTING_DOWN)
        assert (await s.client.get("/health")).status_code == 200


async def test_an_answer_that_is_complete_already_is_not_spoiled() -> None:
    """The engine has finished; the client just has not read it yet."""
    is_blocked, is_open, gate, drain = asyncio.Event(), asyncio.Event(), asyncio.Event(), Drain()
    bodies: list[bytes] = []

    async def slow(message: dict[str, Any]) -> None:
        if message.get("body"):
            bodies.append(message["body"])
            is_blocked.set()
            await is_open.wait()

    backend = FakeBackend(lambda request: [72, gate, 105, 257])
    task = asyncio.create_task(call(backend, make_config(), slow, drain))
    async with asyncio.timeout(SOON_S):
        await is_blocked.wait()
        gate.set()
        await backend.idle.wait()
        draining = asyncio.create_task(drain.drain(0.0))
        await asyncio.sleep(0)
        is_open.set()
        await asyncio.gather(task, draining)
    text = b"".join(bodies)
    assert b"error" not in text
    assert b'"finish_reason":"stop"' in text
    assert text.endswith(b"data: [DONE]\n\n")


class Stuck:
    """A request whose client takes nothing, not even its end."""

    def __init__(self) -> None:
        self.errors: list[BatonError] = []

    def fail(self, error: BatonError) -> None:
        self.errors.append(error)


async def test_who_does_not_take_the_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.drain.FAREWELL_S", 0.01)
    drain, stuck = Drain(), Stuck()
    with drain.opened(stuck):
        async with asyncio.timeout(SOON_S):
            assert await drain.drain(0.0) == 1
        assert len(stuck.errors) == 1
