"""What workers have learnt of their steps, made whole: all of a fleet run the same model.

    reports of the workers ──a kind of step that one has not seen is taken from one that has──► StepModel of each

So a worker that has just started, or has just changed its role, is judged by its colleagues until it knows better,
which takes a few steps. None while nobody has seen a kind.
"""

from __future__ import annotations

from collections.abc import Iterable

from contracts.steps import StepReport
from coordinator.placement import WorkerView
from policy.step_model import Coefficients, StepModel


def whole_reports(views: Iterable[WorkerView]) -> dict[str, StepReport] | None:
    """worker_id -> both kinds of step, as far as known its own; None if a kind is known to nobody."""
    own = {view.worker_id: view.steps for view in views}
    known = [steps for steps in own.values() if steps is not None]
    decode = next((steps for steps in known if steps.is_decode_known), None)
    mixed = next((steps for steps in known if steps.is_mixed_known), None)
    if decode is None or mixed is None:
        return None
    return {worker_id: _whole(steps, decode, mixed) for worker_id, steps in own.items()}


def _whole(own: StepReport | None, decode: StepReport, mixed: StepReport) -> StepReport:
    if own is None:
        own = decode
    elif own.is_decode_known and own.is_mixed_known:
        return own
    return StepReport(
        own.decode if own.is_decode_known else decode.decode,
        own.mixed if own.is_mixed_known else mixed.mixed,
        own.margin,
        own.error,
        True,
        True,
    )


def step_model(steps: StepReport) -> StepModel:
    """The model as its worker sees it now."""
    base_s, decode_s, context_s = steps.decode
    model = StepModel(Coefficients(base_s, 0.0, 0.0, decode_s, context_s), Coefficients(*steps.mixed))
    model.margin = steps.margin
    return model
