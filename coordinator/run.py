"""One attempt at a request: on one pair of workers, and on those that its KV moves to while it is decoded.

    dispatch ──► reserve ──► start ──► events: tokens by index, then Finished │ BatonError
                                │                 └ MoveOn: the decode worker's stream goes on at another one (move.py)
                    close at any point: whoever has not told its end is told to forget the request

The flow (flow.py) owns attempts and decides what follows a failed one.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from contracts.config import BatonConfig
from contracts.errors import (
    BatonError,
    DeadlineError,
    DrainingError,
    Fault,
    OverloadedError,
    WorkerLostError,
)
from contracts.messages import HandedOff, Prefill, Reserve, Reserved, Role, Stayed
from contracts.request import Finished, GenerateRequest, Token
from contracts.ticket import sign
from coordinator.alarm import Alarm
from coordinator.links import Event, MoveOn, WorkerLink
from coordinator.move import RETRY_S, Find, Move, as_moved, ticket_of

Hold = Callable[[Role, str, str], None]
"""(role, replica_id, request_id): enter the request in Serve's books on that worker, which ends the entry itself."""


class Observer(Protocol):
    """What metrics want to know of the flow."""

    def placed(self, route: str) -> None: ...

    def handed_off(self, num_bytes: int, exposed_s: float) -> None: ...

    def continued(self, reason: str) -> None: ...

    def migrated(self, outcome: str, pause_s: float | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Means:
    """What all attempts of a flow share."""

    config: BatonConfig
    secret: bytes
    hold: Hold
    observer: Observer
    find: Find
    moved: Callable[[str, str, str], None]
    """(request_id, from, to): another worker decodes it from now on."""


class Run:
    """One attempt. Owns its links' subscriptions until `close`."""

    def __init__(
        self,
        request: GenerateRequest,
        prefill: WorkerLink | None,
        decode: WorkerLink,
        means: Means,
    ) -> None:
        self.request = request
        self.prefill = prefill
        self.decode = decode
        self.handoff_s: float | None = 0.0 if prefill is None else None  # None: not told yet
        self._means = means
        self._config = means.config
        self._observer = means.observer
        self._inbox: asyncio.Queue[tuple[WorkerLink, Event | None]] = asyncio.Queue()
        # None among the events: nothing has come for as long as somebody waits.
        self._alarm = Alarm(lambda: self._inbox.put_nowait((decode, None)))
        self._handoff_id = secrets.token_hex(8) if prefill is not None else ""
        self._num_cached = 0
        self._open: dict[WorkerLink, bool] = {}
        self._ids: dict[WorkerLink, str] = {}  # the request's name on each
        self._has_decode_spoken = False
        self._output_ids = list(request.output_ids)
        self._early: dict[int, Token] = {}  # tokens whose predecessors have not come yet
        self._move: Move | None = None
        self._num_moves = 0
        self._next_move_s = self._last_token_s = 0.0

    @property
    def num_cached_tokens(self) -> int:
        """Known tokens that a cache supplied, as far as the workers have told."""
        return self._num_cached

    @property
    def worker_ids(self) -> list[str]:
        return [link.info.worker_id for link in (self.prefill, self.decode) if link is not None]

    def dispatch(self) -> None:
        """Ask decode for all blocks; from now on the request is load on its workers. Raises WorkerLostError."""
        self._subscribe(self.decode, self.request)
        if self.prefill is not None:
            self._subscribe(self.prefill, self.request)
        self.decode.send(Reserve(self.request, self._handoff_id, self._config.transfer.lease_s))

    async def reserve(self, deadline: float) -> None:
        """Wait for decode's grant of what `dispatch` asked for. Raises its error, WorkerLostError, or OverloadedError
        when it is too slow.
        """
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                while isinstance((heard := await self._inbox.get())[1], MoveOn):
                    pass  # it is not decoded yet
        except TimeoutError:
            raise OverloadedError(
                f"{self.decode.info.worker_id} did not answer a reservation in time"
            ) from None
        link, event = heard
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
            self._means.hold(link.info.role, link.info.replica_id, self.request.request_id)
        if self.prefill is None:
            worker.send(Prefill(self.request))
            return
        ticket = ticket_of(self._handoff_id, self.request, self.prefill, self.decode)
        worker.send(Prefill(self.request, sign(ticket, self._means.secret), self._num_cached))

    async def events(self, deadline: float) -> AsyncGenerator[Token | Finished, None]:
        """Tokens by index, whichever worker sent them first, then Finished."""
        limits = self._config.coordinator
        start = len(self.request.output_ids)
        end: Finished | None = None
        patience_s = limits.first_token_timeout_s
        # Decode may be through before the first token's frame from prefill is here: the end waits for it.
        while end is None or self._early or len(self._output_ids) == start:
            event = await self._next(deadline, patience_s)
            if isinstance(event, Finished):
                end = event
            elif event is not None and event.index >= len(self._output_ids):
                self._early[event.index] = event
                if len(self._output_ids) == start:
                    (self.prefill or self.decode).was_read(self.request.request_id)
                while (token := self._early.pop(len(self._output_ids), None)) is not None:
                    self._output_ids.append(token.token_id)
                    patience_s = limits.stall_timeout_s
                    yield token
        yield replace(end, num_cached_tokens=max(end.num_cached_tokens, self._num_cached))

    async def _next(self, deadline: float, patience_s: float) -> Token | Finished | None:
        due_s = min(deadline, time.monotonic() + patience_s)
        self._alarm.set(due_s)
        while True:
            link, event = await self._inbox.get()
            if isinstance(event, MoveOn):
                self._leave(link, event.free_share)  # no sign of life: patience goes on
            elif event is not None:
                return self._take(link, event)
            elif time.monotonic() >= due_s:  # not of an event before
                break
        if time.monotonic() >= deadline:
            raise DeadlineError("the request did not finish before its deadline")
        raise WorkerLostError(f"no token from {' or '.join(self.worker_ids)} for {patience_s} s")

    def _take(self, link: WorkerLink, event: Event) -> Token | Finished | None:
        """What of an event concerns the client. Raises the error that ends the attempt."""
        if self._move is not None and self._is_moves(self._move, link, event):
            return None
        if link is self.decode:
            self._has_decode_spoken = True
        if isinstance(event, BatonError):
            self._ended(link, cancel=isinstance(event, DrainingError))
            if link is self.prefill and self._has_decode_spoken and not self._early:
                return None  # prefill is gone, but its KV and its token had arrived: decode goes on alone
            raise event
        if isinstance(event, HandedOff):
            self._handed_off(link, event)
            return None
        if isinstance(event, Finished):
            self._ended(link)
            if link is self.prefill:
                self.handoff_s = 0.0  # over with its first token: there was nothing to hand off
            return event
        if isinstance(event, Token):
            self._last_token_s = time.monotonic()
            return event
        return None

    def _handed_off(self, link: WorkerLink, event: HandedOff) -> None:
        self._ended(link)
        if link is not self.prefill:
            raise WorkerLostError(f"{link.info.worker_id} handed the request to a worker that is lost")
        self._num_cached = max(self._num_cached, event.num_cached_tokens)
        self.handoff_s = event.exposed_s
        self._observer.handed_off(event.num_bytes, event.exposed_s)

    # --- to another decode worker -----------------------------------------------------------------------------------

    def _leave(self, link: WorkerLink, free_share: float) -> None:
        """Begin to move off `link`, if that is where the request is decoded, and somebody else has room for it."""
        now_s = time.monotonic()
        is_decoded = link is self.decode and self._has_decode_spoken and not self._early
        if not is_decoded or self._move is not None or now_s < self._next_move_s:
            return
        self._next_move_s = now_s + RETRY_S
        request = as_moved(self.request, self._output_ids, self._num_moves + 1)
        target = self._means.find(request, link, free_share)
        if target is None or self._open.get(target):  # a link carries one request of a run
            return
        if target is self.prefill:
            self.prefill = None  # its reading is over: from now on it answers
        self._num_moves += 1
        move = self._move = Move(request, link, target)
        self._subscribe(target, request)
        try:
            move.reserve(self._config.transfer.lease_s)
        except WorkerLostError:
            self._stay(move, "stayed")

    def _is_moves(self, move: Move, link: WorkerLink, event: Event) -> bool:
        """Whether the event is about the move alone."""
        if link is move.target and not move.has_spoken and isinstance(event, Token | Finished):
            move.has_spoken = True
            self._observer.migrated("moved", time.monotonic() - self._last_token_s)
        elif link is move.target and isinstance(event, Reserved):
            self._means.hold(link.info.role, link.info.replica_id, move.request.request_id)
            with suppress(WorkerLostError):  # told by an event of its own
                move.begin(self._ids[move.source], event.num_cached_tokens, self._means.secret)
            return True
        elif link is move.target and isinstance(event, BatonError) and not move.is_handed_off:
            self._ended(link, cancel=isinstance(event, DrainingError))
            self._stay(move, "stayed")
            return True
        elif link is move.source and isinstance(event, HandedOff):
            self._change_over(move)
            return True
        elif link is move.source and isinstance(event, Stayed):
            self._stay(move, "stayed")
            return True
        elif link is move.source and isinstance(event, BatonError | Finished):
            if move.has_spoken and not self._early:  # the source is gone, but the target has all of it
                self._change_over(move)
                return True
            self._stay(move, "ended")
        if move.is_through:
            self._move = None
        return False

    def _change_over(self, move: Move) -> None:
        self._ended(move.source)
        self.decode = move.target
        self._means.moved(self.request.request_id, move.source.info.worker_id, move.target.info.worker_id)
        move.is_handed_off = True
        if move.is_through:
            self._move = None

    def _stay(self, move: Move, outcome: str) -> None:
        """The move is over; the source has the request, or tells its end."""
        self._move = None
        self._ended(move.target, cancel=True)
        if not move.has_spoken:
            self._observer.migrated(outcome)

    # --- links ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the request wherever it has not ended by itself; the workers end its entries in Serve's books."""
        self._alarm.close()
        if self._move is not None:
            self._stay(self._move, "ended")
        for link, is_open in self._open.items():
            link.close(self._ids[link], cancel=is_open)
        self._open.clear()

    def _subscribe(self, link: WorkerLink, request: GenerateRequest) -> None:
        def put(event: Event) -> None:
            self._inbox.put_nowait((link, event))

        self._open[link] = True
        self._ids[link] = request.request_id
        is_own = request is self.request
        num_tokens = request.num_known_tokens if is_own and link is (self.prefill or self.decode) else 0
        is_answered_here = not is_own or link is self.decode
        link.open(request.request_id, put, num_tokens, is_answered_here)

    def _ended(self, link: WorkerLink, cancel: bool = False) -> None:
        """It is over on this worker, and the load it carried is gone. `cancel`: the worker does not know yet."""
        if self._open.get(link):
            self._open[link] = False
            link.close(self._ids[link], cancel)
