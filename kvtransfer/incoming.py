"""Decode's end of one handoff: a reservation that a ticket may fill.

    RESERVED ──Open (ticket checked)──► RECEIVING ──Fin, all tokens here──► COMMITTED ──on_done(state)──► DELIVERED
       │                                   │                                    └──on_done raised──┐
       │                                   ├── Abort(error) │ peer lost │ nonsense │ overdue ──────┤
       │                                   ├── Abort(None): the request ended there ───────────────┤ on_done(None)
       └──────────────── cancel() ─────────┴───────────────────────────────────────────────────────► RELEASED(reason)

    event                         RESERVED                 RECEIVING                   DELIVERED    RELEASED
    Open, genuine, matching       RECEIVING                same peer: ignored          ignored      Abort
                                                           other peer: Abort
    Open, forged or not matching  Abort, state unchanged   Abort, state unchanged      Abort        Abort
    Data + bytes                  slot only                checked, scattered          slot only    slot only
    Fin                           ignored                  COMMITTED; or waits for     Commit       Abort
                                                           bytes announced or asked
                                                           for again; else RELEASED
    deadline                      the caller's lease       bytes after Data, and after -            AbortOk within
                                                           Fin: progress_timeout_s                  progress_timeout_s

Who owns what: the caller owns the blocks and lends them from RESERVED until DELIVERED or RELEASED. RECEIVING as such
has no deadline, since prefill may have the request in line: it lasts as long as the connection and the request do.
RELEASED gives the blocks back at once; what is QUARANTINED then are staging slots (slots.py), until their last bytes.
`reason` says why it ended: "ok", "cancelled", "unneeded", or the code of the error.

"slot only": the bytes are received into their staging slot and forgotten. Bytes are scattered where the link has
received them, which may be a thread of its own, as they come where they go as they are (filling.py), under a lock that
every change of the state takes: so after `cancel` has returned nothing is written into the blocks, whatever is still
under way. It waits for one copy at most.
A callback that raises ends its own handoff (the peer gets Abort) and nothing else; so does a copy that fails.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from contracts.errors import BatonError, HandoffError, ProtocolError
from contracts.messages import Data, Fin, HandoffState, Open
from contracts.ticket import Ticket
from kvtransfer.filling import Filling
from kvtransfer.fp8 import Fp8Target
from kvtransfer.joined import AnyPages
from kvtransfer.pages import checksum

logger = logging.getLogger("baton.kvtransfer")


class Arrivals:
    """Which chunks and tokens are here. No I/O."""

    def __init__(self, start: int, max_tokens: int) -> None:
        self._start = start
        self._max_tokens = max_tokens
        self._chunks: dict[int, tuple[int, int]] = {}

    def check(self, chunk: int, low: int, high: int) -> None:
        """Raises ProtocolError if the range is not within the handoff, or `chunk` was another range before."""
        if not self._start <= low < high <= self._max_tokens:
            raise ProtocolError(
                f"expected tokens within [{self._start}, {self._max_tokens}) but peer sent [{low}, {high})"
            )
        known = self._chunks.get(chunk)
        if known is not None and known != (low, high):
            raise ProtocolError(f"expected chunk {chunk} to be tokens {known} but peer sent {(low, high)}")

    def has(self, chunk: int) -> bool:
        return chunk in self._chunks

    def add(self, chunk: int, low: int, high: int) -> None:
        self._chunks[chunk] = (low, high)

    def is_complete(self, num_chunks: int, num_tokens: int) -> bool:
        """Exactly `num_chunks` chunks came and they leave no token of [start, num_tokens) out."""
        reached = self._start
        for low, high in sorted(self._chunks.values()):
            if low > reached:
                return False
            reached = max(reached, high)
        return reached == num_tokens and len(self._chunks) == num_chunks


class IncomingState(enum.Enum):
    RESERVED = enum.auto()
    RECEIVING = enum.auto()
    COMMITTED = enum.auto()
    DELIVERED = enum.auto()
    RELEASED = enum.auto()


OK, CANCELLED, UNNEEDED = "ok", "cancelled", "unneeded"


Outcome = HandoffState | BatonError | None
"""What a reservation comes to: taken over, failed, or not needed, since the request has ended at the sender."""

Stored = bool | HandoffError
"""What came of a chunk: True, it is in the blocks, or nobody wants it any more; False, it is damaged; or it failed."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What decode expects: tokens [start, num_tokens) of `request_id` into `block_ids`, and further ones, up to
    `max_tokens`, that the sender draws meanwhile.
    """

    handoff_id: str
    request_id: str
    prompt_hash: bytes
    num_tokens: int
    start: int
    block_ids: tuple[int, ...]
    max_tokens: int


class Incoming:
    """Created by `KvEndpoint.expect`. The caller owns the blocks, and may reuse them after `cancel` or `on_done`."""

    def __init__(
        self,
        reservation: Reservation,
        pages: AnyPages,
        on_start: Callable[[], object] | None,
        on_done: Callable[[Outcome], object],
        leave: Callable[[Incoming, BatonError | None], None],
    ) -> None:
        """`leave(incoming, error)` is called once, when it is over; with an error if the peer must be told to stop."""
        self.reservation = reservation
        self.state = IncomingState.RESERVED
        self.reason = ""
        self.connection: int | None = None  # which connection's Open was accepted
        self._writing = threading.Lock()  # held while blocks are written and while `state` changes
        self._reserved = pages
        self._pages: AnyPages | Fp8Target = pages
        self._on_start = on_start
        self._on_done = on_done
        self._leave = leave
        self._arrivals = Arrivals(reservation.start, reservation.max_tokens)
        self._damaged: set[int] = set()  # chunks that the sender was asked for again
        self._filling: dict[int, tuple[int, int]] = {}  # chunks of which a part may be in the blocks: tokens
        self.fin: Fin | None = None  # it came before the bytes
        self.fin_deadline_s = math.inf  # of the receiver's clock, for those bytes

    @property
    def has_started(self) -> bool:
        return self.connection is not None

    @property
    def is_over(self) -> bool:
        return self.state in (IncomingState.DELIVERED, IncomingState.RELEASED)

    def cancel(self, error: BatonError | None) -> None:
        """Forget the handoff: constant time, no `on_done`, no write after return. Does nothing when it is over."""
        if not self.is_over:
            self._release(CANCELLED)
            told = error or HandoffError(f"handoff {self.reservation.handoff_id} was cancelled by its target")
            self._leave(self, told)

    def check(self, message: Open) -> None:
        """Raises HandoffError if the ticket (genuine, for us) or `start` does not fit the reservation."""
        ours, ticket = self.reservation, message.ticket
        wanted = (ours.request_id, ours.num_tokens, ours.prompt_hash, ours.start)
        came = (ticket.request_id, ticket.num_tokens, ticket.prompt_hash, message.start)
        if wanted != came:
            raise HandoffError(
                f"expected request, tokens, prompt hash, start = {_show(*wanted)} but peer opened {_show(*came)}"
            )

    def open(self, connection: int, is_rounded: bool = False) -> None:
        """`is_rounded`: what comes over this connection is in 8 bits."""
        self.connection = connection
        if is_rounded:
            self._pages = Fp8Target(self._reserved)
        self._become(IncomingState.RECEIVING)
        try:
            if self._on_start is not None:
                self._on_start()
        except Exception as error:
            logger.exception("handoff %s: on_start failed", self.reservation.handoff_id)
            self.fail(HandoffError(f"the target could not begin: {error}"))

    def check_data(self, data: Data) -> None:
        """Raises ProtocolError on a range or size that this handoff cannot have."""
        self._arrivals.check(data.chunk, data.low, data.high)
        num_bytes = self._pages.num_bytes(data.low, data.high)
        if data.num_bytes != num_bytes:
            raise ProtocolError(f"expected {num_bytes} bytes for a chunk but peer announced {data.num_bytes}")

    def store(self, data: Data, content: Tensor) -> Stored:
        """Write a chunk that came into the blocks, on any thread. `stored` must be told what came of it."""
        with self._writing:
            if self.state is not IncomingState.RECEIVING or self.has(data.chunk):
                return True
            if content.numel() != data.num_bytes or (data.checksum and checksum(content) != data.checksum):
                return False
            try:
                self._pages.scatter(self.reservation.block_ids, data.low, data.high, content)
            except Exception as error:
                logger.exception(
                    "handoff %s: cannot store tokens [%d, %d)", data.handoff_id, data.low, data.high
                )
                return HandoffError(f"tokens [{data.low}, {data.high}) could not be stored: {error!r}")
        return True

    def begin(self, data: Data) -> Filling | None:
        """For a chunk that can be stored as it comes, by `store_part`; None: only in one piece, by `store`.

        One of whose tokens something else may be in the blocks, since it came damaged, is stored when it is whole.
        """
        with self._writing:
            runs = self._pages.runs(self.reservation.block_ids, data.low, data.high)
            if runs is None or any(
                low < data.high and data.low < high for low, high in self._filling.values()
            ):
                return None
            if not self.has(data.chunk):
                self._filling[data.chunk] = (data.low, data.high)
            return Filling(runs, data)

    def store_part(self, data: Data, filling: Filling, here: memoryview) -> Stored:
        """Write what came next of a chunk into the blocks, on any thread. `stored` must be told the last result."""
        with self._writing:
            if self.state is not IncomingState.RECEIVING or self.has(data.chunk):
                return True
            if data.chunk not in self._filling:
                return False  # its tokens came whole as another chunk: the peer sends nonsense
            filling.add(here)
            return filling.is_whole

    def has(self, chunk: int) -> bool:
        """It is in the blocks already."""
        return self._arrivals.has(chunk)

    def stored(self, data: Data, result: Stored) -> bool:
        """False if the chunk must be sent again. A copy that failed, for want of memory say, ends the handoff."""
        if self.is_over or self.has(data.chunk):
            return True
        if result is False:
            self._damaged.add(data.chunk)
            return False
        self._damaged.discard(data.chunk)
        with self._writing:
            for chunk, (low, high) in list(self._filling.items()):
                if data.low <= low and high <= data.high:
                    del self._filling[chunk]  # whatever it left is overwritten
        if isinstance(result, HandoffError):
            self.fail(result)
        else:
            self._arrivals.add(data.chunk, data.low, data.high)
        return True

    def finish(self, message: Fin, num_coming: int) -> bool:
        """True if everything is here: the request is ours from now on.

        Else the handoff has failed; or it goes on, if `num_coming` chunks are announced or any was asked for again.
        NOTE: if the peer sends nonsense, a part of a damaged chunk may be over a whole one's tokens.
        """
        num_tokens = self.reservation.num_tokens + len(message.state.output_ids)
        is_complete = self._arrivals.is_complete(message.num_chunks, num_tokens)
        if self._filling or (not is_complete and (num_coming or self._damaged)):
            self.fin = message
            return False
        if not is_complete:
            self.fail(HandoffError(f"peer ended with {message.num_chunks} chunks but tokens are missing"))
            return False
        self._become(IncomingState.COMMITTED)
        if not self._call_on_done(message.state):
            self._release(HandoffError.code)
            self._leave(self, HandoffError("the target could not take over"))
            return False
        self.reason = OK
        self._become(IncomingState.DELIVERED)
        self._leave(self, None)
        return True

    def fail(self, error: BatonError, tell_peer: bool = True) -> None:
        if not self.is_over:
            self._release(error.code)
            self._leave(self, error if tell_peer else None)
            self._call_on_done(error)

    def dismiss(self) -> None:
        """The sender has ended the request and needs no handoff; it is not told."""
        if not self.is_over:
            self._release(UNNEEDED)
            self._leave(self, None)
            self._call_on_done(None)

    def _release(self, reason: str) -> None:
        self.reason = reason
        self._become(IncomingState.RELEASED)

    def _become(self, state: IncomingState) -> None:
        """NOTE: without the lock, a copy that has just looked at the state would write into blocks of somebody else."""
        with self._writing:
            self.state = state

    def _call_on_done(self, result: Outcome) -> bool:
        try:
            self._on_done(result)
        except Exception:
            logger.exception("handoff %s: on_done failed", self.reservation.handoff_id)
            return False
        return True


def check_ticket(ticket: Ticket, source: tuple[str, int], target: tuple[str, int]) -> None:
    """Raises HandoffError if `ticket` is not from this peer's life to this worker's life."""
    wanted = (*source, *target)
    came = (ticket.source_id, ticket.source_incarnation, ticket.target_id, ticket.target_incarnation)
    if wanted != came:
        raise HandoffError(f"expected a ticket from and to {wanted} but peer showed one for {came}")


def _show(request_id: str, num_tokens: int, prompt_hash: bytes, start: int) -> str:
    return f"({request_id}, {num_tokens}, {prompt_hash.hex()[:8]}, {start})"
