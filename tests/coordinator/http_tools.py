"""An application over a scripted backend, and a client inside the process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from contracts.config import BatonConfig
from coordinator.drain import Drain
from coordinator.http import make_app
from coordinator.ingress import PlainErrors
from engine.text.tokenizer import TextModel
from tests.coordinator.fake_backend import FakeBackend, Script
from tests.engine.text.builders import make_text

MODEL = "bytes"
TEXT = make_text()


def make_config(**sections: dict[str, Any]) -> BatonConfig:
    return BatonConfig.model_validate(sections)


@dataclass
class Service:
    """What a test talks to."""

    client: httpx.AsyncClient
    backend: FakeBackend
    app: FastAPI

    async def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})


@asynccontextmanager
async def service(
    script: Script | None = None,
    *,
    config: BatonConfig | None = None,
    text: TextModel = TEXT,
    peer: str = "127.0.0.1",
    sees_clients: bool = True,
    drain: Drain | None = None,
    **backend: Any,
) -> AsyncIterator[Service]:
    """Leaves only when no request runs any more: a leak is a failed test."""
    fake = FakeBackend(script, **backend)
    app = make_app(config or make_config(), text, fake, sees_clients=sees_clients, drain=drain)
    transport = httpx.ASGITransport(PlainErrors(app), client=(peer, 5000))  # as Serve puts it around
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        yield Service(client, fake, app)
    assert not fake.running


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, after checking its framing."""
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    blocks = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    assert blocks.count("data: [DONE]") == 1
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(part["delta"].get("content", "") if "delta" in part else part["text"] for part in parts)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The OpenAI error, after checking its form."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    error: dict[str, Any] = body["error"]
    return error
