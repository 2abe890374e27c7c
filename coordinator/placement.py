"""Where a request goes. Pure: views in, a decision out; no clock, no I/O.

The rule of load, for whenever predict.py has nothing better to say: decode is the least busy worker that has room for
the known tokens now and could hold the whole request; prefill is the one that will have read the prompt first and holds
a tested connection to it; without such a pair, decode reads the prompt itself. A mixed worker does the work of its pool
first: it writes for a reader's pool when nobody else has room, and reads beside its answers, which takes about twice as
long, when that is sooner all the same. Load is counted at dispatch and ties break at random, so a burst spreads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from contracts.blocks import num_blocks_for
from contracts.messages import Role
from contracts.roles import RoleLabel
from contracts.steps import LinkReport, StepReport


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One ready worker. `num_tokens`: prompt tokens dispatched and not finished; `peers`: tested kv connections;
    `links`: (peer, what its transfers take); `steps`: what its steps cost, None while it does not know.
    Of our own requests there: `num_leftover` of batch and best effort, the blocks that these may grow to, and the
    tightest promised `gap_s`. `num_reading`: those of its requests that it only reads, for another worker to answer;
    `role`: its label; `epoch`: of the order that gave it; `home`: its pool, None: no matter.
    """

    worker_id: str
    num_requests: int
    num_tokens: int
    num_available_blocks: int
    num_blocks: int
    max_num_seqs: int
    peers: frozenset[str] = frozenset()
    links: tuple[tuple[str, LinkReport], ...] = ()
    bytes_per_token: int = 0
    steps: StepReport | None = None
    num_leftover: int = 0
    leftover_blocks: int = 0
    gap_s: float = math.inf
    num_reading: int = 0
    role: RoleLabel = "mixed"
    epoch: int = 0
    home: Role | None = None

    @property
    def num_streams(self) -> int:
        """Requests that it answers, or will."""
        return self.num_requests - self.num_reading


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request takes: `num_blocks` now (known tokens and the next), `max_blocks` if it runs to its limit.
    `num_tokens`: to read.
    """

    num_blocks: int
    max_blocks: int
    num_tokens: int = 0

    @classmethod
    def of(cls, num_known: int, max_total: int, block_size: int) -> Self:
        """From counts of tokens."""
        num_blocks = num_blocks_for(num_known + 1, block_size)
        return cls(num_blocks, num_blocks_for(max_total, block_size), num_known)


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill_id` None: the decode worker reads the prompt itself."""

    decode_id: str
    prefill_id: str | None

    @property
    def reader_id(self) -> str:
        """Who reads the prompt."""
        return self.prefill_id or self.decode_id


@dataclass(frozen=True, slots=True)
class NotNow:
    """No worker for this request at present. `from_blocks`: who needs as many or more hears the same. `opens_in_s`: a
    worker will be open then, as far as is known. `is_hopeless`: the promise is lost, whatever happens.
    """

    verdict: str
    from_blocks: float = math.inf
    opens_in_s: float = math.inf
    is_hopeless: bool = False


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

    def writing(d: WorkerView) -> tuple[bool, bool, float, float]:
        return d.worker_id in avoid, d.home == "prefill", d.num_requests / d.max_num_seqs, draw()

    def reading(p: WorkerView) -> tuple[bool, int, float]:
        times = 2 if p.home == "decode" else 1
        return p.worker_id in avoid, p.num_tokens + times * demand.num_tokens, draw()

    decode_id = min(room, key=writing).worker_id

    def is_able(p: WorkerView) -> bool:
        return (decode_id in p.peers or decode_id == p.worker_id) and p.num_blocks >= demand.num_blocks

    best = min(prefills, key=reading, default=None)
    if best is not None and not is_able(best):  # seldom: all know each other once a fleet has settled
        best = min(filter(is_able, prefills), key=reading, default=None)
    return Placement(decode_id, None if best is None or best.worker_id == decode_id else best.worker_id)


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


def within_leftover(
    num_blocks: int, share: float, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]
) -> tuple[list[WorkerView], list[WorkerView]]:
    """The workers that have room for one more request of batch or best effort, which may grow to `num_blocks`.

    It is read where nothing else waits to be read, and written where that is so, too (a stream more would slow the
    reading down), and where its kind holds less than `share` of sequences and blocks: an interactive request that comes
    next finds an idle reader soon, and its part of every decode worker.
    """
    readers = [p for p in prefills if not p.num_tokens]
    writers = [
        d
        for d in decodes
        if not d.num_tokens
        and (
            not d.num_leftover
            or (
                d.num_leftover + 1 <= share * d.max_num_seqs
                and d.leftover_blocks + num_blocks <= share * d.num_blocks
            )
        )
    ]
    return ([], []) if prefills and not readers else (readers, writers)
