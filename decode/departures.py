"""Sequences on their way to another worker's decode phase, and who owns their blocks until they are there.

    begin ──► leaving ──hand_over──► in_handoff ──closed──► gone
                 │                        ▲
                 └── ends, or is cancelled ┘        the blocks stay until the transfer no longer reads them

    state        computes    blocks are         the transfer failed
    leaving      yes         the sequence's     it goes on here
    in_handoff   no          the transfer's     it ends, unless it has ended before

All on the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.messages import HandoffState
from contracts.request import Token
from engine.blocks import BlockPool, HoldState
from engine.sequence import Sequence
from worker.phases import KvSink


@dataclass(slots=True, eq=False)
class Departure:
    """`num_known`: tokens that the target was told of; `max_tokens`: tokens' KV that it has room for. `is_over`: the
    sequence has ended, or was cancelled, and goes nowhere.
    """

    seq: Sequence
    sink: KvSink
    num_known: int
    max_tokens: int
    num_ready: int = 0
    is_over: bool = False


class Departures:
    """Of one decode phase."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.leaving: dict[str, Departure] = {}
        self.in_handoff: dict[str, Departure] = {}

    def begin(self, departure: Departure) -> None:
        self.leaving[departure.seq.request_id] = departure
        self._show(departure)

    def is_leaving(self, seq: Sequence) -> bool:
        return seq.request_id in self.leaving

    def is_full(self, seq: Sequence) -> bool:
        """Whether the target has no room for one more token's KV."""
        departure = self.leaving.get(seq.request_id)
        return departure is not None and seq.num_tokens > departure.max_tokens

    def computed(self, seq: Sequence) -> None:
        """Tell the transfer if one more block is full."""
        departure = self.leaving.get(seq.request_id)
        if departure is not None and seq.num_computed - departure.num_ready >= self._pool.block_size:
            self._show(departure)

    def hand_over(self, seq: Sequence) -> None:
        """Pass on all that is left. The sequence computes nothing more here."""
        departure = self._keep_blocks(seq.request_id)
        assert departure is not None
        assert seq.num_uncomputed == 1
        assert seq.num_tokens > departure.num_known, (seq, departure.num_known)
        self._show(departure)
        last = Token(seq.num_outputs - 1, seq.token_ids[-1])
        drawn = tuple(seq.token_ids[departure.num_known : -1])
        departure.sink.finish(HandoffState(last, seq.num_cached_tokens, drawn))

    def over(self, seq: Sequence) -> Departure | None:
        """The sequence has ended here: None if it was not leaving, else its blocks are the transfer's for now."""
        departure = self._keep_blocks(seq.request_id) or self.in_handoff.get(seq.request_id)
        if departure is not None:
            departure.is_over = True
        return departure

    def closed(self, request_id: str) -> Departure | None:
        """The transfer reads no block any more. What was in handoff is returned, its blocks given back; what was still
        leaving just stays.
        """
        self.leaving.pop(request_id, None)
        departure = self.in_handoff.pop(request_id, None)
        if departure is not None and departure.seq.hold is not None:
            self._pool.release(departure.seq.hold)
        return departure

    def _keep_blocks(self, request_id: str) -> Departure | None:
        departure = self.leaving.pop(request_id, None)
        if departure is not None:
            assert departure.seq.hold is not None
            self._pool.move(departure.seq.hold, HoldState.IN_HANDOFF)
            self.in_handoff[request_id] = departure
        return departure

    def _show(self, departure: Departure) -> None:
        seq = departure.seq
        departure.num_ready = seq.num_computed - seq.num_computed % self._pool.block_size
        departure.sink.ready(seq.num_computed, seq.block_ids)
