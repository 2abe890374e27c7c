"""A real server on a socket: the official client, clients that leave, clients that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from contracts.config import BatonConfig
from contracts.errors import WorkerLostError
from contracts.request import GenerateRequest, Token, TokenSink
from coordinator.drain import Drain
from coordinator.http import make_app
from coordinator.ingress import middlewares
from tests.coordinator.fake_backend import FakeBackend, Script, reply
from tests.coordinator.http_tools import MODEL, TEXT, joined, make_config

MESSAGES: Any = [{"role": "user", "content": "hi"}]
SOON_S = 2.0


@asynccontextmanager
async def server(
    script: Script | None = None,
    config: BatonConfig | None = None,
    drain: Drain | None = None,
    send_buffer: int | None = None,
    **options: Any,
) -> AsyncIterator[tuple[str, FakeBackend]]:
    """(base url, backend) of a server in this loop.

    The socket listens before the server runs: nothing to wait for.
    """
    backend = FakeBackend(script, **options)
    app: Any = make_app(config or make_config(), TEXT, backend, drain=drain)
    for middleware in middlewares():  # as Serve puts them around
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    settings = uvicorn.Config(
        app, log_level="warning", ws="none", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", backend
    finally:
        server.should_exit = True
        await task
        listener.close()
    assert not backend.running


def async_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


def port_of(url: str) -> int:
    return int(url.split(":")[2].split("/")[0])


def raw_post(messages: Any, **fields: Any) -> bytes:
    """A chat request as bytes, for clients that are no good clients."""
    body = json.dumps({"messages": messages, **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def until_idle(backend: FakeBackend) -> None:
    async with asyncio.timeout(SOON_S):
        await backend.idle.wait()


async def test_the_async_client_reads_streams_and_answers() -> None:
    async with server(reply("Hello 😀!")) as (url, _), async_client(url) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert answer.choices[0].message.content == "Hello 😀!"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello 😀!"
        assert chunks[-1].usage == answer.usage
        completion = await client.completions.create(model=MODEL, prompt=["a", "b"], echo=True)
        assert [choice.text for choice in completion.choices] == ["aHello 😀!", "bHello 😀!"]
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_the_stream_helper_agrees_with_the_whole_answer() -> None:
    async with server(reply("Hello!")) as (url, _), async_client(url) as client:
        async with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, n=3, seed=1, logprobs=True, top_logprobs=1
        ) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == ["Hello!"] * 3
        assert [choice.finish_reason for choice in final.choices] == ["stop"] * 3
        assert [len(choice.logprobs.content) for choice in final.choices if choice.logprobs] == [7, 7, 7]  # type: ignore[arg-type]


async def test_the_sync_client_works_too() -> None:
    def talk(url: str) -> tuple[str | None, str]:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = client.completions.create(model=MODEL, prompt="x", stream=True)
            return answer.choices[0].message.content, "".join(c.choices[0].text for c in stream)

    async with server(reply("Hello!")) as (url, _):
        assert await asyncio.to_thread(talk, url) == ("Hello!", "Hello!")


async def test_the_client_raises_typed_errors_with_fields() -> None:
    async with server(max_total_tokens=50) as (url, _), async_client(url) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
        assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="x" * 60)
        assert caught.value.code == "context_length_exceeded"


async def test_a_stream_that_breaks_raises_in_the_client_after_its_text() -> None:
    gate = asyncio.Event()
    async with (
        server(lambda request: [72, gate, WorkerLostError("lost")]) as (url, _),
        async_client(url) as client,
    ):
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        seen: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                seen.append(chunk.choices[0].delta.content or "")
                gate.set()

        with pytest.raises(openai.APIError) as caught:
            await read()
        assert ("".join(seen), caught.value.code) == ("H", "worker_lost")


async def test_tokens_reach_the_client_one_by_one() -> None:
    gates = [asyncio.Event() for _ in range(5)]
    steps = [step for i, gate in enumerate(gates) for step in (65 + i, gate)]
    async with server(lambda request: [*steps, 257]) as (url, _), async_client(url) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        seen = ""
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                seen += chunk.choices[0].delta.content
                gates[len(seen) - 1].set()
        assert seen == "ABCDE"


@pytest.mark.parametrize("num_tokens", [0, 3], ids=["before the first token", "in the middle"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_backend_at_once(stream: bool, num_tokens: int) -> None:
    forever = asyncio.Event()
    async with server(lambda request: [72] * num_tokens + [forever]) as (url, backend):
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        writer.write(raw_post(MESSAGES, stream=stream, n=2, temperature=1))
        async with asyncio.timeout(SOON_S):
            await backend.started.wait()
        assert backend.running
        writer.close()
        await writer.wait_closed()
        await until_idle(backend)
        assert len(backend.ended) == 2


async def test_many_clients_leaving_leave_nothing_behind() -> None:
    forever = asyncio.Event()
    async with server(lambda request: [72, forever]) as (url, backend), async_client(url) as client:
        for _ in range(20):
            stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            await until_idle(backend)
        backend.script = reply("still well")
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].message.content == "still well"


async def test_parallel_streams_do_not_mix() -> None:
    def echo(request: Any) -> list[int]:
        return [*request.prompt_ids, 257]

    async def one(client: openai.AsyncOpenAI, word: str) -> tuple[str, str]:
        stream = await client.completions.create(model=MODEL, prompt=word, stream=True, max_tokens=40)
        chunks = [chunk async for chunk in stream]
        return chunks[0].id, "".join(chunk.choices[0].text for chunk in chunks)

    async with server(echo) as (url, _), async_client(url) as client:
        words = [f"prompt number {i}" for i in range(32)]
        results = await asyncio.gather(*(one(client, word) for word in words))
        assert [text for _, text in results] == words
        assert len({completion_id for completion_id, _ in results}) == 32


Send = Callable[[dict[str, Any]], Awaitable[None]]


async def call(backend: FakeBackend, config: BatonConfig, send: Send, drain: Drain | None = None) -> None:
    """One streamed chat at the ASGI level, with the test as the network."""
    body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await make_app(config, TEXT, backend, drain=drain)(scope, receive, send)  # type: ignore[arg-type]


async def test_a_reader_that_is_stuck_ends_its_request() -> None:
    async def stuck(message: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    forever = asyncio.Event()
    backend = FakeBackend(lambda request: [72, forever])
    async with asyncio.timeout(SOON_S):
        await call(backend, make_config(coordinator={"slow_reader_timeout_s": 0.05}), stuck)
    assert len(backend.ended) == 1


async def test_a_client_that_stops_reading_is_cut_off_and_its_request_ended() -> None:
    """On a real connection with small buffers: an endless answer fills them, and then nothing moves any more."""

    async def endless(request: GenerateRequest, sink: TokenSink, *_: object) -> None:
        backend.running.add(request.request_id)
        try:
            for index in count():
                assert sink(Token(index, 65))
                await asyncio.sleep(0)
        finally:
            backend.running.discard(request.request_id)
            ended.set()

    ended = asyncio.Event()
    config = make_config(coordinator={"slow_reader_timeout_s": 0.1})
    async with server(config=config, send_buffer=4096, max_total_tokens=1 << 30) as (url, backend):
        backend.generate = endless  # type: ignore[method-assign, assignment]
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port_of(url)))
            await loop.sock_sendall(client, raw_post(MESSAGES, stream=True))
            async with asyncio.timeout(30):
                await ended.wait()
            assert not backend.running
            received = b""
            async with asyncio.timeout(SOON_S):
                while part := await loop.sock_recv(client, 1 << 16):
                    received += part
        assert b'"content":"A' in received
        assert b"[DONE]" not in received
        metrics = await asyncio.to_thread(httpx.get, f"{url.removesuffix('/v1')}/metrics")
        assert 'baton_errors_total{code="slow_reader",endpoint="chat"} 1.0' in metrics.text
        assert 'baton_requests_running{endpoint="chat"} 0.0' in metrics.text


async def test_a_slow_reader_gets_larger_pieces_and_loses_none() -> None:
    is_open, drawn, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()
    bodies: list[bytes] = []

    async def slow(message: dict[str, Any]) -> None:
        if message.get("body"):
            bodies.append(message["body"])
            gate.set()
            await is_open.wait()

    def script(request: Any) -> Any:
        yield 65
        yield gate
        yield from range(66, 91)
        drawn.set()
        yield 257

    backend = FakeBackend(script)
    task = asyncio.create_task(call(backend, make_config(), slow))
    async with asyncio.timeout(SOON_S):
        await drawn.wait()
        is_open.set()
        await task
    lines = [line[6:] for line in b"".join(bodies).split(b"\n\n") if line.startswith(b"data: {")]
    texts = [json.loads(line)["choices"][0]["delta"].get("content") for line in lines]
    assert [text for text in texts if text] == ["A", "BCDEFGHIJKLMNOPQRSTUVWXYZ"]


async def test_an_error_after_tokens_is_an_event_without_finish_reason() -> None:
    bodies: list[bytes] = []
    gate = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            bodies.append(message["body"])
            gate.set()

    backend = FakeBackend(lambda request: [72, 105, gate, WorkerLostError("decode-0 died")])
    async with asyncio.timeout(SOON_S):
        await call(backend, make_config(), send)
    *blocks, done, rest = b"".join(bodies).split(b"\n\n")
    chunks = [json.loads(block.removeprefix(b"data: ")) for block in blocks]
    assert (done, rest) == (b"data: [DONE]", b"")
    assert joined(chunks[:-1]) == "Hi"
    assert chunks[-1]["error"]["code"] == "worker_lost"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


async def test_silence_gets_headers_and_keep_alive_comments() -> None:
    bodies: list[bytes] = []
    gate = asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        bodies.append(message.get("body", b""))
        if sum(body.count(b": keep-alive\n\n") for body in bodies) == 2:
            gate.set()

    backend = FakeBackend(lambda request: [gate, 72, 257])
    async with asyncio.timeout(SOON_S):
        await call(backend, make_config(coordinator={"peek_timeout_s": 0.01, "keep_alive_s": 0.01}), send)
    assert b'"content":"H"' in b"".join(bodies)
    assert bodies[-1].endswith(b"data: [DONE]\n\n")
