"""What is asked of placement: one request, what it was promised, and how long it has waited. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contracts.blocks import num_blocks_for
from contracts.request import GenerateRequest
from contracts.service import Service
from policy.place import PlaceRules

MAX_EXPECTED_TOKENS = 256  # of an answer, when only its limit is known
RULES = PlaceRules()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that wants workers, `waited_s` after its arrival. `service_s`: see `Predictor.service_s`. `avoid`:
    workers that failed it. `is_kept`: it is served even when it is late. `is_resumed`: it was accepted before.
    """

    request: GenerateRequest
    service: Service
    waited_s: float = 0.0
    service_s: float = 0.0
    avoid: frozenset[str] = frozenset()
    is_kept: bool = True
    is_resumed: bool = False

    @property
    def is_leftover(self) -> bool:
        """It has to wait for what others leave. A stream that lost its worker has not."""
        return self.service.is_leftover and not self.is_resumed

    @property
    def left_s(self) -> float:
        """To the first token; a part of the promise is kept for wrong predictions. Infinite without a promise."""
        promised_s = self.service.ttft_s
        return math.inf if promised_s is None else promised_s * RULES.ttft_share - self.waited_s

    @property
    def num_expected(self) -> int:
        """Tokens that its answer may have."""
        return min(self.request.max_total_tokens - self.request.num_known_tokens, MAX_EXPECTED_TOKENS)

    def num_blocks(self, block_size: int) -> int:
        """KV blocks that it takes now: for its known tokens and the next."""
        return num_blocks_for(self.request.num_known_tokens + 1, block_size)

    def grown_blocks(self, block_size: int) -> int:
        """KV blocks that it may grow to, as far as can be foreseen."""
        return num_blocks_for(self.request.num_known_tokens + self.num_expected + 1, block_size)
