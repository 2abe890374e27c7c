"""One request's story on scripted workers: order, one end, nothing left behind, and going on after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from contracts.blocks import num_shared_at_most
from contracts.channel import Channel
from contracts.errors import (
    BatonError,
    DeadlineError,
    EngineError,
    OverloadedError,
    RequestError,
    WireError,
    WorkerLostError,
)
from contracts.messages import Cancel, Ended, Peers, Prefill, Reserve, Reserved, WorkerInfo
from contracts.request import Finished, Token
from contracts.ticket import is_genuine
from coordinator.run import Run
from tests.coordinator.fake_worker import (
    LAYOUT,
    SECRET,
    FakeWorker,
    finish,
    hand_off,
    next_token,
    send_tokens,
)
from tests.coordinator.flow_scene import (
    collect,
    expected,
    is_cancel,
    is_prefill,
    pair,
    request,
    run_remote,
    scene,
    timings_of,
)
from tests.coordinator.streams import Stream


async def test_a_request_goes_through_prefill_and_decode_to_one_end() -> None:
    async with scene(*pair()) as s:
        run_remote(s)
        assert await collect(s, request()) == [*expected(4), Finished("length")]
        assert s.recorder.routes == ["remote"]
        assert s.recorder.held == {("p1", "r.1"), ("d1", "r.1")}


async def test_blocks_are_reserved_before_prefill_hears_of_the_request() -> None:
    async with scene(*pair()) as s:
        run_remote(s)
        await collect(s, request())
        reserve = next(m for m in s["d1"].heard if isinstance(m, Reserve))
        command = next(m for m in s["p1"].heard if isinstance(m, Prefill))
        assert command.ticket is not None
        assert is_genuine(command.ticket, SECRET)
        assert command.ticket.handoff_id == reserve.handoff_id
        assert (command.ticket.source_id, command.ticket.target_id) == ("p1", "d1")


async def test_tokens_that_overtake_the_first_one_wait_for_it() -> None:
    async with scene(*pair()) as s:

        def script(channel: Channel, command: Prefill) -> None:
            send_tokens(s["d1"].channels[-1], command.request.request_id, 2, 1)
            finish_later = asyncio.get_running_loop()
            finish_later.call_soon(send_tokens, channel, command.request.request_id, 0)
            finish_later.call_soon(hand_off, channel, command.request.request_id)
            finish_later.call_soon(send_tokens, s["d1"].channels[-1], command.request.request_id, 3)
            finish_later.call_soon(finish, s["d1"].channels[-1], command.request.request_id)

        s["p1"].on_prefill = script
        events = await collect(s, request())
        assert events == [*expected(4), Finished("length")]


async def test_a_token_told_twice_is_passed_on_once() -> None:
    async with scene(*pair()) as s:

        def script(channel: Channel, command: Prefill) -> None:
            send_tokens(channel, command.request.request_id, 0)
            hand_off(channel, command.request.request_id)
            send_tokens(s["d1"].channels[-1], command.request.request_id, 0, 1, 1, 2, 3)
            finish(s["d1"].channels[-1], command.request.request_id)

        s["p1"].on_prefill = script
        assert await collect(s, request()) == [*expected(4), Finished("length")]


@pytest.mark.parametrize(
    ("workers", "overrides"),
    [(lambda: [FakeWorker("decode", "d1")], {}), (pair, {"placement": "local"})],
    ids=["nobody else", "placement local"],
)
async def test_without_a_prefill_worker_decode_reads_the_prompt(
    workers: Callable[[], Sequence[FakeWorker]], overrides: dict[str, object]
) -> None:
    async with scene(*workers(), **overrides) as s:

        def script(channel: Channel, command: Prefill) -> None:
            assert command.ticket is None
            send_tokens(channel, command.request.request_id, 0, 1)
            finish(channel, command.request.request_id, "stop")

        s["d1"].on_prefill = script
        events = await collect(s, request())
        assert events == [*expected(2), Finished("stop")]
        assert timings_of(events).handoff_s == 0
        assert s.recorder.routes == ["local"]


async def test_what_decode_holds_is_read_there_and_prefill_hears_nothing_of_it() -> None:
    async with scene(*pair()) as s:

        def grant(channel: Channel, command: Reserve) -> None:
            num_shared = num_shared_at_most(command.request.num_known_tokens, LAYOUT.block_size)
            channel.send(Reserved(command.request.request_id, num_shared * LAYOUT.block_size))

        def script(channel: Channel, command: Prefill) -> None:
            assert command.ticket is None
            send_tokens(channel, command.request.request_id, 0, 1)
            finish(channel, command.request.request_id, "stop")

        s["d1"].on_reserve, s["d1"].on_prefill = grant, script
        events = await collect(s, replace(request(), prompt_ids=tuple(range(LAYOUT.block_size + 1))))
        assert [event for event in events if isinstance(event, Finished)]
        assert timings_of(events).handoff_s == 0
        assert s.recorder.routes == ["local"]
        assert s.recorder.held == {("d1", "r.1")}
        assert not any(isinstance(message, Prefill | Cancel) for message in s["p1"].heard)
        assert s.fleet.link("p1").num_requests == s.fleet.link("p1").num_tokens == 0


async def test_a_request_that_ends_with_its_first_token_frees_the_reservation() -> None:
    async with scene(*pair()) as s:

        def script(channel: Channel, command: Prefill) -> None:
            send_tokens(channel, command.request.request_id, 0)
            finish(channel, command.request.request_id)

        s["p1"].on_prefill = script
        events = await collect(s, request(max_tokens=1))
        assert events == [*expected(1), Finished("length")]
        assert timings_of(events).handoff_s == 0
        await s["d1"].wait_for(is_cancel)
        assert not any(isinstance(m, Cancel) for m in s["p1"].heard)


async def test_leaving_cancels_on_both_workers() -> None:
    async with scene(*pair()) as s:
        s["p1"].on_prefill = lambda channel, command: send_tokens(channel, command.request.request_id, 0)
        events = Stream(s.flow, request(), 5.0)
        assert await anext(events) == Token(0, next_token(0))
        await events.aclose()
        await asyncio.gather(s["p1"].wait_for(is_cancel), s["d1"].wait_for(is_cancel))


async def test_a_sink_that_has_enough_gets_no_more_and_both_workers_are_told() -> None:
    async with scene(*pair()) as s:
        tokens: list[Token] = []

        def two(token: Token) -> bool:
            tokens.append(token)
            return len(tokens) < 2

        s["p1"].on_prefill = lambda channel, command: send_tokens(
            channel, command.request.request_id, 0, 1, 2
        )
        assert await s.flow.generate(request(), two, 5.0) is None
        assert tokens == expected(2)
        await asyncio.gather(s["p1"].wait_for(is_cancel), s["d1"].wait_for(is_cancel))


async def test_a_fault_of_one_sink_leaves_the_other_requests_of_its_worker_alone() -> None:
    async with scene(FakeWorker("decode", "d1")) as s:
        commands: list[Prefill] = []

        def script(channel: Channel, command: Prefill) -> None:
            commands.append(command)
            if len(commands) == 2:
                for each in commands:
                    send_tokens(channel, each.request.request_id, *range(4))
                    finish(channel, each.request.request_id)

        def broken(_token: Token) -> bool:
            raise ZeroDivisionError

        s["d1"].on_prefill = script
        good = asyncio.create_task(collect(s, request()))
        with pytest.raises(ZeroDivisionError):
            await s.flow.generate(replace(request(), request_id="broken"), broken, 5.0)
        assert await good == [*expected(4), Finished("length")]
        assert s.recorder.continuations == []


async def test_leaving_before_the_first_token_cancels_on_both_workers() -> None:
    async with scene(*pair()) as s:
        task = asyncio.create_task(collect(s, request()))
        await s["p1"].wait_for(is_prefill)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(s["p1"].wait_for(is_cancel), s["d1"].wait_for(is_cancel))


async def test_after_a_lost_decode_worker_the_stream_goes_on_from_the_tokens_sent() -> None:
    p1, d1 = pair()
    d2 = FakeWorker("decode", "d2", num_blocks=10)
    async with scene(p1, d1, d2) as s:

        def script(channel: Channel, command: Prefill) -> None:
            request_id, known = command.request.request_id, len(command.request.output_ids)
            assert command.ticket is not None
            target = s[command.ticket.target_id]
            send_tokens(channel, request_id, known)
            hand_off(channel, request_id)
            if known == 0:
                send_tokens(target.channels[-1], request_id, 1)
                s.recorder.continuations.append(target.worker_id)
                killers.append(asyncio.get_running_loop().create_task(kill_soon(target)))
            else:
                send_tokens(target.channels[-1], request_id, *range(known + 1, 6))
                finish(target.channels[-1], request_id)

        async def kill_soon(worker: FakeWorker) -> None:
            await got_two.wait()
            await worker.kill()

        killers: list[asyncio.Task[None]] = []
        got_two = asyncio.Event()
        p1.on_prefill = script
        events: list[Token | Finished] = []
        async with contextlib.aclosing(Stream(s.flow, request(max_tokens=6), 10.0)) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == 2:
                    got_two.set()
        await asyncio.gather(*killers)
        assert events == [*expected(6), Finished("length")]
        assert timings_of(events).num_attempts == 2
        first, code = s.recorder.continuations
        assert code == "worker_lost"
        second = next(m for w in (d1, d2) if w.worker_id != first for m in w.heard if isinstance(m, Reserve))
        assert second.request.output_ids == (next_token(0), next_token(1))


async def test_a_worker_lost_after_the_last_token_does_not_ask_for_more() -> None:
    async with scene(*pair()) as s:
        run_remote(s, count=3, end=False)
        events = Stream(s.flow, request(max_tokens=3), 5.0)
        got = [await anext(events) for _ in range(3)]
        await s["d1"].kill()
        got += [event async for event in events]
        assert got == [*expected(3), Finished("length")]
        assert timings_of(got).num_attempts == 1


async def test_a_prefill_worker_lost_after_the_handoff_changes_nothing() -> None:
    async with scene(*pair()) as s:

        def script(channel: Channel, command: Prefill) -> None:
            request_id = command.request.request_id
            send_tokens(channel, request_id, 0)
            send_tokens(s["d1"].channels[-1], request_id, 1)
            ids.append(request_id)

        ids: list[str] = []
        s["p1"].on_prefill = script
        events = Stream(s.flow, request(), 5.0)
        got = [await anext(events) for _ in range(2)]
        await s["p1"].kill()
        send_tokens(s["d1"].channels[-1], ids[0], 2, 3)
        finish(s["d1"].channels[-1], ids[0])
        got += [event async for event in events]
        assert got == [*expected(4), Finished("length")]
        assert s.recorder.continuations == []


async def test_a_failed_step_goes_on_once_and_the_same_again_is_the_end() -> None:
    async with scene(*pair()) as s:

        def script(channel: Channel, command: Prefill) -> None:
            channel.send(Ended(command.request.request_id, error=WireError("engine_error", "NaN in layer 3")))

        s["p1"].on_prefill = script
        with pytest.raises(EngineError):
            await collect(s, request())
        await s["d1"].wait_for(is_cancel)
        assert sum(isinstance(m, Reserve) for m in s["d1"].heard) == 2


async def test_a_request_that_the_worker_refuses_is_not_tried_again() -> None:
    async with scene(*pair()) as s:

        def script(channel: Channel, command: Prefill) -> None:
            channel.send(Ended(command.request.request_id, error=WireError("invalid_value", "no such token")))

        s["p1"].on_prefill = script
        with pytest.raises(RequestError):
            await collect(s, request())
        assert sum(isinstance(m, Reserve) for m in s["d1"].heard) == 1


async def test_attempts_are_bounded_and_the_last_error_is_the_end() -> None:
    async with scene(*pair(), max_continuations=1) as s:

        def script(channel: Channel, command: Prefill) -> None:
            channel.send(Ended(command.request.request_id, error=WireError("handoff_failed", "checksum")))

        s["p1"].on_prefill = script
        with pytest.raises(Exception, match="checksum"):
            await collect(s, request())
        assert sum(isinstance(m, Reserve) for m in s["d1"].heard) == 2


async def test_a_refused_reservation_waits_and_is_placed_when_room_appears() -> None:
    async with scene(*pair()) as s:
        run_remote(s)
        s["d1"].on_reserve = s["d1"].refuse
        task = asyncio.create_task(collect(s, request()))
        await s["d1"].wait_for(lambda m: isinstance(m, Reserve))
        s["d1"].on_reserve = s["d1"].grant
        s["d1"].channels[-1].send(s["d1"].status())
        assert (await task)[-1] == Finished("length")


async def test_a_full_line_refuses_at_once_with_a_retry_time() -> None:
    async with scene(*pair(), max_queue=1) as s:
        s["d1"].on_reserve = s["d1"].refuse
        waiting = asyncio.create_task(collect(s, request()))
        await s["d1"].wait_for(lambda m: isinstance(m, Reserve))
        async with asyncio.timeout(5):
            while s.flow.num_waiting == 0:
                await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="queue is full") as caught:
            await collect(s, replace(request(), request_id="one too many"))
        assert caught.value.retry_after_s == 2  # one before it, and nothing is known of the pace yet
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_the_line_has_a_deadline() -> None:
    async with scene(*pair(), queue_timeout_s=0.05) as s:
        s["d1"].on_reserve = s["d1"].refuse
        with pytest.raises(OverloadedError, match="no worker had room"):
            await collect(s, request())


@pytest.mark.parametrize(
    ("patience_s", "deadline_s", "error", "verdict"),
    [(0.05, 5.0, OverloadedError, "no_room"), (5.0, 0.05, DeadlineError, "deadline")],
)
async def test_who_waited_in_vain_did_not_leave(
    patience_s: float, deadline_s: float, error: type[BatonError], verdict: str
) -> None:
    async with scene(*pair(), queue_timeout_s=patience_s) as s:
        s["d1"].on_reserve = s["d1"].refuse
        with pytest.raises(error):
            await collect(s, request(), deadline_s=deadline_s)
        (record,) = s.flow.predictor.records
        assert (record.rule, record.verdict) == ("refused", verdict)


async def test_a_silent_pair_is_given_up_at_the_request_deadline() -> None:
    async with scene(*pair()) as s:
        with pytest.raises(DeadlineError):
            await collect(s, request(), deadline_s=0.05)
        await asyncio.gather(s["p1"].wait_for(is_cancel), s["d1"].wait_for(is_cancel))


async def test_a_stalled_stream_is_placed_again_then_given_up() -> None:
    async with scene(*pair(), first_token_timeout_s=0.05, max_continuations=1) as s:
        with pytest.raises(WorkerLostError, match="no token from"):
            await collect(s, request())
        assert s.recorder.continuations == ["worker_lost"]


async def test_tokens_that_come_in_time_keep_a_stream_from_stalling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm was set by the first of them alone: it looks when it rings."""
    async with scene(FakeWorker("decode", "d1"), stall_timeout_s=30) as s:
        link, now_s = s.fleet.link("d1"), time.monotonic()
        run = Run(request(), None, link, s.flow._means, lambda token: True)
        ending = asyncio.create_task(run.finish(now_s + 300))
        monkeypatch.setattr("coordinator.run.time.monotonic", lambda: now_s)
        run._hear(link, Reserved("r", 0))
        for index in range(4):
            now_s += 29
            run._hear(link, Token(index, 5))
        run._lose_patience()
        assert run._error is None
        now_s += 31
        run._lose_patience()
        monkeypatch.undo()
        with pytest.raises(WorkerLostError, match="no token from d1 for 30"):
            await ending
        run.close()


