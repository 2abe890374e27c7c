"""Threads with an owner, for work on disk that a request or a task waits for.

A thread cannot be cancelled: whoever is, leaves its work behind. Here `close` waits for that too, so that nothing is
written in a folder after its store was closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

_MAX_THREADS = 8

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Threads:
    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=name)

    async def run(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """As asyncio.to_thread. Raises what `work` raises; RuntimeError after `close`."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))

    async def run_through(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """As `run`; whoever is cancelled goes when the work is done, so that what comes next finds it done."""
        running = asyncio.ensure_future(self.run(work, *args, **kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    async def close(self) -> None:
        """Returns when all work is done, also what nobody waits for any more."""
        await asyncio.to_thread(self._pool.shutdown)
