"""Arrival processes: exact where they are, statistics where they are drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import arrivals

RATES = st.floats(0.01, 100.0)


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert arrivals.constant(4.0, 3) == [0.0, 0.25, 0.5]
    assert arrivals.constant(4.0, 0) == []


@given(RATES, st.integers(2, 300), st.floats(0.1, 10.0), st.integers(0, 2**32 - 1))
def test_gamma_offers_exactly_its_rate_in_order(rate: float, count: int, shape: float, seed: int) -> None:
    times = arrivals.gamma(rate, count, shape, seed)
    assert len(times) == count
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / rate)
    assert times == arrivals.gamma(rate, count, shape, seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gaps_vary_as_the_burstiness_says(burstiness: float, seed: int) -> None:
    gaps = np.diff(arrivals.gamma(5.0, 40_000, burstiness, seed))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.sort(np.diff(arrivals.poisson(2.0, 20_000, seed=3)))
    expected = 1.0 - np.exp(-2.0 * gaps)
    measured = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(expected - measured).max() < 0.012  # Kolmogorov–Smirnov, about 0.6% of seeds would fail


def test_seeds_differ() -> None:
    assert arrivals.poisson(1.0, 10, 0) != arrivals.poisson(1.0, 10, 1)


def test_replay_keeps_the_shape_and_scales_time() -> None:
    assert arrivals.replay([10.0, 10.0, 14.0], time_scale=2.0) == [0.0, 0.0, 2.0]
    assert arrivals.replay([]) == []


@given(st.lists(st.integers(0, 20), min_size=1, max_size=50), st.integers(0, 1000))
def test_jitter_fills_the_grain_only(ticks: list[int], seed: int) -> None:
    recorded = [3.0 * tick for tick in sorted(ticks)]
    times = arrivals.replay(recorded, jitter_s=3.0, seed=seed)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] <= recorded[-1] - recorded[0] + 3.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: arrivals.constant(0.0, 3),
        lambda: arrivals.gamma(1.0, 3, 0.0, 0),
        lambda: arrivals.gamma(float("nan"), 3, 1.0, 0),
        lambda: arrivals.constant(1.0, -1),
        lambda: arrivals.replay([1.0, 0.0]),
        lambda: arrivals.replay([0.0], time_scale=0.0),
    ],
)
def test_impossible_processes_are_refused(call: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        call()  # type: ignore[operator]
