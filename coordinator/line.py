"""The waiting line in front of placement: bounded, first come first served, every wait with a deadline.

A request that finds nobody waiting tries at once; the others wait for their turn. The head of the line tries again
whenever the fleet changes; its success or departure wakes the next. A stream that lost its worker goes before all
newcomers and is never refused for their number; a newcomer that is trying already just goes on trying beside it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

from contracts.errors import OverloadedError


class Pace:
    """How fast places become free, from the last ones that did: what a Retry-After is made of."""

    WINDOW: ClassVar[int] = 64
    MIN_WAIT_S: ClassVar[int] = 1
    MAX_WAIT_S: ClassVar[int] = 120  # clients do not obey longer ones

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=self.WINDOW)

    def note(self, held_s: float, num_running: int) -> None:
        """A place was held for `held_s`, one of `num_running`: so many of them are free once every
        `held_s / num_running` (Little's law).
        """
        self._gaps_s.append(held_s / max(num_running, 1))

    def wait_s(self, num_waiting: int) -> int:
        """Whole seconds until one behind `num_waiting` others should have a place; a second each if nobody knows."""
        gap_s = sum(self._gaps_s) / len(self._gaps_s) if self._gaps_s else 1.0
        return min(max(math.ceil((num_waiting + 1) * gap_s), self.MIN_WAIT_S), self.MAX_WAIT_S)


class Line:
    """`max_waiting` newcomers may wait; one more is refused."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._resumed: deque[asyncio.Future[None]] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._resumed) + len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return self.num_waiting == 0

    @asynccontextmanager
    async def turn(self, retry_after_s: float, is_resumed: bool = False) -> AsyncIterator[None]:
        """Entered when the caller is the head of the line; leaving wakes the next.

        Raises OverloadedError (with `retry_after_s`) if the line is full, for a newcomer only.
        """
        line = self._resumed if is_resumed else self._waiting
        if not is_resumed and len(line) >= self._max_waiting:
            raise OverloadedError(
                f"the queue is full: {len(line)} of {self._max_waiting} requests wait",
                retry_after_s=retry_after_s,
            )
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(mine)
        self._wake_head()
        try:
            await mine
            yield
        finally:
            line.remove(mine)
            self._wake_head()

    def _wake_head(self) -> None:
        line = self._resumed or self._waiting
        if line and not line[0].done():
            line[0].set_result(None)
