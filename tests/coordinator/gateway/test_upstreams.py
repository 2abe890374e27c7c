"""Models of other servers and chains of fallbacks: a gateway in front of servers on real sockets."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import create_engine

from contracts.errors import ConfigError, OverloadedError
from contracts.request import GenerateRequest
from coordinator.gateway.usage import totals
from tests.coordinator.fake_backend import reply
from tests.coordinator.gateway.gateway_tools import bearer, gateway_service, write_keys
from tests.coordinator.http_tools import MODEL, error_of, events, joined, make_config
from tests.coordinator.test_http_clients import MESSAGES, server

SOON_S = 5.0


def full(request: GenerateRequest) -> list[Any]:
    return [OverloadedError("the queue is full", retry_after_s=7)]


def at(url: str, **more: Any) -> dict[str, Any]:
    """An upstream of that base URL, whose model has the name that all fakes have."""
    return {"url": url.removesuffix("/v1"), "model": MODEL, **more}


Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(handle: Handle) -> AsyncIterator[str]:
    """A server that says whatever a test writes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await handle(reader, writer)
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


def saying(status: str, body: bytes, kind: str = "application/json", more: str = "") -> Handle:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}Connection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    return handle


async def test_each_model_is_answered_by_its_own_server(tmp_path: Path) -> None:
    async with server(reply("one")) as (first, a), server(reply("two")) as (second, b):
        upstreams = {"one": at(first), "two": at(second)}
        async with gateway_service(
            reply("own"), folder=tmp_path, upstreams=upstreams, aliases={"gpt-4o": "two"}
        ) as s:
            for model, text in (("one", "one"), ("two", "two"), (MODEL, "own"), ("gpt-4o", "two")):
                whole = await s.chat(model=model)
                assert whole.json()["choices"][0]["message"]["content"] == text
                assert joined(events(await s.chat(model=model, stream=True))) == text
                assert (await s.complete(model=model)).json()["choices"][0]["text"] == text
                response = await s.client.post("/v1/responses", json={"model": model, "input": "hi"})
                assert response.json()["output"][0]["content"][0]["text"] == text
            assert (len(s.backend.requests), len(a.requests), len(b.requests)) == (4, 4, 8)
            listed = (await s.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == [MODEL, "one", "two", "gpt-4o"]
            assert ["max_model_len" in card for card in listed] == [True, False, False, False]
            assert (await s.client.get("/v1/models/one")).json()["id"] == "one"
            unknown = await s.chat(model="three")
            assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")


async def test_what_the_other_server_refuses_reaches_the_client_as_it_is(tmp_path: Path) -> None:
    async with server() as (url, _), gateway_service(folder=tmp_path, upstreams={"other": at(url)}) as s:
        response = await s.chat(model="other", temperature=9)
        assert (response.status_code, error_of(response)["param"]) == (400, "temperature")
        assert response.headers["x-baton-model"] == "other"


async def test_a_request_id_and_the_rest_of_the_time_go_along(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await saying("200 OK", b"{}")(reader, writer)

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        await handle(reader, writer)
        writer.close()

    (tmp_path / "key").write_text("sk-other\n")
    listener = await asyncio.start_server(note, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        upstreams = {"x": {"url": f"http://127.0.0.1:{port}/base/", "key_file": str(tmp_path / "key")}}
        async with gateway_service(folder=tmp_path, upstreams=upstreams, max_request_timeout_s=9.0) as s:
            body = {"model": "x", "messages": MESSAGES}
            headers = {"x-request-id": "mine", "authorization": "Bearer ours", "cookie": "a=b"}
            await s.client.post("/v1/chat/completions", json=body, headers=headers)
    head = seen[0].decode().lower()
    assert head.startswith("post /base/v1/chat/completions ")
    assert "x-request-id: mine" in head
    assert "authorization: bearer sk-other" in head
    assert 0 < float(head.partition("x-request-timeout: ")[2].partition("\r")[0]) <= 9
    assert "cookie" not in head
    assert "bearer ours" not in head


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chain_is_tried_in_turn_until_one_has_room(stream: bool, tmp_path: Path) -> None:
    async with server(full) as (busy, a), server(reply("yes")) as (free, b):
        upstreams = {
            "busy": at(busy), "free": at(free), "gone": {"url": "http://127.0.0.1:1"},
        }  # fmt: skip
        chain = {MODEL: ["gone", "busy", "free"], "busy": [MODEL, "free"]}
        async with gateway_service(full, folder=tmp_path, upstreams=upstreams, fallbacks=chain) as s:
            for model in (MODEL, "busy"):
                response = await s.chat(model=model, stream=stream)
                assert response.status_code == 200
                assert response.headers["x-baton-model"] == "free"
                text = (
                    joined(events(response))
                    if stream
                    else response.json()["choices"][0]["message"]["content"]
                )
                assert text == "yes"
            assert (len(s.backend.requests), len(a.requests), len(b.requests)) == (2, 2, 2)


async def test_the_last_of_a_chain_says_why_not(tmp_path: Path) -> None:
    async with server(full) as (busy, _):
        upstreams = {"busy": at(busy), "gone": {"url": "http://127.0.0.1:1"}}
        async with gateway_service(
            full, folder=tmp_path, upstreams=upstreams, fallbacks={"gone": ["busy"]}
        ) as s:
            response = await s.chat(model="gone")
            assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
            assert response.headers["retry-after"] == "7"
        async with gateway_service(
            full, folder=tmp_path, upstreams=upstreams, fallbacks={"busy": ["gone"]}
        ) as s:
            response = await s.chat(model="busy")
            assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")
            assert "127.0.0.1" not in response.text


async def test_a_callers_own_quota_is_no_reason_to_ask_another(tmp_path: Path) -> None:
    async with server() as (url, backend):
        settings: Any = {"upstreams": {"other": at(url)}, "fallbacks": {MODEL: ["other"]}}
        async with gateway_service(folder=tmp_path, requests_per_minute=1, **settings) as s:
            assert (await s.chat()).status_code == 200
            assert (await s.chat()).status_code == 429
            assert not backend.requests


async def test_a_stream_that_breaks_there_ends_with_an_error_event_here(tmp_path: Path) -> None:
    chunk = b'data: {"choices": [{"index": 0, "delta": {"content": "Hel"}}]}\n\n'
    broken = saying("200 OK", chunk, "text/event-stream", "Content-Length: 5000\r\n")
    async with raw_server(broken) as url, server(reply("fallback")) as (other, _):
        settings: Any = {"upstreams": {"x": {"url": url}, "y": at(other)}, "fallbacks": {"x": ["y"]}}
        async with gateway_service(folder=tmp_path, **settings) as s:
            found = events(await s.chat(model="x", stream=True))
            assert found[0]["choices"][0]["delta"]["content"] == "Hel"
            assert found[-1]["error"]["code"] == "worker_lost"
            assert len(found) == 2


@pytest.mark.parametrize(
    ("status", "body", "kind", "told"),
    [
        ("401 Unauthorized", b'{"error": {"message": "sk-secret"}}', "application/json", 500),
        ("307 Temporary Redirect", b"", "text/plain", 500),
        ("500 Internal Server Error", b"Internal Server Error", "text/plain", 500),
        ("502 Bad Gateway", b"<html>", "text/html", 503),
        ("404 Not Found", b"Path not found", "text/plain", 500),
    ],
)
async def test_a_wrong_set_up_is_our_fault_and_says_nothing_of_the_inside(
    status: str, body: bytes, kind: str, told: int, tmp_path: Path
) -> None:
    async with raw_server(saying(status, body, kind)) as url:
        async with gateway_service(folder=tmp_path, upstreams={"x": {"url": url}}) as s:
            response = await s.chat(model="x")
            assert response.status_code == told
            assert error_of(response)["type"] == "server_error"
            assert "secret" not in response.text


async def test_a_deadline_holds_for_other_servers_too(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with server(lambda _: [never]) as (url, backend):
        async with gateway_service(folder=tmp_path, upstreams={"x": at(url)}) as s:
            body = {"model": "x", "messages": MESSAGES}
            response = await s.client.post(
                "/v1/chat/completions", json=body, headers={"x-request-timeout": "0.2"}
            )
            assert (response.status_code, error_of(response)["code"]) == (504, "timeout")
        async with asyncio.timeout(SOON_S):
            await backend.idle.wait()


async def test_a_client_that_leaves_leaves_there_too(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with server(lambda _: [72, gate, 72]) as (url, backend):
        config = make_config(gateway={"state_dir": str(tmp_path), "upstreams": {"x": at(url)}})
        async with server(config=config) as (front, _):
            async with openai.AsyncOpenAI(base_url=front, api_key="none", max_retries=0) as api:
                stream = await api.chat.completions.create(model="x", messages=MESSAGES, stream=True)
                async for chunk in stream:  # it comes piece by piece: the gate is shut
                    if chunk.choices[0].delta.content:
                        break
                await stream.close()
            async with asyncio.timeout(SOON_S):
                await backend.idle.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_drain_ends_what_is_open_elsewhere(stream: bool, tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with server(lambda _: [72, gate, 72]) as (url, backend):
        async with gateway_service(folder=tmp_path, upstreams={"x": at(url)}) as s:
            asking = asyncio.create_task(s.chat(model="x", stream=stream))
            await backend.started.wait()
            assert await s.drain.drain(0.2) == 1
            async with asyncio.timeout(SOON_S):
                answer = await asking
            assert answer.status_code == (200 if stream else 503)
            told = events(answer)[-1] if stream else answer.json()
            assert told["error"]["code"] == "overloaded"
            assert (await s.chat(model="x")).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_of_other_servers_is_counted_and_no_chunk_is_shown_that_was_not_asked_for(
    stream: bool, tmp_path: Path
) -> None:
    (key,) = write_keys(tmp_path / "keys", "acme")
    async with server(reply("abc"), num_cached=1) as (url, backend):
        settings: Any = {"keys_file": str(tmp_path / "keys"), "tokens_per_minute": 60}
        async with gateway_service(folder=tmp_path, upstreams={"x": at(url)}, **settings) as s:
            for asked in (None, {"include_usage": True}):
                body = {"model": "x", "prompt": "hi", "stream": stream}
                if stream and asked:
                    body["stream_options"] = asked
                response = await s.client.post("/v1/completions", json=body, headers=bearer(key))
                if stream:
                    assert [chunk for chunk in events(response) if not chunk["choices"]] != [] or not asked
                    assert asked or all(chunk["choices"] for chunk in events(response))
            now = asyncio.get_running_loop().time()
            left = s.gateway.quotas.of("acme", now).headers(now)["x-ratelimit-remaining-tokens"]
            assert int(left) < 60  # 12 were used, and one a second flows in again
            assert [request.salt for request in backend.requests] == [backend.requests[0].salt] * 2
            assert backend.requests[0].salt not in ("", "acme/")
            assert s.gateway.ledger is not None
            await s.gateway.ledger.flush()
            engine = create_engine(f"sqlite:///{tmp_path}/usage.db")
            (row,) = totals(engine)
            engine.dispose()
            assert (row["model"], row["requests"], row["prompt_tokens"], row["output_tokens"]) == (
                "x",
                2,
                4,
                8,
            )


async def test_guards_and_caps_hold_for_other_servers_too(tmp_path: Path) -> None:
    settings: Any = {"output_guards": ["examples.mask_emails:mask_answer"], "max_output_tokens": 30}
    async with server(reply("write to ann@example.org please, and soon")) as (url, backend):
        async with gateway_service(folder=tmp_path, upstreams={"x": at(url)}, **settings) as s:
            whole = await s.chat(model="x")
            assert "[e-mail]" in whole.json()["choices"][0]["message"]["content"]
            assert "[e-mail]" in joined(events(await s.chat(model="x", stream=True)))
            assert {request.sampling.max_tokens for request in backend.requests} == {30}
            assert (await s.complete(model="x")).status_code == 200
            assert backend.requests[-1].sampling.max_tokens == 16
            assert error_of(await s.chat(model="x", max_tokens=31))["param"] == "max_tokens"


@pytest.mark.parametrize("model", [5, [], {}, True, "", "x" * 10_000])
async def test_a_model_that_is_no_name_is_refused(model: Any, tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path, upstreams={"x": {"url": "http://127.0.0.1:1"}}) as s:
        response = await s.chat(model=model)
        assert response.status_code in (400, 404)
        assert error_of(response)["param"] == "model"


async def test_a_cap_that_cannot_be_compared_is_no_way_around_it(tmp_path: Path) -> None:
    async with gateway_service(
        folder=tmp_path, max_output_tokens=9, upstreams={"x": {"url": "http://127.0.0.1:1"}}
    ) as s:
        response = await s.chat(model="x", max_tokens=1e9)
        assert (response.status_code, error_of(response)["code"]) == (400, "invalid_value")


async def test_a_client_that_does_not_read_is_not_waited_for(tmp_path: Path) -> None:
    endless = b'data: {"choices": [{"index": 0, "delta": {"content": "' + b"x" * 60_000 + b'"}}]}\n\n'
    is_left = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        try:
            while True:
                writer.write(endless)
                await writer.drain()
        except ConnectionError:
            is_left.set()

    async with raw_server(handle) as url:
        config = make_config(
            gateway={"state_dir": str(tmp_path), "upstreams": {"x": {"url": url}}},
            coordinator={"slow_reader_timeout_s": 0.2},
        )
        async with server(config=config, send_buffer=4096) as (front, _):
            host, _, port = front.removeprefix("http://").removesuffix("/v1").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
            body = json.dumps({"model": "x", "messages": MESSAGES, "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await reader.readexactly(100)
            async with asyncio.timeout(SOON_S):
                await is_left.wait()
            writer.close()


async def test_lines_of_batches_go_to_other_servers(tmp_path: Path) -> None:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "x", "prompt": "hi"},
    }
    async with (
        server(reply("there")) as (url, _),
        gateway_service(folder=tmp_path, upstreams={"x": at(url)}) as s,
    ):
        sent = {"file": ("in.jsonl", json.dumps(line))}
        file = (await s.client.post("/v1/files", files=sent, data={"purpose": "batch"})).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await s.client.post("/v1/batches", json=asked)).json()
        async with asyncio.timeout(SOON_S):
            while batch["status"] != "completed":
                batch = (await s.client.get(f"/v1/batches/{batch['id']}")).json()
        answer = (await s.client.get(f"/v1/files/{batch['output_file_id']}/content")).json()
        assert answer["response"]["body"]["choices"][0]["text"] == "there"


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"upstreams": {MODEL: {"url": "http://a"}}}, "gateway.upstreams"),
        ({"fallbacks": {MODEL: ["none"]}}, "gateway.fallbacks"),
        ({"fallbacks": {"none": [MODEL]}}, "gateway.fallbacks"),
        ({"upstreams": {"x": {"url": "http://a", "key_file": "/nowhere"}}}, "gateway.upstreams.x.key_file"),
    ],
)
async def test_names_that_nobody_serves_stop_the_start(
    settings: dict[str, Any], where: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=where):
        async with gateway_service(folder=tmp_path, **settings) as s:
            await s.chat()


async def test_a_server_of_one_model_loads_no_client() -> None:
    code = "import sys, coordinator.http; sys.exit('aiohttp' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
