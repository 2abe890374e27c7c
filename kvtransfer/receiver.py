"""Decode's side of all connections: reservations, slots, credits, and what each message does to them.

connection:  hello (checked) ──► data link bound by token ──► messages ──EOF │ silence │ nonsense──► fenced
fenced:      its handoffs fail at once, then the link is closed, then its slots are free
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from contracts.channel import Channel
from contracts.config import TransferConfig
from contracts.errors import (
    BatonError,
    DeadlineError,
    HandoffError,
    ProtocolError,
    WorkerLostError,
    from_wire,
    to_wire,
)
from contracts.messages import (
    Abort,
    AbortOk,
    ChunkDone,
    Commit,
    Data,
    Fin,
    Grant,
    Keep,
    Message,
    Open,
    Ping,
    Pong,
    Probe,
    ProbeDone,
    Want,
)
from contracts.ticket import is_genuine
from kvtransfer.connection import Connection
from kvtransfer.incoming import Incoming, IncomingState, Outcome, Reservation, Stored, check_ticket
from kvtransfer.joined import AnyPages
from kvtransfer.landing import Landing
from kvtransfer.pages import checksum
from kvtransfer.selftest import ECHO_BYTES
from kvtransfer.slots import KEPT, Arena, Credits, FlowKey, QuarantineBudget, SlotCounts, SlotTable, Staging
from kvtransfer.transport import Link, LinkClosed
from kvtransfer.watch import Watch, watch_link

logger = logging.getLogger("baton.kvtransfer")

NUM_TOMBSTONES = 4096
MAX_COPIED_BYTES = 8 << 20  # scattered in a row before the event loop's other work has its turn


class Receiver:
    """One per endpoint. All methods on the event loop."""

    def __init__(
        self,
        identity: tuple[str, int],
        secret: bytes,
        pages: AnyPages,
        config: TransferConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._secret = secret
        self._pages = pages
        self._config = config
        self._clock = clock
        self._arena = Arena(config.num_slots, config.slot_bytes)
        self._slots = SlotTable(config.num_slots)
        self._budget = QuarantineBudget(self._slots, config.max_quarantined_share * config.num_slots, clock)
        self._credits = Credits(self._slots)
        self._incoming: dict[str, Incoming] = {}
        self._committed: OrderedDict[str, tuple[str, int]] = OrderedDict()  # handoff -> source
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count()
        self._is_closed = False
        self.num_damaged_chunks = 0
        self.num_ended: Counter[str] = Counter()  # by Incoming.reason

    @property
    def _deadline_s(self) -> float:
        return self._clock() + self._config.progress_timeout_s

    @property
    def slot_counts(self) -> SlotCounts:
        return self._slots.counts()

    def num_open(self) -> Counter[str]:
        """Reservations by state."""
        return Counter(incoming.state.name.lower() for incoming in self._incoming.values())

    def trouble(self) -> str | None:
        """Why nothing more should be sent here, or None."""
        return self._budget.trouble()

    @property
    def num_expected(self) -> int:
        return len(self._incoming)

    def expect(
        self,
        reservation: Reservation,
        on_start: Callable[[], object] | None,
        on_done: Callable[[Outcome], object],
    ) -> Incoming:
        """Raises HandoffError if the handoff is expected, or was committed, already; or after `close`."""
        handoff_id = reservation.handoff_id
        if self._is_closed:
            raise HandoffError("the kv endpoint is closed")
        if handoff_id in self._incoming or handoff_id in self._committed:
            raise HandoffError(f"expected a new handoff but {handoff_id} is known already")
        self._incoming[handoff_id] = Incoming(reservation, self._pages, on_start, on_done, self._leave)
        return self._incoming[handoff_id]

    def close(self) -> None:
        """End the reservations that nobody has opened. Those with a connection end with it."""
        self._is_closed = True
        for incoming in list(self._incoming.values()):
            incoming.fail(HandoffError("the kv endpoint is closed"))

    async def serve(self, channel: Channel, link: Link, is_rounded: bool = False) -> None:
        """One connection, to its end. Raises what ended it. `is_rounded`: its KV comes in 8 bits (fp8.py)."""
        connection = Connection(next(self._numbers), channel, link, Staging(link), is_rounded)
        watch_link(link, channel)
        self._connections[connection.number] = connection
        watch = Watch(self._config.peer_timeout_s, lambda: self._look(connection), channel.abort)
        num_copied = 0
        try:
            while True:
                message = await channel.receive()
                watch.heard()
                self._handle(connection, message)
                num_copied = num_copied + max(message.num_bytes, 1) if isinstance(message, Data) else 0
                if num_copied >= MAX_COPIED_BYTES:  # else messages that are here are read without a pause
                    num_copied = 0
                    await asyncio.sleep(0)
        except ProtocolError as error:
            logger.warning("%s: %s", channel.peer.sender_id, error)
            raise
        finally:
            watch.stop()
            del self._connections[connection.number]
            channel.abort()
            self._fail_all(connection)
            await connection.close(partial(self._slots.release_peer, connection.number))
            self._hand_out()

    # --- messages ---------------------------------------------------------------------------------------------------

    def _handle(self, connection: Connection, message: Message) -> None:
        match message:
            case Open():
                self._open(connection, message)
            case Want(handoff_id, num_chunks):
                if not handoff_id or self._find(connection, handoff_id):
                    self._credits.want((connection.number, handoff_id), num_chunks)
                    self._hand_out()
            case Keep(num_slots):
                self._credits.keep(connection.number, num_slots)
                self._hand_out()
            case Data():
                self._data(connection, message)
            case Fin():
                self._fin(connection, message)
            case Abort(handoff_id):
                self._aborted(connection, message)
            case AbortOk(handoff_id):
                connection.aborting.pop(handoff_id, None)
                self._slots.release_unused((connection.number, handoff_id))
                self._hand_out()
            case Probe():
                self._receive(connection, message.slot, message)
            case Ping(number):
                connection.tell(Pong(number))
            case _:
                raise ProtocolError(f"expected a sender's message but got {type(message).__name__}")

    def _open(self, connection: Connection, message: Open) -> None:
        ticket = message.ticket
        incoming = self._incoming.get(ticket.handoff_id)
        try:
            if not is_genuine(ticket, self._secret):
                raise HandoffError(f"ticket of handoff {ticket.handoff_id} is not genuine")
            check_ticket(ticket, connection.source, self._identity)
            if incoming is None:
                if self._committed.get(ticket.handoff_id) == connection.source:
                    return  # late duplicate
                raise HandoffError(f"handoff {ticket.handoff_id} is not expected here (any more)")
            incoming.check(message)
            if incoming.connection not in (None, connection.number):
                raise HandoffError(f"handoff {ticket.handoff_id} is open on another connection")
        except HandoffError as error:
            connection.tell(Abort(ticket.handoff_id, to_wire(error)))
            return
        if incoming.connection is None:
            incoming.open(connection.number, connection.is_rounded)

    def _data(self, connection: Connection, message: Data) -> None:
        incoming = self._find(connection, message.handoff_id)
        if incoming is not None:
            try:
                incoming.check_data(message)
                if not message.checksum and self._config.checksum == "always":
                    raise ProtocolError(
                        "expected a checksum (transfer.checksum=always here) but peer sent none"
                    )
            except ProtocolError as error:
                incoming.fail(error)
        # Whatever became of the handoff: bytes announced for a granted slot are received, or the link would stand.
        self._receive(connection, message.slot, message)

    def _fin(self, connection: Connection, message: Fin) -> None:
        handoff_id = message.handoff_id
        incoming = self._find(connection, handoff_id)
        if incoming is not None:
            self._finish(connection, incoming, message)
        elif self._committed.get(handoff_id) == connection.source:
            connection.tell(Commit(handoff_id))
        elif handoff_id not in self._incoming:
            error = HandoffError(f"handoff {handoff_id} is not expected here (any more)")
            connection.tell(Abort(handoff_id, to_wire(error)))

    def _aborted(self, connection: Connection, message: Abort) -> None:
        key = (connection.number, message.handoff_id)
        incoming = self._find(connection, message.handoff_id)
        if incoming is not None:
            if message.error is None:
                incoming.dismiss()
            else:
                # As the sender tells it: both sides report to the coordinator, and whichever is heard first decides.
                incoming.fail(from_wire(message.error), tell_peer=False)
        self._slots.release_unused(key)
        connection.aborting.pop(message.handoff_id, None)
        connection.tell(AbortOk(message.handoff_id))
        self._hand_out()

    def _finish(self, connection: Connection, incoming: Incoming, message: Fin) -> None:
        num_coming = self._slots.num_receiving((connection.number, message.handoff_id))
        if incoming.finish(message, num_coming):
            connection.tell(Commit(message.handoff_id))
        elif math.isinf(incoming.fin_deadline_s):
            incoming.fin_deadline_s = self._deadline_s

    # --- slots ------------------------------------------------------------------------------------------------------

    def _receive(self, connection: Connection, slot: int, message: Data | Probe) -> None:
        handoff_id = message.handoff_id if isinstance(message, Data) else ""
        if not self._slots.try_begin(slot, (connection.number, handoff_id)):
            logger.debug("%s: ignored data for slot %d, not granted", connection.source[0], slot)
            return
        incoming = self._find(connection, handoff_id)
        staged = connection.staging.content(slot, message.num_bytes)
        if staged is not None:
            if isinstance(message, Probe):
                self._probed(connection, message, staged)
            else:
                self._stored(connection, message, incoming is not None and incoming.store(message, staged))
            return
        landing = connection.landings.get(slot) or self._post(connection, slot)
        landing.announce(message, incoming)
        if landing.is_final:
            self._landed(connection, landing, message)
        else:
            connection.receiving[slot] = self._deadline_s

    def _post(self, connection: Connection, slot: int) -> Landing:
        landing = connection.landings[slot] = Landing(slot, partial(self._arena.content, slot))
        op = connection.link.post_recv(slot, self._arena.views[slot], landing.arrived)
        op.final.add_done_callback(partial(self._final, connection, landing))
        return landing

    def _final(self, connection: Connection, landing: Landing, final: asyncio.Future[int]) -> None:
        if connection.number not in self._connections:
            return  # fenced: `serve` frees the slots, after the link is closed
        error = final.exception()
        if isinstance(error, LinkClosed):
            connection.channel.abort()
            return
        landing.is_final, landing.num_bytes = True, 0 if error is not None else final.result()
        if landing.message is not None:
            self._landed(connection, landing, landing.message)
        else:
            connection.receiving[landing.slot] = self._deadline_s

    def _landed(self, connection: Connection, landing: Landing, message: Data | Probe) -> None:
        del connection.landings[landing.slot]
        connection.receiving.pop(landing.slot, None)
        if isinstance(message, Probe):
            self._probed(connection, message, landing.content)
        else:
            self._stored(connection, message, landing.result)

    def _probed(self, connection: Connection, message: Probe, content: Tensor) -> None:
        """The bytes are here: look at them, answer, free the slot."""
        is_ok = content.numel() == message.num_bytes and checksum(content) == message.checksum
        if is_ok and message.num_bytes <= ECHO_BYTES:
            done = partial(self._probe_done, connection, message.slot, True)
            connection.echo(message.slot, content, self._deadline_s, done)
            return
        self._probe_done(connection, message.slot, is_ok)

    def _probe_done(self, connection: Connection, slot: int, is_ok: bool) -> None:
        connection.tell(ProbeDone(slot, is_ok))
        self._slots.finish(slot)
        self._hand_out()

    def _stored(self, connection: Connection, message: Data, result: Stored) -> None:
        """The bytes are in their blocks, if anybody wanted them: answer, free the slot."""
        self._slots.finish(message.slot)
        incoming = self._find(connection, message.handoff_id)
        if incoming is None:
            self._hand_out()
            return
        is_ok = incoming.stored(message, result)
        self.num_damaged_chunks += not is_ok
        self._answer(connection, incoming, ChunkDone(message.handoff_id, message.chunk, message.slot, is_ok))

    def _answer(self, connection: Connection, incoming: Incoming, done: ChunkDone) -> None:
        """With the slots that are this handoff's turn now; Commit is answer enough for the last chunk."""
        if done.is_ok and incoming.fin is not None and not incoming.is_over:
            self._finish(connection, incoming, incoming.fin)
        given = self._credits.hand_out()
        granted = given.pop((connection.number, done.handoff_id), ())
        if not incoming.is_over:
            connection.tell(replace(done, granted=granted))
        self._grant(given)

    def _hand_out(self) -> None:
        self._grant(self._credits.hand_out())

    def _grant(self, given: dict[FlowKey, tuple[int, ...]]) -> None:
        for (number, handoff_id), slots in given.items():
            connection = self._connections[number]
            if handoff_id != KEPT:
                connection.tell(Grant(handoff_id, slots))
                continue
            for slot in slots:
                if connection.staging.tensor(slot) is None:
                    self._post(connection, slot)
            connection.tell(Grant("", slots))

    # --- ends -------------------------------------------------------------------------------------------------------

    def _leave(self, incoming: Incoming, told: BatonError | None) -> None:
        handoff_id = incoming.reservation.handoff_id
        del self._incoming[handoff_id]
        self.num_ended[incoming.reason] += 1
        connection = self._connections.get(-1 if incoming.connection is None else incoming.connection)
        if connection is None:
            return
        key = (connection.number, handoff_id)
        self._credits.drop(key)
        if incoming.state is IncomingState.DELIVERED:
            self._slots.release_unused(key)
            self._committed[handoff_id] = connection.source
            if len(self._committed) > NUM_TOMBSTONES:
                self._committed.popitem(last=False)
        if told is not None:
            connection.tell(Abort(handoff_id, to_wire(told)))
        if self._slots.quarantine(key) and told is not None:
            connection.aborting[handoff_id] = self._deadline_s

    def _find(self, connection: Connection, handoff_id: str) -> Incoming | None:
        incoming = self._incoming.get(handoff_id)
        return incoming if incoming is not None and incoming.connection == connection.number else None

    def _fail_all(self, connection: Connection) -> None:
        self._credits.drop_peer(connection.number)
        error = WorkerLostError(f"{connection.source[0]} was lost during the handoff")
        for incoming in list(self._incoming.values()):
            if incoming.connection == connection.number:
                incoming.fail(error, tell_peer=False)

    def _look(self, connection: Connection) -> None:
        """Fence a peer that talks but neither sends what it announced nor lets go of what it was granted.

        One that said Fin and does not send again what was asked for loses that handoff only.
        """
        now_s = self._clock()
        for incoming in list(self._incoming.values()):
            if incoming.connection == connection.number and incoming.fin_deadline_s < now_s:
                incoming.fail(DeadlineError("the peer ended the handoff but its last bytes did not come"))
        if connection.is_overdue(now_s):
            logger.warning("%s: announced data or an answer to an abort is overdue", connection.source[0])
            connection.channel.abort()
