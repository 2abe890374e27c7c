"""How long one step of one worker takes, learnt from the steps it took.

    seconds = a + b·new + c·Σ new·(2·past + new) + d·num_decodes + e·Σ decode context

new: prompt tokens of the step, past: tokens of the same prompt already in KV, so that the sum is the growth of
(past + new)², the work of attention. The form is the usual one of serving simulators (DistServe, appendix A, for the
two phases; Sarathi-Serve for the fused step). A step without prompt tokens is bound by reading the weights, one with
many by arithmetic, so there are two fits: `decode` (a, d, e) and `mixed` (all five); a fused step takes the longer of
both answers.

Life: seeded by published constants or by a short sweep at start-up, then updated by every step, forgetting slowly.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple


class Work(NamedTuple):
    """What one step computes. `attended`: Σ new·(2·past + new) over its prompt chunks."""

    new_tokens: int = 0
    attended: int = 0
    num_decodes: int = 0
    decode_context: int = 0

    def plus_chunk(self, num_tokens: int, past: int) -> Work:
        return Work(
            self.new_tokens + num_tokens,
            self.attended + num_tokens * (2 * past + num_tokens),
            self.num_decodes,
            self.decode_context,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    work: Work
    step_s: float


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per unit of each term, never negative."""

    base_s: float
    token_s: float = 0.0
    attended_s: float = 0.0
    decode_s: float = 0.0
    context_s: float = 0.0


class RecursiveFit:
    """Recursive least squares with forgetting (Ljung, System Identification, 2nd ed., section 11.2) of relative
    errors: a step of 10 ms and one of 1 s weigh the same.

    `scales`: typical size of each feature, which keeps the covariance well conditioned. `start`: prior values in
    units of the features, believed to within `doubt` of themselves.
    """

    NOISE: ClassVar[float] = 0.05  # expected relative error of one measurement
    MAX_VARIANCE: ClassVar[float] = 1e6  # of a coefficient relative to its prior; forgetting stops there

    def __init__(
        self, scales: Sequence[float], start: Sequence[float], doubt: float = 0.3, forgetting: float = 0.995
    ) -> None:
        self._scales = tuple(scales)
        self._forgetting = forgetting
        self._theta = [value * scale for value, scale in zip(start, scales, strict=True)]
        # A prior of zero says nothing about its size: a thousandth of the largest term, generously.
        least = max((abs(value) for value in self._theta), default=0.0) * 1e-2 or 1e-3
        deviations = [doubt * max(abs(value), least) for value in self._theta]
        self._limits = [self.MAX_VARIANCE * deviation**2 for deviation in deviations]
        self._covariance = [
            [deviation**2 if row == column else 0.0 for column in range(len(deviations))]
            for row, deviation in enumerate(deviations)
        ]

    def values(self) -> list[float]:
        return [theta / scale for theta, scale in zip(self._theta, self._scales, strict=True)]

    def update(self, features: Sequence[float], measured: float) -> None:
        """One measurement. Raises ValueError unless it is positive and finite."""
        if not (measured > 0 and math.isfinite(measured)):
            raise ValueError(f"measured: expected a positive time but got {measured}")
        weight = 1.0 / (measured * self.NOISE)
        x = [f / s * weight for f, s in zip(features, self._scales, strict=True)]
        projected = [sum(map(_times, row, x)) for row in self._covariance]
        forgetting = self._forgetting
        if any(self._covariance[i][i] > limit for i, limit in enumerate(self._limits)):
            forgetting = 1.0  # nothing new is learnt in some direction: forgetting it would blow the gain up
        denominator = forgetting + sum(map(_times, x, projected))
        error = 1.0 / self.NOISE - sum(map(_times, x, self._theta))
        for i, gain in enumerate(projected):
            share = gain / denominator
            self._theta[i] += share * error
            row = self._covariance[i]
            for j, other in enumerate(projected):
                row[j] = (row[j] - share * other) / forgetting


def _times(a: float, b: float) -> float:
    return a * b


