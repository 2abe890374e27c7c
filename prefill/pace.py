"""How many prompt tokens make a step of about the wanted length, learnt from the steps that were.

A step cannot be interrupted: whoever cancels, or frees blocks, waits for its end. What a token costs depends on the
device, the model, the length of the context and, on CPU, on who else computes; so it is measured, not configured.
"""

from __future__ import annotations

MIN_TOKENS = 64
"""However slow the device. A step has a fixed cost, on CPU mostly reading the weights: SmolLM2-135M in float32 on one
core needs 1.15 times the CPU seconds with chunks of 128 instead of 256, 1.3 times with 64, 2.9 times with 16. So where
others crowd the CPU, smaller chunks would make all slower still. It is also where to begin, and the least that teaches.
"""
WEIGHT = 0.5  # of the newest step: a machine that has become busy is noticed within two steps


class ChunkPace:
    """Pure arithmetic: a moving average of seconds per token. A step's fixed cost counts into it, so that the number
    of tokens settles where fixed cost + tokens take `max_step_s`.
    """

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """As many as fit the step, at least MIN_TOKENS."""
        if self._token_s is None:
            return MIN_TOKENS
        return max(MIN_TOKENS, int(self._max_step_s / max(self._token_s, 1e-9)))

    def learn(self, num_tokens: int, step_s: float) -> None:
        """A step that did nothing but compute `num_tokens` prompt tokens took `step_s`."""
        if num_tokens < MIN_TOKENS:
            return
        token_s = step_s / num_tokens
        if self._token_s is None:
            self._token_s = token_s
        else:
            self._token_s += WEIGHT * (token_s - self._token_s)
