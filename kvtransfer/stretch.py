"""How long bytes are on their way: what the link's speed is learnt from.

    idle ──something is ready, or only the end is left to tell──► moving ──all acknowledged──► idle: told

Waiting for the prompt's next tokens is no time of the link, so a handoff beside its prefill is several stretches. What
waits for slots, or behind other handoffs, is on its way: that is what the next one will find too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

OnMoved = Callable[[int, float], None]
"""(bytes, seconds) of one stretch."""


class Stretches:
    """Of one handoff, one after the other. One that is cut short by the handoff's failure is not told."""

    def __init__(self, on_moved: OnMoved, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_moved = on_moved
        self._clock = clock
        self._begun_s: float | None = None
        self._num_bytes = 0

    def begin(self) -> None:
        """Nothing, if one has begun."""
        if self._begun_s is None:
            self._begun_s = self._clock()

    def add(self, num_bytes: int) -> None:
        """They are sent."""
        self._num_bytes += num_bytes

    def end(self) -> None:
        """Nothing, if none has begun."""
        if self._begun_s is not None:
            begun_s, num_bytes = self._begun_s, self._num_bytes
            self._begun_s, self._num_bytes = None, 0
            self._on_moved(num_bytes, self._clock() - begun_s)
