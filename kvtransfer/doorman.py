"""Who a new data connection belongs to: it shows a token, and somebody on the control side awaits that token.

    accept(token) ──waits──┐
                           ├──► the connection is theirs
    present(token, thing) ─┘    nobody awaits it within UNBOUND_TIMEOUT_S: False, the caller closes it

Either may come first. Tokens are compared in constant time; how many may stand at the door is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvtransfer.transport import LinkClosed

UNBOUND_TIMEOUT_S = 2.0
MAX_UNBOUND = 64

_Thing = TypeVar("_Thing")


class Doorman(Generic[_Thing]):
    """One per listening transport, on its event loop. `drop` is called for a thing that was handed over too late."""

    def __init__(self, drop: Callable[[_Thing], None]) -> None:
        self._drop = drop
        self._awaited: dict[bytes, asyncio.Future[_Thing]] = {}
        self._arrived = asyncio.Condition()
        self._num_waiting = 0

    @property
    def is_full(self) -> bool:
        return self._num_waiting >= MAX_UNBOUND

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """A place at the door, held by whoever has connected and is not known yet."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    async def accept(self, token: bytes, timeout_s: float) -> _Thing:
        """What shows `token`. Raises LinkClosed after `timeout_s`."""
        waiter: asyncio.Future[_Thing] = asyncio.get_running_loop().create_future()
        self._awaited[token] = waiter
        is_taken = False
        try:
            async with self._arrived:
                self._arrived.notify_all()
            async with asyncio.timeout(timeout_s):
                thing = await waiter
            is_taken = True
            return thing
        except TimeoutError as error:
            raise LinkClosed(f"no data link came within {timeout_s} s") from error
        finally:
            del self._awaited[token]
            if not is_taken and waiter.done() and not waiter.cancelled():
                self._drop(waiter.result())

    async def present(self, token: bytes, thing: _Thing) -> bool:
        """False: nobody awaits `token` (any more), and `thing` is still the caller's. Raises TimeoutError."""
        async with asyncio.timeout(UNBOUND_TIMEOUT_S), self._arrived:
            waiter = await self._arrived.wait_for(lambda: self._find(token))
        assert waiter is not None
        if waiter.done():
            return False
        waiter.set_result(thing)
        return True

    def _find(self, token: bytes) -> asyncio.Future[_Thing] | None:
        for awaited, waiter in self._awaited.items():
            if hmac.compare_digest(awaited, token):
                return waiter
        return None
