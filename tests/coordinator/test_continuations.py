"""Workers that die, stop or leave at every moment of a request: the client's answer is the undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from contracts.channel import Channel
from contracts.config import BatonConfig
from contracts.errors import WireError, WorkerLostError
from contracts.messages import Cancel, Ended, Prefill, Reserve, Tokens
from contracts.request import Finished, Token
from contracts.roles import Duty
from coordinator.cluster import ClusterBackend
from coordinator.http import make_app
from tests.coordinator.fake_worker import FakeWorker, finish, hand_off, next_token, send_tokens
from tests.coordinator.flow_scene import Scene, collect, expected, is_prefill, pair, request, scene
from tests.coordinator.http_tools import MODEL, TEXT, error_of, events, joined
from tests.coordinator.streams import Stream

LOST = WireError("worker_lost", "gone")
NUM_TOKENS = 6


def workers() -> list[FakeWorker]:
    return [
        FakeWorker("prefill", "p1", peers=("d1", "d2")),
        FakeWorker("prefill", "p2", peers=("d1", "d2")),
        FakeWorker("decode", "d1"),
        FakeWorker("decode", "d2"),
    ]


def target_of(s: Scene, command: Prefill) -> FakeWorker:
    assert command.ticket is not None
    return s[command.ticket.target_id]


def answer_all(s: Scene, source: Channel, target: FakeWorker, command: Prefill) -> None:
    """What healthy workers do, from the tokens that are known."""
    request_id, known = command.request.request_id, len(command.request.output_ids)
    assert command.request.output_ids == tuple(map(next_token, range(known)))
    send_tokens(source, request_id, known)
    hand_off(source, request_id)
    send_tokens(target.channels[-1], request_id, *range(known + 1, NUM_TOKENS))
    finish(target.channels[-1], request_id)


def on_first_prefill(s: Scene, disturb: Callable[[Channel, Prefill], None]) -> None:
    """`disturb` the first attempt, serve all others."""
    seen: list[Prefill] = []

    def script(channel: Channel, command: Prefill) -> None:
        seen.append(command)
        if len(seen) == 1:
            disturb(channel, command)
        else:
            answer_all(s, channel, target_of(s, command), command)

    s["p1"].on_prefill = s["p2"].on_prefill = script


async def assert_whole(s: Scene, *reasons: str) -> None:
    got = await collect(s, request(NUM_TOKENS), 10.0)
    assert got == [*expected(NUM_TOKENS), Finished("length")]
    assert tuple(s.recorder.continuations) == reasons


@contextlib.asynccontextmanager
async def killing() -> AsyncIterator[Callable[[FakeWorker], None]]:
    """Kill from within a script, which runs in a task of the victim."""
    async with asyncio.TaskGroup() as tasks:
        yield lambda worker: tasks.create_task(worker.kill()) and None


@pytest.mark.parametrize("victims", [["prefill"], ["decode"], ["prefill", "decode"]])
@pytest.mark.parametrize("num_sent", [0, 1, 3])
async def test_a_death_at_any_moment_costs_a_pause(victims: list[str], num_sent: int) -> None:
    """Before token 0 (decode between its reservation and the commit), after it, and in the middle of the answer."""
    async with scene(*workers()) as s, killing() as kill:

        def disturb(channel: Channel, command: Prefill) -> None:
            target, request_id = target_of(s, command), command.request.request_id
            if num_sent:
                send_tokens(channel, request_id, 0)
            if num_sent > 1:
                send_tokens(target.channels[-1], request_id, *range(1, num_sent))
            source = s["p1"] if channel in s["p1"].channels else s["p2"]
            for role in victims:
                kill(source if role == "prefill" else target)
            if victims == ["prefill"] and num_sent > 1:  # decode has the KV, and goes on alone
                send_tokens(target.channels[-1], request_id, *range(num_sent, NUM_TOKENS))
                finish(target.channels[-1], request_id)

        on_first_prefill(s, disturb)
        is_alone = victims == ["prefill"] and num_sent > 1
        await assert_whole(s, *([] if is_alone else ["worker_lost"]))


async def test_a_decode_worker_that_stops_is_left_for_another() -> None:
    """It neither answers nor closes (SIGSTOP, a hung event loop, a cut wire): silence alone tells."""
    async with scene(*workers(), worker_timeout_s=1.0) as s, asyncio.TaskGroup() as tasks:
        stopped: list[FakeWorker] = []

        def disturb(channel: Channel, command: Prefill) -> None:
            send_tokens(channel, command.request.request_id, 0)
            stopped.append(target_of(s, command))

        async def beat() -> None:
            while True:
                for worker in s.workers.values():
                    if worker not in stopped:
                        worker.channels[-1].send(worker.status())
                await asyncio.sleep(0.05)

        on_first_prefill(s, disturb)
        beats = tasks.create_task(beat())
        await assert_whole(s, "worker_lost")
        beats.cancel()


@pytest.mark.parametrize(
    "code", ["worker_lost", "handoff_failed", "lease_expired", "out_of_memory", "engine_error"]
)
async def test_an_attempt_that_a_worker_gives_up_goes_on_elsewhere(code: str) -> None:
    async with scene(*workers()) as s:
        first: list[str] = []

        def disturb(channel: Channel, command: Prefill) -> None:
            target, request_id = target_of(s, command), command.request.request_id
            send_tokens(channel, request_id, 0)
            hand_off(channel, request_id)
            first.append(target.worker_id)
            target.channels[-1].send(Ended(request_id, error=WireError(code, "told")))

        on_first_prefill(s, disturb)
        await assert_whole(s, code)
        other = "d2" if first == ["d1"] else "d1"
        assert any(isinstance(m, Reserve) for m in s[other].heard)


async def test_a_worker_that_leaves_hands_its_streams_on_and_is_told_to_forget_them() -> None:
    """Half of the grace is theirs to finish; then they move, without counting as failures."""
    async with scene(*workers(), decode__drain_timeout_s=0.1, max_continuations=0) as s:
        left: list[tuple[FakeWorker, str]] = []

        def disturb(channel: Channel, command: Prefill) -> None:
            target, request_id = target_of(s, command), command.request.request_id
            send_tokens(channel, request_id, 0)
            hand_off(channel, request_id)
            left.append((target, request_id))
            decodes = [link.info for link in s.fleet.links() if link.info.role == "decode"]
            s.fleet.sync("decode", [info for info in decodes if info.worker_id != target.worker_id])

        on_first_prefill(s, disturb)
        await assert_whole(s, "draining")
        worker, request_id = left[0]
        await worker.wait_for(lambda m: m == Cancel(request_id))


async def test_the_last_decode_worker_keeps_its_streams_while_it_leaves() -> None:
    async with scene(*workers()[:3], decode__drain_timeout_s=0.0) as s:

        def disturb(channel: Channel, command: Prefill) -> None:
            request_id = command.request.request_id
            send_tokens(channel, request_id, 0)
            hand_off(channel, request_id)
            s.fleet.sync("decode", [])
            loop = asyncio.get_running_loop()
            # The next beat of anybody is when a fleet that has overdue workers looks again.
            loop.call_later(0.05, lambda: s["p1"].channels[-1].send(s["p1"].status()))
            loop.call_later(0.1, send_tokens, s["d1"].channels[-1], request_id, *range(1, NUM_TOKENS))
            loop.call_later(0.1, finish, s["d1"].channels[-1], request_id)

        on_first_prefill(s, disturb)
        await assert_whole(s)


async def test_a_stream_that_nobody_takes_over_ends_with_one_typed_error_in_time() -> None:
    async with scene(*workers()[:3], continue_timeout_s=0.2) as s, killing() as kill:

        def disturb(channel: Channel, command: Prefill) -> None:
            send_tokens(channel, command.request.request_id, 0)
            kill(s["d1"])

        on_first_prefill(s, disturb)
        stream = Stream(s.flow, request(NUM_TOKENS), 10.0)
        assert await anext(stream) == expected(1)[0]
        with pytest.raises(WorkerLostError, match=r"no worker could go on within 0\.2 s") as caught:
            await anext(stream)
        assert caught.value.retry_after_s is not None


async def test_a_request_that_fails_every_worker_ends_at_the_bound() -> None:
    async with scene(*workers(), max_continuations=2) as s:

        def script(channel: Channel, command: Prefill) -> None:
            channel.send(Ended(command.request.request_id, error=LOST))

        s["p1"].on_prefill = s["p2"].on_prefill = script
        with pytest.raises(WorkerLostError):
            await collect(s, request())
        num_tried = sum(is_prefill(m) for p in ("p1", "p2") for m in s[p].heard)
        assert num_tried == 3
        assert s.recorder.continuations == ["worker_lost", "worker_lost"]


# --- the same, seen by a client: text, stop strings, logprobs and usage are made from tokens that survive ---


def speaker(data: bytes, cut: int) -> Callable[[Channel, Prefill], None]:
    """A worker that draws the bytes of `data`, and dies after every `cut` of them."""

    def script(channel: Channel, command: Prefill) -> None:
        sampling, known = command.request.sampling, len(command.request.output_ids)
        assert bytes(command.request.output_ids) == data[:known]
        last = min(len(data), sampling.max_tokens)
        stop = min(known + cut, last)
        items = []
        for index in range(known, stop):
            logprob = None if sampling.num_logprobs is None else -0.1 * index
            top = () if logprob is None else ((data[index], logprob), (66, -9.0))[: sampling.num_logprobs]
            token = Token(index, data[index], logprob, top)
            items.append((command.request.request_id, token))
        channel.send(Tokens.of(items))
        if stop == last:
            channel.send(Ended(command.request.request_id, finished=Finished("length")))
        else:
            channel.send(Ended(command.request.request_id, error=LOST))

    return script


@contextlib.asynccontextmanager
async def served(data: bytes, cut: int, max_continuations: int = 99) -> AsyncIterator[httpx.AsyncClient]:
    async with scene(FakeWorker("decode", "d1"), max_continuations=max_continuations) as s:
        s["d1"].on_prefill = speaker(data, cut)
        config = BatonConfig()
        app = make_app(config, TEXT, ClusterBackend(config, s.fleet, s.flow))
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
            yield client


async def answers(data: bytes, cut: int, **fields: Any) -> tuple[Any, str, Any]:
    """(the whole answer without its id and time, the streamed text, the stream's usage)."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 100, "temperature": 0, **fields}
    async with served(data, cut) as client:
        whole = (await client.post("/v1/completions", json=body)).json()
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events(await client.post("/v1/completions", json=streamed))
    return (whole["choices"], whole["usage"]), joined(chunks), chunks[-1]["usage"]


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"stop": ["jumps"]},
        {"stop": ["€ fox"], "include_stop_str_in_output": True},
        {"stop": ["dog. Never"]},
        {"max_tokens": 11},
        {"stop": ["T"], "min_tokens": 8},
        {"echo": True},
    ],
    ids=str,
)
async def test_a_client_cannot_tell_a_broken_run_from_a_whole_one(cut: int, fields: dict[str, Any]) -> None:
    """Cuts fall inside characters of several bytes and inside stop strings."""
    data = "The brown € fox jümps over The lazy 🦊 dog.".encode()
    assert await answers(data, cut, **fields) == await answers(data, 1000, **fields)


