"""One request's class and promises: how they are asked for, and whether they were kept.

    x-baton-class │ service_tier │ the key's first class ─► class ─┐
    slo.models │ slo.classes │ slo, then x-baton-ttft-ms, -itl-ms ─┴► Service ─► line, placement ─► Account ─► met?

Everything that is wrong is refused before any work, with the name of the header.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from contracts.config_slo import SloConfig
from contracts.errors import PermissionDenied, RequestError
from contracts.service import CLASSES, Service, ServiceClass
from coordinator.fields import number_in

CLASS_HEADER = "x-baton-class"
TTFT_HEADER = "x-baton-ttft-ms"
ITL_HEADER = "x-baton-itl-ms"
SERVICE_HEADERS = (CLASS_HEADER, TTFT_HEADER, ITL_HEADER)

Tier = Literal["auto", "default", "flex", "priority"]
"""OpenAI's `service_tier`, as far as it says who waits for whom."""
_OF_TIER: dict[Tier, ServiceClass] = {"flex": "best_effort", "priority": "interactive"}

Met = Literal["both", "ttft", "itl", "none"]


def tier_of(service_class: ServiceClass, asked: Tier) -> Tier:
    """How a client that asked for a tier is told which class it got: what OpenAI's `service_tier` of an answer is."""
    if service_class != "interactive":
        return "flex"
    return "priority" if asked == "priority" else "default"


def known_tier(value: Any) -> Tier | None:
    """None for what only another server may know."""
    return value if value in get_args(Tier) else None


def read_service(
    slo: SloConfig,
    headers: Mapping[str, str],
    tier: Tier | None,
    model: str,
    tenant: str,
    allowed: Sequence[ServiceClass],
) -> Service:
    """What a request is promised. Raises as `read_class`, and RequestError naming a header of promises."""
    service_class = read_class(headers, tier, allowed)
    service = slo.service(service_class, model, tenant)
    ttft_s = _asked_s(slo, headers, TTFT_HEADER, "ttft_ms", service.ttft_s)
    itl_s = _asked_s(slo, headers, ITL_HEADER, "itl_ms", service.itl_s)
    return replace(service, ttft_s=ttft_s, itl_s=itl_s)


def read_class(
    headers: Mapping[str, str], tier: Tier | None, allowed: Sequence[ServiceClass]
) -> ServiceClass:
    """A request's class. `allowed`: the tenant's classes, the first is its default; the header goes before the body.

    Raises RequestError naming the header, PermissionDenied for a class that the tenant has not.
    """
    asked = headers.get(CLASS_HEADER)
    if asked is not None and asked not in CLASSES:
        raise RequestError(f"{CLASS_HEADER}: expected one of {', '.join(CLASSES)} but got {asked[:40]!r}")
    named = next((name for name in CLASSES if name == asked), None) or (_OF_TIER.get(tier) if tier else None)
    service_class = named or allowed[0]
    if service_class not in allowed:
        where = CLASS_HEADER if asked is not None else "service_tier"
        raise PermissionDenied(
            f"{where}: expected a class of this key ({', '.join(allowed)}) but got {service_class}"
        )
    return service_class


def _asked_s(
    slo: SloConfig, headers: Mapping[str, str], header: str, name: str, promised_s: float | None
) -> float | None:
    """The promise after the header. `name`: the field of the configuration."""
    text = headers.get(header)
    if text is None:
        return promised_s
    base_ms: float | None = getattr(slo, name)
    if base_ms is None:
        raise RequestError(f"{header}: expected a server that makes promises, but this one has no slo.{name}")
    least_ms: float | None = getattr(slo, f"min_{name}")
    if least_ms is None:
        least_ms = base_ms if promised_s is None else 1000.0 * promised_s
    most_ms: float | None = getattr(slo, f"max_{name}")
    value_ms = number_in(text)
    if not (math.isfinite(value_ms) and least_ms <= value_ms <= (math.inf if most_ms is None else most_ms)):
        bounds = f"at least {least_ms:g}" if most_ms is None else f"from {least_ms:g} to {most_ms:g}"
        raise RequestError(f"{header}: expected milliseconds, {bounds}, but got {text[:40]!r}")
    return value_ms / 1000.0


class Account:
    """Whether one request got what it was promised. Times by its owner's clock."""

    def __init__(self, service: Service, arrived_s: float) -> None:
        self.service = service
        self._arrived_s = arrived_s
        self._first_s: float | None = None
        self._last_s = arrived_s
        self._num_tokens = 0

    def tokens(self, num_tokens: int, first_s: float, last_s: float) -> None:
        """Those of one attempt."""
        if self._first_s is None:
            self._first_s = first_s
        self._last_s = last_s
        self._num_tokens += num_tokens

    def met(self, now_s: float, has_failed: bool) -> Met | None:
        """Once it is over. None: nothing was promised, or the client left before it could be said.

        A request that failed or was refused got nothing of what it was promised; whoever leaves after the promised time
        has waited too long.
        """
        ttft_s, itl_s = self.service.ttft_s, self.service.itl_s
        if ttft_s is None and itl_s is None:
            return None
        if has_failed:
            return "none"
        if self._first_s is None:
            return "none" if ttft_s is not None and now_s - self._arrived_s > ttft_s else None
        gap_s = (self._last_s - self._first_s) / max(self._num_tokens - 1, 1)
        is_first_met = ttft_s is None or self._first_s - self._arrived_s <= ttft_s
        are_gaps_met = itl_s is None or gap_s <= itl_s
        if is_first_met:
            return "both" if are_gaps_met else "ttft"
        return "itl" if are_gaps_met else "none"
