"""Links: latency and bandwidth per pair."""

from __future__ import annotations

import math
import random

import pytest

from contracts.steps import LinkReport
from policy.link_model import LinkFit, LinkModel

MIB = 1 << 20


def predicted_s(report: LinkReport, num_bytes: int) -> float:
    return report.latency_s + num_bytes / report.bytes_per_s


def test_measurements_replace_the_start() -> None:
    fit = LinkFit(0.001, 1e9)
    for number in range(300):
        num_bytes = (1 + number % 8) * 8 * MIB
        fit.observe(num_bytes, 0.004 + num_bytes / 10e9)
    assert predicted_s(fit.report(), 100 * MIB) == pytest.approx(0.004 + 100 * MIB / 10e9, rel=0.05)
    assert fit.report().num_transfers == 300


def test_a_link_that_became_slower_is_believed_within_some_transfers() -> None:
    fit = LinkFit(0.001, 10e9)
    for _ in range(100):
        fit.observe(64 * MIB, 0.001 + 64 * MIB / 10e9)
    for _ in range(50):
        fit.observe(64 * MIB, 0.001 + 64 * MIB / 1e9)
    assert predicted_s(fit.report(), 64 * MIB) == pytest.approx(0.001 + 64 * MIB / 1e9, rel=0.1)


def test_tiny_transfers_say_nothing_of_the_bandwidth() -> None:
    rng = random.Random(0)
    fit = LinkFit(0.001, 10e9)
    for number in range(1000):
        fit.observe((48 << 10) + 4096 * (number % 5), rng.lognormvariate(math.log(0.0005), 1.0))
    assert fit.report().bytes_per_s == pytest.approx(10e9)
    assert 0.00025 < fit.report().latency_s < 0.001


def test_a_transfer_that_was_held_up_moves_little() -> None:
    fit = LinkFit(0.0005, 5e9)
    for _ in range(50):
        fit.observe(64 * MIB, 0.0005 + 64 * MIB / 5e9)
        fit.observe(MIB, 0.0005 + MIB / 5e9)
    before_s = predicted_s(fit.report(), 64 * MIB)
    fit.observe(64 * MIB, 30.0)
    assert predicted_s(fit.report(), 64 * MIB) < 1.5 * before_s


def test_noise_never_makes_more_bytes_faster() -> None:
    fit = LinkFit(0.001, 1e9)
    for _ in range(100):
        fit.observe(MIB, 0.5)
        fit.observe(64 * MIB, 0.1)
        fit.observe(0, 0.0)
    assert predicted_s(fit.report(), 64 * MIB) > predicted_s(fit.report(), MIB) > 0


def test_the_error_is_that_of_predictions_made_before() -> None:
    fit = LinkFit(0.001, 1e9)
    assert fit.report().error == 0.0
    fit.observe(64 * MIB, 2 * (0.001 + 64 * MIB / 1e9))
    assert fit.report().error == pytest.approx(1.0)
    for _ in range(200):
        fit.observe(64 * MIB, 2 * (0.001 + 64 * MIB / 1e9))
    assert fit.report().error < 0.05


def test_negative_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match=">= 0"):
        LinkFit(0.001, 1e9).observe(1, -1.0)
    with pytest.raises(ValueError, match="> 0"):
        LinkModel().tell("p", "d", 0.001, 0.0)


def test_what_a_pair_has_measured_counts_for_it() -> None:
    links = LinkModel(0.001, 1e9)
    links.tell("p", "d", 0.002, 20e9)
    links.tell("p", "d", 0.004, 10e9)
    links.tell("p", "e", 0.001, 1e9)
    assert links.predict_s("p", "d", 100 * MIB) == pytest.approx(0.004 + 100 * MIB / 10e9)


def test_an_unmeasured_pair_is_like_the_others() -> None:
    links = LinkModel(0.001, 1e9)
    assert links.predict_s("q", "d", 64 * MIB) == pytest.approx(0.001 + 64 * MIB / 1e9)
    links.tell("p", "d", 0.002, 20e9)
    links.tell("p", "d", 0.001, 10e9)
    links.tell("p", "e", 0.003, 10e9)
    assert links.predict_s("q", "d", 64 * MIB) == pytest.approx(0.002 + 64 * MIB / 10e9)


def test_a_worker_that_left_is_forgotten() -> None:
    links = LinkModel(0.001, 1e9)
    links.tell("p", "d", 1.0, 1e6)
    links.tell("p", "e", 0.001, 2e9)
    links.forget("d")
    assert (
        links.predict_s("p", "d", MIB) == links.predict_s("x", "y", MIB) == pytest.approx(0.001 + MIB / 2e9)
    )
    links.forget("p")
    assert links.predict_s("p", "d", MIB) == LinkModel(0.001, 1e9).predict_s("p", "d", MIB)
