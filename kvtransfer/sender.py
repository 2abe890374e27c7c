"""The sending side of one connection, to one life of one decode worker.

┌► connect ──► data link ──► self-test ──► READY ──EOF │ silence │ nonsense──► all handoffs fail ──┐
│                 └── no link, or it failed the test: the next path, at once, while there is one   │
└──────────────────────────── back-off ◄──refused, not reachable, no path is left ◄─────────────────┘
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

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
    Keep,
    Message,
    PeerEvent,
    PeerStatus,
    Ping,
    Pong,
    ProbeDone,
    WorkerInfo,
)
from contracts.ticket import Ticket
from kvtransfer.fp8 import Fp8Source, is_agreed
from kvtransfer.joined import AnyPages
from kvtransfer.outgoing import Outgoing, OutgoingResult
from kvtransfer.paths import LEAST_JUDGED_BYTES, ON_ONE_HOST, Path, Paths, least_gigabytes_per_s
from kvtransfer.reshard import Reshard, check_layouts
from kvtransfer.route import Route, Source
from kvtransfer.selftest import SelfTest
from kvtransfer.slots import KEPT_SLOTS, SendSlots, Staging
from kvtransfer.stretch import OnMoved
from kvtransfer.transport import Link, LinkClosed, Op
from kvtransfer.watch import WATCH_TAG, Watch, watch_link, while_it_lasts

logger = logging.getLogger("baton.kvtransfer")

NUM_EVENTS = 8  # of each connection, kept for operators
FIRST_BACK_OFF_S = 0.1
LONGEST_BACK_OFF_S = 5.0


def check_peer(ours: Hello, peer: Hello) -> None:
    """Raises ConfigError with both sides' values if blocks of `peer` mean something else than ours."""
    if peer.fingerprint != ours.fingerprint:
        raise ConfigError(
            f"expected model {ours.fingerprint!r} of {ours.sender_id} but {peer.sender_id} has {peer.fingerprint!r}"
        )
    if ours.layout is None or peer.layout is None:
        raise ConfigError(f"expected a kv layout but {peer.sender_id} has {peer.layout}")
    try:
        check_layouts(ours.layout, peer.layout)
    except ConfigError as error:
        raise ConfigError(f"{error} ({ours.sender_id}, {peer.sender_id})") from error
    least = max(ours.layout.bytes_per_token, peer.layout.bytes_per_token)
    for hello in (ours, peer):
        if hello.slot_bytes and hello.slot_bytes < least:
            raise ConfigError(
                f"expected transfer.slot_bytes of at least {least} (one token's KV) "
                f"but {hello.sender_id} has {hello.slot_bytes}"
            )


def check_slots(slots: Sequence[int]) -> None:
    """Raises ProtocolError if a peer grants what cannot be a slot: the number is the tag of a message."""
    if not all(0 <= slot < WATCH_TAG for slot in slots):
        raise ProtocolError(f"expected slots within [0, {WATCH_TAG}) but peer granted {slots}")


class _PathFailed(HandoffError):
    """The data link did not come about, or failed its test; the peer itself answers."""


