"""The next step of a worker: all decodes that are due, and as much prompt as fits before the tightest deadline.

A stream's token i is due at t_first + i·tpot: whoever was early has saved time, which a prompt may use. `bank` bounds
that saving to a few tokens, so that one long step never shows as a stall. Without decodes a step is bounded by its cap
alone (a prefill worker); a decode worker under pressure gets no prompt tokens; everything between is the same formula
(the earliest next-token deadline: Sarathi-Serve's budget made dynamic).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from policy.step_model import StepModel, Work


@dataclass(frozen=True, slots=True)
class Cadence:
    """When tokens are due. `tpot_s`: promised mean gap. `share`: part of it we plan with. `bank`: gaps of saved time
    that one step may spend, beyond its own. `short_output`: length that nine of ten answers exceed; a short answer has
    few gaps to make up for waiting for a step under way, and for `arrival_s`, which its KV takes to arrive.
    """

    tpot_s: float
    share: float = 0.95
    bank: float = 0.5
    short_output: float = math.inf
    arrival_s: float = 0.01

    gap_s: float = field(init=False)
    longest_step_s: float = field(init=False)
    """Whatever was saved. An answer of n tokens keeps its promise if n steps (n - 1 of its own and the one it found
    under way) and the arrival fit into n - 1 gaps.
    """

    def __post_init__(self) -> None:
        gap_s = self.tpot_s * self.share
        longest_s = (1.0 + self.bank) * gap_s
        if math.isfinite(self.short_output):
            num_tokens = max(self.short_output, 3.0)
            longest_s = min(longest_s, ((num_tokens - 1) * gap_s - self.arrival_s) / num_tokens)
        object.__setattr__(self, "gap_s", gap_s)
        object.__setattr__(self, "longest_step_s", longest_s)

    def due_s(self, first_token_s: float, num_gaps: int, last_token_s: float) -> float:
        """Time by which gap number `num_gaps` (1 = the second token) must end; `last_token_s`: the newest token's."""
        return min(first_token_s + num_gaps * self.gap_s, last_token_s + self.longest_step_s)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is left of one prompt: `num_tokens` after `past` tokens already in KV."""

    num_tokens: int
    past: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`chunks`: tokens of each prompt, in order; prompts beyond its length get none."""

    chunks: tuple[int, ...]
    work: Work
    predicted_s: float


def plan_step(
    model: StepModel,
    decodes: Work,
    prompts: Sequence[Prompt],
    budget_s: float = math.inf,
    cap: int = 4096,
    least: int = 0,
) -> StepPlan:
    """Prompts in the given order, each as far as `budget_s` (time to the tightest deadline) and `cap` tokens allow.

    `least`: tokens that the first prompt gets even if no time is left; for a prompt that has starved.
    """
    work = decodes
    chunks: list[int] = []
    left = cap
    for prompt in prompts:
        if left <= 0:
            break
        fits = left
        if math.isfinite(budget_s):
            fits = model.largest_chunk(work, prompt.past, budget_s, left)
        if not chunks:
            fits = max(fits, min(least, left))
        taken = min(fits, prompt.num_tokens)
        if taken <= 0:
            break
        chunks.append(taken)
        work = work.plus_chunk(taken, prompt.past)
        left -= taken
        if taken < prompt.num_tokens:
            break  # those behind it wait: two prompts in halves finish later than one whole and one not begun
    return StepPlan(tuple(chunks), work, model.predict_s(work))