async def test_a_silent_worker_is_lost_and_its_requests_are_told() -> None:
    async with scene(*pair(), worker_timeout_s=0.1, max_continuations=0) as s:
        with pytest.raises(WorkerLostError):
            await collect(s, request())


async def test_a_stream_that_lost_its_worker_goes_before_a_full_line() -> None:
    """It was accepted and has tokens out: it is neither refused like a newcomer nor sent to the tail."""
    async with scene(*pair(), max_queue=1) as s:
        prefill, decode = s["p1"], s["d1"]

        def reserve(channel: Channel, command: Reserve) -> None:
            is_newcomer = command.request.request_id.startswith("newcomer")
            (decode.refuse if is_newcomer else decode.grant)(channel, command)

        def script(channel: Channel, command: Prefill) -> None:
            request_id, known = command.request.request_id, len(command.request.output_ids)
            send_tokens(channel, request_id, known)
            if known == 0:
                channels.append((channel, request_id))
                return
            hand_off(channel, request_id)
            send_tokens(decode.channels[-1], request_id, *range(known + 1, 4))
            finish(decode.channels[-1], request_id)

        channels: list[tuple[Channel, str]] = []
        decode.on_reserve, prefill.on_prefill = reserve, script
        stream = Stream(s.flow, request(), 5.0)
        got = [await anext(stream)]
        waiting = asyncio.create_task(collect(s, replace(request(), request_id="newcomer")))
        async with asyncio.timeout(5):
            while s.flow.num_waiting == 0:
                await asyncio.sleep(0)
        channel, request_id = channels[0]
        channel.send(Ended(request_id, error=WireError("handoff_failed", "peer lost")))
        got += [event async for event in stream]
        assert got == [*expected(4), Finished("length")]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_the_peers_list_is_made_when_a_worker_comes_or_goes_and_not_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Peers] = []

    def count(workers: tuple[WorkerInfo, ...]) -> Peers:
        made.append(Peers(workers))
        return made[-1]

    monkeypatch.setattr("coordinator.fleet.Peers", count)
    d2 = FakeWorker("decode", "d2")
    async with scene(*pair()) as s:
        run_remote(s)
        before = len(made)
        for _ in range(3):
            await collect(s, request())
        assert len(made) == before
        decodes = [link.info for link in s.fleet.links() if link.info.role == "decode"]
        s.fleet.sync("decode", [*decodes, await d2.start()])
        await s["p1"].wait_for(lambda m: isinstance(m, Peers) and len(m.workers) == 2)
        s.fleet.sync("decode", decodes)
        await s["p1"].wait_for(lambda m: m is s["p1"].heard[-1] and m == Peers(tuple(decodes)))
        # each time one for all prefill workers, and one for each decode worker that is told
        assert before + 2 <= len(made) <= before + 5
    await d2.kill()


