"""What a worker tells coordinators about the cost of its steps, so that they can predict the next ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a worker has learnt about its steps (policy/step_model.py), in seconds per unit of each term.

    `decode`: base, per sequence, per token of context. `mixed`: base, per prompt token, per unit of attention, per
    sequence, per token of context. `margin`: factor that nine of ten steps keep. `error`: mean relative error of the
    last predictions. `is_decode_known`, `is_mixed_known`: enough steps of that kind were seen.
    """

    decode: tuple[float, ...]
    mixed: tuple[float, ...]
    margin: float
    error: float
    is_decode_known: bool
    is_mixed_known: bool
