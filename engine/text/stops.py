"""Stop strings over a growing output.

Held back is only the longest end of the output that is a proper beginning of some stop string; it comes out
as soon as the output goes another way, or by `flush`. Nothing that could belong to a stop string is ever
shown too early.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Matches one output against its stop strings; the one that completes earliest wins, ties by list order.

    `include_stop`: the completed stop string is part of the text.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, can_stop: bool = True) -> str:
        """The text that may be shown now. After a match `matched` is set, and the rest is dropped.

        `can_stop` False (before min_tokens): the text passes and can never be part of a match.
        """
        assert self.matched is None, "pushed after the stop"
        if not self._stops or not text:
            return text
        text = self._held + text
        self._held = ""
        if not can_stop:
            return text
        found = self._first_match(text)
        if found is not None:
            start, stop = found
            self.matched = stop
            return text[: start + len(stop)] if self._include_stop else text[:start]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when the output ends without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _num_held(self, text: str) -> int:
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0
