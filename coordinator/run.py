"""One attempt at a request: on one pair of workers, and on those that its KV moves to while it is decoded.

    dispatch ──► reserve ──► start ──► finish: tokens go to the sink by index, then Finished │ BatonError
                                │                 └ MoveOn: the decode worker's stream goes on at another one (move.py)
                    close at any point: whoever has not told its end is told to forget the request

What a worker says is heard in the turn in which its link reads it (`_hear`), all the way to the sink; `reserve` and
`finish` only wait for what comes of it. The flow (flow.py) owns attempts and decides what follows a failed one.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from contracts.blocks import num_shared_at_most
from contracts.config import BatonConfig
from contracts.errors import BatonError, DeadlineError, DrainingError, Fault, OverloadedError, WorkerLostError
from contracts.messages import HandedOff, Prefill, Reserve, Reserved, Role, Stayed
from contracts.request import Finished, GenerateRequest, Token, TokenSink
from contracts.ticket import sign
from coordinator.alarm import Alarm
from coordinator.links import Event, MoveOn, WorkerLink
from coordinator.move import RETRY_S, Find, Move, as_moved, ticket_of
from coordinator.story import Spoken

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
    was_read: Callable[[Run], None]
    """Its first token is here: its reader is open for the next prompt."""


class Run:
    """One attempt. Owns its links' subscriptions until `close`."""

    def __init__(
        self,
        request: GenerateRequest,
        prefill: WorkerLink | None,
        decode: WorkerLink,
        means: Means,
        sink: TokenSink,
    ) -> None:
        self.request = request
        self.prefill = prefill
        self.decode = decode
        self.handoff_s: float | None = 0.0 if prefill is None else None  # None: not told yet
        self._means = means
        self._sink = sink
        self._config = means.config
        self._observer = means.observer
        self._deadline = math.inf
        self._patience_s = means.config.coordinator.first_token_timeout_s
        self._alarm = Alarm(self._lose_patience)
        loop = asyncio.get_running_loop()
        self._granted: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()
        self._error: Exception | None = None
        self._end: Finished | None = None
        self._handoff_id = secrets.token_hex(8) if prefill is not None else ""
        self._num_cached = 0
        self._open: dict[WorkerLink, bool] = {}
        self._ids: dict[WorkerLink, str] = {}  # the request's name on each
        self._has_decode_spoken = False
        self._has_token = False  # of this attempt
        self._output_ids = list(request.output_ids)
        self._early: dict[int, Token] = {}  # tokens whose predecessors have not come yet
        self._move: Move | None = None
        self._num_moves = 0
        self._next_move_s = 0.0
        self._first_token_s = self._last_token_s = 0.0
        # Set while nothing is left to hear but this worker's tokens in order, and the end: nearly always.
        self._steady: WorkerLink | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Known tokens that a cache supplied, as far as the workers have told."""
        return self._num_cached

    @property
    def spoken(self) -> Spoken | None:
        """None: no token came."""
        if not self._has_token:
            return None
        token_ids = tuple(self._output_ids[len(self.request.output_ids) :])
        return Spoken(token_ids, self._first_token_s, self._last_token_s)

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
                await self._granted
        except TimeoutError:
            raise OverloadedError(
                f"{self.decode.info.worker_id} did not answer a reservation in time"
            ) from None
        if self._error is not None:
            raise self._error

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

    async def finish(self, deadline: float) -> Finished | None:
        """Wait for the end; None when the sink has enough. Raises the error that ends the attempt."""
        self._deadline = deadline
        self._wait_on(time.monotonic())
        await self._over
        if self._error is not None:
            raise self._error
        return self._end

    # --- what workers say -------------------------------------------------------------------------------------------

    def _hear(self, link: WorkerLink, event: Event) -> None:
        """One event of a link, which carries other requests too: whatever goes wrong here ends this attempt alone."""
        if self._over.done():
            return
        try:
            if link is self._steady and isinstance(event, Token) and event.index == len(self._output_ids):
                self._last_token_s = time.monotonic()
                self._pass_on(event)
            elif not self._granted.done():
                self._hear_grant(link, event)
            elif isinstance(event, Token) and self._move is None:
                self._hear_token(link, event)
            elif isinstance(event, MoveOn):
                self._leave(link, event.free_share)  # no sign of life: patience goes on
            else:
                self._take(link, event)
        except Exception as error:
            self._fail(error)

    def _hear_grant(self, link: WorkerLink, event: Event) -> None:
        if isinstance(event, MoveOn):
            return  # it is not decoded yet
        if isinstance(event, BatonError):
            self._ended(link, cancel=isinstance(event, DrainingError))
            raise event
        if not isinstance(event, Reserved) or link is not self.decode:
            raise Fault(f"expected a reservation but {link.info.worker_id} sent {type(event).__name__}")
        self._num_cached = event.num_cached_tokens
        size = self.decode.info.layout.block_size
        num_shared = size * num_shared_at_most(self.request.num_known_tokens, size)
        if self.prefill is not None and 0 < self._num_cached == num_shared:
            self._read_at_decode(self.prefill)
        self._granted.set_result(None)

    def _read_at_decode(self, reader: WorkerLink) -> None:
        """Decode holds all that it can hold: what is left of a block it reads sooner than anybody sends it."""
        del self._open[reader]
        reader.close(self._ids.pop(reader), cancel=False)
        self.prefill, self.handoff_s = None, 0.0

    def _hear_token(self, link: WorkerLink, token: Token) -> None:
        """Tokens go on by index, whichever worker sent them first."""
        if link is self.decode:
            self._has_decode_spoken = True
        self._last_token_s = time.monotonic()
        if not self._has_token and token.index >= len(self._output_ids):
            (self.prefill or self.decode).was_read(self.request.request_id)
        if token.index > len(self._output_ids):
            self._early[token.index] = token
        elif token.index == len(self._output_ids):
            self._pass_on(token)
            while (
                not self._over.done() and (ready := self._early.pop(len(self._output_ids), None)) is not None
            ):
                self._pass_on(ready)
        self._check_end()
        has_more = self._early or self._move is not None or self._end is not None
        self._steady = self.decode if link is self.decode and self._has_token and not has_more else None
        self._wait_on(self._last_token_s)

    def _pass_on(self, token: Token) -> None:
        self._output_ids.append(token.token_id)
        if not self._has_token:
            self._has_token = True
            self._first_token_s = self._last_token_s
            self._patience_s = self._config.coordinator.stall_timeout_s
            self._means.was_read(self)
        if not self._sink(token):
            self._end = None
            self._over.set_result(None)

    def _take(self, link: WorkerLink, event: Event) -> None:
        """Any other event after the grant. Raises the error that ends the attempt."""
        if self._move is not None and self._is_moves(self._move, link, event):
            pass
        elif isinstance(event, Token):
            self._hear_token(link, event)
            return
        else:
            if link is self.decode:
                self._has_decode_spoken = True
            if isinstance(event, BatonError):
                self._failed(link, event)
            elif isinstance(event, HandedOff):
                self._handed_off(link, event)
            elif isinstance(event, Finished):
                self._ended(link)
                if link is self.prefill:
                    self.handoff_s = 0.0  # over with its first token: there was nothing to hand off
                self._end = event
                self._check_end()
        self._wait_on(time.monotonic())

    def _failed(self, link: WorkerLink, error: BatonError) -> None:
        self._ended(link, cancel=isinstance(error, DrainingError))
        if link is self.prefill and self._has_decode_spoken and not self._early:
            return  # prefill is gone, but its KV and its token had arrived: decode goes on alone
        raise error

    def _handed_off(self, link: WorkerLink, event: HandedOff) -> None:
        self._ended(link)
        if link is not self.prefill:
            raise WorkerLostError(f"{link.info.worker_id} handed the request to a worker that is lost")
        self._num_cached = max(self._num_cached, event.num_cached_tokens)
        self.handoff_s = event.exposed_s
        self._observer.handed_off(event.num_bytes, event.exposed_s)

    def _check_end(self) -> None:
        """Decode may be through before the first token's frame from prefill is here: the end waits for it."""
        if self._end is not None and self._has_token and not self._early and not self._over.done():
            num_cached = max(self._end.num_cached_tokens, self._num_cached)
            self._end = replace(self._end, num_cached_tokens=num_cached)
            self._over.set_result(None)

    def _wait_on(self, now_s: float) -> None:
        """Something has come: patience begins anew."""
        if not self._over.done():
            self._alarm.set(min(self._deadline, now_s + self._patience_s))

    def _lose_patience(self) -> None:
        now_s = time.monotonic()
        if self._has_token and now_s < min(self._deadline, self._last_token_s + self._patience_s):
            self._wait_on(self._last_token_s)  # a steady stream's tokens do not set the alarm
        elif now_s >= self._deadline:
            self._fail(DeadlineError("the request did not finish before its deadline"))
        else:
            workers = " or ".join(self.worker_ids)
            self._fail(WorkerLostError(f"no token from {workers} for {self._patience_s} s"))

    def _fail(self, error: Exception) -> None:
        if self._over.done():
            return
        self._error = error
        self._over.set_result(None)
        if not self._granted.done():
            self._granted.set_result(None)

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
        self._steady = None
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
        self._over.cancel()
        if self._move is not None:
            self._stay(self._move, "ended")
        for link, is_open in self._open.items():
            link.close(self._ids[link], cancel=is_open)
        self._open.clear()

    def _subscribe(self, link: WorkerLink, request: GenerateRequest) -> None:
        self._open[link] = True
        self._ids[link] = request.request_id
        is_own = request is self.request
        num_tokens = request.num_known_tokens if is_own and link is (self.prefill or self.decode) else 0
        is_answered_here = not is_own or link is self.decode
        link.open(request.request_id, partial(self._hear, link), num_tokens, is_answered_here)

    def _ended(self, link: WorkerLink, cancel: bool = False) -> None:
        """It is over on this worker, and the load it carried is gone. `cancel`: the worker does not know yet."""
        if self._open.get(link):
            self._open[link] = False
            link.close(self._ids[link], cancel)