async def test_one_error_event_ends_a_stream_that_may_not_go_on() -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 100, "stream": True}
    async with served(b"abcdef", 2, max_continuations=1) as client:
        *chunks, last = events(await client.post("/v1/completions", json=body))
        assert joined(chunks) == "abcd"
        assert last["error"]["code"] == "worker_lost"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    async with served(b"ab", 0, max_continuations=0) as client:
        assert error_of(await client.post("/v1/completions", json=body | {"stream": False}))


async def test_a_writer_that_reads_too_is_ready_without_its_reader() -> None:
    async with scene(*pair()) as s:
        backend = ClusterBackend(BatonConfig(), s.fleet, s.flow)
        assert backend.readiness().is_ready
        s["d1"].duty = Duty("mixed", 1)
        s["d1"].tell()
        await s["p1"].kill()
        async with asyncio.timeout(5):
            while any(view.worker_id == "p1" for view in s.fleet.views("prefill")):
                await s.fleet.changed(1.0)
        assert [view.worker_id for view in s.fleet.views("prefill")] == ["d1"]
        assert backend.readiness().is_ready

        def read_and_answer(channel: Channel, command: Prefill) -> None:
            send_tokens(channel, command.request.request_id, *range(4))
            finish(channel, command.request.request_id)

        s["d1"].on_prefill = read_and_answer
        assert (await collect(s, request()))[-1] == Finished("length")
