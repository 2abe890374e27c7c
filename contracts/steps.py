"""What a worker tells coordinators about the cost of its steps and of its links, so that they can predict the next."""

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


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What a worker has learnt about the way to one peer (policy/link_model.py), from its transfers: seconds are
    `latency_s` + bytes / `bytes_per_s`. `error`: mean relative error of the last predictions, 0 before the first
    transfer; `num_transfers`: since the self-test, whose speed is the start.
    """

    latency_s: float
    bytes_per_s: float
    error: float = 0.0
    num_transfers: int = 0
