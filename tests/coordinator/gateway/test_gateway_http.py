"""The gateway around the application: who may ask, how much, for how long, and what is told of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from contracts.request import Finished, GenerateRequest
from coordinator.gateway.guards import Edit, GuardedRequest, Refusal, Window
from coordinator.gateway.usage import totals
from tests.coordinator.fake_backend import Step, reply
from tests.coordinator.gateway.gateway_tools import bearer, gateway_service, write_keys
from tests.coordinator.http_tools import MODEL, error_of, events, joined, make_config, service

HERE = __name__
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
URL = "/v1/chat/completions"


async def test_without_a_key_file_nobody_needs_a_key_and_nothing_is_written(tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path / "state") as s:
        response = await s.chat()
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("x-ratelimit")]
        assert s.backend.requests[0].salt == ""
    assert not (tmp_path / "state").exists()


async def test_with_a_key_file_every_route_but_the_open_ones_needs_one(tmp_path: Path) -> None:
    [key] = write_keys(tmp_path / "keys.json", "acme")
    async with gateway_service(folder=tmp_path, keys_file=str(tmp_path / "keys.json")) as s:
        for method, path in (
            ("POST", URL), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", f"/v1/models/{MODEL}"),
            ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/v1/files"), ("POST", "/v1/batches"),
        ):  # fmt: skip
            for headers in ({}, bearer("sk-wrong"), {"Authorization": key}):
                response = await s.client.request(method, path, headers=headers)
                assert response.status_code == 401
                error = error_of(response)
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert response.headers["x-request-id"]
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await s.client.get(path)).status_code == 200
        assert (await s.client.get("/debug/kv")).status_code == 200
        assert not s.backend.requests
        assert (await s.client.post(URL, json=CHAT, headers=bearer(key))).status_code == 200
        assert (await s.client.get("/v1/models", headers=bearer(key))).status_code == 200


async def test_a_key_does_only_what_its_scopes_say(tmp_path: Path) -> None:
    [key] = write_keys(tmp_path / "keys.json", "acme", scopes=("inference",))
    async with gateway_service(folder=tmp_path, keys_file=str(tmp_path / "keys.json")) as s:
        response = await s.client.get("/v1/batches", headers=bearer(key))
        assert (response.status_code, error_of(response)["code"]) == (403, "permission_denied")
        assert (await s.client.post(URL, json=CHAT, headers=bearer(key))).status_code == 200


async def test_no_field_of_a_body_reaches_another_tenants_cache(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", "acme", "globex")
    async with gateway_service(folder=tmp_path, keys_file=str(tmp_path / "keys.json")) as s:
        salts = []
        for key in keys:
            for salt in ("", "acme", "globex"):
                body = {**CHAT, "cache_salt": salt}
                assert (await s.client.post(URL, json=body, headers=bearer(key))).status_code == 200
                salts.append(s.backend.requests[-1].salt)
        assert salts == ["acme/", "acme/acme", "acme/globex", "globex/", "globex/acme", "globex/globex"]
        for salt in ("globex/", "/", "x/acme"):
            body = {**CHAT, "cache_salt": salt}
            assert (await s.client.post(URL, json=body, headers=bearer(keys[0]))).status_code == 400


async def test_limits_are_told_and_kept(tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path, requests_per_minute=2, tokens_per_minute=100) as s:
        first = await s.complete("abc", max_tokens=2)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        # Exact numbers are test_limits' matter: here they grow with the real time.
        assert 95 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 100
        second = await s.complete("abc", max_tokens=2, stream=True)
        assert second.headers["x-ratelimit-limit-tokens"] == "100"
        refused = await s.complete("abc")
        assert refused.status_code == 429
        assert (error_of(refused)["type"], error_of(refused)["code"]) == (
            "rate_limit_error",
            "rate_limit_exceeded",
        )
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(s.backend.requests) == 2
        assert (await s.client.get("/v1/models")).status_code == 200


async def test_a_prefix_in_front_of_the_routes_is_no_way_around_the_gateway(tmp_path: Path) -> None:
    [key] = write_keys(tmp_path / "keys.json", "acme")
    settings: dict[str, Any] = {"keys_file": str(tmp_path / "keys.json"), "requests_per_minute": 1}
    async with gateway_service(folder=tmp_path, root_path="/baton", **settings) as s:
        assert (await s.client.get("/baton/health")).status_code == 200
        assert (await s.client.post(f"/baton{URL}", json=CHAT)).status_code == 401
        statuses = [
            (await s.client.post(f"/baton{URL}", json=CHAT, headers=bearer(key))).status_code
            for _ in range(2)
        ]
        assert statuses == [200, 429]


async def test_tokens_are_refused_before_any_work_and_once_for_all_choices(tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path, tokens_per_minute=100) as s:
        too_long = await s.complete("x" * 101, max_tokens=1)
        assert (too_long.status_code, error_of(too_long)["type"]) == (400, "invalid_request_error")
        response = await s.complete("x" * 60, max_tokens=2, n=3, temperature=1)
        assert response.json()["usage"]["total_tokens"] == 66
        assert 34 <= int(response.headers["x-ratelimit-remaining-tokens"]) <= 100
        assert len(s.backend.requests) == 3
        refused = await s.complete("x" * 60, max_tokens=2)
        assert refused.status_code == 429
        assert len(s.backend.requests) == 3


async def test_one_request_too_many_at_once_is_refused_until_another_ends(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with gateway_service(lambda _: [72, gate, 257], folder=tmp_path, max_concurrent=1) as s:
        first = asyncio.create_task(s.chat())
        await s.backend.started.wait()
        assert (await s.chat()).status_code == 429
        gate.set()
        assert (await first).status_code == 200
        assert (await s.chat()).status_code == 200


async def test_an_output_is_no_longer_than_its_tenant_may_have(tmp_path: Path) -> None:
    async with gateway_service(reply("Hello!"), folder=tmp_path, max_output_tokens=3) as s:
        answer = (await s.chat()).json()
        assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == (
            "Hel",
            "length",
        )
        for name in ("max_tokens", "max_completion_tokens"):
            response = await s.chat(**{name: 4})
            assert (response.status_code, error_of(response)["param"]) == (400, name)
        assert (await s.chat(max_tokens=2)).json()["choices"][0]["message"]["content"] == "He"


async def test_a_deadline_is_504_before_the_first_token_and_an_event_after(tmp_path: Path) -> None:
    never = asyncio.Event()
    for start, status, timeout_s in (([], 504, 0.05), ([72], 200, 2.0)):
        headers = {"x-request-timeout": str(timeout_s)}
        script: list[Step] = [*start, never]
        async with gateway_service(lambda _, script=script: script, folder=tmp_path) as s:
            response = await s.client.post(URL, json={**CHAT, "stream": True}, headers=headers)
            assert response.status_code == status
            if status == 504:
                assert (error_of(response)["code"], response.headers["x-should-retry"]) == (
                    "timeout",
                    "false",
                )
            else:
                chunks = events(response)
                assert joined(chunks[:-1]) == "H"
                assert chunks[-1]["error"]["code"] == "timeout"
    async with gateway_service(lambda _: [never], folder=tmp_path, max_request_timeout_s=0.05) as s:
        assert (await s.client.post(URL, json=CHAT, headers={"x-request-timeout": "60"})).status_code == 504


async def test_a_deadline_is_the_backends_to_tell_of(tmp_path: Path) -> None:
    """Who is cut off looks like a client who left; placement would remember it so."""
    never = asyncio.Event()
    async with gateway_service(lambda _: [never], folder=tmp_path) as s:
        response = await s.client.post(URL, json=CHAT, headers={"x-request-timeout": "1"})
        assert (response.status_code, error_of(response)["message"]) == (504, "late")


@pytest.mark.parametrize(
    "value", ["0", "-1", "nan", "inf", "1e9", "soon", "", "1_000", "+5", "0x5", "5.", ".5"]
)
async def test_a_deadline_that_is_none_is_refused(value: str, tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path) as s:
        response = await s.client.post(URL, json=CHAT, headers={"x-request-timeout": value})
        assert response.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_key_gives_the_same_answer_once_computed(stream: bool, tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path) as s:
        headers = {"Idempotency-Key": "order-1"}
        body = {**CHAT, "stream": stream, "temperature": 1}
        first = await s.client.post(URL, json=body, headers=headers)
        again = await s.client.post(URL, json=dict(reversed(body.items())), headers=headers)
        assert first.status_code == again.status_code == 200
        assert again.content == first.content
        assert again.headers["content-type"] == first.headers["content-type"]
        assert again.headers["x-baton-replay"] == "idempotency"
        assert again.headers["x-request-id"] != first.headers["x-request-id"]
        assert len(s.backend.requests) == 1
        other = await s.client.post(URL, json={**body, "temperature": 0.5}, headers=headers)
        assert other.status_code == 400
        assert (
            await s.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        ).status_code == 400
        bad = await s.client.post(URL, json=body, headers={"Idempotency-Key": "a b"})
        assert bad.status_code == 400


async def test_the_same_key_while_the_first_still_runs_is_a_conflict(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with gateway_service(lambda _: [72, gate, 257], folder=tmp_path) as s:
        headers = {"Idempotency-Key": "k"}
        first = asyncio.create_task(s.client.post(URL, json=CHAT, headers=headers))
        await s.backend.started.wait()
        second = await s.client.post(URL, json=CHAT, headers=headers)
        assert (second.status_code, error_of(second)["code"]) == (409, "conflict")
        gate.set()
        assert (await first).status_code == 200
        assert (await s.client.post(URL, json=CHAT, headers=headers)).content == (await first).content


async def test_what_failed_runs_again_under_the_same_key(tmp_path: Path) -> None:
    steps: list[list[Step]] = [[ZeroDivisionError()], [72, 257]]
    async with gateway_service(lambda _: steps.pop(0), folder=tmp_path) as s:
        headers = {"Idempotency-Key": "k"}
        assert (await s.client.post(URL, json=CHAT, headers=headers)).status_code == 500
        assert (await s.client.post(URL, json=CHAT, headers=headers)).status_code == 200


async def test_the_cache_answers_what_is_deterministic_and_only_its_own_tenant(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", "acme", "globex")
    settings: dict[str, Any] = {"keys_file": str(tmp_path / "keys.json"), "response_cache": True}
    async with gateway_service(folder=tmp_path, **settings) as s:

        async def replayed(key: str, **fields: Any) -> str | None:
            response = await s.client.post(URL, json={**CHAT, **fields}, headers=bearer(key))
            assert response.status_code == 200
            return response.headers.get("x-baton-replay")

        assert [await replayed(keys[0], temperature=0) for _ in range(2)] == [None, "cache"]
        assert [await replayed(keys[0], temperature=1) for _ in range(2)] == [None, None]
        assert [await replayed(keys[0], temperature=1, seed=3) for _ in range(2)] == [None, "cache"]
        assert [await replayed(keys[1], temperature=0) for _ in range(2)] == [None, "cache"]
        assert [await replayed(keys[0], temperature=0, max_tokens=1) for _ in range(2)] == [None, "cache"]


async def test_aliases_are_listed_and_served(tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path, aliases={"gpt-4o": MODEL, "old": "gone"}) as s:
        listed = (await s.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == [MODEL, "gpt-4o"]
        assert (await s.client.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        assert (await s.chat(model="gpt-4o")).json()["model"] == MODEL
        assert (await s.chat(model="old")).status_code == 404


async def test_cors_is_off_and_on_only_for_listed_origins(tmp_path: Path) -> None:
    origin = "https://chat.example.com"
    ask = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    [key] = write_keys(tmp_path / "keys.json", "acme")
    async with gateway_service(folder=tmp_path) as s:
        assert "access-control-allow-origin" not in (await s.client.options(URL, headers=ask)).headers
    settings: dict[str, Any] = {"cors_origins": [origin], "keys_file": str(tmp_path / "keys.json")}
    async with gateway_service(folder=tmp_path, **settings) as s:
        preflight = await s.client.options(URL, headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        response = await s.client.post(URL, json=CHAT, headers={"Origin": origin, **bearer(key)})
        assert response.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        refused = await s.client.post(URL, json=CHAT, headers={"Origin": origin})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
        other = await s.client.post(URL, json=CHAT, headers={**bearer(key), "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_the_ledger_has_the_cache_hits_of_each_prompt_once(tmp_path: Path) -> None:
    """As the client is told: of a prompt's choices one reads it, and the others may find what it has read."""
    hits = iter([2, 1, 2, 0, 4, 4])
    async with gateway_service(
        lambda _: [*b"Hi", Finished("length", next(hits))],
        folder=tmp_path,
        usage_url=f"sqlite:///{tmp_path}/u.db",
    ) as s:
        body = {"model": MODEL, "prompt": ["alpha", "beta", "gamma"], "n": 2, "temperature": 1}
        usage = (await s.client.post("/v1/completions", json=body)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
        assert s.gateway.ledger is not None
        [told] = s.gateway.ledger._sums.values()
        assert (told.prompt_tokens, told.cached_tokens) == (usage["prompt_tokens"], 5)


async def test_the_ledger_has_every_token_by_tenant_and_endpoint(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", "acme", "globex")
    settings: dict[str, Any] = {"keys_file": str(tmp_path / "keys.json"), "response_cache": True}
    async with gateway_service(reply("Hello!"), folder=tmp_path, **settings) as s:
        usage = []
        for key, fields in (
            (keys[0], {"n": 2, "temperature": 1}),
            (keys[0], {"n": 1, "temperature": 1}),
            (keys[1], {}),
        ):
            body = {"model": MODEL, "prompt": ["ab", "c"], "max_tokens": 3, **fields}
            response = await s.client.post("/v1/completions", json=body, headers=bearer(key))
            usage.append(response.json()["usage"])
        for _ in range(2):
            await s.client.post(URL, json={**CHAT, "temperature": 0}, headers=bearer(keys[1]))
        await s.client.post(URL, json={}, headers=bearer(keys[1]))
        assert s.gateway.ledger is not None
        await s.gateway.ledger.flush()
        found = {
            (row["tenant"], row["endpoint"]): (row["requests"], row["failed"], row["replayed"], row["prompt_tokens"],
                                               row["output_tokens"])
            for row in totals(s.gateway.ledger._engine, "all")
        }  # fmt: skip
    acme = [(u["prompt_tokens"], u["completion_tokens"]) for u in usage[:2]]
    assert found[("acme", "/v1/completions")] == (2, 0, 0, sum(p for p, _ in acme), sum(c for _, c in acme))
    assert found[("globex", "/v1/completions")] == (1, 0, 0, 3, 6)
    chat = found[("globex", URL)]
    assert chat[:3] == (3, 1, 1)
    assert chat[4] == 7


async def test_tokens_of_a_client_that_left_are_counted(tmp_path: Path) -> None:
    never, seen = asyncio.Event(), asyncio.Event()

    def script(_: GenerateRequest) -> list[Step]:
        seen.set()
        return [72, 105, never]

    async with gateway_service(script, folder=tmp_path, usage_url=f"sqlite:///{tmp_path}/u.db") as s:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await s.chat()
        assert s.gateway.ledger is not None
        [(_, usage)] = s.gateway.ledger._sums.items()
        assert (usage.requests, usage.failed, usage.output_tokens) == (1, 1, 2)


async def mask(window: Window) -> list[Edit]:
    start = window.text.find("ann@example.org")
    return [Edit(start, start + 15, "***")] if start >= 0 else []


async def no_secrets(window: Window) -> list[Edit]:
    if "secret" in window.text:
        raise Refusal("no secrets")
    return []


async def shout(request: GuardedRequest) -> dict[str, Any] | None:
    if "refuse" in str(request.body.get("prompt")):
        raise Refusal(f"{request.tenant} may not ask this on {request.endpoint}")
    return {**request.body, "prompt": str(request.body["prompt"]).upper()}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_output_guards_see_what_no_single_token_holds(
    stream: bool, endpoint: str, tmp_path: Path
) -> None:
    script = reply("Write to ann@example.org, or not: é😀!")
    settings: dict[str, Any] = {"output_guards": [f"{HERE}:mask"], "guard_window_chars": 16}
    async with gateway_service(script, folder=tmp_path, **settings) as s:
        response = await getattr(s, endpoint)(stream=stream, n=2, temperature=1, max_tokens=100)
        expected = "Write to ***, or not: é😀!"
        if stream:
            chunks = events(response)
            assert [joined(chunks, i) for i in (0, 1)] == [expected, expected]
            for index in (0, 1):
                reasons = [c["finish_reason"] for k in chunks for c in k["choices"] if c["index"] == index]
                assert reasons[-1] == "stop"
                assert not any(reasons[:-1])
        else:
            choices = response.json()["choices"]
            texts = [c["message"]["content"] if endpoint == "chat" else c["text"] for c in choices]
            assert texts == [expected, expected]
            assert int(response.headers["content-length"]) == len(response.content)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_output_guard_ends_an_answer_with_an_error(stream: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_guards": [f"{HERE}:no_secrets"], "guard_window_chars": 8}
    never = asyncio.Event()
    script = (lambda _: [*b"long before: a secret", never]) if stream else reply("a secret")
    async with gateway_service(script, folder=tmp_path, **settings) as s:
        response = await s.chat(stream=stream)
        if stream:
            chunks = events(response)
            assert chunks[-1]["error"]["code"] == "guardrail"
            assert joined(chunks[:-1]) == "long before"[: len(joined(chunks[:-1]))]
        else:
            assert (response.status_code, error_of(response)["code"]) == (400, "guardrail")
        assert 'baton_guard_refusals_total{code="guardrail"} 1.0' in (await s.client.get("/metrics")).text


async def test_what_output_guards_would_not_see_is_refused(tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path, output_guards=[f"{HERE}:mask"]) as s:
        for fields in ({"logprobs": True}, {"tools": [{"type": "function"}]}, {"prompt_logprobs": 0}):
            response = await s.chat(**fields)
            assert (response.status_code, error_of(response)["code"]) == (400, "unsupported")
        response = await s.complete(logprobs=0)  # lists every token
        assert (response.status_code, error_of(response)["param"]) == (400, "logprobs")
        response = await s.client.post("/v1/responses", json={"input": "hi"})
        assert (response.status_code, error_of(response)["code"]) == (400, "unsupported")


async def test_input_guards_change_or_refuse_a_request(tmp_path: Path) -> None:
    async with gateway_service(folder=tmp_path, input_guards=[f"{HERE}:shout"]) as s:
        assert (await s.complete("abc", echo=True)).json()["choices"][0]["text"] == "ABCHello!"
        response = await s.complete("refuse me")
        assert response.status_code == 400
        assert error_of(response)["message"] == "default may not ask this on /v1/completions"


async def test_a_body_that_the_gateway_reads_is_refused_as_without_it(tmp_path: Path) -> None:
    settings = make_config(gateway={"max_output_tokens": 100}, server={"max_body_bytes": 1024})
    async with service(config=settings) as s:
        for content, status in ((b"{", 400), (b"[]", 400), (b'{"a": NaN}', 400), (b" " * 2000, 413)):
            headers = {"content-type": "application/json"}
            response = await s.client.post(URL, content=content, headers=headers)
            assert response.status_code == status
            error_of(response)


async def test_routes_that_clients_make_up_are_no_lines_of_the_ledger(tmp_path: Path) -> None:
    async with gateway_service(
        folder=tmp_path, usage_url=f"sqlite:///{tmp_path}/usage.db", requests_per_minute=2
    ) as s:
        for name in range(5):
            response = await s.client.post(f"/v1/made-up-{name}", json={})
            assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
        assert (await s.client.post(URL, json=CHAT)).status_code == 200
        assert s.gateway.ledger is not None
        assert [key.endpoint for key in s.gateway.ledger._sums] == [URL]
