"""A chunk that is stored as its bytes come, while they are in the cache, instead of when all of them are there."""

from __future__ import annotations

from contracts.messages import Data
from kvtransfer.pages import Checksum


class Filling:
    """Bytes in order, into the memory of the blocks that wait for them. No I/O, one thread at a time.

    NOTE: they are written before their checksum is known. Nobody reads the blocks before the handoff is committed, for
    which every chunk must be whole, and one that was damaged is sent again over what it left.
    """

    def __init__(self, runs: list[memoryview], data: Data) -> None:
        """`runs`: the blocks' memory, `data.num_bytes` together."""
        self._runs = runs
        self._data = data
        self._run = self._at = self._num_here = 0
        self._sum = Checksum() if data.checksum else None

    @property
    def is_whole(self) -> bool:
        """As many bytes as announced came, and they are what was sent."""
        if self._num_here != self._data.num_bytes:
            return False
        return self._sum is None or self._sum.value == self._data.checksum

    def add(self, here: memoryview) -> None:
        """What is more than announced is counted and not written."""
        self._num_here += len(here)
        if self._sum is not None:
            self._sum.add(here)
        while here and self._run < len(self._runs):
            run = self._runs[self._run]
            size = min(len(run) - self._at, len(here))
            run[self._at : self._at + size] = here[:size]
            here, self._at = here[size:], self._at + size
            if self._at == len(run):
                self._run, self._at = self._run + 1, 0
