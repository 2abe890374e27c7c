"""SIGTERM to a worker's process: it drains instead of ending at once. A second one ends it.

Only a process's main thread may install a handler, and in a Ray worker that thread runs nothing of ours. Ray has
installed one there, whose last act is a call to a function of its module; that function becomes ours.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FunctionType
from typing import Any

_EXIT = "raise_sys_exit_with_custom_error_message"  # Ray 2.60: ray/_private/worker.py; a test looks for it


def drain_on_sigterm(drain: Callable[[], None]) -> bool:
    """Call `drain` at the first SIGTERM, on the main thread. False: the handler is none that we know, and stays."""
    handler = signal.getsignal(signal.SIGTERM)
    if not isinstance(handler, FunctionType) or _EXIT not in handler.__globals__:
        return False
    leave = handler.__globals__[_EXIT]
    has_begun = False

    def begin(*args: Any, **kwargs: Any) -> None:
        nonlocal has_begun
        if has_begun:
            leave(*args, **kwargs)
        has_begun = True
        drain()

    handler.__globals__[_EXIT] = begin
    return True
