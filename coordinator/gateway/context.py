"""Who asks, and what one request has used: made by the middleware, read by the metered backend below the edge.

    middleware: CURRENT.set(RequestContext) ─► edge ─► tasks inherit it ─► MeteredBackend counts into it ─► ledger

A context variable carries it, so no route and no form has to know that there is a gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from contracts.config_gateway import TenantLimits
from contracts.config_slo import SloConfig
from contracts.service import Service, ServiceClass
from coordinator.gateway.limits import Bucket, TenantQuota
from coordinator.promises import Tier, read_class, read_service

DEFAULT_TENANT = "default"
"""Everybody, while no keys are asked for."""
SCOPES = ("inference", "batch")
CALLER = "baton.caller"
"""Key of an ASGI scope: the Caller. A client cannot set it; whoever runs a request inside the process may."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `key_id` is public; empty without keys. `is_batch`: a line of a batch, run by ourselves."""

    tenant: str = DEFAULT_TENANT
    key_id: str = ""
    scopes: tuple[str, ...] = SCOPES
    is_batch: bool = False


@dataclass(slots=True)
class RequestContext:
    """One generation request. `deadline` is in the time of the event loop; None: the server's own alone.

    `salt_prefix` separates the prefix caches of tenants, "" where there is only one. `service`: class and promises,
    once the body is read. `answered_by`: the model that was asked last, "" for the server's own.
    """

    caller: Caller
    limits: TenantLimits
    quota: TenantQuota
    request_id: str = ""
    deadline: float | None = None
    salt_prefix: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    service: Service | None = None
    answered_by: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    _seen: list[tuple[int, ...]] = field(default_factory=list)
    _hits: dict[int, int] = field(default_factory=dict)  # by id: `_seen` has the prompts

    def settle(self, slo: SloConfig, tier: Tier | None, model: str) -> Service:
        """Class and promises from headers, body and key. Raises RequestError, PermissionDenied: see read_service."""
        tenant = self.caller.tenant
        if self.caller.is_batch:
            self.service = slo.service("batch", model, tenant)
        else:
            self.service = read_service(slo, self.headers, tier, model, tenant, self.limits.classes)
        return self.service

    def class_of(self, tier: Tier | None) -> ServiceClass:
        """The class alone, for a server whose promises are not ours. Raises as `settle`."""
        return "batch" if self.caller.is_batch else read_class(self.headers, tier, self.limits.classes)

    def read(self, prompt_ids: tuple[int, ...], now: float) -> None:
        """Charge a prompt, once however many outputs it has. Raises RateLimitError, RequestError: see TenantQuota."""
        if any(ids is prompt_ids for ids in self._seen):
            return
        if not self.caller.is_batch:
            self.quota.take_prompt(len(prompt_ids), now)
        self._seen.append(prompt_ids)
        self.num_prompt_tokens += len(prompt_ids)

    def found(self, prompt_ids: tuple[int, ...], num_cached: int) -> None:
        """Cache hits of one output of a prompt that was read. All but one of them may find what that one has read, so
        the least of them count.
        """
        before = self._hits.get(id(prompt_ids))
        least = self._hits[id(prompt_ids)] = num_cached if before is None else min(before, num_cached)
        self.num_cached_tokens += least - (before or 0)

    def forget(self) -> None:
        """Nothing came of what was read: somebody else is asked, and it is not charged twice."""
        if not self.caller.is_batch:
            self.quota.take_output(-self.num_prompt_tokens - self.num_output_tokens)
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self._seen.clear()
        self._hits.clear()

    @property
    def output_bucket(self) -> Bucket | None:
        """What a token of the output is taken from, if anything."""
        return None if self.caller.is_batch else self.quota.tokens


CURRENT: ContextVar[RequestContext | None] = ContextVar("baton_gateway", default=None)
