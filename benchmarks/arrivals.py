"""When requests arrive: offsets in seconds from the run's start, a pure function of the parameters and the seed.

    constant     one every 1/rate
    poisson      exponential gaps: users who know nothing of each other
    gamma        gaps with coefficient of variation 1/sqrt(burstiness); 1 is Poisson, below 1 is burstier
    trace        recorded times, divided by `time_scale`: the shape of bursts stays

Open loop: nobody waits for an answer before the next arrival. (Closed loop has no arrivals: see runner.run_closed.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def constant(rate: float, num_requests: int) -> list[float]:
    """`rate` in requests/s. Raises ValueError for a rate that is not positive."""
    _check(rate, num_requests)
    return [index / rate for index in range(num_requests)]


def poisson(rate: float, num_requests: int, seed: int) -> list[float]:
    return gamma(rate, num_requests, 1.0, seed)


def gamma(rate: float, num_requests: int, burstiness: float, seed: int) -> list[float]:
    """Offsets with gamma-distributed gaps of shape `burstiness` and mean 1/rate; the first is 0.

    As in `vllm bench serve`, gaps are rescaled so that the offered rate is exactly `rate`: a short run would
    otherwise be offered what its seed happened to draw.
    """
    _check(rate, num_requests)
    if not burstiness > 0:
        raise ValueError(f"burstiness: expected more than 0 but got {burstiness}")
    if num_requests < 2:
        return [0.0] * num_requests
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), num_requests - 1)
    offsets = np.concatenate(([0.0], np.cumsum(gaps)))
    return [float(offset) for offset in offsets * ((num_requests - 1) / rate / offsets[-1])]


def replay(
    times_s: Sequence[float], time_scale: float = 1.0, jitter_s: float = 0.0, seed: int = 0
) -> list[float]:
    """Recorded times from 0 on, `time_scale` times as fast. `jitter_s`: the recording's grain, filled uniformly, since
    times that were rounded to a grain would arrive as bursts nobody sent. Raises ValueError for times out of order.
    """
    if not time_scale > 0 or jitter_s < 0:
        raise ValueError(f"expected time_scale > 0 and jitter_s >= 0 but got {time_scale} and {jitter_s}")
    times = np.asarray(times_s, dtype=np.float64)
    if np.any(np.diff(times) < 0):
        raise ValueError("expected arrival times in ascending order")
    if not len(times):
        return []
    if jitter_s:
        times = np.sort(times + np.random.default_rng(seed).uniform(0.0, jitter_s, len(times)))
    return [float(time) for time in (times - times[0]) / time_scale]


def _check(rate: float, num_requests: int) -> None:
    if not rate > 0:
        raise ValueError(f"rate: expected more than 0 requests/s but got {rate}")
    if num_requests < 0:
        raise ValueError(f"num_requests: expected at least 0 but got {num_requests}")
