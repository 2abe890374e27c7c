"""The story of one request, and all its retries.

    generate ─┬─ placed       wait in line, choose workers, have decode reserve every block        (no device time yet)
              ├─ prefill      tell prefill; its first token goes to the client at once
              ├─ decode       the KV arrives at decode, which streams the rest
              └─ one end      finished | error | the caller leaves: both workers are told, leases end, holds are let go

A worker that dies, or a handoff that fails, is a `TryAgain`: the request is placed again with the tokens the client
already has as `output_ids`, and goes on from there. The draw is keyed by (seed, position), so the client sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Protocol

from contracts.blocks import prompt_hash
from contracts.config import BatonConfig
from contracts.errors import (
    BatonError,
    ContextLengthError,
    DeadlineError,
    Fault,
    OverloadedError,
    TryAgain,
    WorkerLostError,
)
from contracts.messages import HandedOff, Prefill, Reserve, Reserved, Role
from contracts.request import Finished, GenerateRequest, Token
from contracts.ticket import Ticket, sign
from coordinator.fleet import Fleet
from coordinator.line import Line, Pace
from coordinator.links import Event, WorkerLink
from coordinator.placement import Demand, Placement, place
from coordinator.stages import StageClock

logger = logging.getLogger("baton.coordinator")

Hold = Callable[[Role, str, str], None]
"""(role, replica_id, request_id): enter the request in Serve's books on that worker, which ends the entry itself."""


class Observer(Protocol):
    """What metrics want to know of the flow."""

    def queued(self, seconds: float) -> None: ...

    def placed(self, route: str) -> None: ...

    def handed_off(self, num_bytes: int, exposed_s: float) -> None: ...

    def retried(self, code: str) -> None: ...


