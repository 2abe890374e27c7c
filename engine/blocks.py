"""Who owns which KV block of this worker, and which blocks hold a prefix that a later request may share.

    plain free ──acquire/grow──► held (ref count >= 1) ──last release──► idle: indexed blocks, in LRU order
        ▲                            ▲                                     │  │
        │ last release, not indexed  └───── acquire hits the prefix ───────┘  │
        └────────────────────────────────── evicted when no plain one is left ┘

A block is indexed (`publish`) once all its slots are computed, under the chained hash of every token up to its end.
An indexed block is never written again: a request shares only whole blocks before the first token that it computes.
Two requests that compute the same block at the same time keep one copy each; the first to publish is the indexed one.

Owners are `Hold`s, one per request. The engine thread and the event loop both call in: one lock, no method waits.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from contracts.blocks import BlockAudit, BlockOwner, block_hashes, num_blocks_for, num_shared_at_most
from contracts.errors import ConfigError


class HoldState(Enum):
    """Why blocks are held; the values are the words of the audit. Strongest first, as in contracts/blocks.py."""

    QUARANTINED = "quarantined"
    IN_HANDOFF = "in_handoff"
    RUNNING = "running"
    RESERVED = "reserved"


@dataclass(slots=True, eq=False)
class Hold:
    """Blocks of one request. `block_ids` is its block table, in token order; only the pool changes what is in here.

    `num_cached_tokens` were computed before by someone else. `created_s` is the pool's clock.
    """

    request_id: str
    salt: str
    state: HoldState
    block_ids: list[int]
    num_cached_tokens: int
    created_s: float
    hashes: list[bytes] = field(default_factory=list, repr=False)
    num_published: int = 0
    is_released: bool = False


class BlockPool:
    """All blocks of one KV slab. Thread-safe.

    Raises ConfigError if a size is not positive.
    """

    def __init__(self, num_blocks: int, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"expected num_blocks and block_size >= 1 but got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._clock = clock
        self._lock = threading.Lock()
        self._refs = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._holds: set[Hold] = set()
        self._news: dict[bytes, bool] | None = None  # hash -> whether it is indexed now, since `take_news`

    @property
    def num_available(self) -> int:
        """Blocks that can be granted now: free ones and cached ones nobody uses."""
        with self._lock:
            return self._num_available()

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether the empty pool would have room for `num_tokens` tokens."""
        return num_blocks_for(num_tokens, self.block_size) <= self.num_blocks

    def acquire(
        self, request_id: str, token_ids: Sequence[int], num_tokens: int, state: HoldState, salt: str = ""
    ) -> Hold | None:
        """Blocks for `num_tokens` >= len(token_ids) tokens, the first of them shared with the longest cached prefix.

        Only whole blocks are shared and never all of `token_ids`: the last token is always left to compute, since
        its logits are what the request came for. None if there are not enough blocks; then nothing has changed.
        """
        assert num_tokens >= len(token_ids) > 0
        hashes = block_hashes(token_ids, self.block_size, salt)
        max_shared = num_shared_at_most(len(token_ids), self.block_size)
        with self._lock:
            shared = self._longest_prefix(hashes[:max_shared])
            num_fresh = num_blocks_for(num_tokens, self.block_size) - len(shared)
            num_woken = sum(1 for block_id in shared if self._refs[block_id] == 0)
            if num_fresh + num_woken > self._num_available():
                return None
            for block_id in shared:
                self._idle.pop(block_id, None)
                self._refs[block_id] += 1
            block_ids = shared + [self._take() for _ in range(num_fresh)]
            num_cached = len(shared) * self.block_size
            hold = Hold(request_id, salt, state, block_ids, num_cached, self._clock(), hashes, len(shared))
            self._holds.add(hold)
            return hold

    def grow(self, hold: Hold, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all. False, and nothing changed, if there are not enough blocks."""
        with self._lock:
            assert not hold.is_released, hold.request_id
            num_fresh = num_blocks_for(num_tokens, self.block_size) - len(hold.block_ids)
            if num_fresh > self._num_available():
                return False
            hold.block_ids.extend(self._take() for _ in range(num_fresh))
            return True

    def move(self, hold: Hold, state: HoldState) -> None:
        """Change why the blocks are held. Ignored once they are released."""
        with self._lock:
            if not hold.is_released:
                hold.state = state

    def release(self, hold: Hold) -> None:
        """Give all blocks back; what is indexed stays as cache. A second call does nothing."""
        with self._lock:
            if hold.is_released:
                return
            hold.is_released = True
            self._holds.remove(hold)
            # Ends of prefixes become the older ones: a prefix without its end is of use, an end alone is not.
            for block_id in reversed(hold.block_ids):
                self._refs[block_id] -= 1
                if self._refs[block_id] == 0:
                    if block_id in self._hash_of:
                        self._idle[block_id] = None
                    else:
                        self._free.append(block_id)

    def publish(self, hold: Hold, token_ids: Sequence[int], num_computed: int) -> None:
        """Index the blocks of `hold` that [0, num_computed) of `token_ids` fills. Cheap if no block became full.

        `token_ids` are all tokens known so far; what it held at `acquire` or an earlier `publish` must not change.
        """
        num_full = min(num_computed, len(token_ids)) // self.block_size
        if num_full <= hold.num_published:
            return
        if num_full > len(hold.hashes):
            low, high = len(hold.hashes) * self.block_size, num_full * self.block_size
            parent = hold.hashes[-1] if hold.hashes else b""
            hold.hashes += block_hashes(token_ids[low:high], self.block_size, hold.salt, parent)
        with self._lock:
            if hold.is_released:
                return
            for index in range(hold.num_published, num_full):
                block_id, key = hold.block_ids[index], hold.hashes[index]
                if key not in self._block_of and block_id not in self._hash_of:
                    self._block_of[key] = block_id
                    self._hash_of[block_id] = key
                    self._note(key, True)
            hold.num_published = num_full

    def watch(self) -> None:
        """From now on remember, for `take_news`, which blocks are indexed and evicted."""
        self._news = {}

    def take_news(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes that were indexed, and that were evicted, since the last call; of one that was both, the last word."""
        with self._lock:
            news = self._news or {}
            if news:
                self._news = {}
        stored = [key for key, is_stored in news.items() if is_stored]
        return stored, [key for key, is_stored in news.items() if not is_stored]

    def indexed(self) -> list[bytes]:
        """Hashes of all blocks that a request could share now. O(blocks)."""
        with self._lock:
            return list(self._block_of)

    def audit(self) -> BlockAudit:
        """Every block in its strongest state. O(held blocks)."""
        with self._lock:
            seen: set[int] = set()
            counts = {}
            for state in HoldState:
                mine = {b for hold in self._holds if hold.state is state for b in hold.block_ids}
                counts[state.value] = len(mine - seen)
                seen |= mine
            return BlockAudit(total=self.num_blocks, free=len(self._free), cached=len(self._idle), **counts)

    def owners(self) -> tuple[BlockOwner, ...]:
        """Who holds blocks, oldest first; a shared block is counted with each of its owners."""
        with self._lock:
            now_s = self._clock()
            holds = sorted(self._holds, key=lambda hold: hold.created_s)
            return tuple(
                BlockOwner(hold.request_id, hold.state.value, len(hold.block_ids), now_s - hold.created_s)
                for hold in holds
            )

    def check(self) -> None:
        """Recount everything from the holds. For tests: AssertionError if a block is lost or counted twice."""
        assert self.audit().is_balanced, self.audit()
        with self._lock:
            refs = [0] * self.num_blocks
            for hold in self._holds:
                assert not hold.is_released
                assert len(set(hold.block_ids)) == len(hold.block_ids), hold
                for block_id in hold.block_ids:
                    refs[block_id] += 1
            assert refs == self._refs
            unused = {block_id for block_id, count in enumerate(refs) if count == 0}
            assert sorted([*self._free, *self._idle]) == sorted(unused)
            assert all(block_id not in self._hash_of for block_id in self._free)
            assert all(block_id in self._hash_of for block_id in self._idle)
            assert {block_id: key for key, block_id in self._block_of.items()} == self._hash_of

    # --- with the lock held -----------------------------------------------------------------------------------------

    def _num_available(self) -> int:
        return len(self._free) + len(self._idle)

    def _longest_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        shared: list[int] = []
        for key in hashes:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            shared.append(block_id)
        return shared

    def _take(self) -> int:
        if self._free:
            block_id = self._free.popleft()
        else:
            block_id, _ = self._idle.popitem(last=False)
            key = self._hash_of.pop(block_id)
            del self._block_of[key]
            self._note(key, False)
        self._refs[block_id] = 1
        return block_id

    def _note(self, key: bytes, is_stored: bool) -> None:
        if self._news is not None:
            self._news[key] = is_stored
