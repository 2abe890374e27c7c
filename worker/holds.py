"""The calls that keep requests in Serve's books: each returns when its request has ended on this worker.

hold ──► waiting ──ended──► returns        ended before the call came: returns at once
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict

NUM_TOMBSTONES = 4096


class Holds:
    """On the event loop."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self._ended: OrderedDict[str, None] = OrderedDict()

    async def hold(self, request_id: str, timeout_s: float) -> None:
        """Returns when the request has ended here (or never shows up within `timeout_s`)."""
        if request_id in self._ended:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting[request_id].append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return
        finally:
            waiting = self._waiting.get(request_id)
            if waiting is not None and future in waiting:
                waiting.remove(future)
                if not waiting:
                    del self._waiting[request_id]

    def ended(self, request_id: str) -> None:
        self._ended[request_id] = None
        if len(self._ended) > NUM_TOMBSTONES:
            self._ended.popitem(last=False)
        for future in self._waiting.pop(request_id, []):
            if not future.done():
                future.set_result(None)
