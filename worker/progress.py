"""What a worker logs while it starts: weights as they are read, decode steps as they are recorded."""

from __future__ import annotations

import logging
import time

from engine.runner import Captured
from engine.weights import Progress

logger = logging.getLogger("baton.worker")

_SHOWN_BYTES = 64 << 20  # smaller models load in no time


def shown_weights(worker_id: str) -> Progress:
    """Logs each quarter of the weights as it is loaded, and how long it has taken since this call."""
    shown, began_s = 0, time.monotonic()

    def show(num_done: int, num_total: int) -> None:
        nonlocal shown
        quarter = 4 * num_done // max(num_total, 1)
        if quarter > shown and num_total >= _SHOWN_BYTES:
            shown = quarter
            seconds = time.monotonic() - began_s
            logger.info(
                "%s: weights %d of %d MB in %.1f s", worker_id, num_done >> 20, num_total >> 20, seconds
            )

    return show


def shown_graphs(worker_id: str) -> Captured:
    """Logs each decode step as it is recorded."""

    def show(num_seqs: int, seconds: float, num_bytes: int) -> None:
        logger.info(
            "%s: decode graph of %d sequences in %.1f s, %d MB", worker_id, num_seqs, seconds, num_bytes >> 20
        )

    return show
