"""What clients ask for, measured where their requests pass: the food of the planner.

    request ──► arrived(prompt, what no cache will hold of it) ──tokens──► wrote ──its end, whatever it is──► finished
                                                               └──no token──► refused: nobody will read the like of it

How much of a prompt a cache holds is known only when it has been read; until then the share of the last requests is
believed. A replica sees its own clients; Serve spreads requests evenly over ingress replicas, so all of them together
ask for as many times more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from contracts.request import Finished, GenerateRequest, Token, TokenSink
from policy.chunks import Cadence
from policy.planner import Demand, Mix

_CACHED_WEIGHT = 0.1  # of one request in the share that caches hold


class DemandMeter:
    """One per ingress replica. `itl_s`: the promised mean gap."""

    def __init__(self, itl_s: float, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._demand = Demand(Cadence(itl_s), window_s)
        self._clock = clock
        self._cached_share = 0.0
        self._num_written = 0

    @contextmanager
    def measured(self, request: GenerateRequest, sink: TokenSink) -> Iterator[MeasuredRequest]:
        """One request, within. One that ends without a token asked for service all the same, but got none."""
        prompt_len, arrived_s = len(request.prompt_ids), self._clock()
        num_new = round(prompt_len * (1.0 - self._cached_share))
        self._demand.arrived(prompt_len, num_new, arrived_s)
        measured = MeasuredRequest(self, prompt_len, sink)
        try:
            yield measured
        finally:
            if measured.num_tokens:
                self._demand.finished(measured.num_tokens, self._count_written())
            else:
                self._demand.refused(prompt_len, num_new, arrived_s, self._clock())

    def wrote(self) -> None:
        """Somebody, a token."""
        self._num_written += 1

    def was_cached(self, share: float) -> None:
        """Of somebody's prompt."""
        self._cached_share += _CACHED_WEIGHT * (share - self._cached_share)

    def mix(self, num_coordinators: int) -> Mix | None:
        """The demand on the whole service now; None before anybody came."""
        mix = self._demand.mix(self._count_written())
        return mix and replace(mix, requests_per_s=mix.requests_per_s * num_coordinators)

    def _count_written(self) -> float:
        """Tokens so far are of now, which is returned."""
        now_s = self._clock()
        self._demand.wrote(self._num_written, now_s)
        self._num_written = 0
        return now_s


class MeasuredRequest:
    """Counts what passes to a sink."""

    def __init__(self, meter: DemandMeter, prompt_len: int, sink: TokenSink) -> None:
        self._meter = meter
        self._prompt_len = prompt_len
        self._sink = sink
        self.num_tokens = 0

    def sink(self, token: Token) -> bool:
        self.num_tokens += 1
        self._meter.wrote()
        return self._sink(token)

    def ended(self, end: Finished | None) -> None:
        if end is not None:
            self._meter.was_cached(end.num_cached_tokens / max(self._prompt_len, 1))
