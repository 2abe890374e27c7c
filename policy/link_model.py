"""How long KV takes from one worker to another: latency + bytes / bandwidth per ordered pair, from real transfers.

A pair nobody measured is believed to be like the average of all pairs, and all pairs at first like the prior.
"""

from __future__ import annotations

from typing import ClassVar


class Line:
    """A straight line through (bytes, seconds), each measurement weighing FORGETTING times its successor."""

    FORGETTING: ClassVar[float] = 0.98
    PRIOR_WEIGHT: ClassVar[float] = 2.0

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        # Two imagined transfers, an empty one and one of 64 MiB, give the line its start and keep it two-sided.
        for num_bytes in (0.0, float(64 << 20)):
            self._add(num_bytes, latency_s + num_bytes / bytes_per_s, self.PRIOR_WEIGHT)
        self._bytes_per_s = bytes_per_s

    def observe(self, num_bytes: int, seconds: float) -> None:
        keep = self.FORGETTING
        self._weight, self._x, self._y = self._weight * keep, self._x * keep, self._y * keep
        self._xx, self._xy = self._xx * keep, self._xy * keep
        self._add(float(num_bytes), seconds, 1.0)

    def _add(self, x: float, y: float, weight: float) -> None:
        self._weight += weight
        self._x += weight * x
        self._y += weight * y
        self._xx += weight * x * x
        self._xy += weight * x * y

    def fit(self) -> tuple[float, float]:
        """(latency in s, bytes per s). Where all sizes were equal the slope is what the means say."""
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 0 else 0.0
        if slope <= 0:  # noise won: all time is latency, at the last known speed
            slope = 1.0 / self._bytes_per_s
        latency_s = (self._y - slope * self._x) / self._weight
        if latency_s < 0 and self._x > 0:
            latency_s, slope = 0.0, self._y / self._x
        self._bytes_per_s = 1.0 / max(slope, 1e-15)
        return max(latency_s, 0.0), self._bytes_per_s


class LinkModel:
    """All pairs. `latency_s` and `bytes_per_s` are the prior of a pair that was never used."""

    def __init__(self, latency_s: float = 0.001, bytes_per_s: float = 1e9) -> None:
        self._prior = (latency_s, bytes_per_s)
        self._all = Line(latency_s, bytes_per_s)
        self._all_fit = self._all.fit()
        self._pairs: dict[tuple[str, str], Line] = {}
        self._fits: dict[tuple[str, str], tuple[float, float]] = {}

    def observe(self, source: str, target: str, num_bytes: int, seconds: float) -> None:
        """A finished transfer. Raises ValueError for a size or time below zero."""
        if num_bytes < 0 or seconds < 0:
            raise ValueError(f"transfer: expected bytes and seconds >= 0 but got {num_bytes} and {seconds}")
        pair = (source, target)
        line = self._pairs.get(pair)
        if line is None:
            line = self._pairs[pair] = Line(*self._all_fit)
        line.observe(num_bytes, seconds)
        self._fits[pair] = line.fit()
        self._all.observe(num_bytes, seconds)
        self._all_fit = self._all.fit()

    def predict_s(self, source: str, target: str, num_bytes: float) -> float:
        latency_s, bytes_per_s = self._fits.get((source, target), self._all_fit)
        return latency_s + num_bytes / bytes_per_s

    def exposed_s(
        self, source: str, target: str, num_bytes: float, prefill_s: float, num_chunks: int
    ) -> float:
        """What a transfer adds after the prompt is computed, when each finished chunk leaves while the next computes:
        the last chunk, or, where the link is slower than the prefill, all that could not hide behind it.
        """
        latency_s, bytes_per_s = self._fits.get((source, target), self._all_fit)
        total_s = num_bytes / bytes_per_s
        hidden_s = prefill_s * (num_chunks - 1) / num_chunks
        return latency_s + max(total_s / num_chunks, total_s - hidden_s)

    def forget(self, worker_id: str) -> None:
        """The worker is gone; its successor may sit elsewhere."""
        for pair in [pair for pair in self._pairs if worker_id in pair]:
            del self._pairs[pair]
            self._fits.pop(pair, None)
