"""The sending end of one handoff, of a prompt or of a request that is decoded: computed tokens in, chunks out.

    OPENING ──a slot──► STREAMING ──finish() and all chunks sent──► FINISHING ──Commit──► DONE(None)
       └──────────────────┴── abort() │ Abort of the peer │ peer lost │ no progress ────► DONE(error)

    event              OPENING/STREAMING                  FINISHING          DONE
    ready              cut chunks, take what slots the    -                  ignored
                       connection keeps, Want the rest
    Grant              gather + send, one per credit;     -                  ignored: Abort gives the slots back
                       Fin right behind the last one
    ChunkDone ok       next                               -                  ignored
    ChunkDone bad      send again, then fail              the same           ignored
    Abort              fail, AbortOk                      fail, AbortOk      AbortOk

A migration is a handoff whose end is not known when it begins: the request is decoded meanwhile. `on_caught_up` is when
all full blocks are at the target; then the request pauses, and `finish` tells how many tokens there are.

A small prompt is one round trip: Open, Data in a slot that the connection keeps, its bytes and Fin; then Commit. Slots
that were granted to a handoff go back with its Abort; kept ones that it has not used go back to the connection.

A chunk is gathered in one piece on the event loop, into a slot; or, where it lies in one piece anyway, sent straight
from its blocks. DONE follows at once in any state, `on_done` when the link has let go of the blocks as well: the peer
gets nothing but what was computed, and whoever owns the blocks may reuse them from `on_done` on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from contracts.errors import BatonError, DeadlineError, HandoffError, WorkerLostError, to_wire
from contracts.messages import Abort, ChunkDone, Data, Fin, HandoffState, Message, Open, Want
from contracts.ticket import Ticket
from kvtransfer.incoming import OK, UNNEEDED
from kvtransfer.pages import checksum
from kvtransfer.plan import Chunk, ChunkPlan, least_whole_tokens, tokens_per_chunk
from kvtransfer.route import Route
from kvtransfer.stretch import Stretches
from kvtransfer.transport import Op

logger = logging.getLogger("baton.kvtransfer")
_SHARED_PIECE_BYTES = 4 << 20  # of shared memory, which the other end copies best while it is in the cache

_Argument = TypeVar("_Argument")

MAX_SENDING = 2  # slots gathered ahead of the link, so that other handoffs find some


@dataclass(frozen=True, slots=True)
class OutgoingResult:
    """`exposed_s`: from the end of compute to the peer's Commit, the part of the transfer not hidden behind compute;
    `hidden_s`: from the first chunk to the end of compute. `reason`: "ok", "unneeded", or the error's code.
    """

    num_bytes: int
    exposed_s: float
    error: BatonError | None
    hidden_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk goes from: gathered into `staged`, if any; `sent` by the link, if the peer is to get it so."""

    staged: Tensor | None
    sent: memoryview | None = None
    slot: int | None = None  # of ours, to be given back


