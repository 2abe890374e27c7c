"""Hostile requests to the whole application with every part of the gateway on: no 5xx, no hang, and well afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.coordinator.fake_backend import reply
from tests.coordinator.gateway.gateway_tools import GatewayService, gateway_service
from tests.coordinator.gateway.openapi import document
from tests.coordinator.http_tools import error_of

HANG_S = 20.0
EVERYTHING: dict[str, Any] = {
    "max_output_tokens": 64,
    "requests_per_minute": 1_000_000,
    "tokens_per_minute": 100_000_000,
    "max_concurrent": 4,
    "response_cache": True,
    "cors_origins": ["https://a.example"],
    "input_guards": ["examples.mask_emails:mask_prompt"],
    "output_guards": ["examples.mask_emails:mask_answer"],
    "aliases": {"b": "bytes"},
    "upstreams": {"another-server": {"url": "http://127.0.0.1:1"}},
    "fallbacks": {"bytes": ["another-server"]},
    "max_file_bytes": 4096,
}
# Each example has an application of its own; the limit is on their number.
FUZZ = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def cases() -> st.SearchStrategy[Any]:
    """Requests of our own document, and such as break it."""
    from schemathesis import GenerationMode, openapi  # every process that collects tests would wait for it

    operations = openapi.from_dict(document()).get_all_operations()
    return st.one_of(
        operation.ok().as_strategy(generation_mode=mode)
        for operation in operations
        for mode in GenerationMode
    )


@asynccontextmanager
async def guarded() -> AsyncIterator[GatewayService]:
    with TemporaryDirectory() as folder:
        async with gateway_service(reply("ok"), folder=Path(folder) / "state", **EVERYTHING) as s:
            yield s


async def check(s: GatewayService, request: httpx.Request) -> None:
    async with asyncio.timeout(HANG_S):
        response = await s.client.send(request)
    # 504 is what a client with a deadline of its own has asked for.
    is_late = response.status_code == 504 and "x-request-timeout" in request.headers
    assert response.status_code < 500 or is_late, response.text
    assert response.headers["x-request-id"]
    if response.status_code >= 400:
        error_of(response)
    assert (await s.chat()).status_code == 200


@FUZZ
@given(st.deferred(cases))
async def test_no_request_of_the_document_makes_a_5xx(case: Any) -> None:
    prepared = requests.Request(**case.as_transport_kwargs(base_url="http://baton")).prepare()
    headers = [(name, value) for name, value in prepared.headers.items() if name.lower() != "cookie"]
    async with guarded() as s:
        raw = [(_bytes(name), _bytes(value)) for name, value in headers]
        await check(
            s,
            httpx.Request(
                str(prepared.method), str(prepared.url), headers=raw, content=_bytes(prepared.body)
            ),
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    "model", "messages", "prompt", "temperature", "seed", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "stream", "stream_options", "n", "logprobs", "tools", "cache_salt", "stop_token_ids", "logit_bias", "echo",
)  # fmt: skip
GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 2}


@FUZZ
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans())
async def test_no_field_of_a_body_makes_a_5xx(fields: dict[str, Any], is_chat: bool) -> None:
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    async with guarded() as s:
        body = json.dumps(GOOD | fields)
        await check(s, s.client.build_request("POST", path, content=body, headers=_kind()))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/batches"])
@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"temperature": NaN}', b'{"temperature": 1e999}', b'{"prompt": "\\ud800", "seed": 1}',
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}', b'{"prompt": [258], "temperature": 0}',
        b'{"prompt": [-1]}', b'{"prompt": [1e400]}', b'{"prompt": "' + b"x" * 10_000_000 + b'"}',
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b', "temperature": 0}',
        b'{"input_file_id": "\\u0000", "endpoint": {}, "completion_window": []}',
    ],
)  # fmt: skip
async def test_no_bytes_make_a_5xx(path: str, raw: bytes) -> None:
    async with guarded() as s:
        await check(s, s.client.build_request("POST", path, content=raw, headers=_kind()))


@settings(FUZZ, max_examples=25)
@given(st.lists(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()), max_size=6))
async def test_no_input_file_keeps_a_batch_from_ending(lines: list[bytes]) -> None:
    async with guarded() as s:
        sent = {"file": ("in.jsonl", b"\n".join(lines))}
        file = (await s.client.post("/v1/files", files=sent, data={"purpose": "batch"})).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await s.client.post("/v1/batches", json=body)).json()
        async with asyncio.timeout(HANG_S):
            while batch["status"] not in ("failed", "completed"):
                batch = (await s.client.get(f"/v1/batches/{batch['id']}")).json()


def _kind() -> dict[str, str]:
    return {"content-type": "application/json"}


def _bytes(value: str | bytes | None) -> bytes:
    return value.encode("latin-1") if isinstance(value, str) else value or b""
