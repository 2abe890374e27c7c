"""Two endpoints in one process: bytes arrive, and whatever goes wrong, each side hears once and slots come back."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from contracts.blocks import KvLayout
from contracts.channel import Channel
from contracts.errors import (
    BatonError,
    EngineError,
    HandoffError,
    OverloadedError,
    WorkerLostError,
)
from contracts.messages import Data, HandoffState, Message
from kvtransfer import outgoing as outgoing_module
from kvtransfer.incoming import IncomingState
from kvtransfer.outgoing import OutgoingResult
from kvtransfer.pages import Pages, checksum
from kvtransfer.stream import StreamLink
from tests.kvtransfer.tools import (
    FINGERPRINT,
    HOST,
    LAYOUT,
    NUM_SLOTS,
    SLOT_TOKENS,
    STATE,
    WAIT_S,
    Handoff,
    Pair,
    Side,
    connected,
    decode_side,
    make_config,
    make_info,
    make_ticket,
    until,
)

SIZE = LAYOUT.block_size
both = pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])


def kept_credits(pair: Pair) -> Sequence[int]:
    """Of the sender: slots that its connection keeps, and nobody has taken."""
    (sender,) = pair.prefill.endpoint._senders.values()
    return () if sender._route is None else sender._route.kept


async def check_delivered(handoff: Handoff) -> None:
    result, outcome = await handoff.result(), await handoff.outcome()
    assert result.error is None
    num_tokens = handoff.num_tokens - handoff.start
    assert result.num_bytes == num_tokens * LAYOUT.bytes_per_token
    assert result.exposed_s >= 0
    assert outcome == STATE
    assert handoff.arrived == num_tokens
    assert handoff.num_starts == 1


@both
@pytest.mark.parametrize("num_tokens", [1, SIZE - 1, SIZE, SIZE + 1, SLOT_TOKENS + 1, 100])
@pytest.mark.parametrize("start", [0, 1, SIZE, "all"])
async def test_tokens_from_start_on_arrive_and_no_others_are_touched(
    transport: str, num_tokens: int, start: int | str
) -> None:
    first = num_tokens if isinstance(start, str) else min(start, num_tokens)
    async with connected(make_config(transport=transport)) as pair:
        before = pair.decode.slab.clone()
        handoff = pair.handoff(num_tokens, first)
        handoff.expect()
        handoff.open()
        await check_delivered(handoff)
        touched = set(handoff.targets[first // SIZE :]) if first < num_tokens else set[int]()
        others = [block for block in range(len(before)) if block not in touched]
        assert torch.equal(pair.decode.slab[others], before[others])
        after, ours = pair.decode.tokens(handoff.targets), before[handoff.targets]
        untouched = ours.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
        assert torch.equal(after[:first], untouched[:first])
        assert torch.equal(after[num_tokens:], untouched[num_tokens:])


@both
async def test_chunks_follow_compute_and_an_empty_prompt_needs_none(transport: str) -> None:
    async with connected(make_config(transport=transport)) as pair:
        handoff = pair.handoff(50)
        handoff.expect()
        out = handoff.open(num_ready=20)
        await until(lambda: handoff.arrived == 20)
        handoff.ready(10)  # not taken back
        handoff.ready(33)  # a block that is not full waits
        await until(lambda: handoff.arrived == 32)
        out.finish(STATE)
        await check_delivered(handoff)
        nothing = pair.handoff(0)
        nothing.expect()
        nothing.open()
        await check_delivered(nothing)


@both
async def test_a_small_prompt_is_one_round_trip(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    send = Channel.send

    def note(channel: Channel, message: Message) -> None:
        said.append(type(message).__name__)
        send(channel, message)

    monkeypatch.setattr(Channel, "send", note)
    async with connected(make_config(transport=transport)) as pair:
        await until(lambda: len(kept_credits(pair)) == 1)
        said.clear()
        for _ in range(3):
            handoff = pair.handoff(SLOT_TOKENS)
            handoff.expect()
            handoff.open()
            await check_delivered(handoff)
            await until(lambda: len(kept_credits(pair)) == 1)
        ours = [word for word in said if word not in ("Ping", "Pong", "ChunkDone")]
        assert [word for word in ours if word != "Grant"] == ["Open", "Data", "Fin", "Commit"] * 3
        assert ours.count("Grant") == 3  # of the next slot, behind the bytes


@both
async def test_a_kept_credit_that_was_not_used_goes_back_to_the_connection(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(make_config(transport=transport)) as pair:
        await until(lambda: len(kept_credits(pair)) == 1)

        def broken(*_: object) -> None:
            raise ValueError("boom")

        with monkeypatch.context() as patch:
            patch.setattr(Pages, "gather", broken)
            patch.setattr(Pages, "in_place", lambda *_: None)
            handoff = pair.handoff(SLOT_TOKENS)
            handoff.expect()
            handoff.open()
            assert "boom" in str((await handoff.result()).error)
        assert len(kept_credits(pair)) == 1
        aborted = pair.handoff(SLOT_TOKENS)
        aborted.expect()
        aborted.open(0)
        await until(lambda: aborted.num_starts == 1)
        aborted.ready(SLOT_TOKENS)
        assert aborted.outgoing is not None
        aborted.outgoing.abort(None)
        assert (await aborted.result()).error is None
        await until(lambda: len(kept_credits(pair)) == 1)
        good = pair.handoff(SLOT_TOKENS)
        good.expect()
        good.open()
        await check_delivered(good)


@both
async def test_32_handoffs_share_4_slots(transport: str) -> None:
    async with connected(make_config(transport=transport)) as pair:
        handoffs = [pair.handoff(100) for _ in range(32)]
        for handoff in handoffs:
            handoff.expect()
            handoff.open()
        for handoff in handoffs:
            await check_delivered(handoff)


@both
async def test_a_smaller_slot_of_the_peer_is_adapted_to(transport: str) -> None:
    async with decode_side(make_config(transport=transport)) as (decode, port):
        prefill = Side(
            "p", 1, make_config(transport=transport, slot_bytes=4 * SLOT_TOKENS * LAYOUT.bytes_per_token)
        )
        await prefill.endpoint.start(HOST)
        prefill.endpoint.set_peers([make_info(port)])
        await until(lambda: prefill.endpoint.peer_statuses()[0].is_ready)
        handoff = Handoff(Pair(prefill, decode, port), 100, 0)
        handoff.expect()
        handoff.open()
        await check_delivered(handoff)
        await prefill.endpoint.close()


# --- cancelled, by either side, in each state -------------------------------------------------------------------------


@both
async def test_cancel_of_a_reservation_that_nobody_opened(transport: str) -> None:
    async with connected(make_config(transport=transport)) as pair:
        handoff = pair.handoff(40)
        incoming = handoff.expect()
        incoming.cancel(None)
        handoff.open()
        assert isinstance((await handoff.result()).error, HandoffError)
        assert not incoming.has_started
        assert not handoff.received.done()
        assert handoff.arrived == 0


@both
@pytest.mark.parametrize("num_ready", [0, 20, None])
async def test_after_cancel_by_the_target_nothing_is_written(transport: str, num_ready: int | None) -> None:
    async with connected(make_config(transport=transport)) as pair:
        handoff = pair.handoff(100)
        incoming = handoff.expect()
        out = handoff.open(num_ready)
        await until(lambda: incoming.has_started and (num_ready == 0 or handoff.arrived > 0))
        incoming.cancel(WorkerLostError("the client went away"))
        kept = pair.decode.slab.clone()
        handoff.ready(100)
        out.finish(STATE)
        error = (await handoff.result()).error
        assert isinstance(error, WorkerLostError)
        assert "the client went away" in str(error)
        await pair.rest()
        assert torch.equal(pair.decode.slab, kept)
        assert not handoff.received.done()
        incoming.cancel(None)  # over already


@both
@pytest.mark.parametrize("num_ready", [0, 20, 100])
@pytest.mark.parametrize("error", [None, OverloadedError("too many wait"), EngineError("step failed")])
async def test_abort_by_the_source_ends_both_sides_once(
    transport: str, num_ready: int, error: BatonError | None
) -> None:
    """With an error, both hear that one; without, the reservation is not needed and has not failed."""
    async with connected(make_config(transport=transport)) as pair:
        handoff = pair.handoff(100)
        incoming = handoff.expect()
        out = handoff.open(num_ready)
        await until(lambda: incoming.has_started)
        out.abort(error)
        out.abort(HandoffError("again"))
        out.finish(STATE)
        assert (await handoff.result()).error is error
        outcome = await handoff.outcome()
        assert (type(outcome), str(outcome)) == (type(error), str(error))
        assert incoming.state is IncomingState.RELEASED
        assert incoming.reason == ("unneeded" if error is None else error.code)


@both
async def test_cancel_and_abort_after_the_end_change_nothing(transport: str) -> None:
    async with connected(make_config(transport=transport)) as pair:
        handoff = pair.handoff(20)
        incoming = handoff.expect()
        out = handoff.open()
        await check_delivered(handoff)
        incoming.cancel(None)
        out.abort(None)
        assert incoming.state is IncomingState.DELIVERED
        again = pair.handoff(20, handoff_id=handoff.ticket.handoff_id)
        again.expect()
        assert "is known already" in str(await again.outcome())


async def test_abort_before_it_was_opened_tells_nobody() -> None:
    async with connected(make_config()) as pair:
        handoff = pair.handoff(20)
        incoming = handoff.expect()
        handoff.open(0).abort(HandoffError("never mind"))
        assert str((await handoff.result()).error) == "never mind"
        incoming.cancel(None)


async def test_handoffs_are_counted_by_direction_state_and_reason() -> None:
    async with connected(make_config()) as pair:
        good, ended, failed = pair.handoff(20), pair.handoff(20), pair.handoff(20)
        for handoff in (good, ended, failed):
            handoff.expect()
        assert pair.decode.endpoint.gauges()["baton_worker_handoffs_open"] == {
            "in,reserved": 3,
            "out,sending": 0,
        }
        good.open()
        ended.open(0).abort(None)
        failed.open(0).abort(EngineError("step failed"))
        for handoff in (good, ended, failed):
            await handoff.result()
            await handoff.outcome()
        for side, way in ((pair.prefill, "out"), (pair.decode, "in")):
            gauges = side.endpoint.gauges()
            assert gauges["baton_worker_handoffs_ended_total"] == {
                f"{way},ok": 1, f"{way},unneeded": 1, f"{way},engine_error": 1,
            }  # fmt: skip
        await pair.rest()
        assert pair.decode.endpoint.gauges()["baton_worker_kv_slots"] == {
            "free": 3, "granted": 0, "receiving": 0, "quarantined": 0, "kept": 1,
        }  # fmt: skip
        assert (await good.result()).reason == "ok"
        assert pair.decode.endpoint.trouble() is None


async def test_what_happened_to_a_connection_is_told_in_words() -> None:
    async with connected(make_config()) as pair:
        (event,) = pair.prefill.endpoint.peer_statuses()[0].events
        assert event.text.startswith("ready over tcp, ")
        assert event.age_s >= 0
        for connection in pair.decode.endpoint._receiver._connections.values():
            connection.channel.abort()
        await until(lambda: len(pair.prefill.endpoint.peer_statuses()[0].events) == 3)
        texts = [event.text.partition(":")[0] for event in pair.prefill.endpoint.peer_statuses()[0].events]
        assert texts[1] == "not connected"


# --- damaged bytes, faults of our own ---------------------------------------------------------------------------------


def damage(monkeypatch: pytest.MonkeyPatch, num_times: int) -> None:
    calls = itertools.count()
    monkeypatch.setattr(
        outgoing_module, "checksum", lambda data: checksum(data) ^ (2 * (next(calls) < num_times))
    )


@both
async def test_a_damaged_chunk_is_sent_again(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(make_config(transport=transport, checksum="always")) as pair:
        damage(monkeypatch, 2)
        handoff = pair.handoff(SLOT_TOKENS)
        handoff.expect()
        handoff.open()
        assert (await handoff.result()).error is None
        assert handoff.arrived == SLOT_TOKENS
        assert pair.decode.endpoint.num_damaged_chunks == 2


@both
async def test_a_chunk_damaged_each_time_is_a_typed_error(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(make_config(transport=transport, checksum="always")) as pair:
        damage(monkeypatch, 1000)
        handoff = pair.handoff(100)
        handoff.expect()
        handoff.open()
        error = (await handoff.result()).error
        assert isinstance(error, HandoffError)
        assert "arrived damaged 3 times" in str(error)
        assert isinstance(await handoff.outcome(), HandoffError)
        assert handoff.arrived == 0


async def test_a_fault_while_sending_gives_the_slot_back_and_ends_only_that_handoff(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected(make_config()) as pair:

        def broken(*_: object) -> None:
            raise ValueError("boom")

        with monkeypatch.context() as patch:
            patch.setattr(Pages, "gather", broken)
            handoff = pair.handoff(100)
            handoff.sources.reverse()  # neighbours would go without being gathered
            handoff.expect()
            handoff.open()
            assert "boom" in str((await handoff.result()).error)
            assert isinstance(await handoff.outcome(), HandoffError)
        await pair.rest()
        good = pair.handoff(100)
        good.expect()
        good.open()
        await check_delivered(good)


@pytest.mark.parametrize("is_aborted", [False, True])
async def test_no_end_is_told_while_the_link_still_reads_the_blocks(
    is_aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or bytes could be under way, behind a Fin, that are somebody else's by then."""
    async with connected(make_config()) as pair:
        held: list[StreamLink] = []
        with monkeypatch.context() as patch:
            patch.setattr(StreamLink, "_write", lambda link: held.append(link))
            handoff = pair.handoff(SLOT_TOKENS)
            handoff.expect()
            outgoing = handoff.open()
            await until(lambda: bool(held) and outgoing._has_sent_fin)
            assert pair.prefill.endpoint.num_free_send_slots == NUM_SLOTS  # it goes from where it lies
            if is_aborted:
                outgoing.abort()
                assert await handoff.outcome() is None  # the target knows, and has let go of its blocks
            assert not handoff.sent.done()
        (link,) = held
        link._write()
        result = await handoff.result()
        assert result.error is None
        assert result.reason == ("unneeded" if is_aborted else "ok")
        assert handoff.arrived == (0 if is_aborted else SLOT_TOKENS)


