"""One simulated request, from its arrival to its one end."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.metrics import Slo

BLOCK_TOKENS = 16


@dataclass(slots=True, eq=False)
class SimRequest:
    """`hit_tokens`: prompt tokens found in the cache of the worker that read it. `keys`: one per `key_tokens` prompt
    tokens; equal ones in front are equal text.

        arrived -> [waiting] -> reading -> first token -> [in transfer] -> writing -> ended
                        └-> refused
    """

    number: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()
    key_tokens: int = 512
    first_token_s: float | None = None
    end_s: float | None = None
    is_refused: bool = False
    hit_tokens: int = 0
    num_ends: int = field(default=0)

    @property
    def tpot_s(self) -> float | None:
        if self.end_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)

    def is_prompt(self, slo: Slo) -> bool:
        """The first token came in time."""
        if self.first_token_s is None:
            return False
        return slo.ttft_s is None or self.first_token_s - self.arrived_s <= slo.ttft_s

    def is_good(self, slo: Slo) -> bool:
        """Ended, and both promises kept."""
        if self.end_s is None or not self.is_prompt(slo):
            return False
        tpot_s = self.tpot_s
        return slo.tpot_s is None or tpot_s is None or tpot_s <= slo.tpot_s

    def end(self, now_s: float) -> None:
        self.num_ends += 1
        self.end_s = now_s

    def refuse(self) -> None:
        self.num_ends += 1
        self.is_refused = True
