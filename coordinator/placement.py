"""Where a request goes. Pure: views in, a decision out; no clock, no I/O.

The rule of load, for whenever predict.py has nothing better to say: decode is the least busy worker that has room for
the known tokens now and could hold the whole request; prefill is the one with the fewest prompt tokens ahead that holds
a tested connection to it; without such a pair, decode reads the prompt itself. Load is counted at dispatch and ties
break at random, so a burst spreads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from contracts.blocks import num_blocks_for
from contracts.steps import StepReport


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One ready worker. `num_tokens`: prompt tokens dispatched and not finished; `peers`: tested kv connections;
    `speeds`: (peer, bytes per second) of their self-tests; `steps`: what its steps cost, None while it does not know.
    """

    worker_id: str
    num_requests: int
    num_tokens: int
    num_available_blocks: int
    num_blocks: int
    max_num_seqs: int
    peers: frozenset[str] = frozenset()
    speeds: tuple[tuple[str, float], ...] = ()
    bytes_per_token: int = 0
    steps: StepReport | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request takes: `num_blocks` now (known tokens and the next), `max_blocks` if it runs to its limit."""

    num_blocks: int
    max_blocks: int

    @classmethod
    def of(cls, num_known: int, max_total: int, block_size: int) -> Self:
        """From counts of tokens."""
        return cls(num_blocks_for(num_known + 1, block_size), num_blocks_for(max_total, block_size))


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill_id` None: the decode worker reads the prompt itself."""

    decode_id: str
    prefill_id: str | None


def place(
    demand: Demand,
    prefills: Sequence[WorkerView],
    decodes: Sequence[WorkerView],
    avoid: frozenset[str] = frozenset(),
    rng: random.Random | None = None,
) -> Placement | None:
    """The pair for a request, or None: no decode worker has room now.

    Workers in `avoid` (they failed this request) are taken only if there is nobody else.
    """
    draw = (rng or random).random
    room = [d for d in decodes if has_room(d, demand)]
    if not room:
        return None
    decode = min(room, key=lambda d: (d.worker_id in avoid, d.num_requests / d.max_num_seqs, draw()))
    paired = [p for p in prefills if decode.worker_id in p.peers and p.num_blocks >= demand.num_blocks]
    if not paired:
        return Placement(decode.worker_id, None)
    prefill = min(paired, key=lambda p: (p.worker_id in avoid, p.num_tokens, draw()))
    return Placement(decode.worker_id, prefill.worker_id)


def new_home(
    demand: Demand, reachable: frozenset[str], decodes: Sequence[WorkerView], free_share: float = 0.0
) -> str | None:
    """The least busy of the `reachable` decode workers with room, and with `free_share` of all blocks free, for a
    request that leaves its own; None: nobody.
    """
    room = [
        view
        for view in decodes
        if view.worker_id in reachable
        and has_room(view, demand)
        and view.num_available_blocks >= free_share * view.num_blocks
    ]
    if not room:
        return None
    return min(room, key=lambda view: (view.num_requests / view.max_num_seqs, random.random())).worker_id


def has_room(decode: WorkerView, demand: Demand) -> bool:
    """For the known tokens now, and for the whole request if nobody else were there."""
    return (
        decode.num_requests < decode.max_num_seqs
        and decode.num_available_blocks >= demand.num_blocks
        and decode.num_blocks >= demand.max_blocks
    )
