"""What the composition root injects into every worker. Apart from app.py, because a worker reads this file when it
starts and needs nothing of the ingress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contracts.config import EngineConfig
    from engine.blocks import BlockPool
    from engine.loop import Emit
    from engine.sequence import EndRules
    from worker.phases import Phases


def make_phases(pool: BlockPool, config: EngineConfig, ends: EndRules, emit: Emit) -> Phases:
    """A worker's two phases, wired to each other (`worker.phases.PhaseFactory`).

    NOTE: imports here, not above: they bring torch, and neither the driver nor the coordinator wants it.
    """
    from decode.phase import DecodePhase
    from prefill.phase import PrefillPhase
    from worker.phases import Phases

    decode = DecodePhase(pool, config, ends, emit, recompute=lambda seq: prefill.recompute(seq))
    prefill = PrefillPhase(pool, config, ends, emit, adopt=decode.adopt)
    return Phases(prefill, decode)
