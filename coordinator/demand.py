"""What clients ask for, measured where their requests pass: the food of the planner.

    request ──► arrived(prompt, what no cache will hold of it) ──tokens──► wrote ──its end, whatever it is──► finished

How much of a prompt a cache holds is known only when it has been read; until then the share of the last requests is
believed. A replica sees its own clients; Serve spreads requests evenly over ingress replicas, so all of them together
ask for as many times more.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from contracts.request import Finished, GenerateRequest, Token
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

    async def measured(
        self, request: GenerateRequest, stream: AsyncGenerator[Token | Finished, None]
    ) -> AsyncGenerator[Token | Finished, None]:
        """The same events. One that was refused asked for service all the same, and wrote nothing."""
        prompt_len = len(request.prompt_ids)
        self._demand.arrived(prompt_len, round(prompt_len * (1.0 - self._cached_share)), self._clock())
        num_tokens = 0
        try:
            async with aclosing(stream):
                async for event in stream:
                    if isinstance(event, Token):
                        num_tokens += 1
                        self._num_written += 1
                    else:
                        cached_share = event.num_cached_tokens / max(prompt_len, 1)
                        self._cached_share += _CACHED_WEIGHT * (cached_share - self._cached_share)
                    yield event
        finally:
            if num_tokens:
                self._demand.finished(num_tokens, self._count_written())

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
