"""The whole thing from the outside: `make serve`'s launcher, Ray, HAProxy, two pools, the official client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.conftest import DRAIN_S
from tests.cluster.instance import Running, wait_until

pytestmark = pytest.mark.cluster

DATA = json.loads((Path(__file__).parent.parent / "data" / "smollm2_greedy.json").read_text())
NUM_TOKENS = 12
EOS = 2
CHATS = [
    case
    for case in DATA["cases"]
    if case["kind"] == "chat"
    and min(case["margins"][:NUM_TOKENS]) > 0.02
    and EOS not in case["output_ids"][:NUM_TOKENS]
]
MODEL = "smollm2-135m-instruct"


@pytest.fixture
def client(baton: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{baton.url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        yield client


@pytest.fixture
async def busy_client(baton: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    limits = {"base_url": f"{baton.url}/v1", "api_key": "none", "timeout": 180.0, "max_retries": 0}
    async with openai.AsyncOpenAI(**limits) as client:  # type: ignore[arg-type]
        yield client


def ask(case: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": case["request"], "max_tokens": NUM_TOKENS, "temperature": 0, **extra}


async def stream_text(client: openai.AsyncOpenAI, **body: Any) -> tuple[str, list[str]]:
    """The joined text and every finish reason seen."""
    text, reasons = "", []
    async for chunk in await client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason is not None:
                reasons.append(choice.finish_reason)
    return text, reasons


def golden_text(case: dict[str, Any], client: openai.OpenAI) -> str:
    """The case's text is 48 tokens long; ours must be its beginning."""
    text = client.chat.completions.create(**ask(case)).choices[0].message.content
    assert text
    assert case["text"].startswith(text)
    return text


def test_the_launcher_tells_what_serves(baton: Running) -> None:
    printed = "".join(baton.lines)
    (run_dir,) = Path("/tmp").glob(f"baton{baton.url.rsplit(':', 1)[1]}-*")
    assert run_dir.stat().st_mode & 0o077 == 0, "others can read or replace what the instance runs"
    for word in (baton.url, MODEL, "prefill-", "decode-", "curl -N", "Baton is ready after"):
        assert word in printed


def test_workers_have_the_priority_of_who_started_them(baton: Running) -> None:
    own = os.getpriority(os.PRIO_PROCESS, baton.process.pid)
    assert {os.getpriority(os.PRIO_PROCESS, baton.pid_of(role)) for role in ("prefill", "decode")} == {own}


def test_a_chat_is_answered_like_the_reference(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ask(CHATS[0]))
    choice = answer.choices[0]
    assert CHATS[0]["text"].startswith(choice.message.content or "?")
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(CHATS[0]["prompt_ids"])
    assert answer.usage.completion_tokens == NUM_TOKENS


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    text = golden_text(CHATS[0], client)
    chunks = list(
        client.chat.completions.create(**ask(CHATS[0]), stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS


def test_a_completion_from_token_ids(client: openai.OpenAI) -> None:
    case = CHATS[0]
    answer = client.completions.create(
        model=MODEL, prompt=case["prompt_ids"], max_tokens=NUM_TOKENS, temperature=0
    )
    assert case["text"].startswith(answer.choices[0].text)


async def test_64_at_once_are_all_right_and_leave_nothing(
    baton: Running, client: openai.OpenAI, busy_client: openai.AsyncOpenAI
) -> None:
    expected = {i: golden_text(case, client) for i, case in enumerate(CHATS[:8])}

    async def one(number: int) -> None:
        case = CHATS[number % 8]
        if number % 2:
            text, reasons = await stream_text(busy_client, **ask(case))
            assert reasons == ["length"]
        else:
            answer = await busy_client.chat.completions.create(**ask(case))
            text = answer.choices[0].message.content or ""
        assert text == expected[number % 8]

    await asyncio.gather(*(one(number) for number in range(64)))
    wait_until(baton.is_idle, 5.0, "no block to be held")


async def test_a_client_that_leaves_frees_its_blocks_within_a_second(
    baton: Running, busy_client: openai.AsyncOpenAI
) -> None:
    body = ask(CHATS[0]) | {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    stream = await busy_client.chat.completions.create(stream=True, **body)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert not baton.is_idle()
    await stream.close()
    wait_until(baton.is_idle, 1.0, "the blocks of a client that left to be free")


def test_a_prompt_beyond_the_context_is_refused_before_any_work(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[1] * 9000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"


def test_unknown_things_answer_in_openais_form(baton: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**ask(CHATS[0]) | {"model": "gpt-9"})
    assert caught.value.code == "model_not_found"
    assert baton.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    bad = httpx.post(
        f"{baton.url}/v1/chat/completions",
        content=b'{"model": ',
        headers={"content-type": "application/json"},
    )
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_value")


def test_models_health_and_metrics(baton: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert baton.get("/health").status_code == 200
    assert baton.get("/ready").json()["is_ready"] is True
    client.chat.completions.create(**ask(CHATS[0]))
    metrics = baton.get("/metrics").text
    workers = [line for line in metrics.splitlines() if line.startswith("baton_worker_blocks{")]
    for role in ("prefill", "decode"):
        assert any(f'role="{role}"' in line and 'state="free"' in line for line in workers)
    assert "baton_ttft_seconds_count" in metrics


@pytest.mark.parametrize("roles", [("decode",), ("prefill",), ("prefill", "decode")], ids="+".join)
async def test_killed_workers_cost_a_pause(
    baton: Running, client: openai.OpenAI, busy_client: openai.AsyncOpenAI, roles: tuple[str, ...]
) -> None:
    """8 streams, SIGKILL in their middle: each ends once, with the whole answer; ready again within 15 s."""
    expected = [golden_text(case, client) for case in CHATS[:8]]
    killed = asyncio.Event()

    async def one(case: dict[str, Any]) -> tuple[str, list[str]]:
        text, reasons = "", []
        async for chunk in await busy_client.chat.completions.create(stream=True, **ask(case)):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.finish_reason is not None:
                    reasons.append(choice.finish_reason)
            if text and not killed.is_set():
                killed.set()
                for pid in pids.values():
                    os.kill(pid, signal.SIGKILL)
        return text, reasons

    pids = {role: baton.pid_of(role) for role in roles}
    answers = await asyncio.gather(*(one(case) for case in CHATS[:8]))
    assert killed.is_set()
    assert answers == [(text, ["length"]) for text in expected]
    for role, pid in pids.items():
        wait_until(
            lambda r=role, p=pid: baton.is_ready() and baton.pid_of(r) != p, 15.0, f"a new {role} worker"
        )  # type: ignore[misc]
    assert golden_text(CHATS[0], client) == expected[0]
    wait_until(baton.is_idle, 5.0, "no block to be held")


async def test_the_end_of_the_instance_is_told_to_every_stream(baton: Running) -> None:
    """The last test that asks the shared instance: it ends it."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    begun = [asyncio.Event(), asyncio.Event()]

    async def read(index: int) -> list[str]:
        events = []
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    begun[index].set()
        return events

    async with httpx.AsyncClient(base_url=baton.url, timeout=60.0) as http, asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(read(index)) for index in range(2)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), 60.0)
        baton.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: not baton.is_ready(), DRAIN_S, "the drain to begin")
        refused = await http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    for stream in streams:
        *tokens, last, done = stream.result()
        assert done == "[DONE]"
        assert "shutting down" in json.loads(last)["error"]["message"]
        assert tokens
        assert not any("error" in json.loads(token) for token in tokens)
    assert await asyncio.to_thread(baton.process.wait, 60.0) == 0