async def test_cancel_returns_when_the_copy_that_runs_on_another_thread_is_over_and_no_other_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected(make_config()) as pair:
        handoff = pair.handoff(32)
        incoming = handoff.expect()
        incoming.open(0)
        has_begun, may_end, events = threading.Event(), threading.Event(), list[str]()

        def slow(*_: object) -> None:
            has_begun.set()
            assert may_end.wait(WAIT_S)
            events.append("written")

        monkeypatch.setattr(Pages, "scatter", slow)
        num_bytes = 32 * LAYOUT.bytes_per_token
        data, content = Data("h", 0, 0, 0, 32, num_bytes, 0), torch.zeros(num_bytes, dtype=torch.uint8)
        copying = threading.Thread(target=incoming.store, args=(data, content))
        copying.start()
        assert has_begun.wait(WAIT_S)
        threading.Timer(0.05, may_end.set).start()
        incoming.cancel(None)
        events.append("cancelled")
        copying.join()
        assert incoming.store(data, content) is True
        assert events == ["written", "cancelled"]


@both
async def test_a_copy_that_finds_no_memory_ends_only_that_handoff(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(make_config(transport=transport)) as pair:

        def broken(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(Pages, "scatter", broken)
            handoff = pair.handoff(100)
            incoming = handoff.expect()
            handoff.open()
            assert "could not be stored: MemoryError()" in str(await handoff.outcome())
            assert isinstance((await handoff.result()).error, HandoffError)
            assert incoming.reason == HandoffError.code
        await pair.rest()
        good = pair.handoff(100)
        good.expect()
        good.open()
        await check_delivered(good)


@pytest.mark.parametrize("which", ["on_start", "on_done", "on_done of an error"])
async def test_a_callback_that_raises_ends_its_own_handoff_only(which: str) -> None:
    async with connected(make_config()) as pair:
        calls: list[object] = []

        def raising(*args: object) -> None:
            calls.append(args)
            raise ValueError("boom")

        neighbour, handoff = pair.handoff(100), pair.handoff(100)
        neighbour.expect()
        ticket, is_start = handoff.ticket, which == "on_start"
        out = neighbour.open(50)
        pair.decode.endpoint.expect(
            ticket.handoff_id, ticket.request_id, b"prompt", 100, 0, handoff.targets,
            on_start=raising if is_start else None,
            on_done=handoff.received.set_result if is_start else raising,
        )  # fmt: skip
        if which == "on_done of an error":
            handoff.open(50).abort(HandoffError("given up"))
        else:
            handoff.open()
        assert isinstance((await handoff.result()).error, HandoffError)
        if is_start:
            assert isinstance(await handoff.outcome(), HandoffError)
        await until(lambda: len(calls) == 1)
        out.finish(STATE)
        await check_delivered(neighbour)
        await pair.rest()
        assert len(calls) == 1


async def test_a_slow_answer_to_an_abort_does_not_cost_the_connection() -> None:
    """Only progress_timeout_s may: prefill's loop can be busy for seconds."""
    async with connected(make_config(progress_timeout_s=30.0)) as pair:
        handoff = pair.handoff(100)
        incoming = handoff.expect()
        handoff.open()
        await until(lambda: incoming.has_started and pair.decode.endpoint.slot_counts.free < 4)
        receiver = pair.decode.endpoint._receiver
        incoming.cancel(None)
        (connection,) = receiver._connections.values()
        (deadline_s,) = connection.aborting.values()
        assert deadline_s - time.monotonic() > 25.0
        await handoff.result()


# --- connections --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "fingerprint", "values"),
    [
        (LAYOUT, "other", ["'other'", f"'{FINGERPRINT}'"]),
        (replace(LAYOUT, block_size=6), FINGERPRINT, ["block_size=6", "4", "(p, d)"]),
        (replace(LAYOUT, num_kv_heads=3), FINGERPRINT, ["num_kv_heads=3", "peer has 2"]),
        (replace(LAYOUT, num_layers=4), FINGERPRINT, ["num_layers=4", "peer has 2"]),
    ],
)
async def test_a_mismatched_peer_is_refused_with_both_sides_values(
    layout: KvLayout, fingerprint: str, values: Sequence[str]
) -> None:
    async with decode_side(make_config()) as (_, port):
        prefill = Side("p", 1, make_config(), layout, fingerprint)
        await prefill.endpoint.start(HOST)
        prefill.endpoint.set_peers([make_info(port)])
        await until(lambda: prefill.endpoint.peer_statuses()[0].detail != "connecting")
        (status,) = prefill.endpoint.peer_statuses()
        assert not status.is_ready
        assert all(value in status.detail for value in values)
        await prefill.endpoint.close()


async def open_without(endpoint_of: Side, ticket_changes: dict[str, Any]) -> BatonError | None:
    done: asyncio.Future[OutgoingResult] = asyncio.get_running_loop().create_future()
    endpoint_of.endpoint.open(make_ticket(4, **ticket_changes), 0, done.set_result).ready(4, [0])
    return (await done).error


async def test_opening_to_a_stranger_or_to_another_life_is_worker_lost() -> None:
    async with connected(make_config()) as pair:
        for changes in ({"target_id": "x"}, {"target_incarnation": 2}):
            assert isinstance(await open_without(pair.prefill, changes), WorkerLostError)


async def test_a_peer_that_is_removed_ends_its_handoffs_on_both_sides() -> None:
    async with connected(make_config()) as pair:
        handoff = pair.handoff(100)
        incoming = handoff.expect()
        handoff.open(20)
        await until(lambda: incoming.has_started)
        pair.prefill.endpoint.set_peers([])
        assert isinstance((await handoff.result()).error, WorkerLostError)
        assert isinstance(await handoff.outcome(), WorkerLostError)


async def test_an_older_incarnation_never_replaces_a_newer() -> None:
    async with connected(make_config()) as pair:
        pair.prefill.endpoint.set_peers([make_info(1, incarnation=0)])
        assert pair.prefill.endpoint.peer_statuses()[0].is_ready


async def test_close_ends_reservations_that_were_never_opened() -> None:
    async with decode_side(make_config()) as (decode, port):
        prefill = Side("p", 1, make_config())
        handoff = Handoff(Pair(prefill, decode, port), 20, 0)
        handoff.expect()
        await decode.endpoint.close()
        assert "is closed" in str(await handoff.outcome())
        late = Handoff(Pair(prefill, decode, port), 20, 0)
        late.expect()
        assert "is closed" in str(await late.outcome())


async def test_close_is_harmless_without_a_start_or_after_one_that_failed() -> None:
    await Side("d", 1, make_config()).endpoint.close()
    side = Side("d", 1, make_config())
    with pytest.raises(OSError, match=r".*"):
        await side.endpoint.start("192.0.2.1")
    await side.endpoint.close()


def test_the_engine_thread_may_be_a_step_behind_a_closed_loop() -> None:
    async def begin() -> list[Callable[[], None]]:
        side = Side("p", 1, make_config())
        out = side.endpoint.open(make_ticket(4), 0, lambda _result: None)
        return [
            lambda: out.ready(4, [0]),
            lambda: out.finish(HandoffState(STATE.first_token)),
            lambda: out.abort(None),
        ]

    errors: list[BaseException] = []

    def engine(calls: list[Callable[[], None]]) -> None:
        for call in calls:
            try:
                call()
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=engine, args=(asyncio.run(begin()),))
    thread.start()
    thread.join()
    assert not errors


async def test_an_endpoint_that_is_closed_waits_until_its_links_have_let_go_of_the_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, has_begun, may_end = StreamLink.close, asyncio.Event(), asyncio.Event()

    async def slow(self: StreamLink) -> None:
        has_begun.set()
        await may_end.wait()
        await real(self)

    async with decode_side(make_config(transport="tcp")) as (decode, port):
        prefill = Side("p", 1, make_config(transport="tcp"))
        await prefill.endpoint.start(HOST)
        prefill.endpoint.set_peers([make_info(port)])
        await until(lambda: prefill.endpoint.peer_statuses()[0].is_ready)
        await until(lambda: decode.endpoint.slot_counts.kept > 0)
        monkeypatch.setattr(StreamLink, "close", slow)
        ends = asyncio.create_task(prefill.endpoint.close())
        await until(lambda: not decode.endpoint._receiver._connections and has_begun.is_set())
        assert decode.endpoint._server is not None
        for _ in range(4):  # however often it is cancelled, a turn or two apart
            for task in decode.endpoint._server._tasks:
                task.cancel()
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        await decode.endpoint.close()
        assert may_end.is_set()
        assert decode.is_at_rest
        await ends
