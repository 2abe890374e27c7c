"""Is this process getting on? A thread of its own looks, and tells once if not.

    engine thread ──beats at every step──┐
    event loop ──answers every look──────┴──► Watchdog ──no sign for longer than allowed──► on_stuck(reason), once

A hung thread cannot be ended, a hung process can: whoever owns the process ends it, and connections that end tell
coordinators and peers at once what a missed health check would tell them much later.

Silence counts only while this process was running: one that was stopped (SIGSTOP, a debugger, a frozen container)
must not be condemned, when it goes on, for the time that it was not there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

LOOK_PERIOD_S = 0.5
MAX_TICK_S = 2.0
"""The time between two looks counts as this at most; if it was longer, the looker was not running."""


class AwakeClock:
    """Seconds that this process has been running, as far as `tick` is called every LOOK_PERIOD_S. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mark = (clock(), 0.0)  # one object: readers on other threads see both or neither

    def __call__(self) -> float:
        marked_s, awake_s = self._mark
        return awake_s + min(self._clock() - marked_s, MAX_TICK_S)

    def tick(self) -> None:
        """One caller only."""
        now_s = self._clock()
        marked_s, awake_s = self._mark
        self._mark = (now_s, awake_s + min(now_s - marked_s, MAX_TICK_S))


class Watchdog:
    """Owns the clock's ticks and the thread. `trouble` says what is wrong, None if nothing is; it must be quick."""

    def __init__(
        self,
        clock: AwakeClock,
        trouble: Callable[[], str | None],
        loop_timeout_s: float,
        on_stuck: Callable[[str], None],
    ) -> None:
        """`on_stuck` is called on the watchdog's thread, which then ends."""
        self._clock = clock
        self._trouble = trouble
        self._loop_timeout_s = loop_timeout_s
        self._on_stuck = on_stuck
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heard_s = clock()
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch the running event loop, too, from now on. Once."""
        assert self._thread is None
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._clock()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No call comes after this returns. Blocks for as long as one look takes."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> str | None:
        """One tick, and what is wrong now."""
        self._clock.tick()
        silence_s = self._clock() - self._heard_s
        if silence_s > self._loop_timeout_s:
            return f"no sign of life from the event loop for {silence_s:.1f} s"
        return self._trouble()

    def _run(self) -> None:
        while not self._is_stopped.wait(LOOK_PERIOD_S):
            reason = self.look()
            if reason is not None:
                self._on_stuck(reason)
                return
            try:
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._heard)
            except RuntimeError:
                return  # the loop is closed: the process ends by itself

    def _heard(self) -> None:
        self._heard_s = self._clock()