async def test_a_prefill_worker_that_comes_back_is_told_its_peers_again() -> None:
    async with scene(*pair()) as s:
        heard = s["p1"].heard
        async with asyncio.timeout(5):
            while not any(isinstance(m, Peers) for m in heard):
                await s.fleet.changed(0.01)
            heard.clear()
            s["p1"].channels[-1].abort()
            while not any(isinstance(m, Peers) for m in heard):
                await s.fleet.changed(0.01)
        assert heard[0] == Peers((s.fleet.link("d1").info,))


async def test_a_decode_worker_that_drains_is_a_peer_until_its_last_request_ends() -> None:
    async with scene(*pair()) as s:
        s["p1"].on_prefill = lambda channel, command: send_tokens(channel, command.request.request_id, 0)
        events = Stream(s.flow, request(), 5.0)
        await anext(events)
        s.fleet.sync("decode", [])
        assert s.fleet.views("decode") == []
        assert s.fleet.link("d1").is_alive
        await events.aclose()
        await s["p1"].wait_for(lambda m: m == Peers(()))
        with pytest.raises(WorkerLostError):
            s.fleet.link("d1")


async def test_a_closed_fleet_ends_every_open_request_at_once() -> None:
    """One runs, one waits, one comes later: none waits for workers that nobody follows any more."""
    async with scene(*pair()) as s:

        def reserve(channel: Channel, command: Reserve) -> None:
            is_first = command.request.request_id.startswith("r.")
            (s["d1"].grant if is_first else s["d1"].refuse)(channel, command)

        s["d1"].on_reserve = reserve
        s["p1"].on_prefill = lambda channel, command: send_tokens(channel, command.request.request_id, 0)
        running = Stream(s.flow, request(), 5.0)
        assert await anext(running) == Token(0, next_token(0))
        waiting = asyncio.create_task(collect(s, replace(request(), request_id="waiting")))
        async with asyncio.timeout(5):
            while s.flow.num_waiting == 0:
                await asyncio.sleep(0)
        await s.fleet.close()
        async with asyncio.timeout(1):
            for attempt in (anext(running), waiting, collect(s, request())):
                with pytest.raises(OverloadedError, match="shutting down"):
                    await attempt


