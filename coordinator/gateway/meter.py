"""The backend with a meter in front: what a request reads and draws, within its tenant's limits and its deadline.

Below the edge nothing can be missed: every endpoint, every choice, every stream that was cut short passes here. And
nothing of a client's body decides whose prefix cache it meets: the salt gets the tenant's name in front.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

from contracts.errors import DeadlineError
from contracts.request import Finished, GenerateRequest, Token
from contracts.service import Service
from coordinator.backend import Backend, Capacity, Readiness, TokenStream, WorkerAudit
from coordinator.gateway.context import CURRENT, RequestContext
from coordinator.planning import PlanRecord
from coordinator.predict import Record

logger = logging.getLogger(__name__)

_GRACE_S = 1.0
"""The backend keeps the deadline, and knows what to tell of it; only so much later it is cut off."""


class MeteredBackend:
    """A `Backend`; requests without a context pass untouched."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def generate(
        self, request: GenerateRequest, deadline_s: float | None, service: Service | None = None
    ) -> TokenStream:
        context = CURRENT.get()
        if context is None:
            return self._inner.generate(request, deadline_s, service)
        return _MeteredStream(self._inner, request, deadline_s, context)

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


class _MeteredStream:
    """One output; a `TokenStream`. Its work starts with the first `__anext__`, like any other's."""

    def __init__(
        self, backend: Backend, request: GenerateRequest, deadline_s: float | None, context: RequestContext
    ) -> None:
        self._backend = backend
        self._request = request
        self._deadline_s = deadline_s
        self._context = context
        self._stream: TokenStream | None = None

    def __aiter__(self) -> AsyncIterator[Token | Finished]:
        return self

    async def __anext__(self) -> Token | Finished:
        """Raises what the backend raises; RateLimitError, RequestError, DeadlineError of the context."""
        stream = self._stream or self._start()
        deadline = self._context.deadline
        if deadline is None:
            item = await stream.__anext__()
        else:
            try:
                async with asyncio.timeout_at(deadline + _GRACE_S) as timeout:
                    item = await stream.__anext__()
            except TimeoutError as error:
                if not timeout.expired():
                    raise
                raise _late() from error
        if isinstance(item, Token):
            self._context.drew()
        elif isinstance(item, Finished):
            self._context.num_cached_tokens += item.num_cached_tokens
        return item

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    def _start(self) -> TokenStream:
        context, request, now = self._context, self._request, asyncio.get_running_loop().time()
        context.read(request.prompt_ids, now)
        deadline_s = self._deadline_s
        if context.deadline is not None:
            rest_s = context.deadline - now
            if rest_s <= 0:
                raise _late()
            deadline_s = rest_s if deadline_s is None else min(deadline_s, rest_s)
        logger.debug("request %s generates as %s", context.request_id, request.request_id)
        self._stream = self._backend.generate(_within(request, context), deadline_s, context.service)
        return self._stream


def _within(request: GenerateRequest, context: RequestContext) -> GenerateRequest:
    """`request` with the tenant's salt, and no longer than the tenant's outputs may be."""
    sampling = request.sampling
    most = context.limits.max_output_tokens
    if most is not None and sampling.max_tokens > most:
        sampling = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
    return replace(request, sampling=sampling, salt=context.salt_prefix + request.salt)


def _late() -> DeadlineError:
    return DeadlineError("the request was not done at its deadline (x-request-timeout)")
