"""One prefill and one decode worker, driven by hand: how long a reservation lives, and who tells which end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from contracts.blocks import prompt_hash
from contracts.channel import Channel, connect
from contracts.errors import BatonError, LeaseExpiredError, TryAgain, WorkerLostError, from_wire
from contracts.messages import (
    AskAudit,
    AuditReply,
    Ended,
    HandedOff,
    Hello,
    Message,
    Prefill,
    Reserve,
    Reserved,
    Status,
    Tokens,
)
from contracts.request import GenerateRequest
from contracts.ticket import Ticket, sign
from tests.local.cluster import SECRET, LocalCluster, greedy, local_cluster
from worker.worker import Worker

PROMPT = [3 + i % 50 for i in range(100)]
WAIT_S = 10.0


class Told:
    """A coordinator's connection to one worker, and everything but statuses that came over it."""

    def __init__(self, worker: Worker, channel: Channel) -> None:
        self.worker = worker
        self.channel = channel
        self.messages: list[Message] = []

    async def until(self, is_it: Callable[[Message], bool]) -> Message:
        """The first such message from now on."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self.channel.receive()
                if not isinstance(message, Status | AuditReply):
                    self.messages.append(message)
                if is_it(message):
                    return message

    async def ended(self, name: str) -> Ended:
        message = await self.until(lambda m: isinstance(m, Ended) and m.request_id == name)
        assert isinstance(message, Ended)
        return message

    async def audited(self, state: str, is_so: Callable[[int], bool]) -> None:
        """Ask for audits until the blocks in `state` are as many as wanted."""
        while True:
            self.channel.send(AskAudit(1))
            reply = await self.until(lambda m: isinstance(m, AuditReply))
            assert isinstance(reply, AuditReply)
            if is_so(getattr(reply.audit, state)):
                return

    def of(self, name: str) -> list[type[Message]]:
        """The kinds of message about one request, in order."""
        return [
            type(message)
            for message in self.messages
            if getattr(message, "request_id", "") == name
            or (
                isinstance(message, Tokens)
                and any(item[0] == name for item in (*message.plain, *message.detailed))
            )
        ]


class Pair:
    """What a coordinator does, without its decisions."""

    def __init__(self, prefill: Told, decode: Told) -> None:
        self.prefill = prefill
        self.decode = decode

    async def reserve(self, request: GenerateRequest, lease_s: float) -> Reserved:
        self.decode.channel.send(Reserve(request, "h-" + request.request_id, lease_s))
        message = await self.decode.until(lambda m: isinstance(m, Reserved))
        assert isinstance(message, Reserved)
        return message

    def go(self, request: GenerateRequest, skip_tokens: int = 0) -> None:
        source, target = self.prefill.worker.info, self.decode.worker.info
        ticket = Ticket(
            "h-" + request.request_id,
            request.request_id,
            source.worker_id,
            source.incarnation,
            target.worker_id,
            target.incarnation,
            request.num_known_tokens,
            prompt_hash(request.prompt_ids, request.salt),
        )
        self.prefill.channel.send(Prefill(request, sign(ticket, SECRET), skip_tokens))


@asynccontextmanager
async def pair_of(cluster: LocalCluster) -> AsyncIterator[Pair]:
    async with asyncio.timeout(4 * WAIT_S):
        told = []
        for worker in (cluster.workers["prefill-0"], cluster.workers["decode-0"]):
            hello = Hello("by-hand", 1, "commands", b"")
            told.append(Told(worker, await connect("127.0.0.1", worker.info.port, hello, SECRET)))
        yield Pair(*told)
        for one in told:
            one.channel.abort()


@contextmanager
def held_up(worker: Worker) -> Iterator[threading.Event]:
    """The worker's engine thread takes no step until the event is set: all that comes now waits in its line."""
    event = threading.Event()
    worker._engine.submit(lambda: event.wait() and None)
    try:
        yield event
    finally:
        event.set()


def failures(cluster: LocalCluster) -> dict[str, int]:
    return {name: worker._desk.num_handoff_failures for name, worker in cluster.workers.items()}


async def test_a_reservation_outlives_its_lease_while_its_request_waits_in_line(tiny_model: Path) -> None:
    """The second one was reserved later and nobody opened it: when its lease is over, so is the first one's time."""
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster, pair_of(cluster) as pair:
        kept, left = greedy("kept", PROMPT, 4, ignore_eos=True), greedy("left", PROMPT, 4)
        with held_up(cluster.workers["prefill-0"]) as go_on:
            await pair.reserve(kept, lease_s=1.0)
            pair.go(kept)
            await pair.decode.audited("in_handoff", lambda count: count > 0)
            await pair.reserve(left, lease_s=1.0)
            end = await pair.decode.ended("left")
            assert end.error is not None
            assert isinstance(from_wire(end.error), LeaseExpiredError)
            assert pair.decode.of("kept") == [Reserved]
            go_on.set()
        await pair.prefill.until(lambda m: isinstance(m, HandedOff))
        assert (await pair.decode.ended("kept")).finished is not None
        assert cluster.workers["decode-0"]._desk.num_lease_expiries == 1


