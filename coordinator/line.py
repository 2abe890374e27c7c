"""The waiting line in front of placement: bounded, first come first served, every wait with a deadline.

A request that finds nobody waiting tries at once; the others wait for their turn. The head of the line tries again
whenever the fleet changes; its success or departure wakes the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contracts.errors import OverloadedError


class Line:
    """`max_waiting` requests may wait; one more is refused."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @asynccontextmanager
    async def turn(self, retry_after_s: float) -> AsyncIterator[None]:
        """Entered when the caller is the head of the line; leaving wakes the next.

        Raises OverloadedError (with `retry_after_s`) if the line is full.
        """
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(
                f"the queue is full: {len(self._waiting)} of {self._max_waiting} requests wait",
                retry_after_s=retry_after_s,
            )
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        self._wake_head()
        try:
            await mine
            yield
        finally:
            self._waiting.remove(mine)
            self._wake_head()

    def _wake_head(self) -> None:
        if self._waiting and not self._waiting[0].done():
            self._waiting[0].set_result(None)
