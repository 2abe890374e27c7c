"""An OpenAI endpoint that answers by a script and stamps what it does. Standard library only; run as a process.

    python fake_server.py '{"ttft_s": 0.05, "gap_s": 0.01}'     prints its port, ends with its stdin

`ttft_s`, `gap_s`: delays before the first and each further chunk. `chunk_tokens`: tokens per chunk, in turn.
`stalls`: {"index of chunk": seconds more}. What a request does besides is said by the `model` it asks for:

    normal · crlf (line ends of two bytes) · glued (all events in one write) · no_usage · no_chunk_usage
    reject (503) · error (500) · error_event · broken (closes without a finish_reason) · silent (headers, then nothing)
    hidden (tokens without text between those with) · eos (no token with text)
    strict (400 for include_timings)

`timings_ms`: what the usage of who asked for timings has under that name.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

OVERHEAD = 5
"""Tokens that this server's template puts around a user's words; each word is one token, but for long ones."""


def count_tokens(text: str) -> int:
    """A word of up to eight letters is one token, a longer one two."""
    return sum(1 if len(word) <= 8 else 2 for word in text.split())


class FakeServer:
    def __init__(self, script: dict[str, Any]) -> None:
        self.script = script
        self.stamps: dict[str, dict[str, Any]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await self._read(reader)) is not None:
                method_path, headers, body = request
                received_s = time.monotonic()
                if method_path.startswith("POST /v1/"):
                    await self._generate(
                        writer, headers.get("x-request-id", ""), json.loads(body), received_s
                    )
                    break
                self._answer(writer, method_path, body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes] | None:
        line = (await reader.readline()).decode().strip()
        if not line:
            return None
        headers = {}
        while (header := (await reader.readline()).decode().strip()) != "":
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return line, headers, body

    def _answer(self, writer: asyncio.StreamWriter, method_path: str, body: bytes) -> None:
        path = method_path.split()[1]
        if path == "/tokenize" and self.script.get("tokenize", True):
            content = json.loads(body)
            messages = content.get("messages")
            count = (
                OVERHEAD + sum(count_tokens(message["content"]) for message in messages)
                if messages
                else 1 + count_tokens(content["prompt"])
            )
            self._write(writer, 200, {"count": count, "tokens": [0] * count})
        elif path == "/v1/models":
            self._write(writer, 200, {"data": [{"id": self.script.get("model", "normal")}]})
        elif path == "/stamps":
            self._write(writer, 200, self.stamps)
        else:
            self._write(writer, 404, {"error": {"message": "no such route"}})

    def _write(self, writer: asyncio.StreamWriter, status: int, content: object, header: bytes = b"") -> None:
        body = json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n" % (status, header, len(body)) + body)

    async def _generate(
        self, writer: asyncio.StreamWriter, request_id: str, body: dict[str, Any], received_s: float
    ) -> None:
        stamp: dict[str, Any] = {"received_s": received_s, "chunks_s": [], "body": body}
        previous = self.stamps.get(request_id, {})
        self.stamps[request_id] = stamp
        stamp["num_sent"] = previous.get("num_sent", 0) + 1
        mode = body["model"]
        if mode == "strict" and "include_timings" in body["stream_options"]:
            message = "Extra inputs are not permitted: stream_options.include_timings"
            self._write(writer, 400, {"error": {"message": message}}, b"Connection: close\r\n")
            await writer.drain()
            return
        if mode in ("reject", "error"):
            self._write(writer, 503 if mode == "reject" else 500, {"error": {"message": "scripted"}})
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        await writer.drain()
        if mode == "silent":
            await asyncio.sleep(3600)
        end = b"\r\n\r\n" if mode == "crlf" else b"\n\n"
        glued = b""
        for delay_s, event, has_text in self._events(body):
            await asyncio.sleep(delay_s)
            data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + end
            if has_text:  # before it is written: the client may have it before this process runs on
                stamp["chunks_s"].append(time.monotonic())
            if mode == "glued":
                glued += data
            else:
                writer.write(data)
            await writer.drain()
        writer.write(glued)
        await writer.drain()

    def _events(self, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any] | bytes, bool]]:
        """(delay before it, content, whether it is a chunk with text)."""
        mode, left, done = body["model"], body["max_tokens"], 0
        prompt_tokens = OVERHEAD + sum(count_tokens(m["content"]) for m in body.get("messages", []))
        stalls = self.script.get("stalls", {})
        yield 0.0, _chunk({"role": "assistant", "content": ""}, 0, None, mode), False
        for index, size in enumerate(cycle(self.script.get("chunk_tokens", [1]))):
            size = min(size, left)
            if not size or mode == "eos":
                break
            left, done = left - size, done + size
            delay_s = self.script.get("gap_s", 0.0) if index else self.script.get("ttft_s", 0.0)
            delay_s += stalls.get(str(index), 0.0)
            has_text = mode != "hidden" or index % 2 == 0
            if has_text:
                yield delay_s, _chunk({"content": " word" * size}, done, None, mode), True
            else:
                yield delay_s, _chunk({"content": ""}, done, None, mode), False
            if mode == "broken":
                return
            if mode == "error_event":
                yield 0.0, {"error": {"message": "scripted failure", "code": "x"}}, False
                yield 0.0, b"[DONE]", False
                return
        yield 0.0, _chunk({}, done, "length", mode), False
        if mode != "no_usage":
            details = {"cached_tokens": self.script.get("cached_tokens", 0)}
            usage = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": done,
                "prompt_tokens_details": details,
            }
            if body["stream_options"].get("include_timings") and "timings_ms" in self.script:
                usage["timings_ms"] = self.script["timings_ms"]
            yield 0.0, {"choices": [], "usage": usage}, False
        yield 0.0, b"[DONE]", False


def _chunk(delta: dict[str, str], num_tokens: int, reason: str | None, mode: str) -> dict[str, Any]:
    chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if mode not in ("no_usage", "no_chunk_usage"):
        chunk["usage"] = {"prompt_tokens": 0, "completion_tokens": num_tokens}
    return chunk


async def main() -> None:
    server = await asyncio.start_server(FakeServer(json.loads(sys.argv[1])).serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
