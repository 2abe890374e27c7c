"""Measures where one request's time goes; see contracts.request.Timings for what belongs to which stage. Pure.

made at arrival ─► placed ─► [lost ─► placed]… ─► token ─► [lost ─► placed]… ─► timings
"""

from __future__ import annotations

import time
from collections.abc import Callable

from contracts.request import Timings


class StageClock:
    """One request's, from its arrival on. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._arrived_s = now()
        self._first_token_s: float | None = None
        self._queue_s = 0.0
        self._handoff_s = 0.0
        self._num_attempts = 0

    def placed(self, waited_s: float) -> None:
        """An attempt has its workers, after it waited for them."""
        self._num_attempts += 1
        if self._first_token_s is None:
            self._queue_s += waited_s

    def first_token(self, at_s: float) -> None:
        """Of an attempt; the first attempt's counts."""
        if self._first_token_s is None:
            self._first_token_s = at_s

    def lost(self, handoff_s: float | None) -> None:
        """The attempt is over and another follows. A handoff that it did not come to tell counts as none."""
        self._handoff_s += handoff_s or 0.0

    def timings(self, handoff_s: float | None = 0.0) -> Timings:
        """The whole account, now that the request has ended; `handoff_s` of the last attempt."""
        end_s = self._now()
        first_s = end_s if self._first_token_s is None else self._first_token_s
        return Timings(
            queue_s=self._queue_s,
            prefill_s=first_s - self._arrived_s - self._queue_s,
            handoff_s=None if handoff_s is None else self._handoff_s + handoff_s,
            decode_s=end_s - first_s,
            num_attempts=self._num_attempts,
        )
