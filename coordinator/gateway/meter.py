"""The backend with a meter in front: what a request reads and draws, within its tenant's limits and its deadline.

Below the edge nothing can be missed: every endpoint, every choice, every stream that was cut short passes here. And
nothing of a client's body decides whose prefix cache it meets: the salt gets the tenant's name in front.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from contracts.errors import DeadlineError
from contracts.request import Finished, GenerateRequest, Token, TokenSink
from contracts.service import Service
from coordinator.backend import Backend, Capacity, Readiness, WorkerAudit
from coordinator.gateway.context import CURRENT, RequestContext
from coordinator.planning import PlanRecord
from coordinator.records import Record

logger = logging.getLogger(__name__)

_GRACE_S = 1.0
"""The backend keeps the deadline, and knows what to tell of it; only so much later it is cut off."""


class MeteredBackend:
    """A `Backend`; requests without a context pass untouched."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    async def generate(
        self,
        request: GenerateRequest,
        sink: TokenSink,
        deadline_s: float | None,
        service: Service | None = None,
    ) -> Finished | None:
        """Raises what the backend raises; RateLimitError, RequestError, DeadlineError of the context."""
        context = CURRENT.get()
        if context is None:
            return await self._inner.generate(request, sink, deadline_s, service)
        now = asyncio.get_running_loop().time()
        context.read(request.prompt_ids, now)
        if context.deadline is not None:
            rest_s = context.deadline - now
            if rest_s <= 0:
                raise _late()
            deadline_s = rest_s if deadline_s is None else min(deadline_s, rest_s)
        logger.debug("request %s generates as %s", context.request_id, request.request_id)
        end = await self._run(_within(request, context), _counted(context, sink), deadline_s, context)
        if end is not None:
            context.found(request.prompt_ids, end.num_cached_tokens)
        return end

    async def _run(
        self, request: GenerateRequest, sink: TokenSink, deadline_s: float | None, context: RequestContext
    ) -> Finished | None:
        cut_off = None if context.deadline is None else context.deadline + _GRACE_S
        try:
            async with asyncio.timeout_at(cut_off) as timeout:
                return await self._inner.generate(request, sink, deadline_s, context.service)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise _late() from error

    def readiness(self) -> Readiness:
        return self._inner.readiness()

    def capacity(self) -> Capacity:
        return self._inner.capacity()

    async def audit(self) -> list[WorkerAudit]:
        return await self._inner.audit()

    def decisions(self) -> list[Record]:
        return self._inner.decisions()

    def plans(self) -> list[PlanRecord]:
        return self._inner.plans()


def _counted(context: RequestContext, sink: TokenSink) -> TokenSink:
    bucket = context.output_bucket

    def count(token: Token) -> bool:
        context.num_output_tokens += 1
        if bucket is not None:
            bucket.take(1)
        return sink(token)

    return count


def _within(request: GenerateRequest, context: RequestContext) -> GenerateRequest:
    """`request` with the tenant's salt, and no longer than the tenant's outputs may be."""
    sampling = request.sampling
    most = context.limits.max_output_tokens
    if most is not None and sampling.max_tokens > most:
        sampling = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
    return replace(request, sampling=sampling, salt=context.salt_prefix + request.salt)


def _late() -> DeadlineError:
    return DeadlineError("the request was not done at its deadline (x-request-timeout)")
