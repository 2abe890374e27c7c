"""One thread that owns a UCX worker and everything made from it; the event loop never waits for UCX.

    event loop ──submit(call)──► inbox ──► thread: calls, progress, finished requests ──told──► event loop
                                             └── nothing to do: asleep on the worker's and the inbox's descriptors

The thread talks UCXX's core API: its asyncio layer spins a core while a receive is pending. A request is kept until it
is final, since only then UCX has let go of its buffer; neither cancelling it nor forgetting it stops a transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

logger = logging.getLogger("baton.kvtransfer")

SPIN_S = (
    50e-6  # how long to look again before sleeping, while something is under way: a wake-up costs as much
)
LONGEST_SLEEP_S = 1.0
STOP_TIMEOUT_S = 5.0

OnFinal = Callable[[Exception | None], None]


class UcxEngine:
    """`make_worker` and all that `submit` takes run on the thread; `watch` and `tell` may be called only there."""

    def __init__(self, make_worker: Callable[[], Any]) -> None:
        self._make_worker = make_worker
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Callable[[], None]] = deque()
        self._told: list[Callable[[], None]] = []
        self._pending: dict[int, tuple[Any, OnFinal]] = {}
        self._number = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not closed before we are gone (a late `submit` must not hit another file), and not at the interpreter's exit:
        # UCX may call back until its very end.
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._is_stopping = self._is_waking = False
        self.num_links = 0  # the event loop's count of links that are not closed yet
        self._started: asyncio.Future[None] = self._loop.create_future()
        # NOTE: a daemon, because a process must be able to end when UCX does not return.
        self._thread = threading.Thread(target=self._run, name="baton-ucx", daemon=True)
        self.worker: Any = None

    async def start(self) -> None:
        """Raises what `make_worker` raised."""
        self._thread.start()
        await asyncio.shield(self._started)

    async def stop(self) -> None:
        """Ends the thread; while links are open, only lets it end with the last of them."""
        self.submit(self._stop)
        if self.num_links:
            return
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("ucx: the engine thread did not end within %s s", STOP_TIMEOUT_S)

    def submit(self, call: Callable[[], None]) -> None:
        """From any thread."""
        self._inbox.append(call)
        os.eventfd_write(self._wake, 1)

    def submit_soon(self, call: Callable[[], None]) -> None:
        """From the event loop, when its turn is over.

        NOTE: the thread that wakes takes the interpreter, and keeps the loop from what it was about to say for as long
        as it is busy: the words that belong to the bytes must be out first.
        """
        self._inbox.append(call)
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._wake_up)

    def _wake_up(self) -> None:
        self._is_waking = False
        os.eventfd_write(self._wake, 1)

    def watch(self, request: Any, on_final: OnFinal) -> None:
        """Call `on_final(error or None)` when `request` is final; until then it and its buffer are kept."""
        self._number += 1
        self._pending[self._number] = (request, on_final)

    def tell(self, call: Callable[[], None]) -> None:
        """Run `call` on the event loop, soon."""
        self._told.append(call)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        try:
            self.worker = self._make_worker()
            self.worker.init_blocking_progress_mode()
        except Exception as error:  # the starter's to handle
            reason = error
            self._on_loop([lambda: self._started.set_exception(reason)])
            return
        self._on_loop([lambda: self._started.set_result(None)])
        with contextlib.closing(select.epoll()) as poll:
            poll.register(self.worker.epoll_file_descriptor, select.EPOLLIN)
            poll.register(self._wake, select.EPOLLIN)
            busy_s = time.monotonic()
            while not self._is_stopping or self.num_links:
                if self._turn():
                    busy_s = time.monotonic()
                elif self._pending and time.monotonic() - busy_s < SPIN_S:
                    continue
                elif self.worker.arm():
                    self._sleep(poll)
        self._pending.clear()
        self.worker = None

    def _turn(self) -> bool:
        """Whether there was anything to do."""
        calls = len(self._inbox)
        for _ in range(calls):
            self._guard(self._inbox.popleft())
        self.worker.progress()
        final = [number for number, (request, _) in self._pending.items() if request.completed]
        for number in final:
            request, on_final = self._pending.pop(number)
            self._guard(partial(on_final, _error_of(request)))
        told, self._told = self._told, []
        if told:
            self._on_loop(told)
        return bool(calls or final or told)

    def _sleep(self, poll: select.epoll) -> None:
        if self._inbox:
            return
        for descriptor, _event in poll.poll(LONGEST_SLEEP_S):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)

    def _guard(self, call: Callable[[], None]) -> None:
        """NOTE: one link's trouble must not end the thread, on which all links depend."""
        try:
            call()
        except Exception:
            logger.exception("ucx: a call on the engine thread failed")

    def _on_loop(self, calls: list[Callable[[], None]]) -> None:
        def run() -> None:
            for call in calls:
                call()

        with contextlib.suppress(RuntimeError):  # the loop is closed: its process ends
            self._loop.call_soon_threadsafe(run)


def _error_of(request: Any) -> Exception | None:
    try:
        request.check_error()
    except Exception as error:  # of the library's own tree, told apart by whoever waits
        return error
    return None