class Outgoing:
    """`ready`, `finish` and `abort` may be called from any thread and never block; all else runs on the event loop."""

    def __init__(
        self,
        ticket: Ticket,
        start: int,
        on_done: Callable[[OutgoingResult], None],
        route: Route | BatonError,
        on_caught_up: Callable[[], None] | None = None,
    ) -> None:
        """With an error for a route, `on_done` gets that. With `on_caught_up` it is a migration."""
        self.handoff_id = ticket.handoff_id
        self._ticket = ticket
        self._block_ids: Sequence[int] = ()
        self._start = start
        self._on_done = on_done
        self._on_caught_up = on_caught_up
        self._loop = asyncio.get_running_loop()
        self._credits: deque[int] = deque()
        self._kept: deque[int] = deque()  # credits as well, but the connection's
        self._state: HandoffState | None = None
        self._finished_s = self._begun_s = 0.0
        self._num_bytes = 0
        self._num_asked = self._num_kept = 0
        self._num_sending = self._num_in_slots = 0
        self._is_opened = self._has_sent_fin = self._is_done = self._is_pumping = False
        self._result: OutgoingResult | None = None  # for `on_done`, when the link lets go
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf
        if isinstance(route, BatonError):
            self._is_done = True
            self._loop.call_soon(on_done, OutgoingResult(0, 0.0, route, reason=route.code))
            return
        self._route = route
        layout = route.pages.layout
        is_staged = route.staging.tensor(0) is not None  # then nothing is sent from where it lies
        slot_bytes = min(route.slot_bytes, max(_SHARED_PIECE_BYTES, layout.bytes_per_token))
        max_tokens = tokens_per_chunk(layout, slot_bytes if is_staged else route.slot_bytes)
        num_tokens = ticket.num_tokens if on_caught_up is None else None
        least_whole = max_tokens + 1 if is_staged else least_whole_tokens(layout)
        self._stretches = Stretches(route.on_moved)
        self._plan = ChunkPlan(start, num_tokens, layout.block_size, max_tokens, least_whole)
        self._loop.call_soon(self._open)

    # --- the engine's side, any thread ------------------------------------------------------------------------------

    def ready(self, num_tokens: int, block_ids: Sequence[int]) -> None:
        """KV of tokens [0, num_tokens) is in `block_ids`, which hold the whole sequence and stay so until `on_done`."""
        self._hop(self._ready, (num_tokens, tuple(block_ids)))

    def finish(self, state: HandoffState) -> None:
        """Nothing more comes; pass `state` on with the last chunk's acknowledgement."""
        self._hop(self._finish, state)

    def abort(self, error: BatonError | None = None) -> None:
        """Stop at once; the peer is told. `on_done` gets `error` (None: not needed, the request has ended here)."""
        self._hop(self._abort, error)

    def _hop(self, call: Callable[[_Argument], None], argument: _Argument) -> None:
        try:
            self._loop.call_soon_threadsafe(call, argument)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The worker has ended, and all handoffs with it; the engine's thread may be a step behind.

    # --- the peer's side, event loop --------------------------------------------------------------------------------

    def granted(self, slots: Sequence[int]) -> None:
        if not self._is_done:
            self._credits.extend(slots)
            self._watch()
            self._pump_soon()

    def chunk_done(self, message: ChunkDone) -> None:
        if self._is_done:
            return
        try:
            self._plan.done(message.chunk, message.is_ok)
        except HandoffError as error:
            self._abort(error)
            return
        if not self._plan.is_under_way and not self._has_sent_fin:
            self._stretches.end()
        self._credits.extend(message.granted)
        self._advance()
        self._pump_soon()

    def committed(self) -> None:
        if self._has_sent_fin:
            self._stretches.end()
            self._end(None, OK)

    def fail(self, error: BatonError) -> None:
        """The peer aborted, or is lost: it is not told."""
        self._end(error)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if not self._is_done and self._tell(Open(self._ticket, self._start)):
            self._is_opened = True
            self._advance()

    def _ready(self, progress: tuple[int, Sequence[int]]) -> None:
        if not self._is_done:
            num_tokens, self._block_ids = progress
            self._plan.ready(num_tokens)
            if self._plan.is_under_way:
                self._stretches.begin()
            self._advance()

    def _finish(self, state: HandoffState) -> None:
        if not self._is_done and self._state is None:
            self._state = state
            self._finished_s = time.monotonic()
            self._plan.end(self._ticket.num_tokens + len(state.output_ids))
            self._stretches.begin()
            self._advance()

    def _abort(self, error: BatonError | None) -> None:
        if self._is_done:
            return
        if self._is_opened:
            self._tell(Abort(self.handoff_id, to_wire(error) if error is not None else None))
        self._end(error)

    def _advance(self) -> None:
        """Ask for slots, or send Fin, whichever the plan allows now."""
        if not self._is_opened or self._is_done:
            return
        num_lacking = self._plan.num_wanted - self._num_asked - self._num_kept
        if num_lacking and self._route.kept:
            num_taken = min(num_lacking, len(self._route.kept))
            self._kept.extend(self._route.kept.popleft() for _ in range(num_taken))
            self._num_kept += num_taken
            num_lacking -= num_taken
        if num_lacking:
            if not self._tell(Want(self.handoff_id, self._num_asked + num_lacking)):
                return
            self._num_asked += num_lacking
        if self._state is not None and self._plan.is_sent and not self._has_sent_fin:
            if not self._tell(Fin(self.handoff_id, self._plan.num_chunks, self._state)):
                return
            self._has_sent_fin = True
        self._watch()
        if self._on_caught_up is not None and self._block_ids and not self._plan.is_under_way:
            tell, self._on_caught_up = self._on_caught_up, None
            tell()
        if self._kept and not self._is_pumping:
            self._pump()  # at once, so that Open, Data and Fin go out together

    def _pump_soon(self) -> None:
        if not self._is_pumping:
            self._is_pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send one chunk, then let the loop breathe: others' chunks and messages come in between."""
        self._is_pumping = False
        credits = self._kept or self._credits
        if self._is_done or not credits or not self._plan.has_next:
            self._route.slots.pass_on()
            return
        chunk = self._plan.peek()
        try:
            place = self._place(chunk, credits[0])
        except Exception as error:
            self._cannot_send(chunk, error)
            return
        if place is None:
            return
        self._plan.next()
        self._send(place, credits, chunk)
        if (self._kept or self._credits) and self._plan.has_next:
            self._pump_soon()
        elif self._plan.is_sent:
            self._advance()

    def _place(self, chunk: Chunk, credit: int) -> _Place | None:
        """Where the chunk is sent from: the peer's memory, its own blocks, or a slot. None: wait for one."""
        route = self._route
        num_bytes = route.pages.num_bytes(chunk.low, chunk.high)
        staged = route.staging.content(credit, num_bytes)
        if staged is not None:
            return _Place(staged)
        in_blocks = route.pages.in_place(self._block_ids, chunk.low, chunk.high)
        if in_blocks is not None:
            return _Place(None, in_blocks)
        if self._num_in_slots >= MAX_SENDING:
            route.slots.pass_on()
            return None
        slot = route.slots.try_take(self._pump_soon)
        if slot is None:
            return None
        return _Place(route.slots.arena.content(slot, num_bytes), route.slots.arena.views[slot], slot)

    def _send(self, place: _Place, credits: deque[int], chunk: Chunk) -> None:
        """With the first of `credits`, which is used up when the peer is told of it."""
        route, credit = self._route, credits[0]
        num_bytes = route.pages.num_bytes(chunk.low, chunk.high)
        self._begun_s = self._begun_s or time.monotonic()
        try:
            content: Tensor | memoryview | None = place.sent
            if place.staged is not None:
                content = place.staged
                route.pages.gather(self._block_ids, chunk.low, chunk.high, content)
            assert content is not None
            summed = checksum(content) if route.is_summed else 0
            route.tell(Data(self.handoff_id, chunk.number, credit, chunk.low, chunk.high, num_bytes, summed))
            credits.popleft()
            self._stretches.add(num_bytes)
            if place.sent is None:
                self._num_bytes += num_bytes
                return
            op = route.link.send(credit, place.sent[:num_bytes])
        except Exception as error:
            self._give_back(place)
            self._cannot_send(chunk, error)
            return
        self._num_sending += 1
        self._num_in_slots += place.slot is not None
        op.final.add_done_callback(lambda _final: self._sent(op, place, num_bytes))

    def _cannot_send(self, chunk: Chunk, error: Exception) -> None:
        """Whatever it is, it ends this handoff and not the connection."""
        if isinstance(error, WorkerLostError):
            self._end(error)
            return
        logger.error(
            "handoff %s: cannot send tokens [%d, %d)", self.handoff_id, chunk.low, chunk.high, exc_info=error
        )
        self._abort(HandoffError(f"tokens [{chunk.low}, {chunk.high}) could not be sent: {error}"))

    def _give_back(self, place: _Place) -> None:
        if place.slot is not None:
            self._route.slots.give_back(place.slot)

    def _sent(self, op: Op, place: _Place, num_bytes: int) -> None:
        self._give_back(place)
        self._num_sending -= 1
        self._num_in_slots -= place.slot is not None
        error = op.final.exception()
        if error is None:
            self._num_bytes += num_bytes
            self._pump_soon()
        else:
            self._abort(WorkerLostError(f"data link to {self._ticket.target_id} failed: {error}"))
        self._tell_result()

    def _tell(self, message: Message) -> bool:
        try:
            self._route.tell(message)
        except WorkerLostError as error:
            self._end(error)
            return False
        return True

    def _watch(self) -> None:
        """(Re)start the wait for the peer's next step, if it is the peer's turn."""
        is_theirs = not self._is_done and (self._has_sent_fin or self._plan.is_under_way)
        self._due_s = self._loop.time() + self._route.progress_timeout_s if is_theirs else math.inf
        if self._timer is None and is_theirs:
            self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        """One timer, set anew only when it rings: what it waits for moves with every message."""
        self._timer = None
        if self._loop.time() < self._due_s:
            if not self._is_done and self._due_s < math.inf:
                self._timer = self._loop.call_at(self._due_s, self._look)
            return
        target, timeout_s = self._ticket.target_id, self._route.progress_timeout_s
        self._abort(DeadlineError(f"{target} made no progress with the handoff for {timeout_s} s"))

    def _end(self, error: BatonError | None, reason: str = UNNEEDED) -> None:
        if self._is_done:
            return
        self._is_done = True
        if self._timer is not None:
            self._timer.cancel()
        self._route.slots.forget(self._pump_soon)
        self._route.kept.extend(self._kept)
        self._kept.clear()
        self._route.forget(self.handoff_id)
        now_s = time.monotonic()
        exposed_s = now_s - self._finished_s if self._finished_s else 0.0
        hidden_s = max((self._finished_s or now_s) - self._begun_s, 0.0) if self._begun_s else 0.0
        reason = reason if error is None else error.code
        self._result = OutgoingResult(self._num_bytes, exposed_s, error, hidden_s, reason)
        self._loop.call_soon(self._tell_result)

    def _tell_result(self) -> None:
        """Once: it is over, and no block is read any more."""
        if self._result is not None and not self._num_sending:
            result, self._result = self._result, None
            self._on_done(replace(result, num_bytes=self._num_bytes))
