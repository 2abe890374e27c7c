"""One attempt at a request on one pair of workers.

    dispatch ──► reserve ──► start ──► events: tokens by index, then Finished │ BatonError
                    close at any point: whoever has not told its end is told to forget the request

The flow (flow.py) owns attempts and decides what follows a failed one.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Protocol

from contracts.blocks import prompt_hash
from contracts.config import BatonConfig
from contracts.errors import (
    BatonError,
    DeadlineError,
    DrainingError,
    Fault,
    OverloadedError,
    WorkerLostError,
)
from contracts.messages import HandedOff, Prefill, Reserve, Reserved, Role
from contracts.request import Finished, GenerateRequest, Token
from contracts.ticket import Ticket, sign
from coordinator.links import Event, WorkerLink

Hold = Callable[[Role, str, str], None]
"""(role, replica_id, request_id): enter the request in Serve's books on that worker, which ends the entry itself."""


class Observer(Protocol):
    """What metrics want to know of the flow."""

    def placed(self, route: str) -> None: ...

    def handed_off(self, num_bytes: int, exposed_s: float) -> None: ...

    def continued(self, reason: str) -> None: ...


class Run:
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
    def num_cached_tokens(self) -> int:
        """Known tokens that a cache supplied, as far as the workers have told."""
        return self._num_cached

    @property
    def worker_ids(self) -> list[str]:
        return [link.info.worker_id for link in (self.prefill, self.decode) if link is not None]

    def dispatch(self) -> None:
        """Ask decode for all blocks; from now on the request is load on its workers. Raises WorkerLostError."""
        self._subscribe(self.decode)
        if self.prefill is not None:
            self._subscribe(self.prefill)
        self.decode.send(Reserve(self.request, self._handoff_id, self._config.transfer.lease_s))

    async def reserve(self, deadline: float) -> None:
        """Wait for decode's grant of what `dispatch` asked for. Raises its error, WorkerLostError, or OverloadedError
        when it is too slow.
        """
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                link, event = await self._inbox.get()
        except TimeoutError:
            raise OverloadedError(
                f"{self.decode.info.worker_id} did not answer a reservation in time"
            ) from None
        if isinstance(event, BatonError):
            self._ended(link, cancel=isinstance(event, DrainingError))
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
            elif event is not None and event.index >= expected:
                early[event.index] = event
                if expected == start:
                    (self.prefill or self.decode).was_read(self.request.request_id)
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
            self._ended(link, cancel=isinstance(event, DrainingError))
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
        link.open(self.request.request_id, put, num_tokens, is_answered_here=link is self.decode)

    def _ended(self, link: WorkerLink, cancel: bool = False) -> None:
        """It is over on this worker, and the load it carried is gone. `cancel`: the worker does not know yet."""
        if self._open.get(link):
            self._open[link] = False
            link.close(self.request.request_id, cancel)
