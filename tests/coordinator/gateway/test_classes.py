"""Class and promises of a request, from its header, its body and its key to the backend."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts.service import Service
from coordinator.gateway.gate import Gate
from tests.coordinator.gateway.gateway_tools import bearer, gateway_service, write_keys
from tests.coordinator.gateway.test_batches import ended, jsonl, line, start
from tests.coordinator.http_tools import MODEL, error_of, events, make_config, service
from tests.coordinator.test_http_clients import server

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SLO: dict[str, Any] = {"ttft_ms": 500, "itl_ms": 50, "models": {"calm": {"ttft_ms": 900}}}


async def test_every_endpoint_tells_the_backend_what_was_promised() -> None:
    config = make_config(slo=SLO, gateway={"aliases": {"calm": MODEL}})
    async with service(config=config) as s:
        headers = {"x-baton-class": "batch"}
        await s.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        await s.client.post("/v1/completions", json={"prompt": "hi"}, headers={"x-baton-ttft-ms": "700"})
        await s.client.post("/v1/responses", json={"input": "hi", "service_tier": "flex"})
        await s.client.post("/v1/completions", json={"prompt": "hi", "model": "calm"})
        await s.client.post("/v1/completions", json={"prompt": "hi", "n": 2, "service_tier": "auto"})
    tenant = "default"
    assert s.backend.services == [
        Service("batch", tenant=tenant),
        Service("interactive", 0.7, 0.05, tenant),
        Service("best_effort", tenant=tenant),
        Service("interactive", 0.9, 0.05, tenant),
        *[Service("interactive", 0.5, 0.05, tenant)] * 2,
    ]


@pytest.mark.parametrize(
    ("headers", "body", "message"),
    [
        ({"x-baton-class": "gold"}, {}, "x-baton-class: expected one of"),
        ({"x-baton-itl-ms": "1"}, {}, "x-baton-itl-ms: expected milliseconds, at least 50"),
        (
            {},
            {"service_tier": "scale"},
            "service_tier: input should be 'auto', 'default', 'flex' or 'priority'",
        ),
        ({}, {"service_tier": 1}, "service_tier: "),
        ({}, {"priority": 3}, "priority: not supported"),
    ],
)
async def test_what_is_unknown_is_refused_by_name_before_any_work(
    headers: dict[str, str], body: dict[str, Any], message: str
) -> None:
    async with service(config=make_config(slo=SLO)) as s:
        response = await s.client.post("/v1/chat/completions", json=CHAT | body, headers=headers)
        assert response.status_code == 400
        assert error_of(response)["message"].startswith(message)
        assert not s.backend.requests


BAD_HEADERS = [
    ({"x-baton-class": "gold"}, 400),
    ({"x-baton-class": "best_effort"}, 403),
    ({"x-baton-ttft-ms": "soon"}, 400),
    ({"x-baton-ttft-ms": "1"}, 400),
    ({"x-baton-itl-ms": "nan"}, 400),
    ({"x-request-timeout": "-1"}, 400),
    ({"content-type": "text/plain"}, 400),
    ({"content-encoding": "gzip"}, 400),
]


@pytest.mark.parametrize(("headers", "status"), BAD_HEADERS)
async def test_a_kept_answer_is_no_way_around_a_header_that_is_refused(
    headers: dict[str, str], status: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"response_cache": True, "classes": ["interactive", "batch"]}
    body = CHAT | {"temperature": 0}
    async with gateway_service(folder=tmp_path, slo=SLO, **settings) as s:

        async def ask(**headers: str) -> httpx.Response:
            return await s.client.post("/v1/chat/completions", json=body, headers=headers)

        for key in ({}, {"idempotency-key": "k"}):
            assert [(await ask(**key)).status_code for _ in range(2)] == [200, 200]
            assert (await ask(**key)).headers["x-baton-replay"] == ("idempotency" if key else "cache")
            refused = await ask(**key, **headers)
            # A key is for one request, and this is another one.
            assert refused.status_code in ((400, status) if key else (status,)), refused.text
            assert error_of(refused)["type"] in ("invalid_request_error", "permission_error")


async def test_a_kept_answer_tells_the_tier_of_its_own_request(tmp_path: Path) -> None:
    body = CHAT | {"temperature": 0, "service_tier": "auto"}
    async with gateway_service(folder=tmp_path, slo=SLO, response_cache=True) as s:
        for _ in range(2):
            for service_class, tier in (("interactive", "default"), ("batch", "flex")):
                headers = {"x-baton-class": service_class}
                answer = await s.client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.json()["service_tier"] == tier
        assert len(s.backend.requests) == 2


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "a"}}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_promises_are_settled_before_a_prompt_is_rendered_or_a_grammar_compiled(
    path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = []
    monkeypatch.setattr("coordinator.http.chat_prompt", lambda *_: worked.append("chat"))
    monkeypatch.setattr("coordinator.http.completion_prompts", lambda *_: worked.append("completion"))
    async with service(config=make_config(slo=SLO)) as s:
        response = await s.client.post(path, json=more, headers={"x-baton-itl-ms": "1"})
        assert (response.status_code, worked) == (400, [])
        assert error_of(response)["message"].startswith("x-baton-itl-ms")


@pytest.mark.parametrize(
    ("asked", "headers", "told"),
    [
        ("auto", {}, "default"),
        ("default", {}, "default"),
        ("priority", {}, "priority"),
        ("flex", {}, "flex"),
        ("flex", {"x-baton-class": "interactive"}, "default"),
        ("priority", {"x-baton-class": "batch"}, "flex"),
    ],
)
async def test_who_asks_for_a_tier_is_told_which_one_it_got(
    asked: str, headers: dict[str, str], told: str
) -> None:
    async with service() as s:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"input": "hi"}),
        ):
            plain = await s.client.post(path, json=body, headers=headers)
            assert "service_tier" not in plain.json()
            whole = await s.client.post(path, json=body | {"service_tier": asked}, headers=headers)
            assert whole.json()["service_tier"] == told
            if path != "/v1/responses":
                body = body | {"service_tier": asked, "stream": True}
                chunks = events(await s.client.post(path, json=body, headers=headers))
                assert {chunk["service_tier"] for chunk in chunks} == {told}


async def test_a_key_has_the_classes_of_its_tenant_and_the_first_is_its_default(tmp_path: Path) -> None:
    acme, globex = write_keys(tmp_path / "keys.json", "acme", "globex")
    tenants = {"globex": {"classes": ["best_effort", "interactive"]}}
    async with gateway_service(
        folder=tmp_path, keys_file=str(tmp_path / "keys.json"), tenants=tenants, classes=["interactive"]
    ) as s:
        for key, headers, status in (
            (acme, {}, 200),
            (acme, {"x-baton-class": "batch"}, 403),
            (globex, {}, 200),
            (globex, {"x-baton-class": "interactive"}, 200),
            (globex, {"x-baton-class": "batch"}, 403),
        ):
            response = await s.client.post("/v1/chat/completions", json=CHAT, headers=bearer(key) | headers)
            assert response.status_code == status, response.text
        assert s.backend.services == [
            Service("interactive", tenant="acme"),
            Service("best_effort", tenant="globex"),
            Service("interactive", tenant="globex"),
        ]


async def test_a_class_holds_for_the_models_of_other_servers_and_is_told_there(tmp_path: Path) -> None:
    async with server(config=make_config(slo=SLO)) as (url, there):
        other = {"url": url.removesuffix("/v1"), "model": MODEL}
        async with gateway_service(
            folder=tmp_path, upstreams={"x": other}, classes=["batch", "interactive"]
        ) as s:
            for headers, more, status in (
                ({}, {}, 200),
                ({"x-baton-class": "interactive", "x-baton-ttft-ms": "800"}, {}, 200),
                ({}, {"service_tier": "priority"}, 200),
                ({"x-baton-class": "interactive", "x-baton-ttft-ms": "1"}, {}, 400),
                ({"x-baton-class": "best_effort"}, {}, 403),
                ({"x-baton-class": "gold"}, {}, 400),
                ({}, {"service_tier": "flex"}, 403),
                ({"x-baton-class": "interactive"}, {"service_tier": "scale"}, 400),
            ):
                body = CHAT | {"model": "x"} | more
                response = await s.client.post("/v1/chat/completions", json=body, headers=headers)
                assert response.status_code == status, response.text
            batch = await ended(s, await start(s, jsonl(line("a", model="x"))))
            assert batch["request_counts"]["completed"] == 1
        assert [(each.service_class, each.ttft_s) for each in there.services if each] == [
            ("batch", None),
            ("interactive", 0.8),
            ("interactive", 0.5),
            ("batch", None),
        ]


async def test_the_lines_of_a_batch_are_of_the_batch_class_whoever_sent_it(tmp_path: Path) -> None:
    [key] = write_keys(tmp_path / "keys.json", "acme")
    async with gateway_service(
        folder=tmp_path, keys_file=str(tmp_path / "keys.json"), classes=["interactive"]
    ) as s:
        batch_id = await start(s, jsonl(line("a"), line("b", service_tier="priority")), bearer(key))
        batch = await ended(s, batch_id, bearer(key))
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert s.backend.services == [Service("batch", tenant="acme")] * 2


async def test_the_counts_of_line_and_promises_are_shown() -> None:
    async with service() as s:
        metrics = s.app.state.gateway.metrics
        metrics.waiting("batch", +1)
        metrics.refused("interactive", "too_late")
        metrics.promised("interactive", "both")
        shown = (await s.client.get("/metrics")).text
        assert 'baton_queue_requests{class="batch"} 1.0' in shown
        assert 'baton_refusals_total{class="interactive",reason="too_late"} 1.0' in shown
        assert 'baton_promises_total{class="interactive",met="both"} 1.0' in shown
        assert "service_tier" in json.dumps((await s.client.get("/openapi.json")).json())


async def test_with_promises_the_line_says_when_batches_give_way_and_the_gate_only_counts() -> None:
    for gives_way, num_lines in ((True, 1), (False, 4)):
        gate, go = Gate(4, gives_way), asyncio.Event()

        async def run(gate: Gate = gate, go: asyncio.Event = go) -> None:
            async with gate.line():
                await go.wait()

        with gate.caller():
            tasks = [asyncio.create_task(run()) for _ in range(6)]
            for _ in range(20):
                await asyncio.sleep(0)
            assert gate.num_lines == num_lines
            go.set()
        await asyncio.gather(*tasks)
