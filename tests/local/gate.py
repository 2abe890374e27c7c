"""What a test does in the middle of an answer comes before its end, on a machine of any speed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from decode.phase import DecodePhase
from engine.loop import Budget, Work
from worker.worker import Worker


class Gate:
    """Before the token of index `limit`: no worker draws it, and all hear commands meanwhile."""

    def __init__(self, workers: Iterable[Worker], limit: float) -> None:
        self._workers = tuple(workers)
        self._limit = limit

    def move(self, limit: float = math.inf) -> None:
        """Before a later token, or away."""
        self._limit = limit
        for worker in self._workers:
            worker._engine.submit(lambda: None)  # so that it looks again

    def _put_before(self, phase: DecodePhase) -> None:
        propose = phase.propose

        def proposed(budget: Budget) -> list[Work]:
            is_shut = any(seq.num_outputs >= self._limit for seq in phase.running)
            return [] if is_shut else propose(budget)

        phase.propose = proposed  # type: ignore[method-assign]


@contextmanager
def gate_before(workers: Iterable[Worker], limit: float) -> Iterator[Gate]:
    """In all of `workers`, until the end."""
    gate = Gate(workers, limit)
    phases = [worker._phases.decode for worker in gate._workers]
    for phase in phases:
        gate._put_before(phase)
    try:
        yield gate
    finally:
        for phase in phases:
            del phase.propose
        gate.move()
