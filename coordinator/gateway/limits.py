"""What a tenant may take: requests and tokens per minute, requests open at once. Pure: the caller brings the time.

A limit of L per minute is a token bucket: it holds L, and L/60 flow in each second. A prompt is taken when its length
is known, before any device time; output is taken as it is drawn, because nobody knows beforehand how long it will be.
So the level may fall below zero, by no more than the outputs that were open then, and the tenant waits until it is
above again. The limits hold per ingress replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contracts.config_gateway import GatewayConfig, TenantLimits
from contracts.errors import RateLimitError, RequestError

_MINUTE_S = 60.0
_RETRY_CONCURRENT_S = 1.0


class Bucket:
    """`limit` units per minute."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._filled_at = now

    def level(self, now: float) -> float:
        gained = max(now - self._filled_at, 0.0) * self.limit / _MINUTE_S
        self._level = min(self._level + gained, float(self.limit))
        self._filled_at = max(now, self._filled_at)
        return self._level

    def take(self, amount: int) -> None:
        """May leave the level below zero."""
        self._level -= amount

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount` is there; 0 if it is."""
        return max(amount - self.level(now), 0.0) * _MINUTE_S / self.limit


class TenantQuota:
    """One tenant's buckets and open requests."""

    def __init__(self, tenant: str, limits: TenantLimits, now: float) -> None:
        self._tenant = tenant
        self._limits = limits
        self._requests = _bucket(limits.requests_per_minute, now)
        self.tokens = _bucket(limits.tokens_per_minute, now)
        self._num_open = 0

    @contextmanager
    def opened(self, now: float) -> Iterator[None]:
        """One request, from its admission to its end. Raises RateLimitError saying when to come again."""
        most = self._limits.max_concurrent
        if most is not None and self._num_open >= most:
            raise RateLimitError(
                f"expected at most {most} open requests of {self._tenant} but this would be one more",
                retry_after_s=_RETRY_CONCURRENT_S,
            )
        # Whoever is in debt waits; how long the prompt is, is not known yet.
        self._check("tokens", self.tokens, 1, now)
        self._check("requests", self._requests, 1, now)
        if self._requests is not None:
            self._requests.take(1)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    def take_prompt(self, num_tokens: int, now: float) -> None:
        """Raises RateLimitError, or RequestError for a prompt that no waiting will make fit."""
        bucket = self.tokens
        if bucket is None:
            return
        if num_tokens > bucket.limit:
            raise RequestError(
                f"expected a prompt within the limit of {bucket.limit} tokens per minute but got {num_tokens}"
            )
        self._check("tokens", bucket, num_tokens, now)
        bucket.take(num_tokens)

    def take_output(self, num_tokens: int) -> None:
        if self.tokens is not None:
            self.tokens.take(num_tokens)

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's `x-ratelimit-*`, for the limits that exist."""
        found: dict[str, str] = {}
        for unit, bucket in (("requests", self._requests), ("tokens", self.tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{unit}"] = str(bucket.limit)
                found[f"x-ratelimit-remaining-{unit}"] = str(max(int(bucket.level(now)), 0))
                found[f"x-ratelimit-reset-{unit}"] = duration(bucket.wait_s(bucket.limit, now))
        return found

    def _check(self, unit: str, bucket: Bucket | None, amount: int, now: float) -> None:
        if bucket is not None and (wait_s := bucket.wait_s(amount, now)) > 0:
            raise RateLimitError(
                f"expected at most {bucket.limit} {unit} per minute of {self._tenant}; try again in "
                f"{duration(wait_s)}",
                retry_after_s=wait_s,
            )


class Quotas:
    """The quota of each tenant that has been seen."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._quotas: dict[str, TenantQuota] = {}

    def of(self, tenant: str, now: float) -> TenantQuota:
        """NOTE: tenants come from the key file, so their number is bounded by its author."""
        if tenant not in self._quotas:
            self._quotas[tenant] = TenantQuota(tenant, self._config.limits_of(tenant), now)
        return self._quotas[tenant]


def duration(seconds: float) -> str:
    """As OpenAI writes it: `20ms`, `1s`, `6m0s`; rounded up, so that who obeys it does not come too early."""
    if seconds < 1:
        return f"{-int(-seconds * 1000 // 1)}ms" if seconds > 0 else "0s"
    whole = -int(-seconds // 1)
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _bucket(limit: int | None, now: float) -> Bucket | None:
    return None if limit is None else Bucket(limit, now)