class StepModel:
    """One worker's. All predictions are expected values; multiply by `margin` for what nine of ten steps keep."""

    WINDOW: ClassVar[int] = 256
    REFRESH: ClassVar[int] = 16  # measurements between two looks at the residuals
    MAX_MARGIN: ClassVar[float] = 1.5  # one stall of the machine must not stop all prefill
    OUTLIER: ClassVar[float] = 4.0  # a step this many times longer than predicted was no step of ours

    def __init__(self, decode: Coefficients, mixed: Coefficients, doubt: float = 0.3) -> None:
        self._decode_fit = RecursiveFit(
            (1.0, 1e2, 1e5), (decode.base_s, decode.decode_s, decode.context_s), doubt
        )
        self._mixed_fit = RecursiveFit(
            (1.0, 1e3, 1e6, 1e2, 1e5),
            (mixed.base_s, mixed.token_s, mixed.attended_s, mixed.decode_s, mixed.context_s),
            doubt,
        )
        self._ratios: deque[float] = deque(maxlen=self.WINDOW)
        self._since_refresh = 0
        self.num_samples = 0
        self.margin = 1.0
        self.error = 0.0
        """Mean relative error of the predictions of the last steps, each made before its step was learnt from."""
        self.decode = decode
        self.mixed = mixed

    @classmethod
    def from_sweep(cls, samples: Iterable[Sample]) -> StepModel:
        """Fitted to a start-up sweep. Raises ValueError without a sample of both kinds."""
        found = list(samples)
        decode = [s for s in found if not s.work.new_tokens]
        mixed = [s for s in found if s.work.new_tokens]
        if not decode or not mixed:
            raise ValueError(
                f"sweep: expected steps with and without prompt tokens but got {len(mixed)} and {len(decode)}"
            )
        token_s = min(s.step_s / s.work.new_tokens for s in mixed)
        base_s = min(s.step_s for s in found)
        model = cls(
            Coefficients(base_s, decode_s=base_s / 100, context_s=base_s / 1e5),
            Coefficients(base_s, token_s, token_s / 1e4, token_s, base_s / 1e5),
            doubt=10.0,
        )
        for sample in found:
            model.observe(sample.work, sample.step_s)
        model._ratios.clear()
        for sample in found:  # the guesses before the fit are no errors of the fit
            model._ratios.append(sample.step_s / model.predict_s(sample.work))
        model._refresh()
        return model

    def decode_step_s(self, num_decodes: float, decode_context: float) -> float:
        """A step of decodes alone."""
        fit = self.decode
        return fit.base_s + fit.decode_s * num_decodes + fit.context_s * decode_context

    def predict_s(self, work: Work) -> float:
        decode_s = self.decode_step_s(work.num_decodes, work.decode_context) if work.num_decodes else 0.0
        if not work.new_tokens:
            return decode_s
        fit = self.mixed
        return max(
            decode_s,
            fit.base_s
            + fit.token_s * work.new_tokens
            + fit.attended_s * work.attended
            + fit.decode_s * work.num_decodes
            + fit.context_s * work.decode_context,
        )

    def prefill_s(self, num_tokens: int, past: int = 0, chunk_tokens: int = 4096) -> float:
        """A prompt alone on the worker, in chunks of `chunk_tokens`."""
        fit = self.mixed
        num_steps = max(1, -(-num_tokens // chunk_tokens))
        return (
            num_steps * fit.base_s
            + fit.token_s * num_tokens
            + fit.attended_s * num_tokens * (2 * past + num_tokens)
        )

    def largest_chunk(self, work: Work, past: int, budget_s: float, cap: int) -> int:
        """Most prompt tokens (of a prompt with `past` tokens in KV) that can join `work` within `budget_s`.

        The root of the step's formula in `new`, with the margin taken off the budget.
        """
        budget_s /= self.margin
        if work.num_decodes and self.decode_step_s(work.num_decodes, work.decode_context) > budget_s:
            return 0
        fit = self.mixed
        rest_s = (
            budget_s
            - fit.base_s
            - fit.token_s * work.new_tokens
            - fit.attended_s * work.attended
            - fit.decode_s * work.num_decodes
            - fit.context_s * work.decode_context
        )
        if rest_s <= 0:
            return 0
        linear, square = fit.token_s + 2 * fit.attended_s * past, fit.attended_s
        # c·n² + (b + 2·c·past)·n = rest, in the form that survives c -> 0
        root = 2 * rest_s / max(linear + math.sqrt(linear * linear + 4 * square * rest_s), 1e-15)
        return min(cap, int(root))

    def reading_s(
        self, num_new: int, past: int, decodes: tuple[int, int], budget_s: float, cap: int, least: int
    ) -> tuple[float, float]:
        """(time, time beyond what the decodes take anyway) of `num_new` prompt tokens behind `past` ones, read in the
        chunks of up to `cap` that fit beside `decodes` (streams, their context) within `budget_s`; infinite where only
        chunks below `least` do.

        NOTE: placement asks this of every option, so it is `largest_chunk` and `predict_s` written out.
        """
        num_decodes, context = decodes
        alone, fit, middle = self.decode, self.mixed, past + num_new // 2
        alone_s = alone.base_s + alone.decode_s * num_decodes + alone.context_s * context
        budget_s /= self.margin
        fixed_s = fit.base_s + fit.decode_s * num_decodes + fit.context_s * context
        rest_s = budget_s - fixed_s
        if alone_s > budget_s or rest_s <= 0:
            return math.inf, math.inf
        square = fit.attended_s
        linear = fit.token_s + 2 * square * middle
        bottom = linear + math.sqrt(linear * linear + 4 * square * rest_s)
        chunk = int(2 * rest_s / (bottom if bottom > 1e-15 else 1e-15))
        most = cap if cap < num_new else num_new
        if chunk >= most:
            chunk = most
        elif chunk < least:
            return math.inf, math.inf
        full_s = fixed_s + (linear + square * chunk) * chunk
        if full_s < alone_s:
            full_s = alone_s
        num_steps = num_new / chunk
        return num_steps * full_s, num_steps * (full_s - alone_s)

    def observe(self, work: Work, step_s: float) -> None:
        """Learn from a step. Raises ValueError unless `step_s` is a positive time."""
        if not work.new_tokens and not work.num_decodes:
            return
        predicted_s = self.predict_s(work)
        ratio = step_s / predicted_s if predicted_s > 0 else math.inf
        if self.num_samples > self.REFRESH and ratio > self.OUTLIER:
            ratio = self.OUTLIER  # it is felt in the margin, but teaches no coefficient
        elif not work.new_tokens:
            self._decode_fit.update((1.0, work.num_decodes, work.decode_context), step_s)
            base, decode, context = self._decode_fit.values()
            self.decode = Coefficients(max(base, 1e-6), 0.0, 0.0, max(decode, 0.0), max(context, 0.0))
        elif not self._is_floored(work, step_s):
            self._mixed_fit.update(
                (1.0, work.new_tokens, work.attended, work.num_decodes, work.decode_context), step_s
            )
            base, *slopes = self._mixed_fit.values()
            self.mixed = Coefficients(max(base, 1e-6), *(max(slope, 0.0) for slope in slopes))
        self._ratios.append(ratio)
        self.num_samples += 1
        self._since_refresh += 1
        if self._since_refresh >= self.REFRESH:
            self._refresh()

    def _is_floored(self, work: Work, step_s: float) -> bool:
        """The weights' reading, not the prompt's arithmetic, took the time: says nothing about `mixed`."""
        return work.num_decodes > 0 and step_s < 1.02 * self.decode_step_s(
            work.num_decodes, work.decode_context
        )

    def _refresh(self) -> None:
        self._since_refresh = 0
        ordered = sorted(self._ratios)
        p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
        self.margin = min(max(p90, 1.0), self.MAX_MARGIN)
        self.error = sum(abs(ratio - 1.0) for ratio in ordered) / len(ordered)
