"""Prefill's side of one connection, to one life of one decode worker.

┌► connect ──► data link ──► self-test ──► READY ──EOF │ silence │ nonsense──► all handoffs fail ──┐
└──────────────────────────── back-off ◄──refused, not reachable, self-test failed ◄────────────────┘
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable

from contracts.channel import Channel, connect, raise_if_refused
from contracts.config import TransferConfig
from contracts.errors import (
    BatonError,
    ConfigError,
    HandoffError,
    ProtocolError,
    WorkerLostError,
    from_wire,
)
from contracts.messages import (
    Abort,
    AbortOk,
    ChunkDone,
    Commit,
    Grant,
    Hello,
    Message,
    PeerStatus,
    Ping,
    Pong,
    ProbeDone,
    WorkerInfo,
)
from contracts.ticket import Ticket
from kvtransfer.outgoing import Outgoing, OutgoingResult, Route
from kvtransfer.pages import Pages
from kvtransfer.selftest import SelfTest
from kvtransfer.slots import SendSlots
from kvtransfer.transport import Link, Transport
from kvtransfer.watch import Watch

logger = logging.getLogger("baton.kvtransfer")

FIRST_BACK_OFF_S = 0.1
LONGEST_BACK_OFF_S = 5.0


def check_peer(ours: Hello, peer: Hello) -> None:
    """Raises ConfigError with both sides' values if blocks of `peer` mean something else than ours."""
    if peer.fingerprint != ours.fingerprint:
        raise ConfigError(
            f"expected model {ours.fingerprint!r} of {ours.sender_id} but {peer.sender_id} has {peer.fingerprint!r}"
        )
    if peer.layout != ours.layout:
        raise ConfigError(
            f"expected {ours.layout} of {ours.sender_id} but {peer.sender_id} has {peer.layout}"
        )
    least = ours.layout.bytes_per_token if ours.layout is not None else 1
    if peer.slot_bytes and peer.slot_bytes < least:
        raise ConfigError(
            f"expected transfer.slot_bytes of at least {least} (one token's KV) "
            f"but {peer.sender_id} has {peer.slot_bytes}"
        )


