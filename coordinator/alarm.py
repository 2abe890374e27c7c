"""A deadline that moves with every token and is hardly ever missed.

    set ─► set ─► set ─► …        one timer, which looks when it fires whether the deadline is still its own
                  └ nobody sets it in time: ring

`asyncio.timeout` makes and cancels a timer each time, which is a fifth of what a streamed token costs. `Patience` is
`asyncio.timeout` with such a deadline.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Alarm:
    """Rings once for each deadline that passes; `close` when nobody listens any more. Times are time.monotonic()."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._due_s = math.inf
        self._fires_s = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due_s: float) -> None:
        """In place of the deadline before."""
        self._due_s = due_s
        if due_s < self._fires_s:
            self._arm()

    def off(self) -> None:
        """No deadline until the next one is set."""
        self._due_s = math.inf

    def close(self) -> None:
        self._due_s = self._fires_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_s = self._due_s
        delay_s = max(self._due_s - time.monotonic(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer, self._fires_s = None, math.inf
        if self._due_s <= time.monotonic():
            self._due_s = math.inf
            self._ring()
        elif self._due_s < math.inf:
            self._arm()


class Patience:
    """`async with`: TimeoutError when the alarm rings within. Not to be entered twice."""

    def __init__(self) -> None:
        self._timeout = asyncio.timeout(None)
        self.alarm = Alarm(lambda: self._timeout.reschedule(asyncio.get_running_loop().time()))

    @property
    def is_over(self) -> bool:
        return self._timeout.expired()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.alarm.close()
        await self._timeout.__aexit__(kind, error, trace)
