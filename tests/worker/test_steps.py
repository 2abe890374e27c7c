"""A worker's step model from live steps: quiet until it knows, then right."""

from __future__ import annotations

import pytest

from engine.loop import Work
from engine.sequence import Sequence
from tests.builders import make_request
from worker.steps import FIRST_STEPS, KNOWN_STEPS, StepMeter


def work(num_tokens: int, past: int = 0, is_decode: bool = False) -> Work:
    """As it is after its step: the sequence has moved on."""
    seq = Sequence(make_request(past + num_tokens))
    seq.num_computed = past + num_tokens
    return Work(seq, num_tokens, wants_token=is_decode)


def decode_s(num: int, context: int) -> float:
    return 0.010 + 0.001 * num + 1e-6 * context


def feed_decodes(meter: StepMeter, count: int) -> None:
    for step in range(count):
        num, context = 1 + step % 5, 100 + 37 * step % 800
        meter.stepped([work(1, context, is_decode=True)] * num, decode_s(num, num * context))


def test_nothing_is_reported_before_the_first_steps() -> None:
    meter = StepMeter()
    feed_decodes(meter, FIRST_STEPS - 1)
    assert meter.report() is None


def test_only_the_kinds_that_were_seen_are_known() -> None:
    meter = StepMeter()
    feed_decodes(meter, KNOWN_STEPS)
    report = meter.report()
    assert report is not None
    assert (report.is_decode_known, report.is_mixed_known) == (True, False)


def test_the_coefficients_are_found_and_the_error_falls() -> None:
    meter = StepMeter()
    feed_decodes(meter, 400)
    report = meter.report()
    assert report is not None
    base_s, per_decode_s, per_token_s = report.decode
    assert base_s + 3 * per_decode_s + 900 * per_token_s == pytest.approx(decode_s(3, 900), rel=0.02)
    assert report.error < 0.02


def test_prompt_tokens_teach_the_mixed_fit() -> None:
    meter = StepMeter()
    for step in range(300):
        num, past = 64 + 16 * (step % 8), 64 * (step % 5)
        meter.stepped([work(num, past)], 0.005 + 1e-4 * num + 1e-8 * num * (2 * past + num))
    report = meter.report()
    assert report is not None
    assert report.is_mixed_known
    assert not report.is_decode_known
    assert report.mixed[1] == pytest.approx(1e-4, rel=0.1)


def test_a_clock_that_stood_still_teaches_nothing() -> None:
    meter = StepMeter()
    for _ in range(FIRST_STEPS):
        meter.stepped([work(1, is_decode=True)], 0.0)
    assert meter.report() is None
