"""The end of this process as its clients see it: open requests finish in time, or end with one error each.

    serving ─► draining: newcomers get 503, /ready says so ─┬─► the last open request has ended
                                                            └─► time over: each open one fails and tells its client

Serve knows nothing of this. Its own shutdown ends the proxies first, and every stream with them; a replica that it
stops alone may finish its requests, but is killed with what is open when graceful_shutdown_timeout_s is over. So
whoever stops the service drains it first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from contracts.errors import BatonError, OverloadedError

SHUTTING_DOWN = "the server is shutting down"
# For the last bytes to leave. A client that does not read them then is not waited for.
FAREWELL_S = 2.0
_RETRY_AFTER_S = 5.0


class Endable(Protocol):
    """An open request."""

    def fail(self, error: BatonError) -> None: ...


class Drain:
    """All open requests of this process."""

    def __init__(self) -> None:
        self._open: set[Endable] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_open(self) -> int:
        return len(self._open)

    def check(self) -> None:
        """Raises OverloadedError while draining: nothing new begins."""
        if self._is_draining:
            raise shutting_down()

    @contextmanager
    def opened(self, request: Endable) -> Iterator[None]:
        """`request` is open within. Raises OverloadedError while draining."""
        self.check()
        self._open.add(request)
        try:
            yield
        finally:
            self._open.discard(request)
            if not self._open:
                for waiter in self._waiters:
                    if not waiter.done():
                        waiter.set_result(None)

    async def drain(self, timeout_s: float) -> int:
        """Returns when nothing is open any more: the requests cut short after `timeout_s`. There is no way back."""
        self._is_draining = True
        await self._emptied(timeout_s)
        cut = list(self._open)
        for request in cut:
            request.fail(shutting_down())
        await self._emptied(FAREWELL_S)
        return len(cut)

    async def _emptied(self, timeout_s: float) -> None:
        if not self._open:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)


def shutting_down() -> OverloadedError:
    """What a request is told that comes too late or stays too long."""
    return OverloadedError(SHUTTING_DOWN, retry_after_s=_RETRY_AFTER_S)
