"""A simulated worker's KV, in blocks. Every block is in one state: free + cached + reserved + running == total.

    free --reserve--> reserved --run--> running --release--> cached (whole keys of the prompt) or free
    cached --evict, oldest use first--> free

A simplification that favours nobody: a request takes blocks for its whole answer at once, so nothing is preempted; a
block held through a prefix hit is counted where it was, in cached, and stays evictable.
"""

from __future__ import annotations

from collections import OrderedDict

from benchmarks.sim.requests import BLOCK_TOKENS
from policy.prefix import PrefixIndex


class Memory:
    def __init__(self, worker_id: str, num_tokens: int, index: PrefixIndex | None) -> None:
        self.total = self.free = num_tokens // BLOCK_TOKENS
        self.reserved = self.running = self.cached = 0
        self._worker_id = worker_id
        self._index = index
        self._keys: OrderedDict[int, int] = OrderedDict()  # key -> blocks, oldest use first

    @property
    def is_balanced(self) -> bool:
        states = (self.free, self.cached, self.reserved, self.running)
        return min(states) >= 0 and sum(states) == self.total and self.cached == sum(self._keys.values())

    def hit_tokens(self, keys: tuple[int, ...], key_tokens: int, prompt_tokens: int) -> int:
        """Leading prompt tokens held here; the last token is always recomputed."""
        if not keys or keys[0] not in self._keys:
            return 0
        depth = 0
        for key in keys:
            if key not in self._keys:
                break
            self._keys.move_to_end(key)
            depth += 1
        return min(depth * key_tokens, prompt_tokens - 1)

    def reserve(self, num_tokens: int) -> int | None:
        """Blocks now reserved, or None: not so many can be freed."""
        num_blocks = -(-num_tokens // BLOCK_TOKENS)
        if self.free + self.cached < num_blocks:
            return None
        if self.free < num_blocks:
            self._evict(num_blocks - self.free)
        self.free -= num_blocks
        self.reserved += num_blocks
        return num_blocks

    def run(self, num_blocks: int) -> None:
        self.reserved -= num_blocks
        self.running += num_blocks

    def release(self, num_blocks: int, keys: tuple[int, ...] = (), key_tokens: int = 512) -> None:
        """Running blocks end; those of the prompt's keys stay as cache."""
        self.running -= num_blocks
        self.free += num_blocks
        if not keys:
            return
        per_key = max(1, key_tokens // BLOCK_TOKENS)
        stored = []
        for key in keys:
            if key in self._keys:
                continue
            if num_blocks < per_key:
                break
            num_blocks -= per_key
            self._keys[key] = per_key
            self.free -= per_key
            self.cached += per_key
            stored.append(key)
        if self._index is not None and stored:
            self._index.add(self._worker_id, stored)

    def _evict(self, num_blocks: int) -> None:
        gone = []
        while num_blocks > 0:
            key, size = self._keys.popitem(last=False)
            gone.append(key)
            self.cached -= size
            self.free += size
            num_blocks -= size
        if self._index is not None:
            self._index.remove(self._worker_id, gone)
