"""Was the client itself on time? A load generator that runs late measures itself.

Two lags: from the scheduled arrival to the sending, and of the event loop's own timers. A run whose lag is too
high is void: its checks fail, whatever else it shows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.metrics import percentile
from benchmarks.records import Record
from benchmarks.result import Check

MAX_SEND_LAG_MS = 500.0
"""AIPerf's bound for a run to count."""
MAX_LOOP_LAG_MS = 100.0

_PERIOD_S = 0.01


@dataclass(frozen=True, slots=True)
class Lag:
    """99th percentiles and worst, None if nothing was sent."""

    p99_send_ms: float | None
    p99_loop_ms: float | None
    max_loop_ms: float | None

    @property
    def is_void(self) -> bool:
        return not all(check.is_ok for check in self.checks())

    def checks(self) -> list[Check]:
        return [
            Check("client_send_lag_p99_ms", self.p99_send_ms, "<=", MAX_SEND_LAG_MS),
            Check("client_loop_lag_p99_ms", self.p99_loop_ms, "<=", MAX_LOOP_LAG_MS),
        ]

    def row(self) -> dict[str, float | bool | None]:
        return {
            "p99_loop_lag_ms": self.p99_loop_ms,
            "max_loop_lag_ms": self.max_loop_ms,
            "is_void": self.is_void,
        }


class LoopLag:
    """How late the loop runs a timer of 10 ms, for as long as the `with` block lasts."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def __enter__(self) -> Self:
        self._arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._due = time.monotonic() + _PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._ring)

    def _ring(self) -> None:
        self._late_s.append(max(0.0, time.monotonic() - self._due))
        self._arm()

    def lag(self, records: Iterable[Record]) -> Lag:
        """With the sending lag of these records."""
        sent_s = [lag_s for record in records if (lag_s := record.send_lag_s) is not None]
        late_s = self._late_s or [0.0]  # over before the first ring: nothing was late
        return Lag(_ms(percentile(sent_s, 99)), _ms(percentile(late_s, 99)), max(late_s) * 1000.0)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000.0