class Flow:
    """Runs requests on a fleet. One per ingress replica."""

    def __init__(
        self,
        config: BatonConfig,
        fleet: Fleet,
        secret: bytes,
        hold: Hold,
        observer: Observer,
        eos_ids: frozenset[int],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._secret = secret
        self._hold = hold
        self._observer = observer
        self._eos_ids = eos_ids
        self._line = Line(config.coordinator.max_queue)
        self._pace = Pace()
        self._num_running = 0

    @property
    def num_waiting(self) -> int:
        return self._line.num_waiting

    @property
    def num_running(self) -> int:
        return self._num_running

    async def generate(
        self, request: GenerateRequest, deadline_s: float | None
    ) -> AsyncGenerator[Token | Finished, None]:
        """Tokens in order, then exactly one Finished, with timings. Closing the iterator cancels everywhere.

        Raises BatonError, before or after tokens, as the one terminal event instead of Finished.
        """
        limit_s = self._config.coordinator.request_timeout_s
        deadline = time.monotonic() + (limit_s if deadline_s is None else min(limit_s, deadline_s))
        self._check_fits(request)
        stages = StageClock()
        known = list(request.output_ids)
        avoid: frozenset[str] = frozenset()
        for attempt in range(1, self._config.coordinator.max_attempts + 1):
            if (end := self._end_of(request, known)) is not None:
                yield replace(end, timings=stages.timings())
                return
            trial = replace(request, request_id=f"{request.request_id}.{attempt}", output_ids=tuple(known))
            used: list[str] = []
            try:
                async with aclosing(self._attempt(trial, deadline, avoid, used, stages)) as events:
                    async for event in events:
                        if isinstance(event, Token):
                            known.append(event.token_id)
                            stages.token()
                        yield event
                return
            except TryAgain as error:
                is_last = attempt == self._config.coordinator.max_attempts
                if is_last or not used or time.monotonic() >= deadline:
                    raise
                logger.warning("%s: %s; goes on from token %d", trial.request_id, error.message, len(known))
                self._observer.retried(error.code)
                avoid |= frozenset(used)

    def _check_fits(self, request: GenerateRequest) -> None:
        """Raises ContextLengthError for a request that no worker could ever finish."""
        limit = self._fleet.max_total_tokens()
        if request.max_total_tokens > limit:
            raise ContextLengthError(
                f"expected prompt + max_tokens of at most {limit} tokens but got {request.max_total_tokens}"
            )

    def _end_of(self, request: GenerateRequest, known: list[int]) -> Finished | None:
        """The end that a lost worker did not come to tell, if the last token sent was the last one."""
        sampling = request.sampling
        if len(known) == len(request.output_ids):
            return None
        if known[-1] in sampling.stop_token_ids:
            return Finished("stop", stop_token_id=known[-1])
        if known[-1] in self._eos_ids and not sampling.ignore_eos:
            return Finished("stop")
        return Finished("length") if len(known) >= sampling.max_tokens else None

    async def _attempt(
        self,
        request: GenerateRequest,
        deadline: float,
        avoid: frozenset[str],
        used: list[str],
        stages: StageClock,
    ) -> AsyncGenerator[Token | Finished, None]:
        async with self._placed(request, deadline, avoid, stages) as run:
            used.extend(run.worker_ids)
            try:
                run.start()
                async with aclosing(run.events(deadline)) as events:
                    async for event in events:
                        if isinstance(event, Finished):
                            event = replace(event, timings=stages.timings(run.handoff_s))
                        yield event
            except TryAgain:
                stages.lost(run.handoff_s)
                raise

    @asynccontextmanager
    async def _placed(
        self, request: GenerateRequest, deadline: float, avoid: frozenset[str], stages: StageClock
    ) -> AsyncIterator[_Run]:
        """A run whose blocks decode has reserved. Whatever happens after, leaving ends it on both workers."""
        begun_s = time.monotonic()
        run = await self._try_place(request, deadline, avoid) if self._line.is_empty else None
        if run is None:
            run = await self._wait_for_place(request, deadline, avoid, is_resumed=bool(avoid))
        placed_s = time.monotonic()
        stages.placed(placed_s - begun_s)
        self._observer.queued(placed_s - begun_s)
        self._observer.placed("remote" if run.prefill is not None else "local")
        self._num_running += 1
        try:
            yield run
        finally:
            self._pace.note(time.monotonic() - placed_s, self._num_running)
            self._num_running -= 1
            run.close()

    async def _wait_for_place(
        self, request: GenerateRequest, deadline: float, avoid: frozenset[str], is_resumed: bool
    ) -> _Run:
        """A stream that was accepted before waits as long as it may live; a newcomer `queue_timeout_s`."""
        limits = self._config.coordinator
        line_deadline = deadline if is_resumed else min(deadline, time.monotonic() + limits.queue_timeout_s)
        try:
            async with (
                asyncio.timeout(line_deadline - time.monotonic()),
                self._line.turn(self._pace.wait_s(self._line.num_waiting), is_resumed),
            ):
                while True:
                    run = await self._try_place(request, line_deadline, avoid)
                    if run is not None:
                        return run
                    await self._fleet.changed(1.0)
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise DeadlineError("the request's deadline passed before a worker had room") from None
            raise OverloadedError(
                f"no worker had room within {limits.queue_timeout_s} s",
                retry_after_s=self._pace.wait_s(self._line.num_waiting),
            ) from None

    async def _try_place(
        self, request: GenerateRequest, deadline: float, avoid: frozenset[str]
    ) -> _Run | None:
        """A reserved run, or None: nobody has room now. Raises OverloadedError if nobody ever will have."""
        self._fleet.check_open()
        if self._num_running >= self._config.coordinator.max_running:
            return None
        block_size = self._config.engine.block_size
        placement = place(
            Demand.of(request.num_known_tokens, request.max_total_tokens, block_size),
            self._fleet.views("prefill"),
            self._fleet.views("decode"),
            avoid,
        )
        if placement is None:
            return None
        run = self._make_run(request, placement)
        try:
            await run.reserve(min(deadline, time.monotonic() + self._config.coordinator.reserve_timeout_s))
        except TryAgain as error:
            run.close()
            logger.debug("%s: %s", request.request_id, error.message)
            return None
        except BaseException:
            run.close()
            raise
        return run

    def _make_run(self, request: GenerateRequest, placement: Placement) -> _Run:
        decode = self._fleet.link(placement.decode_id)
        prefill = self._fleet.link(placement.prefill_id) if placement.prefill_id else None
        return _Run(request, prefill, decode, self._config, self._secret, self._hold, self._observer)


class _Run:
    """One attempt on one pair of workers. Owns both links' subscriptions until `close`."""

    def __init__(
        self,
        request: GenerateRequest,
        prefill: WorkerLink | None,
        decode: WorkerLink,
        config: BatonConfig,
        secret: bytes,
        hold: Hold,
        observer: Observer,
    ) -> None:
        self.request = request
        self.prefill = prefill
        self.decode = decode
        self.handoff_s: float | None = 0.0 if prefill is None else None  # None: not told yet
        self._config = config
        self._secret = secret
        self._hold = hold
        self._observer = observer
        self._inbox: asyncio.Queue[tuple[WorkerLink, Event]] = asyncio.Queue()
        self._handoff_id = secrets.token_hex(8) if prefill is not None else ""
        self._num_cached = 0
        self._open: dict[WorkerLink, bool] = {}
        self._has_decode_spoken = False

    @property
    def worker_ids(self) -> list[str]:
        return [link.info.worker_id for link in (self.prefill, self.decode) if link is not None]

    async def reserve(self, deadline: float) -> None:
        """Have decode grant all blocks. Raises its error, WorkerLostError, or OverloadedError when it is too slow."""
        request = self.request
        self._subscribe(self.decode)
        if self.prefill is not None:
            self._subscribe(self.prefill)  # counted as load from dispatch on
        self.decode.send(Reserve(request, self._handoff_id, self._config.transfer.lease_s))
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                link, event = await self._inbox.get()
        except TimeoutError:
            raise OverloadedError(
                f"{self.decode.info.worker_id} did not answer a reservation in time"
            ) from None
        if isinstance(event, BatonError):
            self._ended(link)
            raise event
        if not isinstance(event, Reserved) or link is not self.decode:
            raise Fault(f"expected a reservation but {link.info.worker_id} sent {type(event).__name__}")
        self._num_cached = event.num_cached_tokens

    def start(self) -> None:
        """Tell the prefilling worker to go. Raises WorkerLostError."""
        worker = self.prefill or self.decode
        for link in self._open:
            self._hold(link.info.role, link.info.replica_id, self.request.request_id)
        if self.prefill is None:
            worker.send(Prefill(self.request))
            return
        request, source, target = self.request, self.prefill.info, self.decode.info
        known = request.prompt_ids + request.output_ids
        ticket = Ticket(
            self._handoff_id,
            request.request_id,
            source.worker_id,
            source.incarnation,
            target.worker_id,
            target.incarnation,
            len(known),
            prompt_hash(known, request.salt),
        )
        worker.send(Prefill(request, sign(ticket, self._secret), self._num_cached))

    async def events(self, deadline: float) -> AsyncGenerator[Token | Finished, None]:
        """Tokens by index, whichever worker sent them first, then Finished."""
        limits = self._config.coordinator
        start = expected = len(self.request.output_ids)
        early: dict[int, Token] = {}
        end: Finished | None = None
        patience_s = limits.first_token_timeout_s
        # Decode may be through before the first token's frame from prefill is here: the end waits for it.
        while end is None or early or expected == start:
            event = await self._next(deadline, patience_s)
            if isinstance(event, Finished):
                end = event
            elif event is not None:
                early[event.index] = event
                while (token := early.pop(expected, None)) is not None:
                    expected += 1
                    patience_s = limits.stall_timeout_s
                    yield token
        yield replace(end, num_cached_tokens=max(end.num_cached_tokens, self._num_cached))

    async def _next(self, deadline: float, patience_s: float) -> Token | Finished | None:
        now = time.monotonic()
        try:
            async with asyncio.timeout(min(deadline - now, patience_s)):
                link, event = await self._inbox.get()
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise DeadlineError("the request did not finish before its deadline") from None
            raise WorkerLostError(
                f"no token from {' or '.join(self.worker_ids)} for {patience_s} s"
            ) from None
        if link is self.decode:
            self._has_decode_spoken = True
        if isinstance(event, BatonError):
            self._ended(link)
            if link is self.prefill and self._has_decode_spoken:
                return None  # prefill is gone, but its KV had arrived: decode goes on alone
            raise event
        if isinstance(event, HandedOff):
            self._ended(link)
            self._num_cached = max(self._num_cached, event.num_cached_tokens)
            self.handoff_s = event.exposed_s
            self._observer.handed_off(event.num_bytes, event.exposed_s)
            return None
        if isinstance(event, Finished):
            self._ended(link)
            if link is self.prefill:
                self.handoff_s = 0.0  # over with its first token: there was nothing to hand off
            return event
        return event if isinstance(event, Token) else None

    def close(self) -> None:
        """End the request wherever it has not ended by itself; the workers end its entries in Serve's books."""
        for link, is_open in self._open.items():
            link.close(self.request.request_id, cancel=is_open)
        self._open.clear()

    def _subscribe(self, link: WorkerLink) -> None:
        def put(event: Event) -> None:
            self._inbox.put_nowait((link, event))

        self._open[link] = True
        num_tokens = self.request.num_known_tokens if link is (self.prefill or self.decode) else 0
        link.open(self.request.request_id, put, num_tokens)

    def _ended(self, link: WorkerLink) -> None:
        """The worker has told its terminal event: it needs no cancel, and the load it carried is gone."""
        if self._open.get(link):
            self._open[link] = False
            link.close(self.request.request_id, cancel=False)
