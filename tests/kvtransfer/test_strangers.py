"""What the receiver does with a peer that is forged, stale, repetitive, wrong or no peer at all."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from contracts.errors import DeadlineError, WorkerLostError
from contracts.messages import (
    Abort,
    AbortOk,
    ChunkDone,
    Commit,
    Data,
    Fin,
    Grant,
    Keep,
    Message,
    Open,
    Probe,
    Want,
)
from contracts.ticket import sign
from kvtransfer import door, doorman, stream
from kvtransfer.pages import Pages, checksum
from kvtransfer.slots import KEPT
from tests.kvtransfer.tools import (
    HOST,
    LAYOUT,
    SECRET,
    STATE,
    WAIT_S,
    Handoff,
    Pair,
    RawSender,
    Side,
    connected,
    decode_side,
    make_config,
    raw_sender,
    until,
)

NUM_TOKENS = 10


@contextlib.asynccontextmanager
async def facing(num_tokens: int = NUM_TOKENS, **changes: Any) -> AsyncIterator[tuple[Handoff, RawSender]]:
    """A reservation and a hand-driven sender; afterwards every slot is back."""
    async with decode_side(make_config(**changes)) as (decode, port):
        handoff = Handoff(Pair(Side("p", 1, make_config()), decode, port), num_tokens, 0)
        incoming = handoff.expect()
        async with raw_sender(port) as raw:
            yield handoff, raw
        incoming.cancel(None)
        await until(lambda: decode.is_at_rest)


def payload(handoff: Handoff) -> torch.Tensor:
    data = torch.empty(NUM_TOKENS * LAYOUT.bytes_per_token, dtype=torch.uint8)
    Pages(handoff.pair.prefill.slab, LAYOUT).gather(handoff.sources, 0, NUM_TOKENS, data)
    return data


async def get_slot(handoff: Handoff, raw: RawSender) -> int:
    answers = await raw.ask(Open(handoff.ticket, 0), Want(handoff.ticket.handoff_id, 1))
    (grant,) = answers
    assert isinstance(grant, Grant)
    return grant.slots[0]


async def deliver(handoff: Handoff, raw: RawSender, slot: int) -> Message:
    data = payload(handoff)
    head = Data(handoff.ticket.handoff_id, 0, slot, 0, NUM_TOKENS, data.numel(), checksum(data))
    raw.channel.send(head)
    raw.link.send(slot, memoryview(data.numpy()))
    return await raw.hear()


@pytest.mark.parametrize(
    "changes",
    [
        {"mac": b"x" * 32},
        {"num_tokens": NUM_TOKENS + 1},  # altered after it was signed
        {"source_id": "q"},
        {"source_incarnation": 0},
        {"target_id": "e"},
        {"target_incarnation": 0},
        {"prompt_hash": b"other"},
        {"request_id": "other"},
        {"handoff_id": "stale"},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("is_signed", [False, True])
async def test_a_ticket_that_is_not_ours_is_refused_and_the_right_one_still_works(
    changes: dict[str, object], is_signed: bool
) -> None:
    async with facing() as (handoff, raw):
        wrong = replace(handoff.ticket, **changes)  # type: ignore[arg-type]
        if is_signed and "mac" not in changes:
            wrong = sign(wrong, SECRET)
        (answer,) = await raw.ask(Open(wrong, 0))
        assert isinstance(answer, Abort)
        assert handoff.num_starts == 0
        slot = await get_slot(handoff, raw)
        assert await deliver(handoff, raw, slot) == ChunkDone(handoff.ticket.handoff_id, 0, slot, True)


async def test_a_wrong_start_is_refused() -> None:
    async with facing() as (handoff, raw):
        (answer,) = await raw.ask(Open(handoff.ticket, 1))
        assert isinstance(answer, Abort)
        assert "expected request, tokens, prompt hash, start" in answer.error.message


async def test_duplicates_of_every_message_change_nothing() -> None:
    async with facing() as (handoff, raw):
        handoff_id = handoff.ticket.handoff_id
        slot = await get_slot(handoff, raw)
        assert await raw.ask(Open(handoff.ticket, 0), Want(handoff_id, 1)) == []
        assert isinstance(await deliver(handoff, raw, slot), ChunkDone)
        assert (
            await raw.ask(Data(handoff_id, 0, slot, 0, NUM_TOKENS, 2560, 0)) == []
        )  # no slot any more: ignored
        fin = Fin(handoff_id, 1, STATE)
        assert await raw.ask(fin, fin, Open(handoff.ticket, 0)) == [Commit(handoff_id), Commit(handoff_id)]
        assert await handoff.outcome() == STATE
        assert handoff.num_starts == 1
        assert handoff.arrived == NUM_TOKENS


async def test_fin_without_all_tokens_fails_the_handoff() -> None:
    async with facing() as (handoff, raw):
        slot = await get_slot(handoff, raw)
        assert slot >= 0
        answers = await raw.ask(Fin(handoff.ticket.handoff_id, 0, STATE), AbortOk(handoff.ticket.handoff_id))
        assert isinstance(answers[0], Abort)
        assert "tokens are missing" in str(await handoff.outcome())


async def test_fin_may_come_before_the_bytes() -> None:
    async with facing() as (handoff, raw):
        handoff_id, data = handoff.ticket.handoff_id, payload(handoff)
        slot = await get_slot(handoff, raw)
        head = Data(handoff_id, 0, slot, 0, NUM_TOKENS, data.numel(), checksum(data))
        assert await raw.ask(head, Fin(handoff_id, 1, STATE)) == []
        raw.link.send(slot, memoryview(data.numpy()))
        assert await raw.hear() == Commit(handoff_id)
        assert await handoff.outcome() == STATE
        assert handoff.arrived == NUM_TOKENS


async def test_fin_waits_for_a_chunk_that_was_asked_for_again() -> None:
    async with facing() as (handoff, raw):
        handoff_id, data = handoff.ticket.handoff_id, payload(handoff)
        slot = await get_slot(handoff, raw)
        raw.channel.send(Data(handoff_id, 0, slot, 0, NUM_TOKENS, data.numel(), checksum(data) ^ 2))
        raw.link.send(slot, memoryview(data.numpy()))
        assert await raw.hear() == ChunkDone(handoff_id, 0, slot, False)
        (grant,) = await raw.ask(Fin(handoff_id, 1, STATE), Want(handoff_id, 2))
        assert isinstance(grant, Grant)
        assert await deliver(handoff, raw, grant.slots[0]) == Commit(handoff_id)
        assert handoff.arrived == NUM_TOKENS


async def keep_slot(raw: RawSender) -> int:
    (grant,) = await raw.ask(Keep(2))
    assert isinstance(grant, Grant)
    assert grant.handoff_id == ""
    return grant.slots[0]


@pytest.mark.parametrize("order", ["Data first", "bytes first", "all at once"])
async def test_what_comes_in_a_kept_slot_needs_no_grant_in_either_order(order: str) -> None:
    async with facing() as (handoff, raw):
        handoff_id, data = handoff.ticket.handoff_id, payload(handoff)
        slot = await keep_slot(raw)
        counts = handoff.pair.decode.endpoint.slot_counts
        assert (counts.kept, counts.free) == (1, 3)
        head = Data(handoff_id, 0, slot, 0, NUM_TOKENS, data.numel(), checksum(data))
        fin = Fin(handoff_id, 1, STATE)
        if order == "bytes first":
            await raw.link.send(slot, memoryview(data.numpy())).wait()
            (landing,) = (
                each.landings[slot] for each in handoff.pair.decode.endpoint._receiver._connections.values()
            )
            await until(lambda: landing.is_final)
        for message in (Open(handoff.ticket, 0), head, fin):
            raw.channel.send(message)
        if order == "Data first":
            assert await raw.ask() == []
        if order != "bytes first":
            raw.link.send(slot, memoryview(data.numpy()))
        else:  # it was stored before Fin was read
            assert await raw.hear() == ChunkDone(handoff_id, 0, slot, True)
            assert isinstance(await raw.hear(), Grant)
        assert await raw.hear() == Commit(handoff_id)
        if order == "bytes first":
            return
        assert isinstance(await raw.hear(), Grant)  # the next one
        assert await handoff.outcome() == STATE
        assert handoff.arrived == NUM_TOKENS


async def test_bytes_in_a_kept_slot_that_nobody_announces_end_the_connection_and_touch_no_block() -> None:
    async with facing(peer_timeout_s=2.0, progress_timeout_s=0.1) as (handoff, raw):
        before = handoff.pair.decode.slab.clone()
        raw.link.send(await keep_slot(raw), memoryview(bytes(2560)))
        with pytest.raises(WorkerLostError):
            await raw.hear()
        assert torch.equal(handoff.pair.decode.slab, before)


async def test_no_word_frees_a_kept_slot_whose_receive_is_posted() -> None:
    async with facing() as (handoff, raw):
        slot = await keep_slot(raw)
        words = (
            Abort(KEPT),
            AbortOk(KEPT),
            Abort(""),
            AbortOk(""),
            Want(KEPT, 3),
            Keep(0),
            Keep(-1),
            Keep(1 << 40),
        )
        assert await raw.ask(*words) == [AbortOk(KEPT), AbortOk("")]
        assert await raw.ask(Probe(slot, 10, 1)) == []  # not for that
        assert handoff.pair.decode.endpoint.slot_counts.kept == 1
        async with raw_sender(handoff.pair.port) as other:
            assert await other.ask(Keep(2)) == []  # there is no other to keep
            assert await other.ask(Data("nobody", 0, slot, 0, 4, 1024, 0)) == []  # nor is it theirs
        raw.channel.send(Open(handoff.ticket, 0))
        assert isinstance(await deliver(handoff, raw, slot), ChunkDone)


async def test_a_chunk_in_a_kept_slot_of_a_handoff_that_is_over_is_thrown_away() -> None:
    async with facing() as (handoff, raw):
        slot = await keep_slot(raw)
        (answer,) = await raw.ask(Open(replace(handoff.ticket, mac=b"forged"), 0))
        assert isinstance(answer, Abort)
        grant = await deliver(handoff, raw, slot)  # bytes that were under way
        assert isinstance(grant, Grant)
        assert handoff.arrived == 0
        raw.channel.send(Open(handoff.ticket, 0))
        assert isinstance(await deliver(handoff, raw, grant.slots[0]), ChunkDone)
        assert handoff.arrived == NUM_TOKENS


async def test_a_chunk_that_was_asked_for_again_and_does_not_come_ends_at_a_deadline() -> None:
    async with facing(peer_timeout_s=2.0, progress_timeout_s=0.1) as (handoff, raw):
        handoff_id, data = handoff.ticket.handoff_id, payload(handoff)
        slot = await get_slot(handoff, raw)
        raw.send_data(Data(handoff_id, 0, slot, 0, NUM_TOKENS, data.numel(), checksum(data) ^ 2), data)
        assert await raw.hear() == ChunkDone(handoff_id, 0, slot, False)
        assert await raw.ask(Fin(handoff_id, 1, STATE)) == []
        assert isinstance(await handoff.outcome(), DeadlineError)


async def test_data_of_a_wrong_size_or_range_is_never_written() -> None:
    for low, high, num_bytes in [(0, NUM_TOKENS, 100), (0, 99, 2560), (5, 5, 0), (-1, 3, 1024)]:
        async with facing() as (handoff, raw):
            before = handoff.pair.decode.slab.clone()
            slot = await get_slot(handoff, raw)
            raw.link.send(slot, memoryview(bytes(64)))
            answers = await raw.ask(Data(handoff.ticket.handoff_id, 0, slot, low, high, num_bytes, 0))
            assert isinstance(answers[0], Abort)
            await until(lambda: handoff.pair.decode.endpoint.slot_counts.receiving == 0)
            assert torch.equal(handoff.pair.decode.slab, before)


async def test_words_about_unknown_handoffs_are_answered_or_ignored() -> None:
    async with facing() as (handoff, raw):
        assert await raw.ask(Want("nobody", 3), AbortOk("nobody"), Data("nobody", 0, 0, 0, 4, 1024, 0)) == []
        (answer,) = await raw.ask(Fin("nobody", 0, STATE))
        assert isinstance(answer, Abort)
        stop = Abort("nobody", answer.error)
        assert await raw.ask(stop) == [AbortOk("nobody")]
        assert await raw.ask(Fin(handoff.ticket.handoff_id, 0, STATE)) == []  # expected, but not opened


async def test_a_second_connection_cannot_take_an_open_handoff() -> None:
    async with facing() as (handoff, raw):
        await get_slot(handoff, raw)
        async with raw_sender(handoff.pair.port) as other:
            (answer,) = await other.ask(Open(handoff.ticket, 0), Want(handoff.ticket.handoff_id, 1))
            assert isinstance(answer, Abort)
            assert "another connection" in answer.error.message


async def test_a_sender_that_is_gone_ends_its_handoff() -> None:
    async with facing() as (handoff, raw):
        await get_slot(handoff, raw)
        raw.channel.abort()
        assert "was lost" in str(await handoff.outcome())


async def test_garbage_on_both_ports_is_closed_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doorman, door):
        monkeypatch.setattr(module, "UNBOUND_TIMEOUT_S", 0.1)
    async with connected(make_config()) as pair:
        data_port = int(pair.decode.endpoint._address.rpartition(":")[2])
        for port in (pair.port, data_port):
            for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 70_000):
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(garbage)
                if not garbage:
                    writer.write_eof()
                with contextlib.suppress(ConnectionError):
                    async with asyncio.timeout(WAIT_S):
                        while await reader.read(1 << 16):
                            pass  # until the endpoint closes
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
        handoff = pair.handoff(50)
        handoff.expect()
        handoff.open()
        assert (await handoff.result()).error is None
        assert handoff.arrived == 50


async def test_a_close_that_is_cancelled_closes_all_the_same() -> None:
    """Both workers of a pair stop at once: one ends the connection, and the other's answer to that is cut short."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        closing = asyncio.create_task(stream.StreamLink(ours).close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        async with asyncio.timeout(5):
            while ours.fileno() != -1:
                await asyncio.sleep(0)
