"""How much prompt fits into a step beside decodes, before the tightest next-token deadline (policy/chunks.py).

    each step ──► the step model learns, and every stream's next token falls due
    the next  ──► largest chunk whose step is predicted to end before the first of them

A stream that was early has saved time that a prompt may use, up to half a gap (`Cadence.bank`). Under pressure nothing
fits; after STARVED_STEPS of that the prompt gets its fixed share all the same, or it would never be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from engine.loop import Work
from policy.chunks import Cadence
from worker.steps import StepMeter

STARVED_STEPS = 8


class ChunkSizer:
    """One worker's; on the engine thread. `itl_s`: the promised mean gap."""

    def __init__(self, meter: StepMeter, itl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._cadence = Cadence(itl_s)
        self._clock = clock
        self._streams: dict[str, tuple[float, int]] = {}  # request_id -> (first token seen, gaps since)
        self._last_s = clock()
        self._num_refused = 0

    def stepped(self, works: SequenceOf[Work], step_s: float) -> None:
        """An `engine.loop.Watch`. A stream that sat a step out is late, and counts from its next token again."""
        self._meter.stepped(works, step_s)
        now_s = self._last_s = self._clock()
        seen = self._streams
        self._streams = {}
        for work in works:
            if work.wants_token:
                first_s, num_gaps = seen.get(work.seq.request_id, (now_s, -1))
                self._streams[work.seq.request_id] = (first_s, num_gaps + 1)

    def fitting(self, decodes: SequenceOf[Work], past: int, cap: int) -> int | None:
        """An `engine.loop.ChunkLimit`."""
        now_s = self._clock()
        due_s = now_s + self._cadence.longest_step_s
        for work in decodes:
            stream = self._streams.get(work.seq.request_id)
            if stream is not None:
                first_s, num_gaps = stream
                due_s = min(due_s, self._cadence.due_s(first_s, num_gaps + 1, self._last_s))
        chunk = self._meter.largest_chunk(decodes, past, due_s - now_s, cap)
        if chunk:
            self._num_refused = 0
        elif chunk == 0:
            self._num_refused += 1
            if self._num_refused > STARVED_STEPS:
                self._num_refused = 0
                return None
        return chunk
