"""How an instance ends: open requests first, then Serve, then Ray, then what is left of them.

    signal ─► drain (at most decode.drain_timeout_s; a second signal: now) ─► Serve ─► Ray ─► run folder, claim

The drain comes before Serve's own shutdown because that one ends HAProxy first, and with it every open stream. A start
that did not come to its end has no request and nothing to drain: its processes are ended as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from coordinator.instance import Instance, processes_using

SHUTDOWN_TIMEOUT_S = 15.0
"""For Serve and Ray, when the last request has ended."""

_UNHEARD_S = 2.0
_FAREWELL_S = 5.0  # for those who are cut to be told
_RAY_END_TIMEOUT_S = 2.0  # for what is left to do when the node process is gone


class Interrupt:
    """A signal handler that raises KeyboardInterrupt, and not twice within _UNHEARD_S: until `give_back` listens, the
    second one would break off the way out that the first has begun. After that, the first was lost on its way.
    """

    def __init__(self) -> None:
        self._raised_s = -math.inf

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._raised_s > _UNHEARD_S:
            self._raised_s = now_s
            raise KeyboardInterrupt


def give_back(instance: Instance, signals: Sequence[signal.Signals], drain_s: float | None) -> None:
    """End all that the instance started. `drain_s`: how long open requests may take; None if none can be open."""
    begun_s = time.monotonic()
    has_started = "ray" in sys.modules
    ender = _Ender(drain_s)
    for number in signals:
        signal.signal(number, ender.hurry)
    if has_started:
        _shut_down(instance, ender)
    is_clean = instance.close(is_idle=drain_s is None)
    if not is_clean:
        print(f"baton: could not remove {instance.run_dir}; the next start tries again", file=sys.stderr)
    elif has_started:
        print(f"stopped within {time.monotonic() - begun_s:.1f} s; nothing is left running", flush=True)


def wait_lost(instance: Instance, timeout_s: float | None = None) -> None:
    """Return when Ray's node process has ended, or after `timeout_s`; at once if there is none."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for pid in processes_using(str(instance.run_dir), program="raylet"):
            with contextlib.suppress(ProcessLookupError):
                nodes.append(os.pidfd_open(pid))
                stack.callback(os.close, nodes[-1])
        if nodes:
            select.select(nodes, [], [], timeout_s)


def _shut_down(instance: Instance, ender: _Ender) -> None:
    """What still runs when this gives up is ended by Instance.close."""
    thread = threading.Thread(target=ender.run, name="end-ray", daemon=True)
    # Ray reports the end of Serve's controller, which is what was asked for, as a failed task: on stdout.
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        thread.start()
        if ender.drain_s is not None:  # else whatever of Ray has come up has nothing to finish
            # NOTE: without its raylet, Serve's shutdown would wait for its whole time-out. A signal to the process
            # group (a closed terminal) ends Ray and this process at the same time.
            wait_lost(instance, ender.drain_s + _FAREWELL_S + SHUTDOWN_TIMEOUT_S)
        thread.join(_RAY_END_TIMEOUT_S)


class _Ender:
    """Ends Serve and Ray on a thread of its own; `hurry` is a signal handler of the main thread."""

    def __init__(self, drain_s: float | None) -> None:
        self.drain_s = drain_s
        self._hurried = threading.Event()

    def hurry(self, _number: int, _frame: FrameType | None) -> None:
        """Open requests are told now, not when their time is over."""
        self._hurried.set()

    def run(self) -> None:
        import ray

        if self.drain_s is not None:
            # Only Serve knows how to end its parts; if it fails, its processes end with Ray all the same.
            with contextlib.suppress(Exception):
                asyncio.run(self._end_serve(self.drain_s))
        ray.shutdown()

    async def _end_serve(self, drain_s: float) -> None:
        from ray import serve

        with contextlib.suppress(Exception):  # a coordinator that does not answer cannot be waited for
            await self._drain(drain_s)
        # NOTE: in this loop: Serve's handles are bound to the loop of their first call.
        await serve.shutdown_async()

    async def _drain(self, drain_s: float) -> None:
        from ray import serve

        handle = serve.get_app_handle("baton")

        async def cut_when_hurried() -> None:
            await asyncio.to_thread(self._hurried.wait)
            await handle.broadcast("drain", 0.0).results_async()

        try:
            async with asyncio.timeout(drain_s + _FAREWELL_S), asyncio.TaskGroup() as tasks:
                hurrying = tasks.create_task(cut_when_hurried())
                await handle.broadcast("drain", drain_s).results_async()
                hurrying.cancel()
        finally:
            self._hurried.set()  # ends the thread that waits for it
