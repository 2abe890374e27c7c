"""How batch lines give way: as many at once as configured while nobody else asks, one alone while somebody does.

With promises (`slo`) the line before placement knows better what the others can spare, and this gate only counts. First
come, first served among the lines. Callers never wait here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Gate:
    """Counts callers' requests and lets lines through beside them."""

    def __init__(self, max_lines: int, gives_way: bool = True) -> None:
        self.max_lines = max_lines
        self._gives_way = gives_way
        self._num_callers = 0
        self._num_lines = 0
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def num_lines(self) -> int:
        return self._num_lines

    @contextmanager
    def caller(self) -> Iterator[None]:
        """A request of somebody who waits for it."""
        self._num_callers += 1
        try:
            yield
        finally:
            self._num_callers -= 1
            self._changed.set()

    @asynccontextmanager
    async def line(self) -> AsyncIterator[None]:
        """One batch line; entered when there is room for it."""
        async with self._turn:
            while self._num_lines >= (1 if self._num_callers and self._gives_way else self.max_lines):
                self._changed.clear()
                await self._changed.wait()
            self._num_lines += 1
        try:
            yield
        finally:
            self._num_lines -= 1
            self._changed.set()
