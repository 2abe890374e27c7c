"""What this worker's steps cost, learnt from the steps themselves: `policy.step_model` on live numbers.

    with promises:  a sweep at start-up (sweep.py) ──► a model through it ─────────────┐
    without:        FIRST_STEPS steps are gathered ──► a rough model through them ──────┴► each further step corrects it

Without promises nobody decides by it, and a sweep would only make the start longer. Until a kind of step (decodes
alone, steps with prompt tokens) has been seen often enough, the report says that it is not known, and nobody decides by
it. `stepped` belongs to the engine thread; `report` may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from contracts.steps import StepReport
from engine.loop import Work as LoopWork
from policy.step_model import Coefficients, Sample, StepModel, Work

FIRST_STEPS = 8
KNOWN_STEPS = 8  # of a kind, before its predictions are worth anything


class StepMeter:
    """One worker's. `stepped` is an `engine.loop.Watch`."""

    def __init__(self) -> None:
        self._first: list[Sample] = []
        self._model: StepModel | None = None
        self._num_decode_steps = 0
        self._num_mixed_steps = 0

    def swept(self, samples: SequenceOf[Sample]) -> None:
        """Begin with a sweep, which is believed like any first guess: it ran without what is around a real step, and
        perhaps while others started. Nothing begins if it has too few of a kind.
        """
        num_mixed = sum(1 for sample in samples if sample.work.new_tokens)
        if min(num_mixed, len(samples) - num_mixed) < KNOWN_STEPS:
            return
        found = StepModel.from_sweep(samples)
        self._model = StepModel(found.decode, found.mixed)
        self._model.margin, self._model.error = found.margin, found.error
        self._num_decode_steps = self._num_mixed_steps = KNOWN_STEPS

    def stepped(self, works: SequenceOf[LoopWork], step_s: float) -> None:
        """A step computed `works`, whose sequences have moved on. A clock that stood still teaches nothing."""
        if step_s <= 0:
            return
        work = _measured(works)
        if work.new_tokens:
            self._num_mixed_steps += 1
        else:
            self._num_decode_steps += 1
        if self._model is not None:
            self._model.observe(work, step_s)
            return
        self._first.append(Sample(work, step_s))
        if len(self._first) >= FIRST_STEPS:
            self._model = _rough(self._first)
            for sample in self._first:
                self._model.observe(sample.work, sample.step_s)
            self._first.clear()

    def largest_chunk(
        self, decodes: SequenceOf[LoopWork], past: int, budget_s: float, cap: int
    ) -> int | None:
        """Prompt tokens, after `past` others, that fit into `budget_s` beside `decodes`; None: not known yet."""
        if self._model is None or not (self._is_decode_known and self._is_mixed_known):
            return None
        context = sum(work.seq.num_computed for work in decodes)
        return self._model.largest_chunk(Work(0, 0, len(decodes), context), past, budget_s, cap)

    @property
    def _is_decode_known(self) -> bool:
        return self._num_decode_steps >= KNOWN_STEPS

    @property
    def _is_mixed_known(self) -> bool:
        return self._num_mixed_steps >= KNOWN_STEPS

    def report(self) -> StepReport | None:
        """The model in numbers; None while nothing is known."""
        model = self._model
        if model is None:
            return None
        decode, mixed = model.decode, model.mixed
        return StepReport(
            (decode.base_s, decode.decode_s, decode.context_s),
            (mixed.base_s, mixed.token_s, mixed.attended_s, mixed.decode_s, mixed.context_s),
            model.margin,
            model.error,
            self._is_decode_known,
            self._is_mixed_known,
        )


def _measured(works: SequenceOf[LoopWork]) -> Work:
    """One token that draws another is a decode, whichever phase asked for it: it costs the same."""
    found = Work()
    for work in works:
        past = work.seq.num_computed - work.num_tokens
        if work.num_tokens == 1 and work.wants_token:
            found = found._replace(
                num_decodes=found.num_decodes + 1, decode_context=found.decode_context + past
            )
        else:
            found = found.plus_chunk(work.num_tokens, past)
    return found


def _rough(samples: SequenceOf[Sample]) -> StepModel:
    """Of the right size, and believed so little that the next steps decide. What was not seen is a guess."""
    base_s = min(sample.step_s for sample in samples)
    tokens_s = [sample.step_s / sample.work.new_tokens for sample in samples if sample.work.new_tokens]
    token_s = min(tokens_s, default=base_s / 10)
    return StepModel(
        Coefficients(base_s, decode_s=base_s / 100, context_s=base_s / 1e5),
        Coefficients(base_s, token_s, token_s / 1e4, token_s, base_s / 1e5),
        doubt=10.0,
    )
