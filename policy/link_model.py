"""How long KV takes from one worker to another: latency + bytes / bandwidth of each ordered pair, from real transfers.

    sender: self-test ──► LinkFit ◄── each stretch of a handoff          coordinator: LinkModel ◄── what senders report

A pair nobody has measured is believed to be like the average of all pairs, and all pairs at first like the prior.
"""

from __future__ import annotations

import math
from typing import ClassVar

from contracts.steps import LinkReport


class LinkFit:
    """One pair's latency and bandwidth, learnt from its transfers.

    A Kalman filter of the logarithms of both numbers (extended: Simon, Optimal State Estimation, section 13.2), which
    drift. So each measurement moves either by what it has to say of it, none can become zero or negative, and a
    transfer of 1 ms and one of 1 s weigh the same.
    """

    NOISE: ClassVar[float] = 0.5  # of the logarithm of one measurement
    DOUBT: ClassVar[float] = 1.0  # of the logarithms of the start, and the most that is ever doubted
    DRIFT: ClassVar[float] = 0.07  # between two measurements
    MOST_SURPRISE: ClassVar[float] = 2.0  # a transfer that took longer than seven times as long was held up
    LEAST_BYTES: ClassVar[int] = (
        1 << 20
    )  # a smaller transfer is all messages: it says nothing of the bandwidth
    ERROR_SHARE: ClassVar[float] = 0.05  # of the newest in the mean error

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._logs = [math.log(latency_s), -math.log(bytes_per_s)]
        self._covariance = [self.DOUBT**2, 0.0, self.DOUBT**2]  # of latency, of both, of seconds per byte
        self._error = 0.0
        self._num_transfers = 0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A finished transfer. Raises ValueError for a size or time below zero."""
        if num_bytes < 0 or seconds < 0:
            raise ValueError(f"transfer: expected bytes and seconds >= 0 but got {num_bytes} and {seconds}")
        latency_s, byte_s = map(math.exp, self._logs)
        predicted_s = latency_s + num_bytes * byte_s
        surprise = math.log(max(seconds, 1e-9) / predicted_s)
        self._num_transfers += 1
        share = max(self.ERROR_SHARE, 1.0 / self._num_transfers)
        self._error += share * (
            min(abs(seconds / predicted_s - 1.0), math.exp(self.MOST_SURPRISE)) - self._error
        )
        large = num_bytes * byte_s / predicted_s if num_bytes >= self.LEAST_BYTES else 0.0
        self._learn(1.0 - large, large, max(-self.MOST_SURPRISE, min(self.MOST_SURPRISE, surprise)))

    def _learn(self, small: float, large: float, surprise: float) -> None:
        """`small` and `large`: which part of the prediction is latency and which is bytes, its derivatives."""
        a, b, c = self._covariance
        a, c = (
            min(variance + (self.DRIFT * part) ** 2, self.DOUBT**2)
            for variance, part in ((a, small), (c, large))
        )
        gains = a * small + b * large, b * small + c * large
        total = small * gains[0] + large * gains[1] + self.NOISE**2
        self._logs = [known + gain / total * surprise for known, gain in zip(self._logs, gains, strict=True)]
        self._covariance = [
            a - gains[0] ** 2 / total, b - gains[0] * gains[1] / total, c - gains[1] ** 2 / total,
        ]  # fmt: skip

    def report(self) -> LinkReport:
        """What is known by now."""
        return LinkReport(math.exp(self._logs[0]), math.exp(-self._logs[1]), self._error, self._num_transfers)


class LinkModel:
    """All pairs. `latency_s` and `bytes_per_s` are the prior of a pair that was never used."""

    def __init__(self, latency_s: float = 0.001, bytes_per_s: float = 1e9) -> None:
        self._prior = (latency_s, 1.0 / bytes_per_s)
        self._pairs: dict[tuple[str, str], tuple[float, float]] = {}
        self._sums = [0.0, 0.0]

    def tell(self, source: str, target: str, latency_s: float, bytes_per_s: float) -> None:
        """What the source has measured. Raises ValueError unless there is a bandwidth and no latency below zero."""
        if latency_s < 0 or bytes_per_s <= 0:
            raise ValueError(
                f"link: expected latency >= 0, bandwidth > 0 but got {latency_s} and {bytes_per_s}"
            )
        pair, known = (source, target), (latency_s, 1.0 / bytes_per_s)
        if self._pairs.get(pair) != known:
            self._drop(pair)
            self._pairs[pair] = known
            self._add(known, 1)

    def predict_s(self, source: str, target: str, num_bytes: float) -> float:
        latency_s, byte_s = self._pairs.get((source, target)) or self._mean()
        return latency_s + num_bytes * byte_s

    def forget(self, worker_id: str) -> None:
        """The worker is gone; its successor may sit elsewhere."""
        for pair in [pair for pair in self._pairs if worker_id in pair]:
            self._drop(pair)

    def _mean(self) -> tuple[float, float]:
        num_pairs = len(self._pairs)
        return (self._sums[0] / num_pairs, self._sums[1] / num_pairs) if num_pairs else self._prior

    def _drop(self, pair: tuple[str, str]) -> None:
        known = self._pairs.pop(pair, None)
        if known is not None:
            self._add(known, -1)

    def _add(self, known: tuple[float, float], sign: int) -> None:
        self._sums = [total + sign * value for total, value in zip(self._sums, known, strict=True)]
