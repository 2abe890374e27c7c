"""Around the answers: errors, headers, ids, health, models, metrics, the block audit."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from contracts.errors import (
    BatonError,
    ConfigError,
    DeadlineError,
    EngineError,
    Fault,
    OverloadedError,
    WorkerLostError,
)
from contracts.metrics import METRICS
from coordinator.errors_http import error_headers
from coordinator.http import off_loop
from coordinator.metrics import Metrics
from tests.coordinator.fake_backend import reply
from tests.coordinator.http_tools import MODEL, TEXT, error_of, make_config, service


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)]
)
async def test_unknown_routes_and_methods_answer_in_openai_form(method: str, path: str, status: int) -> None:
    async with service() as s:
        response = await s.client.request(method, path)
        assert response.status_code == status
        assert error_of(response)["type"] == "invalid_request_error"
        assert response.headers["x-request-id"]


async def test_an_unknown_model_is_404_and_a_missing_name_is_the_one_model() -> None:
    async with service() as s:
        messages = [{"role": "user", "content": "hi"}]
        for path, asked in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": messages}),
        ):
            response = await s.client.post(path, json={"model": "nope", **asked})
            assert response.status_code == 404
            assert (error_of(response)["param"], error_of(response)["code"]) == ("model", "model_not_found")
            assert (await s.client.post(path, json=asked)).status_code == 200


async def test_a_listed_model_can_be_fetched_with_slashes_too() -> None:
    async with service(config=make_config(model={"served_name": "org/name"}), max_total_tokens=77) as s:
        listed = (await s.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        card = listed["data"][0]
        assert (card["id"], card["object"], card["max_model_len"]) == ("org/name", "model", 77)
        for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
            assert (await s.client.get(path)).json() == card
        assert (await s.client.get("/v1/models/other")).status_code == 404


async def test_an_adapter_is_listed_with_its_base_and_refused_by_name() -> None:
    adapters = {"support": "/srv/adapters/support"}
    config = make_config(model={"adapters": adapters}, gateway={"aliases": {"help": "support"}})
    async with service(config=config) as s:
        cards = (await s.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
            (MODEL, MODEL, None),
            ("support", "/srv/adapters/support", MODEL),
            ("help", "/srv/adapters/support", MODEL),
        ]
        assert (await s.client.get("/v1/models/support")).json() == cards[1]
        for name in ("support", "help"):
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/responses", {"input": "hi"}),
            ):
                response = await s.client.post(path, json={"model": name, **body})
                error = error_of(response)
                assert (response.status_code, error["code"], error["param"]) == (400, "unsupported", "model")
                assert f"'{name}' is a LoRA adapter of '{MODEL}'" in error["message"]
        assert not s.backend.requests


@pytest.mark.parametrize("taken", [{"aliases": {"a": MODEL}}, {"upstreams": {"a": {"url": "http://x"}}}, {}])
async def test_an_adapter_with_the_name_of_something_else_stops_the_start(taken: dict[str, Any]) -> None:
    config = make_config(model={"adapters": {"a" if taken else MODEL: "/x"}}, gateway=taken)
    with pytest.raises(ConfigError, match=r"model\.adapters: expected a name that nothing else has"):
        async with service(config=config):
            pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "headers"),
    [
        (OverloadedError("queue is full", retry_after_s=2.2), 503, "overloaded", {"retry-after": "3"}),
        (OverloadedError("draining"), 503, "overloaded", {"retry-after": "1"}),
        (OverloadedError("far", retry_after_s=9999), 503, "overloaded", {"retry-after": "120"}),
        (WorkerLostError("decode-0 died"), 503, "worker_lost", {"retry-after": "1"}),
        (DeadlineError("too late"), 504, "timeout", {"x-should-retry": "false"}),
        (EngineError("secret inside"), 500, "internal_error", {}),
        (ZeroDivisionError("secret inside"), 500, "internal_error", {}),
    ],
)
async def test_an_error_before_the_first_token_has_its_status(
    stream: bool, error: Exception, status: int, code: str, headers: dict[str, str]
) -> None:
    async with service(lambda request: [error]) as s:
        response = await s.chat(stream=stream)
        assert response.status_code == status
        assert error_of(response)["code"] == code
        assert "secret" not in response.text
        assert headers.items() <= dict(response.headers).items()


async def test_an_answer_that_is_not_streamed_is_whole_or_an_error() -> None:
    async with service(lambda request: [72, 105, WorkerLostError("decode-0 died")]) as s:
        response = await s.chat()
        assert (response.status_code, error_of(response)["code"]) == (503, "worker_lost")


async def test_one_failed_choice_fails_the_request_and_stops_the_others() -> None:
    forever = asyncio.Event()

    def script(request: Any) -> list[Any]:
        return [OverloadedError("full")] if request.request_id.endswith("-1") else [72, forever]

    async with service(script) as s:
        assert (await s.chat(n=3, temperature=1)).status_code == 503
        assert (await s.chat(n=3, temperature=1, stream=True)).status_code == 503
        assert len(s.backend.ended) == len(s.backend.requests)


async def test_a_backend_without_terminal_event_is_our_fault() -> None:
    async with service() as s:

        async def silent(*_: object) -> None:
            """Neither an end nor a sink that had enough."""

        s.backend.generate = silent  # type: ignore[method-assign, assignment]
        assert (await s.chat()).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_the_edge_keeps_the_deadline_if_the_backend_does_not(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.outputs._DEADLINE_GRACE_S", 0.0)
    async with service(config=make_config(coordinator={"request_timeout_s": 0.02})) as s:

        async def stuck(*_: object) -> None:
            await asyncio.Event().wait()

        s.backend.generate = stuck  # type: ignore[method-assign, assignment]
        response = await s.chat(stream=stream)
        assert (response.status_code, error_of(response)["code"]) == (504, "timeout")


async def test_a_sane_request_id_comes_back_and_others_are_replaced() -> None:
    async with service() as s:
        for stream in (False, True):
            response = await s.client.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "x"}], "stream": stream},
                headers={"X-Request-Id": "conf-123"},
            )
            assert response.headers["x-request-id"] == "conf-123"
        for bad in ("x" * 129, "a b", "é".encode("latin-1").decode("latin-1")):
            found = (await s.client.get("/nope", headers={"X-Request-Id": bad.encode("latin-1")})).headers
            assert re.fullmatch(r"req_[0-9a-f]{24}", found["x-request-id"])
        assert not any("conf-123" in request.request_id for request in s.backend.requests)


async def test_health_is_the_process_and_ready_is_the_service() -> None:
    async with service() as s:
        assert (await s.client.get("/health")).json() == {"status": "ok"}
        ready = await s.client.get("/ready")
        assert (ready.status_code, ready.json()["pools"]["decode"]) == (
            200,
            {"num_workers": 1, "num_ready": 1},
        )
        s.backend.is_ready = False
        ready = await s.client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "no decode worker")
        assert (await s.client.get("/health")).status_code == 200
        assert (await s.client.get("/version")).json()["version"]


async def test_the_audit_has_the_documented_form() -> None:
    async with service() as s:
        workers = (await s.client.get("/debug/kv")).json()["workers"]
        assert workers == [
            {
                "worker_id": "prefill-0",
                "role": "prefill",
                "pid": 42,
                "incarnation": 3,
                "total": 8,
                "free": 6,
                "cached": 1,
                "running": 1,
                "reserved": 0,
                "in_handoff": 0,
                "quarantined": 0,
                "owners": [{"request_id": "r", "state": "running", "num_blocks": 1, "age_s": 0.5}],
            }
        ]


async def test_decisions_are_told_with_the_numbers_of_every_option() -> None:
    async with service() as s:
        [decision] = (await s.client.get("/debug/decisions")).json()["decisions"]
        assert decision.pop("age_s") > 0
        [option] = decision.pop("options")
        assert decision == {
            "request_id": "r.1",
            "class": "interactive",
            "prompt_tokens": 7,
            "ttft_ms": 600.0,
            "itl_ms": None,
            "left_ms": 500.0,
            "slack_ms": None,
            "rule": "predicted",
            "verdict": "placed",
            "route": "remote",
            "prefill_id": "prefill-0",
            "decode_id": "decode-0",
        }
        assert (option["ttft_ms"], option["gap_ms"], option["price_ms"]) == (250.0, 20.0, None)
    async with service(sees_clients=False) as s:
        assert (await s.client.get("/debug/decisions")).status_code == 403


async def test_plans_are_told_with_the_rate_of_every_split() -> None:
    async with service() as s:
        carried_out, idle = (await s.client.get("/debug/decisions")).json()["plans"]
        assert carried_out.pop("age_s") > 0
        assert carried_out == {
            "verdict": "gain",
            "num_times": 1,
            "demand": {
                "requests_per_s": 2.0,
                "prompt_tokens": 100.0,
                "new_tokens": 80.0,
                "output_tokens": 30.0,
                "new_tokens_with_refused": 220.0,
            },
            "reason": "2 readers carry +100.0%",
            "num_prefill": 1,
            "wanted_prefill": 2,
            "wanted_workers": 5,
            "requests_per_s_by_num_prefill": {"1": 1.5, "2": 3.0},
            "flips": [{"worker_id": "decode-0", "role": "prefill", "epoch": 7}],
        }
        assert (idle["verdict"], idle["num_times"], idle["demand"]) == ("no worker is ready", 3, None)
        shown = (await s.client.get("/metrics")).text
        assert 'baton_role{role="mixed",worker_id="prefill-0"} 1.0' in shown


@pytest.mark.parametrize(
    ("peer", "forwarded", "key", "status"),
    [
        ("127.0.0.1", None, None, 200),
        ("::1", None, None, 200),
        ("::ffff:127.0.0.1", None, None, 200),
        ("10.0.0.5", None, None, 403),
        ("127.0.0.1", "10.0.0.5", None, 403),
        ("127.0.0.1", "127.0.0.1, 10.0.0.5", None, 403),
        ("127.0.0.1", "10.0.0.5, 127.0.0.1", None, 200),
        ("127.0.0.1", "nonsense", None, 403),
        ("10.0.0.5", "127.0.0.1", None, 403),
        ("10.0.0.5", None, "secret", 200),
        ("10.0.0.5", None, "wrong", 401),
        ("127.0.0.1", None, "wrong", 401),
    ],
)
async def test_the_audit_answers_on_loopback_or_to_the_admin_key(
    peer: str, forwarded: str | None, key: str | None, status: int
) -> None:
    headers = {"x-forwarded-for": forwarded} if forwarded else {}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    async with service(config=make_config(server={"admin_key": "secret"}), peer=peer) as s:
        response = await s.client.get("/debug/kv", headers=headers)
        assert response.status_code == status
        if status != 200:
            error_of(response)


async def test_the_paths_between_workers_are_shown_to_the_same_callers() -> None:
    async with service() as s:
        (worker,) = (await s.client.get("/debug/peers")).json()["workers"]
        assert (worker["worker_id"], worker["role"], worker["is_ready"]) == ("prefill-0", "prefill", True)
        assert worker["slots"] == {"free": 3, "quarantined": 1}
        assert worker["peers"] == [
            {
                "worker_id": "decode-0",
                "is_ready": True,
                "transport": "tcp",
                "gigabytes_per_s": 1.5,
                "detail": "",
                "is_slow": False,
                "events": [{"age_s": 2.0, "text": "ready over tcp, 1.5 GB/s"}],
                "link": {"latency_s": 0.002, "bytes_per_s": 1.2e9, "error": 0.1, "num_transfers": 7},
            }
        ]
    async with service(peer="10.0.0.5") as s:
        assert (await s.client.get("/debug/peers")).status_code == 403


@pytest.mark.parametrize("forwarded", [None, "127.0.0.1"])
async def test_behind_a_proxy_that_hides_clients_only_the_key_opens_the_audit(forwarded: str | None) -> None:
    headers = {"x-forwarded-for": forwarded} if forwarded else {}
    config = make_config(server={"admin_key": "secret"})
    async with service(config=config, sees_clients=False) as s:
        assert (await s.client.get("/debug/kv", headers=headers)).status_code == 403
        with_key = {**headers, "authorization": "Bearer secret"}
        assert (await s.client.get("/debug/kv", headers=with_key)).status_code == 200


def test_metrics_hear_what_the_flow_tells() -> None:
    metrics = Metrics()
    metrics.queued("batch", 0.3)
    metrics.placed("remote")
    metrics.handed_off(1000, 0.01)
    metrics.continued("worker_lost")
    text = metrics.render().decode()
    for line in (
        'baton_queue_seconds_sum{class="batch"} 0.3',
        'baton_placements_total{route="remote"} 1.0',
        "baton_handoff_bytes_total 1000.0",
        "baton_handoff_exposed_seconds_count 1.0",
        'baton_continuations_total{reason="worker_lost"} 1.0',
    ):
        assert line in text, line


async def test_metrics_tell_what_happened() -> None:
    async with service(reply("Hi"), num_cached=1) as s:
        await s.chat()
        await s.complete(max_tokens=1)
        await s.chat(temperature=9)
        text = (await s.client.get("/metrics")).text
        for line in (
            'baton_requests_total{endpoint="chat",outcome="stop"} 1.0',
            'baton_requests_total{endpoint="completions",outcome="length"} 1.0',
            'baton_errors_total{code="invalid_value",endpoint="chat"} 1.0',
            'baton_http_responses_total{endpoint="chat",status="400"} 1.0',
            'baton_requests_running{endpoint="chat"} 0.0',
            "baton_output_tokens_total 4.0",
            "baton_cached_prompt_tokens_total 2.0",
            'baton_ttft_seconds_count{endpoint="chat"} 1.0',
            'baton_itl_seconds_count{endpoint="chat"} 2.0',
            'baton_worker_blocks{role="prefill",state="free",worker_id="prefill-0"} 6.0',
            'baton_worker_steps_total{role="prefill",worker_id="prefill-0"} 7.0',
            'baton_worker_kv_slots{role="prefill",state="quarantined",worker_id="prefill-0"} 1.0',
            'baton_worker_handoffs_ended_total{direction="out",reason="ok",role="prefill",worker_id="prefill-0"} 4.0',
            'baton_link_bytes_per_second{peer_id="decode-0",transport="tcp",worker_id="prefill-0"} 1.5e+09',
            'baton_link_error_ratio{peer_id="decode-0",worker_id="prefill-0"} 0.1',
            'baton_kv_path{peer_id="decode-0",transport="tcp",worker_id="prefill-0"} 1.0',
            'baton_kv_path_slow{peer_id="decode-0",transport="tcp",worker_id="prefill-0"} 0.0',
        ):
            assert line in text, line


def test_the_metric_table_keeps_its_naming_rules() -> None:
    for spec in METRICS:
        assert re.fullmatch(r"baton_[a-z0-9_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert bool(spec.buckets) == (spec.kind == "histogram")
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    assert Metrics().render()


def test_only_errors_that_may_pass_ask_for_a_retry() -> None:
    assert error_headers(Fault("x")) == {}
    assert error_headers(BatonError("x")) == {}
    assert error_headers(OverloadedError("x", retry_after_s=0)) == {"Retry-After": "1"}


async def test_long_prompts_leave_the_event_loop_free() -> None:
    """The tokenizer runs in a thread, and lets the loop turn while it is at work."""
    prompt = "Hello world 123 日本 " * 20_000
    num_turns = 0

    async def turn() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    def work() -> tuple[list[int], int]:
        before = num_turns
        return TEXT.encode(prompt), num_turns - before

    turning = asyncio.create_task(turn())
    ids, num_turns_meanwhile = await off_loop(len(prompt), work)
    turning.cancel()
    await asyncio.gather(turning, return_exceptions=True)
    assert len(ids) == len(prompt.encode())
    assert num_turns_meanwhile > 10


async def test_the_served_name_defaults_to_the_models_own() -> None:
    async with service() as s:
        assert (await s.chat()).json()["model"] == MODEL


async def test_tokenize_counts_what_a_request_would_cost() -> None:
    async with service(max_total_tokens=99) as s:
        answer = (await s.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        assert answer["tokens"] == list("hé".encode())
        assert (answer["count"], answer["max_model_len"], len(answer["token_strs"])) == (3, 99, 3)
        messages = [{"role": "user", "content": "hi"}]
        counted = (await s.client.post("/tokenize", json={"messages": messages})).json()["count"]
        assert counted == (await s.chat("hi", max_tokens=1)).json()["usage"]["prompt_tokens"]
        back = await s.client.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": "hé"}


@pytest.mark.parametrize("tokens", [[-1], [10**12], [True], ["a"], "a", None, {}])
async def test_ids_outside_the_vocabulary_cannot_be_detokenized(tokens: Any) -> None:
    async with service() as s:
        response = await s.client.post("/detokenize", json={"tokens": tokens})
        assert (response.status_code, error_of(response)["param"]) == (400, "tokens")
        assert (await s.client.post("/tokenize", json={"messages": []})).status_code == 400


async def test_tokens_are_those_of_the_servers_own_model() -> None:
    async with service() as s:
        for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [65]})):
            for model, status in ((MODEL, 200), (None, 200), ("other", 404), (5, 400)):
                response = await s.client.post(path, json=body | {"model": model})
                assert response.status_code == status
                assert status == 200 or error_of(response)["param"] == "model"


async def test_an_empty_text_has_no_tokens() -> None:
    async with service() as s:
        answer = await s.client.post("/tokenize", json={"prompt": "", "return_token_strs": True})
        assert answer.json() == {"count": 0, "max_model_len": 4096, "tokens": [], "token_strs": []}


async def test_tokenize_takes_a_prompt_or_messages_and_never_guesses_which() -> None:
    async with service() as s:
        for prompt in ("hi", "", [65]):
            body = {"prompt": prompt, "messages": [{"role": "user", "content": "x"}]}
            response = await s.client.post("/tokenize", json=body)
            assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
            assert "messages" in error_of(response)["message"]


@pytest.mark.parametrize("value", [1, "true", [], {}])
async def test_tokenize_wants_a_flag_where_a_flag_is_meant(value: Any) -> None:
    async with service() as s:
        response = await s.client.post("/tokenize", json={"prompt": "hi", "return_token_strs": value})
        assert (response.status_code, error_of(response)["param"]) == (400, "return_token_strs")
