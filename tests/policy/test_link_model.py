"""Links: latency and bandwidth per pair."""

from __future__ import annotations

import pytest

from policy.link_model import LinkModel

MIB = 1 << 20


def test_measurements_replace_the_prior() -> None:
    links = LinkModel(0.001, 1e9)
    for number in range(300):
        num_bytes = (1 + number % 8) * 8 * MIB
        links.observe("p", "d", num_bytes, 0.004 + num_bytes / 10e9)
    assert links.predict_s("p", "d", 100 * MIB) == pytest.approx(0.004 + 100 * MIB / 10e9, rel=0.05)


def test_an_unmeasured_pair_is_like_the_others() -> None:
    links = LinkModel(0.001, 1e9)
    for _ in range(300):
        links.observe("p", "d", 64 * MIB, 0.001 + 64 * MIB / 20e9)
        links.observe("p", "d", MIB, 0.001 + MIB / 20e9)
    assert links.predict_s("q", "d", 64 * MIB) == pytest.approx(0.001 + 64 * MIB / 20e9, rel=0.1)


def test_noise_never_makes_more_bytes_faster() -> None:
    links = LinkModel(0.001, 1e9)
    for _ in range(100):
        links.observe("p", "d", MIB, 0.5)
        links.observe("p", "d", 64 * MIB, 0.1)
    assert links.predict_s("p", "d", 64 * MIB) > links.predict_s("p", "d", MIB) > 0


def test_chunks_hide_behind_the_prefill_unless_the_link_is_slower() -> None:
    links = LinkModel(0.001, 1e9)
    fast = links.exposed_s("p", "d", 1e8, prefill_s=1.0, num_chunks=10)
    assert fast == pytest.approx(0.001 + 0.01, rel=0.05)
    slow = links.exposed_s("p", "d", 5e9, prefill_s=1.0, num_chunks=10)
    assert slow == pytest.approx(0.001 + 5.0 - 0.9, rel=0.05)


def test_a_worker_that_left_is_forgotten() -> None:
    links = LinkModel(0.001, 1e9)
    fresh = links.predict_s("p", "d", MIB)
    for _ in range(50):
        links.observe("p", "d", MIB, 1.0)
        links.observe("p", "e", MIB, fresh)
    links.forget("d")
    assert links.predict_s("p", "d", MIB) == links.predict_s("x", "y", MIB)


def test_negative_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match=">= 0"):
        LinkModel().observe("p", "d", 1, -1.0)