class Sender:
    """`run` is the task that keeps the connection; `status` is what it has come to."""

    def __init__(
        self,
        info: WorkerInfo,
        hello: Hello,
        secret: bytes,
        transport: Transport,
        pages: Pages,
        slots: SendSlots,
        config: TransferConfig,
        on_change: Callable[[], None],
    ) -> None:
        self.info = info
        self.status = PeerStatus(info.worker_id, False, transport.name, detail="connecting")
        self._hello = hello
        self._secret = secret
        self._transport = transport
        self._pages = pages
        self._slots = slots
        self._config = config
        self._on_change = on_change
        self._outgoing: dict[str, Outgoing] = {}
        self._route: Route | None = None
        self._silence: WorkerLostError | None = None

    def open(
        self,
        ticket: Ticket,
        start: int,
        on_done: Callable[[OutgoingResult], None],
    ) -> Outgoing:
        error: BatonError | None = None
        if self._route is None or not self.status.is_ready:
            error = WorkerLostError(f"no connection to {self.info.worker_id}: {self.status.detail}")
        elif ticket.target_incarnation != self.info.incarnation:
            error = WorkerLostError(
                f"{self.info.worker_id}: expected incarnation {self.info.incarnation} "
                f"but the ticket names {ticket.target_incarnation}"
            )
        elif ticket.handoff_id in self._outgoing:
            error = HandoffError(f"handoff {ticket.handoff_id} is under way already")
        if error is not None or self._route is None:
            return Outgoing(ticket, start, on_done, error or WorkerLostError("not connected"))
        outgoing = Outgoing(ticket, start, on_done, self._route)
        self._outgoing[ticket.handoff_id] = outgoing
        return outgoing

    async def run(self) -> None:
        back_off_s = FIRST_BACK_OFF_S
        try:
            while True:
                begun_s = time.monotonic()
                try:
                    await self._connect()
                except BatonError as error:
                    reason = self._silence or error
                    logger.info("kv connection to %s: %s", self.info.worker_id, reason)
                    self._set(
                        PeerStatus(self.info.worker_id, False, self._transport.name, detail=str(reason))
                    )
                if time.monotonic() - begun_s > LONGEST_BACK_OFF_S:
                    back_off_s = FIRST_BACK_OFF_S  # it worked for a while: this is a new trouble
                await asyncio.sleep(back_off_s * random.uniform(0.5, 1.0))
                back_off_s = min(2 * back_off_s, LONGEST_BACK_OFF_S)
        finally:
            self._fail_all(WorkerLostError(f"{self.info.worker_id} was removed from the peers"))

    async def _connect(self) -> None:
        """One connection, to its end. Raises what ended it."""
        self._silence = None
        channel = await connect(self.info.host, self.info.kv_port, self._hello, self._secret, self._check)
        try:
            peer = channel.peer
            link = await self._transport.connect(
                peer.data_address, peer.bind_token, self._config.connect_timeout_s
            )
            try:
                await self._talk(channel, link)
            finally:
                self._fail_all(WorkerLostError(f"connection to {self.info.worker_id} was lost"))
                channel.abort()
                await link.close()
        finally:
            channel.abort()

    async def _talk(self, channel: Channel, link: Link) -> None:
        config = self._config
        slot_bytes = min(config.slot_bytes, channel.peer.slot_bytes or config.slot_bytes)
        if slot_bytes < config.slot_bytes:
            logger.info(
                "transfer.slot_bytes: %d here but %d at %s: pieces are cut to the smaller",
                config.slot_bytes, slot_bytes, self.info.worker_id,
            )  # fmt: skip
        self._route = Route(
            channel.send, link, self._slots, self._pages, slot_bytes, config.progress_timeout_s,
            lambda handoff_id: self._forget(handoff_id),
        )  # fmt: skip
        test = SelfTest(config.probe_bytes, slot_bytes, channel, link, self._slots)
        numbers = itertools.count()

        def ping() -> None:
            if not channel.is_closed:
                channel.send(Ping(next(numbers)))

        watch = Watch(config.peer_timeout_s, ping, lambda: self._give_up(channel, "is silent"))
        loop = asyncio.get_running_loop()
        limit = loop.call_later(
            config.connect_timeout_s, self._give_up, channel, "did not finish the self-test in time"
        )
        try:
            test.start()
            while True:
                if test.is_passed and not self.status.is_ready:
                    limit.cancel()
                    self._set(
                        PeerStatus(self.info.worker_id, True, self._transport.name, test.gigabytes_per_s)
                    )
                message = raise_if_refused(await channel.receive())
                watch.heard()
                self._handle(channel, test, message)
        finally:
            limit.cancel()
            watch.stop()
            test.stop()
            self._route = None

    def _handle(self, channel: Channel, test: SelfTest, message: Message) -> None:
        match message:
            case Grant(handoff_id="", slots=slots):
                test.granted(slots)
            case Grant(handoff_id, slots):
                if (outgoing := self._outgoing.get(handoff_id)) is not None:
                    outgoing.granted(slots)
            case ChunkDone(handoff_id):
                if (outgoing := self._outgoing.get(handoff_id)) is not None:
                    outgoing.chunk_done(message)
            case Commit(handoff_id):
                if (outgoing := self._outgoing.get(handoff_id)) is not None:
                    outgoing.committed()
            case Abort(handoff_id, error):
                if (outgoing := self._outgoing.get(handoff_id)) is not None:
                    given_up = HandoffError(f"{self.info.worker_id} gave the handoff up")
                    outgoing.fail(from_wire(error) if error is not None else given_up)
                channel.send(AbortOk(handoff_id))
            case ProbeDone(_, is_ok):
                test.probe_done(is_ok)
            case AbortOk() | Pong():
                pass
            case _:
                raise ProtocolError(f"expected a receiver's message but got {type(message).__name__}")

    def _check(self, peer: Hello) -> None:
        life = (self.info.worker_id, self.info.incarnation)
        if (peer.sender_id, peer.incarnation) != life:
            raise WorkerLostError(f"expected {life} but reached {(peer.sender_id, peer.incarnation)}")
        check_peer(self._hello, peer)

    def _give_up(self, channel: Channel, why: str) -> None:
        self._silence = WorkerLostError(f"{self.info.worker_id} {why}")
        channel.abort()

    def _forget(self, handoff_id: str) -> None:
        self._outgoing.pop(handoff_id, None)

    def _fail_all(self, error: BatonError) -> None:
        for outgoing in list(self._outgoing.values()):
            outgoing.fail(error)

    def _set(self, status: PeerStatus) -> None:
        if status != self.status:
            self.status = status
            self._on_change()
