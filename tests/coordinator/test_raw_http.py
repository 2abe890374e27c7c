"""Bytes on a socket: what is no HTTP is told so in OpenAI's form, and each version of HTTP gets its own framing."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from contracts.request import GenerateRequest
from tests.coordinator.fake_backend import EOS, Step, reply
from tests.coordinator.test_http_clients import MESSAGES, port_of, raw_post, server, until_idle

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


async def told(url: str, raw: bytes) -> tuple[bytes, bytes]:
    """(head, what follows) until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    writer.write(raw)
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head.lower(), body


NO_HTTP = [
    *(CHAT + b"content-type: application/json" + bytes([each]) + b"\r\n\r\n" for each in (0, 1, 11, 31, 127)),
    CHAT + b"authorization: a\x01\r\n\r\n",
    CHAT + b"\xff: b\r\n\r\n",
    CHAT + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    CHAT + b"content-length: x\r\n\r\n",
    CHAT + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET /v1/mod\xc3\xa9ls HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://[::/ HTTP/1.1\r\nhost: x\r\n\r\n",
    b"BREW / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # https
]


@pytest.mark.parametrize("raw", NO_HTTP)
async def test_what_is_no_http_gets_an_error_in_openais_form(raw: bytes) -> None:
    async with server() as (url, backend):
        head, body = await told(url, raw)
        assert head.startswith(b"http/1.1 400 "), head
        assert b"\r\ncontent-type: application/json" in head
        assert b"\r\nconnection: close" in head
        assert b"\r\nx-request-id: req_" in head
        assert b"\r\ncontent-length: %d" % len(body) in head
        error = json.loads(body)["error"]
        assert (error["type"], error["code"], set(error)) == (
            "invalid_request_error", "invalid_value", {"message", "type", "param", "code"},
        )  # fmt: skip
        assert not backend.requests


@pytest.mark.parametrize(
    "value", [b"\xff", b"\xc3\xa9", b"a/b; charset=\x80", b"\t", b'"', b"application/j\xf6son"]
)
async def test_odd_bytes_that_http_allows_are_told_of_like_any_other_fault(value: bytes) -> None:
    async with server() as (url, backend):
        headers = b"content-type: " + value + b"\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
        head, body = await told(url, CHAT + headers)
        assert head.startswith(b"http/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert not backend.requests


async def test_rubbish_behind_an_answer_that_has_begun_is_not_written_into_it() -> None:
    held = asyncio.Event()

    def script(request: GenerateRequest) -> list[Step]:
        return [ord("a"), held, EOS]

    async with server(script) as (url, backend):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        writer.write(raw_post(MESSAGES, stream=True))
        found = await reader.readuntil(b'"content":"a"')
        writer.write(b"\x00\x00\x00\r\n\r\n")
        async with asyncio.timeout(10):
            found += await reader.read()
        assert found.count(b"HTTP/1.1") == 1
        await until_idle(backend)
        writer.close()


@pytest.mark.parametrize(
    "target", [b"//v1/models", b"//x/v1/models", b"///v1/models", b"//x:80/health", b"//x"]
)
async def test_a_path_of_two_slashes_names_no_host(target: bytes) -> None:
    async with server() as (url, _):
        head, body = await told(url, b"GET " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert head.startswith(b"http/1.1 404 "), head
        assert json.loads(body)["error"]["message"] == f"no such route: GET {target.decode()}"


@pytest.mark.parametrize("host", [b"host: x", b"host: x/y?z", b"host:", b"x: y"])
async def test_a_route_is_named_by_its_path_whatever_the_host_says(host: bytes) -> None:
    async with server() as (url, _):
        for target in (b"/v1/nothing", b"//v1/models"):
            _, body = await told(url, b"GET " + target + b" HTTP/1.0\r\n" + host + b"\r\n\r\n")
            assert json.loads(body)["error"]["message"] == f"no such route: GET {target.decode()}"


async def test_a_client_that_closes_its_side_has_left() -> None:
    """TCP tells the end of a client's writing and its leaving by the same sign."""
    held = asyncio.Event()
    async with server(lambda _: [ord("a"), held, EOS]) as (url, backend):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        writer.write(raw_post(MESSAGES, stream=True))
        await reader.readuntil(b'"content":"a"')
        writer.write_eof()
        await until_idle(backend)
        writer.close()


def old(raw: bytes) -> bytes:
    return raw.replace(b"HTTP/1.1", b"HTTP/1.0", 1)


async def test_a_stream_to_an_old_client_ends_with_its_connection() -> None:
    async with server(reply("Hello!")) as (url, _):
        head, body = await told(url, old(raw_post(MESSAGES, stream=True)))
        assert head.startswith(b"http/1.1 200 ")
        assert b"transfer-encoding" not in head
        assert b"content-length" not in head
        assert re.findall(rb"connection: [^\r]*", head) == [b"connection: close"]
        events = body.split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events[:-1])
        assert events[-2:] == [b"data: [DONE]", b""]
        text = "".join(
            json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in events[:-2]
        )
        assert text == "Hello!"


async def test_an_old_client_may_leave_and_may_be_answered_whole() -> None:
    async with server(lambda _: [ord("a"), asyncio.Event()]) as (url, backend):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        writer.write(old(raw_post(MESSAGES, stream=True)))
        await reader.readuntil(b'"content":"a"')
        writer.close()
        await until_idle(backend)
    async with server() as (url, _):
        head, body = await told(url, old(raw_post(MESSAGES)))
        assert b"\r\ncontent-length: %d" % len(body) in head
        head, body = await told(url, old(b"GET /v1/nothing HTTP/1.1\r\n\r\n"))
        assert json.loads(body)["error"]["code"] == "not_found"


async def test_a_new_client_gets_chunks() -> None:
    async with server() as (url, _):
        raw = raw_post(MESSAGES, stream=True).replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n")
        head, body = await told(url, raw)
        assert b"\r\ntransfer-encoding: chunked" in head
        assert body.endswith(b"0\r\n\r\n")
        assert re.findall(rb"connection: [^\r]*", head) == [b"connection: close"]
