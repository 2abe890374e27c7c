"""The coordinator's end of the data plane: one authenticated, multiplexed connection per worker.

    connecting ──► alive (Status every second) ──► lost ──► connecting … until the worker leaves the fleet

When a link is lost, by EOF or by silence longer than `worker_timeout_s`, every request on it gets a WorkerLostError at
once, so no request waits for a dead worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from contracts.cached import Cached
from contracts.channel import Channel, connect
from contracts.errors import BatonError, EngineError, ProtocolError, WorkerLostError, from_wire
from contracts.messages import (
    AskAudit,
    AuditReply,
    Cancel,
    Ended,
    HandedOff,
    Hello,
    Message,
    Reserved,
    Status,
    Stayed,
    Tokens,
    WorkerInfo,
)
from contracts.request import Finished, Token
from contracts.roles import RoleLabel
from coordinator.alarm import Patience

logger = logging.getLogger("baton.coordinator")


@dataclass(frozen=True, slots=True)
class MoveOn:
    """Not a worker's word: whoever can shall leave this worker, without a break, for one where at least `free_share` of
    the blocks are free.
    """

    free_share: float = 0.0


Event = Reserved | Token | HandedOff | Stayed | Finished | MoveOn | BatonError
MAX_BACKOFF_S = 1.0


class WorkerLink:
    """One worker as this coordinator sees it. `run` is its owner task.

    `on_change(link)` fires whenever its state changes or its load falls, `on_load(worker_id)` at any change of both,
    `on_cached(worker_id, news)` with what it tells of its prefix cache: nothing is known of that of a lost one.
    """

    def __init__(
        self,
        info: WorkerInfo,
        hello: Hello,
        secret: bytes,
        timeout_s: float,
        on_change: Callable[[WorkerLink], None],
        on_load: Callable[[str], None],
    ) -> None:
        self.info = info
        self.status: Status | None = None
        self._hello = hello
        self._secret = secret
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._on_load = on_load
        self.on_cached: Callable[[str, Cached], None] = lambda _worker_id, _news: None
        self._channel: Channel | None = None
        self._sinks: dict[str, Callable[[Event], None]] = {}
        self._num_tokens: dict[str, int] = {}
        self._total_tokens = 0
        self._reading: set[str] = set()
        self._audits: dict[int, asyncio.Future[AuditReply]] = {}
        self._call_ids = itertools.count(1)

    @property
    def is_alive(self) -> bool:
        """Connected, and heard of lately."""
        return self._channel is not None and self.status is not None

    @property
    def is_ready(self) -> bool:
        return self.is_alive and self.status is not None and self.status.is_ready

    @property
    def label(self) -> RoleLabel:
        """What it is used for now: its duty, or its pool's role."""
        duty = self.status.duty if self.status is not None else None
        return self.info.role if duty is None else duty.role

    @property
    def num_requests(self) -> int:
        """Requests this coordinator has here, counted from dispatch."""
        return len(self._sinks)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens this coordinator has sent here and not seen the end of."""
        return self._total_tokens

    @property
    def num_reading(self) -> int:
        """Those of its requests that another worker answers."""
        return len(self._reading)

    def send(self, message: Message) -> None:
        """Raises WorkerLostError if the worker is not connected."""
        if self._channel is None:
            raise WorkerLostError(f"{self.info.worker_id} is not connected")
        self._channel.send(message)

    def open(
        self, request_id: str, sink: Callable[[Event], None], num_tokens: int, is_answered_here: bool = True
    ) -> None:
        """Events of `request_id` go to `sink` until `close`. `num_tokens` is the load it brings."""
        self._sinks[request_id] = sink
        if not is_answered_here:
            self._reading.add(request_id)
        self._num_tokens[request_id] = num_tokens
        self._total_tokens += num_tokens
        self._on_load(self.info.worker_id)

    def was_read(self, request_id: str) -> None:
        """Its prompt is no load any more; the request itself still is."""
        if request_id in self._num_tokens:
            self._total_tokens -= self._num_tokens[request_id]
            self._num_tokens[request_id] = 0
            self._on_load(self.info.worker_id)

    def close(self, request_id: str, cancel: bool) -> None:
        """Forget the request; with `cancel`, the worker forgets it too."""
        if self._sinks.pop(request_id, None) is None:
            return
        self._total_tokens -= self._num_tokens.pop(request_id)
        self._reading.discard(request_id)
        if cancel and self._channel is not None:
            try:
                self._channel.send(Cancel(request_id))
            except WorkerLostError:
                logger.debug("%s was lost before the cancel of %s", self.info.worker_id, request_id)
        self._changed()

    def ask_to_move(self) -> None:
        """Whoever is decoded here shall go on elsewhere, while it is decoded."""
        for sink in list(self._sinks.values()):
            sink(MoveOn())

    def ask_one_to_move(self, free_share: float) -> None:
        """The youngest, which has most before it and least to copy, if there is a worker with so many free blocks."""
        answered = [sink for request_id, sink in self._sinks.items() if request_id not in self._reading]
        if answered and len(self._sinks) > 1:  # alone it has nothing to make room for
            answered[-1](MoveOn(free_share))

    def give_up(self, error: BatonError) -> None:
        """Tell every request here to go elsewhere. Its flow then closes it, which cancels it on the worker."""
        for sink in list(self._sinks.values()):
            sink(error)

    async def audit(self, timeout_s: float) -> AuditReply:
        """The worker's block audit now. Raises WorkerLostError if it does not answer in time."""
        call_id = next(self._call_ids)
        future: asyncio.Future[AuditReply] = asyncio.get_running_loop().create_future()
        self._audits[call_id] = future
        try:
            self.send(AskAudit(call_id))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise WorkerLostError(
                f"{self.info.worker_id} did not answer an audit within {timeout_s} s"
            ) from error
        finally:
            del self._audits[call_id]

    async def run(self) -> None:
        """Keep the connection up until cancelled."""
        backoff_s = 0.05
        try:
            while True:
                begun_s = time.monotonic()
                try:
                    await self._session()
                except BatonError as error:
                    logger.warning("%s: %s", self.info.worker_id, error.message)
                if time.monotonic() - begun_s > 1.0:
                    backoff_s = 0.05
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            self._lose(WorkerLostError(f"{self.info.worker_id} left the fleet"))

    async def _session(self) -> None:
        channel = await connect(self.info.host, self.info.port, self._hello, self._secret, self._check)
        self._channel = channel
        try:
            async with Patience() as patience:
                while True:
                    patience.alarm.set(time.monotonic() + self._timeout_s)
                    self._take(await channel.receive())
        except TimeoutError:
            raise WorkerLostError(f"no sign of life for {self._timeout_s} s") from None
        finally:
            channel.abort()
            self._lose(WorkerLostError(f"connection to {self.info.worker_id} was lost"))

    def _check(self, peer: Hello) -> None:
        if peer.sender_id != self.info.worker_id or peer.incarnation != self.info.incarnation:
            raise ProtocolError(
                f"expected {self.info.worker_id} in its life {self.info.incarnation} "
                f"but {peer.sender_id} answered in its life {peer.incarnation}"
            )

    def _take(self, message: Message) -> None:
        match message:
            case Tokens(plain, detailed):
                for request_id, index, token_id in plain:
                    self._give(request_id, Token(index, token_id))
                for request_id, token in detailed:
                    self._give(request_id, token)
            case Reserved(request_id) | HandedOff(request_id) | Stayed(request_id):
                self._give(request_id, message)
            case Ended(request_id, finished, error):
                end = finished or (from_wire(error) if error else EngineError("ended without a reason"))
                self._give(request_id, end)
            case Status():
                if message.incarnation == self.info.incarnation:
                    self.status = message
                    self._changed()
            case Cached():
                self.on_cached(self.info.worker_id, message)
            case AuditReply(call_id):
                future = self._audits.get(call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                raise ProtocolError(f"expected a worker's message but got {type(message).__name__}")

    def _give(self, request_id: str, event: Event) -> None:
        sink = self._sinks.get(request_id)
        if sink is not None:
            sink(event)

    def _lose(self, error: WorkerLostError) -> None:
        self._channel = None
        self.status = None
        self.on_cached(self.info.worker_id, Cached(is_all=True))
        self.give_up(error)
        for future in self._audits.values():
            if not future.done():
                future.set_exception(error)
        self._changed()

    def _changed(self) -> None:
        self._on_load(self.info.worker_id)
        self._on_change(self)
