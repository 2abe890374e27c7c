"""Is the peer still there? Looks a few times per timeout, by timers of the event loop, and costs nothing in between.

A data link tells its end by itself: a receive is posted that nobody ever sends to, and fails when the link does. Before
there is one, the end of the control connection tells.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from contracts.channel import Channel, raise_if_refused
from contracts.messages import Message, Refusal
from kvtransfer.transport import Link, Op

LOOKS_PER_TIMEOUT = 5
WATCH_TAG = (1 << 22) - 1


def watch_link(link: Link, channel: Channel) -> Op:
    """Abort `channel` when `link` ends, so that its handoffs fail at once though nothing was under way."""
    op = link.post_recv(WATCH_TAG, memoryview(bytearray(8)))
    op.final.add_done_callback(lambda _final: channel.abort())
    return op


async def while_it_lasts(channel: Channel, linking: Awaitable[Link]) -> Link:
    """The link, waited for until `channel` ends or the peer refuses: raises what says so."""
    hearing = channel.hear()
    try:
        async with asyncio.timeout(None) as patience:

            def heard(_hearing: asyncio.Task[Message]) -> None:
                if hearing.cancelled() or hearing.exception() or isinstance(hearing.result(), Refusal):
                    patience.reschedule(asyncio.get_running_loop().time())

            hearing.add_done_callback(heard)
            try:
                return await linking
            finally:
                hearing.remove_done_callback(heard)
    except TimeoutError:
        raise_if_refused(await channel.receive())
        raise


class Watch:
    """Calls `on_look()` regularly until `stop`; `on_silence()` once, when `heard` was not called for `timeout_s`."""

    def __init__(self, timeout_s: float, on_look: Callable[[], None], on_silence: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._period_s = timeout_s / LOOKS_PER_TIMEOUT
        self._on_look = on_look
        self._on_silence = on_silence
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._looked_s = time.monotonic()
        self._timer = self._loop.call_later(self._period_s, self._look)

    def heard(self) -> None:
        self._heard_s = time.monotonic()

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s > 2 * self._period_s:
            # NOTE: we slept ourselves (stopped, or a long hold of the interpreter); the peer's word may lie unread.
            self._heard_s = now_s
        self._looked_s = now_s
        if now_s - self._heard_s > self._timeout_s:
            self._on_silence()
            return
        self._timer = self._loop.call_later(self._period_s, self._look)
        self._on_look()
