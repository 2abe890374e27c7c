"""The waiting line, classes and promises of the live flow, on scripted workers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from contracts.channel import Channel
from contracts.errors import BatonError, OverloadedError, WireError
from contracts.messages import Ended, Prefill, Reserve
from contracts.request import Finished, GenerateRequest, Token
from contracts.service import Service
from contracts.steps import StepReport
from tests.coordinator.fake_worker import FakeWorker, finish, hand_off, next_token, send_tokens
from tests.coordinator.flow_scene import Scene, expected, pair, request, run_remote, scene
from tests.coordinator.streams import Stream

BATCH, EFFORT = Service("batch"), Service("best_effort")
# 10 ms to read the weights, 1 ms a prompt token.
STEPS = StepReport((0.010, 20e-6, 10e-9), (0.010, 1e-3, 0.0, 100e-6, 10e-9), 1.0, 0.0, True, True)
SLO = {"slo__ttft_ms": 500.0, "slo__itl_ms": 50.0}


def named(name: str, prompt_len: int = 20) -> GenerateRequest:
    return replace(request(prompt_len=prompt_len), request_id=name)


async def ask(s: Scene, req: GenerateRequest, service: Service | None = None) -> list[Token | Finished]:
    return [event async for event in Stream(s.flow, req, 20.0, service)]


def beat(s: Scene, worker_id: str, steps: StepReport | None = None, **status: Any) -> None:
    worker = s[worker_id]
    worker.channels[-1].send(replace(worker.status(), steps=steps, **status))


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def reserved(s: Scene, worker_id: str = "d1") -> list[str]:
    """Who has asked for blocks, in order, without the number of the attempt."""
    heard = s[worker_id].heard
    return [m.request.request_id.partition(".")[0] for m in heard if isinstance(m, Reserve)]


async def learnt(s: Scene) -> None:
    """The workers have told what their steps cost."""
    for worker_id in s.workers:
        beat(s, worker_id, STEPS)
    await until(lambda: all(v.steps for role in ("prefill", "decode") for v in s.fleet.views(role)))  # type: ignore[arg-type]


async def test_a_small_request_passes_a_large_one_that_finds_no_room() -> None:
    async with scene(*pair(num_blocks=40)) as s:
        run_remote(s)
        beat(s, "d1", audit=s["d1"].status(num_free=5).audit)
        await until(lambda: s.fleet.views("decode")[0].num_available_blocks == 5)
        large = asyncio.create_task(ask(s, named("large", prompt_len=16 * 20)))
        await until(lambda: s.flow.num_waiting == 1)
        assert (await ask(s, named("small")))[-1] == Finished("length")
        assert reserved(s) == ["small"]
        beat(s, "d1")
        assert (await large)[-1] == Finished("length")


async def test_a_burst_is_counted_when_it_is_sent_and_not_when_the_worker_tells() -> None:
    """Room for two; the third is not even asked for."""
    async with scene(*pair(num_blocks=5)) as s:
        tasks = [asyncio.create_task(ask(s, named(f"r{n}"))) for n in range(3)]
        await until(lambda: s.flow.num_waiting == 1 and len(reserved(s)) == 2)
        assert s.flow.num_running == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [record.rule for record in s.flow.predictor.records] == ["load", "load", "left"]


async def test_no_more_run_at_once_than_allowed_and_who_waits_for_that_is_told_so() -> None:
    async with scene(*pair(), coordinator__max_running=1) as s:
        first, second = (asyncio.create_task(ask(s, named(name))) for name in ("first", "second"))
        await until(lambda: s.flow.num_waiting == 1 and reserved(s) == ["first"])
        record = s.flow.predictor.records[-1]
        assert (record.request_id, record.rule, record.verdict) == ("second.1", "wait", "max_running")
        first.cancel()
        await until(lambda: reserved(s) == ["first", "second"])
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def test_a_refusal_is_not_asked_for_again_until_the_worker_tells_anew() -> None:
    async with scene(*pair()) as s:
        run_remote(s)
        s["d1"].on_reserve = s["d1"].refuse
        tasks = [asyncio.create_task(ask(s, named(f"r{n}"))) for n in range(4)]
        await until(lambda: s.flow.num_waiting == 4)
        num_asked = len(reserved(s))
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(reserved(s)) == num_asked
        s["d1"].on_reserve = s["d1"].grant
        beat(s, "d1")
        assert [(await task)[-1] for task in tasks] == [Finished("length")] * 4


async def test_a_reader_that_is_lost_says_nothing_of_the_room_at_decode() -> None:
    async with scene(*pair()) as s:
        s["d1"].on_reserve = lambda _channel, _command: None
        task = asyncio.create_task(ask(s, named("r")))
        await until(lambda: len(reserved(s)) == 1)
        await s["p1"].kill()
        await until(lambda: len(reserved(s)) == 2)  # d1 has told nothing since
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_leftover_requests_are_read_one_at_a_time_and_after_interactive_ones() -> None:
    async with scene(*pair()) as s:
        tasks = [asyncio.create_task(ask(s, named(name), BATCH)) for name in ("batch1", "batch2")]
        await until(lambda: reserved(s) == ["batch1"])
        assert s.recorder.waiting_now == {"batch": 1, "interactive": 0} or s.flow.num_waiting == 1
        chat = asyncio.create_task(ask(s, named("chat")))
        await until(lambda: reserved(s) == ["batch1", "chat"])
        await until(lambda: sum(isinstance(m, Prefill) for m in s["p1"].heard) == 2)
        for name in ("batch1.1", "chat.1"):
            send_tokens(s["p1"].channels[-1], name, 0)
        await until(lambda: reserved(s) == ["batch1", "chat", "batch2"])
        for task in (*tasks, chat):
            task.cancel()
        await asyncio.gather(*tasks, chat, return_exceptions=True)


async def test_leftover_requests_leave_their_part_of_a_worker_to_others() -> None:
    """Of 8 sequences they hold 2."""
    async with scene(FakeWorker("decode", "d1"), prefill__num_replicas=0, slo__leftover_share=0.25) as s:

        def read(channel: Channel, command: Prefill) -> None:
            send_tokens(channel, command.request.request_id, 0)

        s["d1"].on_prefill = read
        tasks = [asyncio.create_task(ask(s, named(f"effort{n}"), EFFORT)) for n in range(3)]
        await until(lambda: len(reserved(s)) == 2 and s.flow.num_waiting == 1)
        chats = [asyncio.create_task(ask(s, named(f"chat{n}"))) for n in range(6)]
        await until(lambda: len(reserved(s)) == 8)
        assert s.flow.num_waiting == 1
        for task in (*tasks, *chats):
            task.cancel()
        await asyncio.gather(*tasks, *chats, return_exceptions=True)


async def test_a_batch_stream_that_lost_its_worker_waits_for_nothing_to_be_left_over() -> None:
    async with scene(*pair()) as s:

        def script(channel: Channel, command: Prefill) -> None:
            request_id, known = command.request.request_id, len(command.request.output_ids)
            send_tokens(channel, request_id, known)
            if not known:
                channel.send(Ended(request_id, error=WireError("handoff_failed", "gone")))
                return
            hand_off(channel, request_id)
            send_tokens(s["d1"].channels[-1], request_id, *range(known + 1, 4))
            finish(s["d1"].channels[-1], request_id)

        s["p1"].on_prefill = script
        unread = asyncio.create_task(ask(s, named("unread")))
        s["p1"].on_prefill = lambda *_: None
        await until(lambda: any(isinstance(m, Prefill) for m in s["p1"].heard))
        stream = Stream(s.flow, named("effort"), 5.0, replace(BATCH))
        first = asyncio.create_task(anext(stream))
        await until(lambda: s.flow.num_waiting == 1)  # the reader has something to read
        s["p1"].on_prefill = script
        send_tokens(s["p1"].channels[-1], "unread.1", 0)
        got = [await first] + [event async for event in stream]
        assert got == [*expected(4), Finished("length")]
        unread.cancel()
        await asyncio.gather(unread, return_exceptions=True)


async def test_prompts_wait_in_the_line_and_not_at_a_busy_reader() -> None:
    """With promises and known steps, a reader gets the next prompt when it should be about to be through."""
    async with scene(*pair(), slo__ttft_ms=60_000.0, slo__itl_ms=50.0) as s:
        await learnt(s)
        tasks = [asyncio.create_task(ask(s, named("first", prompt_len=400)))]
        await until(lambda: reserved(s) == ["first"])
        tasks += [asyncio.create_task(ask(s, named(f"r{n}", prompt_len=400))) for n in range(2)]
        await until(lambda: s.flow.num_waiting == 1)
        assert s.flow.num_running == 2  # one is read by decode itself, in the time that is left over
        await until(lambda: any(isinstance(m, Prefill) for m in s["p1"].heard))
        send_tokens(s["p1"].channels[-1], "first.1", 0)
        await until(lambda: len(reserved(s)) == 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_with_refuse_a_lost_promise_is_told_before_any_work() -> None:
    async with scene(*pair(), **SLO, slo__refuse=True) as s:
        await learnt(s)
        run_remote(s)
        assert (await ask(s, named("known")))[-1] == Finished("length")
        with pytest.raises(OverloadedError, match="expected a first token after 470 ms at most") as caught:
            await ask(s, named("long", prompt_len=490))
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        assert reserved(s) == ["known"]
        assert s.recorder.refusals == [("interactive", "too_late")]
        newest = s.flow.predictor.records[-1]
        assert (newest.rule, newest.verdict, newest.service_class) == ("refused", "too_late", "interactive")
        assert newest.slack_s is not None
        assert newest.slack_s < 0
        assert s.recorder.promises == [("interactive", "both"), ("interactive", "none")]


async def test_without_refuse_it_is_served_late() -> None:
    async with scene(*pair(), **SLO) as s:
        await learnt(s)
        run_remote(s)
        assert (await ask(s, named("long", prompt_len=490)))[-1] == Finished("length")


async def test_promises_are_counted_by_class_whatever_the_end() -> None:
    tight = Service("batch", ttft_s=1e-9, itl_s=10.0)
    async with scene(*pair()) as s:
        run_remote(s)
        await ask(s, named("a"), tight)
        await ask(s, named("b"), Service(ttft_s=60.0, itl_s=60.0))
        await ask(s, named("c"))
        s["p1"].on_prefill = lambda channel, command: channel.send(
            Ended(command.request.request_id, error=WireError("invalid_value", "no"))
        )
        with pytest.raises(BatonError):
            await ask(s, named("d"), Service(ttft_s=60.0))
        assert s.recorder.promises == [("batch", "itl"), ("interactive", "both"), ("interactive", "none")]


@pytest.mark.parametrize("seed", range(2))
async def test_two_hundred_requests_of_all_classes_with_random_leaving_each_end_once(seed: int) -> None:
    rng = random.Random(seed)
    workers = [
        FakeWorker("prefill", "p1", peers=("d1", "d2")),
        FakeWorker("decode", "d1", num_blocks=30),
        FakeWorker("decode", "d2", num_blocks=20),
    ]
    async with scene(*workers, max_queue=150, **SLO) as s:
        await learnt(s)
        loop = asyncio.get_running_loop()

        def reserve(channel: Channel, command: Reserve) -> None:
            worker = s["d1"] if channel in s["d1"].channels else s["d2"]
            (worker.refuse if rng.random() < 0.3 else worker.grant)(channel, command)
            if rng.random() < 0.5:
                loop.call_soon(channel.send, replace(worker.status(), steps=STEPS))

        def read(channel: Channel, command: Prefill) -> None:
            """At once, in a moment, or not at all; by either kind of worker."""
            request_id, known = command.request.request_id, len(command.request.output_ids)
            luck = rng.random()
            if luck < 0.1:
                channel.send(Ended(request_id, error=WireError("out_of_memory", "no memory")))
                return
            send_tokens(channel, request_id, known)
            target = channel
            if command.ticket is not None:
                hand_off(channel, request_id)
                target = s[command.ticket.target_id].channels[-1]
            send_tokens(target, request_id, *range(known + 1, 4))
            finish(target, request_id)

        for worker_id in ("d1", "d2"):
            s[worker_id].on_reserve = reserve
        for worker in workers:
            worker.on_prefill = read
        services = [None, Service(tenant="a", ttft_s=0.5, itl_s=0.05), BATCH, EFFORT]

        async def one(number: int) -> str:
            req, service = named(f"r{number}", rng.choice([5, 40, 150])), rng.choice(services)
            got: list[Token | Finished] = []
            try:
                async for event in Stream(s.flow, req, 30.0, service):
                    got.append(event)
            except BatonError as error:
                return error.code
            assert got == [*(Token(i, next_token(i)) for i in range(4)), Finished("length")]
            return "finished"

        async def beats() -> None:
            while True:
                for worker_id in s.workers:
                    beat(s, worker_id, STEPS)
                await asyncio.sleep(0.02)

        beating = asyncio.create_task(beats())
        tasks = []
        for number in range(200):
            tasks.append(asyncio.create_task(one(number)))
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        async with asyncio.timeout(60):  # beyond the deadline that each has
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        codes = ["cancelled" if isinstance(end, asyncio.CancelledError) else end for end in ends]
        assert set(codes) <= {"finished", "cancelled", "overloaded", "out_of_memory"}
        assert codes.count("finished") > 80
