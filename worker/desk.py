"""Every request of one worker, from the first command to the one terminal event.

    decode side    Reserve ──► RESERVED ──(a peer opens the handoff)──► IN_HANDOFF ──(KV is here)──► RUNNING ──► Ended
                                  │└──(Prefill without ticket)──► PREFILLING ──► RUNNING    │
                                  └──(lease over)──► Ended(error) ◄──────(handoff failed)───┤
                                          forgotten, no event ◄───(it ended at the peer)────┘
    prefill side   Prefill ──► PREFILLING ──► HandedOff | Ended
    migration      RUNNING ──Migrate──► RUNNING, its KV leaves ──► HandedOff | Stayed (RUNNING) | Ended
    any            Cancel, or the coordinator's connection ends: forgotten, blocks freed, no event any more

The lease bounds RESERVED alone: how long the coordinator and the prefill worker may take to put the request in line
there, which opens the handoff. IN_HANDOFF lasts while the prefill worker holds on, however long its line and the
prompt: it ends the handoff itself, or its connection ends (EOF, silence of `transfer.peer_timeout_s`), or the
coordinator cancels when the request's own deadline has passed.

A request with a grammar enters the engine when the grammar is compiled, on a thread; decode begins that with the
reservation, so that it is done long before the KV arrives.

An entry owns what its request holds here: blocks, the incoming or outgoing handoff, the lease timer. All methods run
on the event loop; what belongs to the engine thread goes there by `StepLoop.submit`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Protocol

from contracts.blocks import prompt_hash
from contracts.errors import (
    BatonError,
    HandoffError,
    LeaseExpiredError,
    OverloadedError,
    RequestError,
    to_wire,
)
from contracts.messages import (
    Ended,
    HandedOff,
    Message,
    Migrate,
    Prefill,
    Reserve,
    Reserved,
    Stayed,
    Tokens,
)
from contracts.request import GenerateRequest, Token
from engine.blocks import BlockPool, Hold, HoldState
from engine.loop import EndEvent, Event, StepLoop, TokenEvent
from engine.sequence import Sequence
from engine.text.grammar import GrammarState, LazyGrammars
from kvtransfer.endpoint import KvEndpoint
from kvtransfer.incoming import Incoming, Outcome
from kvtransfer.outgoing import Outgoing, OutgoingResult
from worker.grammar_line import GrammarLine
from worker.holds import Holds
from worker.migrations import Migrations
from worker.phases import Phases


class Reply(Protocol):
    """Where a request's events go: its coordinator's connection."""

    def send(self, message: Message) -> None: ...


@dataclass(slots=True, eq=False)
class _Entry:
    request: GenerateRequest
    reply: Reply
    hold: Hold | None = None  # decode side, until the engine owns it
    incoming: Incoming | None = None
    outgoing: Outgoing | None = None  # of the prefill side, or a migration
    seq: Sequence | None = None  # prefill side, once the engine has it
    lease: asyncio.TimerHandle | None = None
    is_in_engine: bool = False


class Desk:
    """Commands in, events out."""

    def __init__(
        self,
        loop: StepLoop,
        phases: Phases,
        pool: BlockPool,
        kv: KvEndpoint,
        grammars: LazyGrammars,
        on_freed: Callable[[], None],
    ) -> None:
        """`on_freed` is called whenever a request has left: somebody may be waiting for its room."""
        self._engine = loop
        self._phases = phases
        self._pool = pool
        self._kv = kv
        self._grammars = GrammarLine(grammars)
        self._migrations = Migrations(loop, phases.decode, kv)
        self._on_freed = on_freed
        self._entries: dict[str, _Entry] = {}
        self.holds = Holds()
        self.num_lease_expiries = 0
        self.num_reservations = 0
        self.num_handoffs = self.num_handoff_failures = self.num_handoff_bytes = 0
        self.handoff_exposed_s = self.handoff_hidden_s = 0.0

    def requests(self) -> list[tuple[Reply, int]]:
        """Whose each request here is, and how many tokens of its prompt are still to be read for another worker."""
        return [(e.reply, e.seq.num_uncomputed if e.seq is not None else 0) for e in self._entries.values()]

    # --- commands ---------------------------------------------------------------------------------------------------

    def reserve(self, command: Reserve, reply: Reply) -> None:
        """Grant blocks for the whole prompt and the next token, or answer with the error at once."""
        request = command.request
        try:
            hold = self._grant(request, command.num_more)
        except BatonError as error:
            _end(reply, request.request_id, error)
            return
        self.num_reservations += 1
        entry = self._entries[request.request_id] = _Entry(request, reply, hold=hold)
        loop = asyncio.get_running_loop()
        entry.lease = loop.call_later(command.lease_s, self._expire, request.request_id, command.lease_s)
        if command.handoff_id:
            entry.incoming = self._kv.expect(
                command.handoff_id,
                request.request_id,
                prompt_hash(request.prompt_ids + request.output_ids, request.salt),
                request.num_known_tokens,
                hold.num_cached_tokens,
                hold.block_ids,
                num_more=command.num_more,
                on_start=lambda: self._opened(entry, hold),
                on_done=lambda result: self._arrived(request.request_id, result),
            )
        reply.send(Reserved(request.request_id, hold.num_cached_tokens))
        self._with_grammar(entry, lambda _grammar: None)  # compiled once, and kept

    def prefill(self, command: Prefill, reply: Reply) -> None:
        """Start to compute: into the request's own reservation, or for the ticket's target."""
        request = command.request
        entry = self._entries.get(request.request_id)
        if command.ticket is None:
            self._prefill_here(request, entry, reply)
            return
        if entry is not None:
            _end(reply, request.request_id, RequestError(f"request {request.request_id} is here already"))
            return
        entry = _Entry(request, reply, is_in_engine=True)
        # Now, and not with the first chunk: the target must know that the request is in line here.
        outgoing = entry.outgoing = self._kv.open(
            command.ticket, command.skip_tokens, lambda result: self._handed_off(entry, result)
        )
        self._entries[request.request_id] = entry

        def start(grammar: GrammarState | None) -> None:
            seq = entry.seq = Sequence(request, grammar=grammar)
            self._engine.submit(lambda: self._phases.prefill.add(seq, outgoing, None))

        self._with_grammar(entry, start)

    def migrate(self, command: Migrate, reply: Reply) -> None:
        """Hand a running request to another decode worker while it runs; one that has ended has told so."""
        request_id = command.request_id
        entry = self._entries.get(request_id)
        if entry is None:
            return
        if not entry.is_in_engine or entry.outgoing is not None:
            error = HandoffError(
                f"expected a running request but {request_id} is none yet, or leaves already"
            )
            _try_send(reply, Stayed(request_id, to_wire(error)))
            return
        entry.outgoing = self._migrations.begin(
            command,
            lambda result: self._tell_handed_off(entry, result, 0),
            lambda result: self._stays(entry, result),
        )

    def cancel(self, request_id: str) -> None:
        """Forget a request in any state; its blocks are free as soon as nothing can touch them."""
        entry = self._forget(request_id)
        if entry is None:
            return
        if entry.incoming is not None:
            entry.incoming.cancel(None)
        if entry.hold is not None and not entry.is_in_engine:
            self._pool.release(entry.hold)
        elif entry.outgoing is not None:
            outgoing = entry.outgoing
            self._engine.submit(lambda: self._abort_in_engine(request_id, outgoing))
        elif entry.is_in_engine:
            self._engine.submit(lambda: self._cancel_in_engine(request_id))

    def drop(self, reply: Reply) -> None:
        """The coordinator behind `reply` is gone: so are its requests."""
        for request_id in [rid for rid, entry in self._entries.items() if entry.reply is reply]:
            self.cancel(request_id)

    def end_all(self, error: BatonError) -> None:
        """Give every request its terminal event. For a worker that stops."""
        for request_id, entry in list(self._entries.items()):
            _end(entry.reply, request_id, error)
            self.cancel(request_id)
        self._grammars.close()

    # --- events -----------------------------------------------------------------------------------------------------

    def deliver(self, events: SequenceOf[Event]) -> None:
        """Events of one engine step: one Tokens frame per coordinator, then the ends."""
        batches: defaultdict[Reply, list[tuple[str, Token]]] = defaultdict(list)
        ends: list[EndEvent] = []
        for event in events:
            entry = self._entries.get(event.request_id)
            if entry is None:
                continue  # cancelled while the step ran
            if isinstance(event, TokenEvent):
                batches[entry.reply].append((event.request_id, event.token))
            else:
                ends.append(event)
        for reply, items in batches.items():
            _try_send(reply, Tokens.of(items))
        for end in ends:
            self._finish(end)

    def _finish(self, end: EndEvent) -> None:
        entry = self._forget(end.request_id)
        if entry is None:
            return
        error = to_wire(end.error) if end.error is not None else None
        _try_send(entry.reply, Ended(end.request_id, finished=end.finished, error=error))

    def _opened(self, entry: _Entry, hold: Hold) -> None:
        if entry.lease is not None:
            entry.lease.cancel()
        self._pool.move(hold, HoldState.IN_HANDOFF)

    def _arrived(self, request_id: str, result: Outcome) -> None:
        entry = self._entries.get(request_id)
        if entry is None or entry.hold is None:
            return
        if result is None:
            self.cancel(request_id)  # the end is the prefill worker's to tell
            return
        if isinstance(result, BatonError):
            self.num_handoff_failures += 1
            self._end_reserved(request_id, result)
            return
        hold = entry.hold
        output_ids = (*entry.request.output_ids, *result.output_ids)
        request = entry.request = replace(entry.request, output_ids=output_ids)

        def start(grammar: GrammarState | None) -> None:
            self._enter_engine(entry)
            seq = Sequence(request, hold=hold, grammar=grammar)
            seq.take_over(result.first_token, num_cached_tokens=result.num_cached_tokens)
            self._engine.submit(lambda: self._phases.decode.adopt(seq))

        self._with_grammar(entry, start)

    def _handed_off(self, entry: _Entry, result: OutgoingResult) -> None:
        request_id = entry.request.request_id
        error = result.error
        self._engine.submit(lambda: self._phases.prefill.handed_off(request_id, error))
        if error is None:
            self._tell_handed_off(entry, result, entry.seq.num_cached_tokens if entry.seq is not None else 0)
            return
        self._count(result)
        if self._entries.get(request_id) is entry:
            self._forget(request_id)
            self.num_handoff_failures += 1
            _end(entry.reply, request_id, error)

    def _stays(self, entry: _Entry, result: OutgoingResult) -> None:
        """A migration came to nothing, and the request goes on here."""
        self._count(result)
        self.num_handoff_failures += 1
        entry.outgoing = None
        request_id = entry.request.request_id
        if self._entries.get(request_id) is entry:
            error = result.error or HandoffError("it was not handed over")
            _try_send(entry.reply, Stayed(request_id, to_wire(error)))

    def _tell_handed_off(self, entry: _Entry, result: OutgoingResult, num_cached: int) -> None:
        self._count(result)
        request_id = entry.request.request_id
        if self._entries.get(request_id) is not entry:
            return  # ended or cancelled before; only the blocks had to wait
        self._forget(request_id)
        self.num_handoffs += 1
        _try_send(entry.reply, HandedOff(request_id, result.num_bytes, result.exposed_s, num_cached))

    def _count(self, result: OutgoingResult) -> None:
        self.num_handoff_bytes += result.num_bytes
        self.handoff_exposed_s += result.exposed_s
        self.handoff_hidden_s += result.hidden_s

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _grant(self, request: GenerateRequest, num_more: int) -> Hold:
        if request.request_id in self._entries:
            raise RequestError(f"request {request.request_id} is here already")
        hold = self._phases.decode.reserve(request, HoldState.RESERVED, num_more)
        if hold is None:
            available = self._pool.audit().num_available
            raise OverloadedError(
                f"no room for {request.num_known_tokens} tokens: {available} blocks are free",
                retry_after_s=1.0,
            )
        return hold

    def _prefill_here(self, request: GenerateRequest, entry: _Entry | None, reply: Reply) -> None:
        if entry is None or entry.hold is None or entry.is_in_engine:
            error = HandoffError(f"request {request.request_id} has no reservation here")
            _end(reply, request.request_id, error)
            return
        hold, known = entry.hold, entry
        if entry.incoming is not None:
            entry.incoming.cancel(None)  # nothing comes: all but the end of the prompt was here
            entry.incoming = None

        def start(grammar: GrammarState | None) -> None:
            self._enter_engine(known)
            seq = Sequence(request, hold=hold, grammar=grammar)
            self._engine.submit(lambda: self._phases.prefill.add(seq, None, hold))

        self._with_grammar(entry, start)

    def _with_grammar(self, entry: _Entry, start: Callable[[GrammarState | None], None]) -> None:
        """Call `start` at once, or when the request's grammar is compiled, unless the request is gone by then."""
        request_id = entry.request.request_id

        def go_on(grammar: GrammarState | None) -> None:
            if self._entries.get(request_id) is entry:
                start(grammar)

        self._grammars.behind(entry.request, go_on, lambda error: self._end_reserved(request_id, error))

    def _enter_engine(self, entry: _Entry) -> None:
        """From here on the engine thread owns the blocks and the lease is over."""
        if entry.lease is not None:
            entry.lease.cancel()
        if entry.hold is not None:
            self._pool.move(entry.hold, HoldState.RUNNING)
        entry.hold = None
        entry.is_in_engine = True

    def _expire(self, request_id: str, lease_s: float) -> None:
        self.num_lease_expiries += 1
        self._end_reserved(
            request_id,
            LeaseExpiredError(f"no prefill worker had the request within the lease of {lease_s} s"),
        )

    def _end_reserved(self, request_id: str, error: BatonError) -> None:
        """End a request that is not in the engine yet."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self.cancel(request_id)
            _end(entry.reply, request_id, error)

    def _abort_in_engine(self, request_id: str, outgoing: Outgoing) -> None:
        """NOTE: the blocks may be read until the handoff is over; its on_done then releases them (`handed_off`)."""
        self._phases.prefill.cancel(request_id)
        self._phases.decode.cancel(request_id)
        outgoing.abort()

    def _cancel_in_engine(self, request_id: str) -> None:
        hold = self._phases.prefill.cancel(request_id)
        if hold is not None:
            self._pool.release(hold)
        self._phases.decode.cancel(request_id)

    def _forget(self, request_id: str) -> _Entry | None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        if entry.lease is not None:
            entry.lease.cancel()
        self.holds.ended(request_id)
        self._on_freed()
        return entry


def _end(reply: Reply, request_id: str, error: BatonError) -> None:
    """Tell the terminal error of a request."""
    _try_send(reply, Ended(request_id, error=to_wire(error)))


def _try_send(reply: Reply, message: Message) -> None:
    """A coordinator that is gone needs no event: its requests are dropped when its channel ends."""
    try:
        reply.send(message)
    except BatonError:
        return
