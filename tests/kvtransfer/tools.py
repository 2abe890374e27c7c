"""Builders for kvtransfer's tests: tiny endpoints, a pair of them, a hand-driven sender, and one way to wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contracts.blocks import KvLayout
from contracts.channel import Channel, connect
from contracts.config import TransferConfig
from contracts.messages import Data, HandoffState, Hello, Message, Ping, Pong, WorkerInfo
from contracts.request import Token
from contracts.ticket import Ticket, sign
from kvtransfer.endpoint import KvEndpoint
from kvtransfer.incoming import Incoming, Outcome
from kvtransfer.outgoing import Outgoing, OutgoingResult
from kvtransfer.slots import SlotCounts
from kvtransfer.transport import TOKEN_BYTES, Link, Transport
from tests.kvtransfer.links import make_transport

HOST = "127.0.0.1"
SECRET = b"s" * 32
FINGERPRINT = "tiny"
LAYOUT = KvLayout(
    num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32"
)  # 256 bytes per token
SLOT_TOKENS = 16
NUM_BLOCKS = 32
NUM_SLOTS = 4
STATE = HandoffState(Token(0, 7), num_cached_tokens=3)
WAIT_S = 30.0
TOKEN = b"t" * TOKEN_BYTES

_numbers = itertools.count()


def make_config(**changes: Any) -> TransferConfig:
    fields = {
        "slot_bytes": SLOT_TOKENS * LAYOUT.bytes_per_token, "num_slots": NUM_SLOTS, "probe_bytes": 10_000,
        "transport": "tcp", "host": HOST,
    }  # fmt: skip
    return TransferConfig(**(fields | changes))


def make_slab(seed: int, layout: KvLayout = LAYOUT) -> Tensor:
    shape = (NUM_BLOCKS, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, layout.dtype))


def make_ticket(num_tokens: int, handoff_id: str = "", **changes: Any) -> Ticket:
    handoff_id = handoff_id or f"h{next(_numbers)}"
    fields = {
        "handoff_id": handoff_id, "request_id": "r-" + handoff_id, "source_id": "p", "source_incarnation": 1,
        "target_id": "d", "target_incarnation": 1, "num_tokens": num_tokens, "prompt_hash": b"prompt",
    }  # fmt: skip
    return sign(Ticket(**(fields | changes)), SECRET)


def make_info(port: int, worker_id: str = "d", incarnation: int = 1) -> WorkerInfo:
    return WorkerInfo(
        worker_id, "decode", 0, incarnation, HOST, 0, port, FINGERPRINT, LAYOUT, NUM_BLOCKS, 8, 128
    )  # fmt: skip


async def until(is_so: Callable[[], bool], timeout_s: float = WAIT_S, pause_s: float = 0.0) -> None:
    """Let the event loop run until `is_so`; with a pause, other processes run as well on a machine of one core."""
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(pause_s)


@dataclass(frozen=True)
class Held:
    """What this process has of the system."""

    files: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        return cls(len(os.listdir("/proc/self/fd")), threading.active_count())

    async def again(self) -> None:
        """Until it is no more than that. What lies in a cycle is gone when Python has looked for it."""

        def is_no_more() -> bool:
            now = Held.now()
            return now.files <= self.files and now.threads <= self.threads

        try:
            await until(lambda: is_no_more() or (gc.collect() >= 0 and is_no_more()), pause_s=0.002)
        except TimeoutError as error:
            raise AssertionError(f"expected at most {self} but there is {Held.now()}") from error


class Side:
    """An endpoint and its slab."""

    def __init__(
        self,
        name: str,
        seed: int,
        config: TransferConfig,
        layout: KvLayout = LAYOUT,
        fingerprint: str = FINGERPRINT,
        incarnation: int = 1,
    ) -> None:
        self.slab = make_slab(seed, layout)
        self.endpoint = KvEndpoint((name, incarnation), fingerprint, layout, self.slab, config, SECRET)

    @property
    def is_at_rest(self) -> bool:
        """Every slot of both directions is free, but for those that connections keep, and keep only while they last."""
        num_slots, counts = self.endpoint._config.num_slots, self.endpoint.slot_counts
        num_kept = counts.kept if self.endpoint._receiver._connections else 0
        rest = SlotCounts(num_slots - num_kept, 0, 0, 0, num_kept)
        return counts == rest and self.endpoint.num_free_send_slots == num_slots

    def tokens(self, block_ids: Sequence[int]) -> Tensor:
        """[tokens, L, 2, K, D] of the sequence in `block_ids`."""
        return self.slab[list(block_ids)].permute(0, 4, 1, 2, 3, 5).flatten(0, 1).clone()


class Handoff:
    """Both ends of one, and what they were told."""

    def __init__(self, pair: Pair, num_tokens: int, start: int, **changes: Any) -> None:
        loop = asyncio.get_running_loop()
        num_blocks = -(-num_tokens // LAYOUT.block_size)
        self.pair = pair
        self.sources = list(range(num_blocks))
        self.targets = list(range(NUM_BLOCKS - 1, NUM_BLOCKS - 1 - num_blocks, -1))
        self.ticket = make_ticket(num_tokens, **changes)
        self.num_tokens, self.start = num_tokens, start
        self.sent: asyncio.Future[OutgoingResult] = loop.create_future()
        self.received: asyncio.Future[Outcome] = loop.create_future()
        self.num_starts = 0
        self.on_over: Callable[[], None] = lambda: None
        self.outgoing: Outgoing | None = None

    def expect(self) -> Incoming:
        ticket = self.ticket
        return self.pair.decode.endpoint.expect(
            ticket.handoff_id, ticket.request_id, b"prompt", self.num_tokens, self.start, self.targets,
            on_start=self._started, on_done=self.take_over,
        )  # fmt: skip

    def open(self, num_ready: int | None = None) -> Outgoing:
        """Everything is computed, or `num_ready` tokens are and more may come."""
        self.outgoing = self.pair.prefill.endpoint.open(self.ticket, self.start, self.sent.set_result)
        self.ready(self.num_tokens if num_ready is None else num_ready)
        if num_ready is None:
            self.outgoing.finish(STATE)
        return self.outgoing

    def ready(self, num_tokens: int) -> None:
        assert self.outgoing is not None
        self.outgoing.ready(num_tokens, self.sources)

    async def result(self) -> OutgoingResult:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.shield(self.sent)

    async def outcome(self) -> Outcome:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.shield(self.received)

    def take_over(self, outcome: Outcome) -> None:
        self.on_over()
        self.received.set_result(outcome)

    def _started(self) -> None:
        self.num_starts += 1

    @property
    def arrived(self) -> int:
        """How many tokens from `start` on are in place."""
        ours = self.pair.prefill.tokens(self.sources)[self.start : self.num_tokens]
        theirs = self.pair.decode.tokens(self.targets)[self.start : self.num_tokens]
        return int((ours == theirs).flatten(1).all(1).sum())


class Growing(Handoff):
    """A migration: `num_known` tokens are known when it begins, `num_tokens` when it ends; there is room for all."""

    def __init__(self, pair: Pair, num_known: int, num_tokens: int, start: int = 0, **changes: Any) -> None:
        super().__init__(pair, num_tokens, start, **changes)
        self.num_known = num_known
        self.ticket = make_ticket(num_known, self.ticket.handoff_id)
        self.num_caught_up = 0

    @property
    def state(self) -> HandoffState:
        return HandoffState(Token(0, 7), 3, tuple(range(self.num_known, self.num_tokens)))

    def expect(self, num_more: int | None = None) -> Incoming:
        ticket, room = self.ticket, self.num_tokens - self.num_known
        return self.pair.decode.endpoint.expect(
            ticket.handoff_id, ticket.request_id, b"prompt", self.num_known, self.start, self.targets,
            num_more=room if num_more is None else num_more,
            on_start=self._started, on_done=self.take_over,
        )  # fmt: skip

    def open(self, num_ready: int | None = None) -> Outgoing:
        self.outgoing = self.pair.prefill.endpoint.open(
            self.ticket, self.start, self.sent.set_result, self._caught_up
        )
        self.ready(self.num_known if num_ready is None else num_ready)
        return self.outgoing

    def _caught_up(self) -> None:
        self.num_caught_up += 1


class Pair:
    """A prefill and a decode endpoint, connected."""

    def __init__(self, prefill: Side, decode: Side, port: int) -> None:
        self.prefill, self.decode, self.port = prefill, decode, port

    def handoff(self, num_tokens: int, start: int = 0, **changes: Any) -> Handoff:
        return Handoff(self, num_tokens, start, **changes)

    async def rest(self) -> None:
        await until(lambda: self.prefill.is_at_rest and self.decode.is_at_rest)


@contextlib.asynccontextmanager
async def linked(dialler: Transport, listener: Transport) -> AsyncIterator[tuple[Link, Link]]:
    """(dialler's, listener's) ends; leaves no task."""
    tasks = asyncio.all_tasks()
    address = await listener.listen()
    near, far = await asyncio.gather(dialler.connect(address, TOKEN, WAIT_S), listener.accept(TOKEN, WAIT_S))
    try:
        yield near, far
    finally:
        for part in (near, far, dialler, listener):
            await part.close()
    await until(lambda: asyncio.all_tasks() <= tasks)


@contextlib.asynccontextmanager
async def decode_side(config: TransferConfig) -> AsyncIterator[tuple[Side, int]]:
    """A started endpoint "d" and its kv_port; closing it leaves no task."""
    tasks = asyncio.all_tasks()
    side = Side("d", 2, config)
    try:
        yield side, await side.endpoint.start(HOST)
    finally:
        await side.endpoint.close()
    assert side.is_at_rest
    await until(lambda: asyncio.all_tasks() <= tasks)


@contextlib.asynccontextmanager
async def connected(config: TransferConfig) -> AsyncIterator[Pair]:
    """Ends by checking that every slot came back and no task is left."""
    async with decode_side(config) as (decode, port):
        prefill = Side("p", 1, config)
        try:
            await prefill.endpoint.start(HOST)
            prefill.endpoint.set_peers([make_info(port)])
            await until(lambda: prefill.endpoint.peer_statuses()[0].is_ready)
            pair = Pair(prefill, decode, port)
            yield pair
            await pair.rest()
        finally:
            await prefill.endpoint.close()


class RawSender:
    """A peer that says what the test wants it to say."""

    def __init__(self, channel: Channel, link: Link) -> None:
        self.channel, self.link = channel, link

    def send_data(self, head: Data, content: Tensor) -> None:
        """Announce `content` and let it follow, or lie there already, whichever this link does."""
        staged = self.link.staging(head.slot)
        if staged is not None:
            staged[: content.numel()] = memoryview(content.numpy())
        self.channel.send(head)
        if staged is None:
            self.link.send(head.slot, memoryview(content.numpy()))

    async def ask(self, *messages: Message) -> list[Message]:
        """Everything that was answered by the time all `messages` were handled."""
        number = next(_numbers)
        for message in (*messages, Ping(number)):
            self.channel.send(message)
        answers: list[Message] = []
        async with asyncio.timeout(WAIT_S):
            while (answer := await self.channel.receive()) != Pong(number):
                answers.append(answer)
        return answers

    async def hear(self) -> Message:
        async with asyncio.timeout(WAIT_S):
            return await self.channel.receive()


@contextlib.asynccontextmanager
async def raw_sender(port: int, name: str = "p") -> AsyncIterator[RawSender]:
    channel = await connect(HOST, port, Hello(name, 1, "kv", b"", FINGERPRINT, LAYOUT), SECRET)
    transport, _, address = channel.peer.data_address.partition("=")
    dialler = make_transport(transport)
    link = await dialler.connect(address, channel.peer.bind_token, WAIT_S)
    try:
        yield RawSender(channel, link)
    finally:
        await link.close()
        await channel.close()
        await dialler.close()