async def test_each_stage_holds_the_time_that_was_spent_in_it() -> None:
    """The workers' own waits are measured here; each lies within one stage, and all stages within the whole."""
    async with scene(*pair()) as s:
        waits_s: list[float] = []
        s["d1"].on_reserve = s["d1"].refuse
        begun_s = time.monotonic()
        stream = Stream(s.flow, request(max_tokens=2), 5.0)
        first = asyncio.create_task(anext(stream))
        await s["d1"].wait_for(lambda m: isinstance(m, Reserve))
        asked_s = time.monotonic()
        s["d1"].on_reserve = s["d1"].grant
        waits_s.append(time.monotonic() - asked_s)
        s["d1"].channels[-1].send(s["d1"].status())
        command = await s["p1"].wait_for(is_prefill)
        assert isinstance(command, Prefill)
        request_id, asked_s = command.request.request_id, time.monotonic()
        waits_s.append(time.monotonic() - asked_s)
        send_tokens(s["p1"].channels[-1], request_id, 0)
        got = [await first]
        asked_s = time.monotonic()

        def end_it() -> None:
            waits_s.append(time.monotonic() - asked_s)
            send_tokens(s["d1"].channels[-1], request_id, 1)
            finish(s["d1"].channels[-1], request_id)

        s.recorder.on_handed_off = end_it
        hand_off(s["p1"].channels[-1], request_id)
        got += [event async for event in stream]
        timings = timings_of(got)
        stages_s = (timings.queue_s, timings.prefill_s, timings.decode_s)
        assert all(stage_s >= wait_s for stage_s, wait_s in zip(stages_s, waits_s, strict=True))
        assert timings.total_s <= time.monotonic() - begun_s
        assert (timings.handoff_s, timings.num_attempts) == (0.001, 1)


async def test_a_handoff_that_prefill_had_not_told_by_the_end_is_unknown() -> None:
    async with scene(*pair()) as s:

        def script(channel: Channel, command: Prefill) -> None:
            send_tokens(channel, command.request.request_id, 0)
            send_tokens(s["d1"].channels[-1], command.request.request_id, 1)
            finish(s["d1"].channels[-1], command.request.request_id)

        s["p1"].on_prefill = script
        assert timings_of(await collect(s, request(max_tokens=2))).handoff_s is None