class Sender:
    """`run` is the task that keeps the connection; `status` is what it has come to."""

    def __init__(
        self,
        info: WorkerInfo,
        hello: Hello,
        secret: bytes,
        paths: Paths,
        pages: AnyPages,
        slots: SendSlots,
        config: TransferConfig,
        on_change: Callable[[], None],
        on_moved: OnMoved,
    ) -> None:
        self.info = info
        self.status = PeerStatus(info.worker_id, False, detail="connecting")
        self._hello = hello
        self._secret = secret
        self._paths = paths
        self._path_name = ""
        self._failed: dict[str, str] = {}  # paths that are not tried (again) now, and why
        self._pages = pages
        self._slots = slots
        self._config = config
        self._on_change = on_change
        self._on_moved = on_moved
        self._outgoing: dict[str, Outgoing] = {}
        self._route: Route | None = None
        self._silence: WorkerLostError | None = None
        self._events: deque[tuple[float, str]] = deque(maxlen=NUM_EVENTS)

    def status_now(self) -> PeerStatus:
        """With what has happened lately."""
        now_s = time.monotonic()
        return replace(
            self.status, events=tuple(PeerEvent(now_s - at_s, text) for at_s, text in self._events)
        )

    @property
    def num_open(self) -> int:
        return len(self._outgoing)

    def open(
        self,
        ticket: Ticket,
        start: int,
        on_done: Callable[[OutgoingResult], None],
        on_caught_up: Callable[[], None] | None = None,
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
        outgoing = Outgoing(ticket, start, on_done, self._route, on_caught_up)
        self._outgoing[ticket.handoff_id] = outgoing
        return outgoing

    async def run(self) -> None:
        back_off_s = FIRST_BACK_OFF_S
        try:
            while True:
                begun_s = time.monotonic()
                try:
                    await self._connect()
                except Exception as error:  # whatever it is, the pair finds together again
                    # NOTE: the error itself must not be kept: it holds all that was part of the connection.
                    reason = str(self._silence or error) or repr(error)
                    is_ours = isinstance(error, BatonError)
                    logger.info("kv connection to %s: %s", self.info.worker_id, reason, exc_info=not is_ours)
                    self._set(PeerStatus(self.info.worker_id, False, self._path_name, detail=reason))
                    if isinstance(error, _PathFailed):
                        self._failed[self._path_name] = reason
                        continue
                self._failed.clear()  # what was no path then may be one now
                if time.monotonic() - begun_s > LONGEST_BACK_OFF_S:
                    back_off_s = FIRST_BACK_OFF_S  # it worked for a while: this is a new trouble
                await asyncio.sleep(back_off_s * random.uniform(0.5, 1.0))
                back_off_s = min(2 * back_off_s, LONGEST_BACK_OFF_S)
        finally:
            self._fail_all(WorkerLostError(f"{self.info.worker_id} was removed from the peers"))

    async def _connect(self) -> None:
        """One connection, to its end. Raises what ended it; _PathFailed if another path is worth a try."""
        self._silence = None
        channel = await connect(self.info.host, self.info.kv_port, self._hello, self._secret, self._check)
        try:
            path = self._choose(channel.peer.data_address)
            try:
                dialling = path.transport.connect(
                    path.address, channel.peer.bind_token, self._config.connect_timeout_s
                )
                link = await while_it_lasts(channel, dialling)
            except LinkClosed as error:
                raise _PathFailed(str(error)) from error
            staging = Staging(link)
            try:
                await self._talk(channel, link, staging)
            finally:
                self._fail_all(WorkerLostError(f"connection to {self.info.worker_id} was lost"))
                channel.abort()
                staging.close()
                await link.close()
        finally:
            channel.abort()

    def _choose(self, published: str) -> Path:
        """The best path that has not just failed. Raises LinkClosed if none is left."""
        paths = self._paths.common(published)
        for path in paths:
            if path.name not in self._failed:
                self._path_name = path.name
                return path
        raise LinkClosed("; ".join(f"{name}: {why}" for name, why in self._failed.items()))

    async def _talk(self, channel: Channel, link: Link, staging: Staging) -> None:
        config = self._config
        channel.batch()
        slot_bytes = min(config.slot_bytes, channel.peer.slot_bytes or config.slot_bytes)
        if slot_bytes < config.slot_bytes:
            logger.info(
                "transfer.slot_bytes: %d here but %d at %s: pieces are cut to the smaller",
                config.slot_bytes, slot_bytes, self.info.worker_id,
            )  # fmt: skip
        route = self._route = Route(
            channel.send, link, staging, self._is_summed, self._slots, self._pages_for(channel.peer), slot_bytes,
            config.progress_timeout_s, self._forget, self._on_moved, deque(),
        )  # fmt: skip
        numbers = itertools.count()

        def ping() -> None:
            if not channel.is_closed:
                channel.send(Ping(next(numbers)))

        watch = Watch(config.peer_timeout_s, ping, lambda: self._give_up(channel, "is silent"))
        end = watch_link(link, channel)
        try:
            least = self._least_gigabytes_per_s()
            speed = await self._pass(SelfTest(config.probe_bytes, channel, route, least), channel, watch, end)
            channel.send(Keep(KEPT_SLOTS))
            self._set(self._judge(speed, least))
            while True:
                self._handle(channel, raise_if_refused(await channel.receive()))
                watch.heard()
        finally:
            watch.stop()
            self._route = None

    def _pages_for(self, peer: Hello) -> Source:
        """Our blocks as the peer's layout wants them, rounded if both want that."""
        pages: AnyPages | Reshard = self._pages
        if peer.layout is not None and peer.layout != self._pages.layout:
            logger.info("kv of %s: %s becomes %s", self.info.worker_id, self._pages.layout, peer.layout)
            pages = Reshard(self._pages, peer.layout)
        if self._hello.wire_dtype != peer.wire_dtype:
            logger.info(
                "transfer.wire_dtype: %s here but %s at %s: kv is not rounded",
                self._hello.wire_dtype or "auto", peer.wire_dtype or "auto", self.info.worker_id,
            )  # fmt: skip
        return Fp8Source(pages) if is_agreed(self._hello, peer) else pages

    async def _pass(self, test: SelfTest, channel: Channel, watch: Watch, end: Op) -> float:
        """Run the self-test: GB/s. Raises _PathFailed if bytes are damaged or do not come in time, or the link ends."""
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                test.start()
                while not test.is_passed:
                    message = raise_if_refused(await channel.receive())
                    watch.heard()
                    match message:
                        case Grant(handoff_id="", slots=slots):
                            check_slots(slots)
                            test.granted(slots)
                        case ProbeDone(slot, is_ok):
                            await test.probe_done(slot, is_ok)
                        case _:
                            self._handle(channel, message)
            return test.gigabytes_per_s
        except TimeoutError as error:
            raise _PathFailed("the transfer self-test did not finish in time") from error
        except HandoffError as error:
            raise _PathFailed(str(error)) from error
        except WorkerLostError as error:
            if end.final.done() and self._silence is None:
                raise _PathFailed("the data link ended during the transfer self-test") from error
            raise
        finally:
            test.stop()

    @property
    def _is_summed(self) -> bool:
        """Whether chunks carry checksums on the path of now."""
        if self._config.checksum != "auto":
            return self._config.checksum == "always"
        return self._path_name not in ON_ONE_HOST and self.info.host != self._paths.host

    def _least_gigabytes_per_s(self) -> float:
        """Of the path of now; 0 if the self-test is too short to be judged."""
        if self._config.probe_bytes < LEAST_JUDGED_BYTES:
            return 0.0
        return least_gigabytes_per_s(self._path_name, self._paths.host)

    def _judge(self, speed: float, least: float) -> PeerStatus:
        """Ready; and what an operator should know about the path. Both in GB/s."""
        is_slow = speed < least
        notes = [f"{name} is not used: {why}" for name, why in self._failed.items()]
        if is_slow:
            notes.append(
                f"expected at least {least:.2g} GB/s over {self._path_name} but measured {speed:.2g}"
            )
        if notes:
            logger.warning("kv path to %s: %s", self.info.worker_id, "; ".join(notes))
        logger.info("kv path to %s: %s, %.2g GB/s", self.info.worker_id, self._path_name, speed)
        return PeerStatus(self.info.worker_id, True, self._path_name, speed, "; ".join(notes), is_slow)

    def _handle(self, channel: Channel, message: Message) -> None:
        match message:
            case Grant(handoff_id, slots):
                check_slots(slots)
                if not handoff_id and self._route is not None:
                    self._route.kept.extend(slots)
                elif (outgoing := self._outgoing.get(handoff_id)) is not None:
                    outgoing.granted(slots)
            case ChunkDone(handoff_id):
                check_slots(message.granted)
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
            case AbortOk() | Pong() | ProbeDone():
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
            self._events.append((time.monotonic(), _words(status)))
            self._on_change()


def _words(status: PeerStatus) -> str:
    """One line for an operator."""
    if not status.is_ready:
        return f"not connected: {status.detail}"
    text = f"ready over {status.transport}, {status.gigabytes_per_s:.2g} GB/s"
    return f"{text}; {'slow; ' if status.is_slow else ''}{status.detail}" if status.detail else text