async def test_a_prefill_worker_that_is_gone_ends_what_waits_in_its_line(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster, pair_of(cluster) as pair:
        request = greedy("orphan", PROMPT, 4)
        with held_up(cluster.workers["prefill-0"]):
            await pair.reserve(request, lease_s=WAIT_S)
            pair.go(request)
            await pair.decode.audited("in_handoff", lambda count: count > 0)
            for connection in list(cluster.workers["decode-0"]._kv._receiver._connections.values()):
                connection.channel.abort()
            for end in (await pair.decode.ended("orphan"), await pair.prefill.ended("orphan")):
                assert end.error is not None
                assert isinstance(from_wire(end.error), WorkerLostError)
        await pair.decode.audited("in_handoff", lambda count: count == 0)
        await pair.prefill.audited("running", lambda count: count == 0)


@pytest.mark.parametrize("lives_on", ["prefill-0", "decode-0"])
async def test_a_request_for_a_stranger_is_told_at_once(tiny_model: Path, lives_on: str) -> None:
    """It does not wait in line first, only to find out that there is no way to hand it off."""
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster, pair_of(cluster) as pair:
        request = greedy("lost", PROMPT, 4)
        with held_up(cluster.workers["prefill-0"]):
            if lives_on == "prefill-0":
                cluster.workers["prefill-0"]._kv.set_peers([])
            pair.go(request)  # decode expects no such handoff
            end = await pair.prefill.ended("lost")
        assert end.error is not None
        assert isinstance(from_wire(end.error), TryAgain)
        await pair.prefill.audited("running", lambda count: count == 0)


@pytest.mark.parametrize("last", ["length", "stop"])
async def test_an_end_at_the_first_token_is_told_by_prefill_alone(tiny_model: Path, last: str) -> None:
    """Decode lets go of its blocks, unasked, and has neither an event nor a failure to tell."""
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster, pair_of(cluster) as pair:
        (first_token, _), _ = await cluster.run(greedy("look", PROMPT, 2, ignore_eos=True))
        limits = (
            {"max_tokens": 1} if last == "length" else {"max_tokens": 50, "stop_token_ids": (first_token,)}
        )
        request = greedy("one", PROMPT, **limits)
        reserved = await pair.reserve(request, lease_s=WAIT_S)
        pair.go(request, reserved.num_cached_tokens)
        end = await pair.prefill.ended("one")
        assert end.finished is not None
        assert end.finished.reason == last
        assert pair.prefill.of("one") == [Tokens, Ended]
        await pair.decode.audited("in_handoff", lambda count: count == 0)
        await pair.decode.audited("reserved", lambda count: count == 0)
        assert pair.decode.of("one") == [Reserved]
        assert set(failures(cluster).values()) == {0}


async def test_a_refused_prefill_is_told_by_prefill_alone(tiny_model: Path) -> None:
    async with (
        local_cluster(tiny_model, engine__num_blocks=64, engine__max_waiting=1) as cluster,
        pair_of(cluster) as pair,
    ):
        waiting, refused = greedy("waiting", PROMPT, 2, ignore_eos=True), greedy("refused", PROMPT, 2)
        with held_up(cluster.workers["prefill-0"]):
            for request in (waiting, refused):
                await pair.reserve(request, lease_s=WAIT_S)
                pair.go(request)
            await pair.decode.audited("in_handoff", lambda count: count == 14)  # both are in line
        error: BatonError = await _error(pair.prefill, "refused")
        assert "waiting already" in error.message
        assert (await pair.decode.ended("waiting")).finished is not None
        await pair.decode.audited("in_handoff", lambda count: count == 0)
        assert pair.decode.of("refused") == [Reserved]
        assert set(failures(cluster).values()) == {0}


async def test_one_token_requests_are_no_failures_and_no_retries(tiny_model: Path) -> None:
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster:
        for number in range(20):
            ids, end = await cluster.run(greedy(f"one{number}", PROMPT[number:], 1))
            assert (len(ids), end.reason) == (1, "length")
        await cluster.settled()
        assert set(failures(cluster).values()) == {0}
        assert cluster.workers["prefill-0"]._desk.num_handoffs == 0


async def test_a_prompt_that_decode_holds_is_not_sent_again(tiny_model: Path) -> None:
    """Nor is the next turn, of which the decode worker has written a part itself: only what is new goes its way."""
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster:
        first = greedy("first", PROMPT, 30, ignore_eos=True)
        answer, _ = await cluster.run(first)
        desk = cluster.workers["prefill-0"]._desk
        sent = desk.num_handoffs, desk.num_handoff_bytes
        again, end = await cluster.run(greedy("again", PROMPT, 30, ignore_eos=True))
        assert again == answer
        assert end.num_cached_tokens == 96
        assert (desk.num_handoffs, desk.num_handoff_bytes) == sent
        _, end = await cluster.run(greedy("turn", [*PROMPT, *answer, 5], 2, ignore_eos=True))
        assert end.num_cached_tokens == 128
        assert (desk.num_handoffs, desk.num_handoff_bytes) == sent
        await cluster.run(greedy("long turn", [*PROMPT, *answer, *range(3, 43)], 2, ignore_eos=True))
        layout = cluster.workers["prefill-0"].info.layout
        assert desk.num_handoff_bytes - sent[1] == (130 + 40 - 128) * layout.bytes_per_token
        await cluster.settled()
        incoming = cluster.workers["decode-0"]._kv._receiver
        assert incoming.num_expected == 0


async def _error(told: Told, name: str) -> BatonError:
    end = await told.ended(name)
    assert end.error is not None
    return from_wire(end.error)
