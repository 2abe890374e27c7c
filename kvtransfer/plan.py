"""Which pieces of a sequence go out next, and how large they are. No I/O."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass

from contracts.blocks import KvLayout
from contracts.errors import HandoffError

PIECE_BYTES = 63 << 18  # what a chunk has, if whole blocks allow it: nearly a slot of the default size
# Of whole blocks that are sent from where they lie: less is faster gathered with the rest.
LEAST_WHOLE_BYTES = 2 << 20
MAX_SENDS = 3  # of one chunk: the first and two repeats


@dataclass(frozen=True, slots=True)
class Chunk:
    number: int
    low: int
    high: int


def tokens_per_chunk(layout: KvLayout, slot_bytes: int) -> int:
    """As many whole blocks as PIECE_BYTES holds, at least one; but no more tokens than a slot holds."""
    num_blocks = max(PIECE_BYTES // layout.bytes_per_block, 1)
    return min(num_blocks * layout.block_size, slot_bytes // layout.bytes_per_token)


def least_whole_tokens(layout: KvLayout) -> int:
    """So many that it is worth a piece of its own not to gather them."""
    return -(-LEAST_WHOLE_BYTES // layout.bytes_per_token)


class ChunkPlan:
    """Which token ranges go out next, again, or are through. No I/O.

    Chunks end at block boundaries where a whole block fits, since whole blocks copy fastest; a block that is not full
    yet waits, unless nothing more comes. `num_tokens` None: not known before `end`. From `least_whole` tokens on, whole
    blocks go without the part of a block that ends the sequence: whatever has that part must be gathered.
    """

    def __init__(
        self,
        start: int,
        num_tokens: int | None,
        block_size: int,
        max_tokens: int,
        least_whole: int = sys.maxsize,
    ) -> None:
        self._cut = start
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._least_whole = least_whole
        self._queue: deque[Chunk] = deque()
        self._under_way: dict[int, Chunk] = {}
        self._num_sends: dict[int, int] = {}
        self.num_chunks = 0
        self.num_wanted = 0

    @property
    def is_complete(self) -> bool:
        """All tokens were cut, sent and acknowledged."""
        return self._cut == self._num_tokens and not self._queue and not self._under_way

    @property
    def is_sent(self) -> bool:
        """All tokens were cut and sent, some perhaps not acknowledged."""
        return self._cut == self._num_tokens and not self._queue

    @property
    def has_next(self) -> bool:
        return bool(self._queue)

    @property
    def is_under_way(self) -> bool:
        return bool(self._queue or self._under_way)

    def ready(self, num_tokens: int) -> None:
        """Tokens [0, num_tokens) may be read; what was said before is not taken back by a smaller number."""
        limit = num_tokens if self._num_tokens is None else min(num_tokens, self._num_tokens)
        if limit != self._num_tokens:
            limit -= limit % self._block_size
        while self._cut < limit:
            high = min(limit, self._cut + self._max_tokens)
            aligned = high - high % self._block_size
            if aligned > self._cut and (high < limit or aligned - self._cut >= self._least_whole):
                high = aligned
            self._queue.append(Chunk(self.num_chunks, self._cut, high))
            self.num_chunks += 1
            self.num_wanted += 1
            self._cut = high

    def end(self, num_tokens: int) -> None:
        """All `num_tokens` tokens may be read, and no more come."""
        self._num_tokens = num_tokens
        self.ready(num_tokens)

    def peek(self) -> Chunk:
        return self._queue[0]

    def next(self) -> Chunk:
        chunk = self._queue.popleft()
        self._under_way[chunk.number] = chunk
        self._num_sends[chunk.number] = self._num_sends.get(chunk.number, 0) + 1
        return chunk

    def done(self, number: int, is_ok: bool) -> None:
        """The peer's word on a chunk; one that is not under way is a duplicate. Raises HandoffError after MAX_SENDS."""
        chunk = self._under_way.pop(number, None)
        if chunk is None or is_ok:
            return
        if self._num_sends[number] >= MAX_SENDS:
            raise HandoffError(f"tokens [{chunk.low}, {chunk.high}) arrived damaged {MAX_SENDS} times")
        self._queue.append(chunk)
        self.num_wanted += 1
