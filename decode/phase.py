"""The continuous batch: reservations become running sequences, each gets one token per step until it ends.

    reserve ──► reserved ──adopt──► running ──► ended (finished | error)
       │            │                 │  ▲
       │            └─ cancel / lease │  └── adopt, after `recompute` drew the next token
       └─ None: no room               ├─ preempted: blocks released, waits in the prefill phase
                                      └─ migrate: goes on, and its KV leaves for another worker (departures.py)

Preemption: when a sequence needs a block and there is none, the youngest running one gives up its blocks, maybe the
asker itself; never the oldest, so the oldest always gets on. If the oldest is alone and others (reservations, local
prefills, handoffs) hold the blocks, it sits out steps until they run, end or expire. Nothing new is reserved while
somebody was preempted or sits out: what becomes free is theirs. A sequence that leaves for another worker is not
preempted: where it finds no block, it leaves at once.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable

from contracts.config import EngineConfig
from contracts.errors import BatonError, OverloadedError
from contracts.request import Finished, GenerateRequest
from decode.departures import Departure, Departures
from engine.blocks import BlockPool, Hold, HoldState
from engine.loop import Budget, Emit, EndEvent, Event, Result, TokenEvent, Work
from engine.sequence import EndRules, Sequence
from worker.phases import KvSink


class DecodePhase:
    """Writes answers. `reserve` from any thread, all else on the engine thread.

    `recompute` gets a preempted sequence without blocks: it computes prompt and outputs again, draws and emits the
    next token, and calls `adopt`, unless that token ends the sequence.
    """

    name = "decode"

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        ends: EndRules,
        emit: Emit,
        recompute: Callable[[Sequence], None],
    ) -> None:
        self._pool = pool
        self._config = config
        self._ends = ends
        self._emit = emit
        self._recompute = recompute
        self.running: list[Sequence] = []  # oldest first
        self._departures = Departures(pool)
        self._over: list[KvSink] = []  # of sequences that have just ended while they were leaving
        self.num_preemptions = 0
        # Shared with `reserve`. A reservation or a preempted sequence may end elsewhere (lease, prefill): the object
        # itself says so, and the entry goes when the next one asks.
        self._lock = threading.Lock()
        self._here: dict[str, Hold | Sequence] = {}
        self._preempted: dict[str, Sequence] = {}
        self._is_sitting_out = False

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Reserved or preempted."""
        with self._lock:
            self._prune()
            return len(self._here) - len(self.running)

    # --- commands ---------------------------------------------------------------------------------------------------

    def reserve(self, request: GenerateRequest, state: HoldState, num_more: int = 0) -> Hold | None:
        """Blocks for all known tokens, the next one and `num_more`, the cached prefix included. None: no room now.

        Counts against `max_num_seqs` until the hold is released or its sequence has ended. Any thread.
        """
        with self._lock:
            self._prune()
            is_full = len(self._here) >= self._config.max_num_seqs
            if is_full or self._preempted or self._is_sitting_out or request.request_id in self._here:
                return None
            known = (*request.prompt_ids, *request.output_ids)
            num_tokens = len(known) + 1 + num_more
            hold = self._pool.acquire(request.request_id, known, num_tokens, state, request.cache_key)
            if hold is not None:
                self._here[request.request_id] = hold
            return hold

    def adopt(self, seq: Sequence) -> None:
        """Run `seq`: KV of all tokens but the last is in its hold, and the last is drawn and emitted.

        Ignored if the cancellation came first.
        """
        assert seq.num_uncomputed == 1, seq
        if seq.is_ended or seq.hold is None or seq.hold.is_released:
            return
        self._pool.move(seq.hold, HoldState.RUNNING)
        self._pool.publish(seq.hold, seq.token_ids, seq.num_computed)
        insort(self.running, seq, key=lambda other: other.arrival_s)
        with self._lock:
            self._here[seq.request_id] = seq
            self._preempted.pop(seq.request_id, None)

    def migrate(self, request_id: str, sink: KvSink, num_known: int, max_tokens: int) -> bool:
        """Let the KV of a running sequence go to `sink` while it runs. False, and nothing begins, if it does not run.

        The target knows of its first `num_known` tokens and has room for the KV of `max_tokens`.
        """
        seq = next((seq for seq in self.running if seq.request_id == request_id), None)
        if seq is None or not num_known < seq.num_tokens <= max_tokens + 1:
            return False
        self._departures.begin(Departure(seq, sink, num_known, max_tokens))
        return True

    def pass_on(self, request_id: str) -> None:
        """Its full blocks are at the target: stop it here, and pass on the rest. Ignored if it has left or ended."""
        departure = self._departures.leaving.get(request_id)
        if departure is not None:
            self._hand_over(departure.seq)

    def handed_off(self, request_id: str, error: BatonError | None) -> bool:
        """The transfer is over and reads no block any more. Whether the sequence goes on here.

        With `error` a sequence that had stopped for it ends: the target may have it, or not.
        """
        departure = self._departures.closed(request_id)
        if departure is None or departure.is_over:
            return departure is None  # it was still leaving, or never began to
        departure.seq.is_ended = True
        with self._lock:
            self._here.pop(request_id, None)
        if error is not None:
            self._emit([EndEvent(request_id, error=error)])
        return False

    def cancel(self, request_id: str) -> None:
        """Forget the request and release its blocks; unknown ids are ignored. No event is emitted for it any more.

        A sequence that leaves keeps its blocks until `handed_off`; the caller aborts the transfer next. One that is
        being (re)computed here is the prefill phase's: cancel it there first. A handoff that is arriving must be
        cancelled at kvtransfer first, so that nothing is written into these blocks later.
        """
        with self._lock:
            entry = self._here.pop(request_id, None)
            self._preempted.pop(request_id, None)
        if isinstance(entry, Hold):
            self._pool.release(entry)
        elif entry is not None:
            if entry in self.running:
                self.running.remove(entry)
            entry.is_ended = True
            if self._departures.over(entry) is None and entry.hold is not None:
                self._pool.release(entry.hold)

    # --- engine.loop.Phase ------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        with self._lock:
            self._prune()
            return bool(self._here)

    def propose(self, budget: Budget) -> list[Work]:
        """One token for each running sequence that has, or can be given, room for it; oldest first."""
        works: list[Work] = []
        is_sitting_out = False
        while len(works) < len(self.running) and len(works) < budget.num_tokens:
            seq = self.running[len(works)]
            assert seq.hold is not None
            if self._departures.is_full(seq):
                self._hand_over(seq)
            elif self._pool.grow(seq.hold, seq.num_tokens):
                works.append(Work(seq, 1, wants_token=True))
            elif self._departures.is_leaving(seq):
                self._hand_over(seq)
            elif not self._pool.can_ever_hold(seq.num_tokens):
                reason = f"{seq.num_tokens} tokens do not fit {self._pool.num_blocks} blocks"
                self._emit([self._end(seq, OverloadedError(reason))])
            elif (victim := self._victim(len(works))) is not None:
                self._preempt(victim)
            else:
                is_sitting_out = True
                break
        self._is_sitting_out = is_sitting_out
        budget.decodes = works
        budget.num_tokens -= len(works)
        return works

    def take(self, results: list[Result]) -> list[Event]:
        events: list[Event] = []
        for result in results:
            seq, token = result.work.seq, result.token
            assert token is not None
            assert seq.hold is not None
            seq.append(token.token_id)
            self._pool.publish(seq.hold, seq.token_ids, seq.num_computed)
            events.append(TokenEvent(seq.request_id, token))
            if (end := self._ends.end(seq)) is not None:
                events.append(self._end(seq, end))
            else:
                self._departures.computed(seq)
        return self._told(events)

    def fail(self, works: list[Work], error: BatonError) -> list[Event]:
        return self._told([self._end(work.seq, error) for work in works])

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _told(self, events: list[Event]) -> list[Event]:
        """What the loop shall emit. Where a transfer is over with an event, the outside hears of that one first."""
        if not self._over:
            return events
        self._emit(events)
        over, self._over = self._over, []
        for sink in over:
            sink.abort()
        return []

    def _hand_over(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._departures.hand_over(seq)

    def _victim(self, num_proposed: int) -> Sequence | None:
        """The youngest that may be preempted: never the oldest, and nobody who runs in this step or leaves."""
        younger = self.running[max(num_proposed, 1) :]
        return next((seq for seq in reversed(younger) if not self._departures.is_leaving(seq)), None)

    def _preempt(self, seq: Sequence) -> None:
        assert seq.hold is not None
        self.running.remove(seq)
        self._pool.release(seq.hold)
        seq.hold = None
        seq.num_computed = 0
        self.num_preemptions += 1
        with self._lock:
            self._preempted[seq.request_id] = seq
        self._recompute(seq)

    def _end(self, seq: Sequence, end: Finished | BatonError) -> EndEvent:
        self.running.remove(seq)
        seq.is_ended = True
        departure = self._departures.over(seq)
        if departure is not None:
            self._over.append(departure.sink)
        elif seq.hold is not None:
            self._pool.release(seq.hold)
        with self._lock:
            self._here.pop(seq.request_id, None)
        return EndEvent.of(seq.request_id, end)

    def _prune(self) -> None:
        for request_id, entry in list(self._here.items()):
            if entry.is_released if isinstance(entry, Hold) else entry.is_ended:
                del self._here[request_id]
                self._preempted.pop(request_id, None)
