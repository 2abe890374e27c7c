"""Quotas, with the test's own clock."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.config_gateway import GatewayConfig, TenantLimits
from contracts.errors import RateLimitError, RequestError
from coordinator.gateway.limits import Quotas, TenantQuota, duration


def quota(**limits: int) -> TenantQuota:
    return TenantQuota("acme", TenantLimits(**limits), now=100.0)


def wait_of(call: Any) -> float:
    with pytest.raises(RateLimitError) as error:
        call()
    assert error.value.retry_after_s is not None
    return error.value.retry_after_s


def request(q: TenantQuota, now: float) -> None:
    with q.opened(now):
        pass


def test_requests_flow_in_at_the_limits_rate() -> None:
    q = quota(requests_per_minute=60)
    for _ in range(60):
        request(q, 100.0)
    assert wait_of(lambda: request(q, 100.0)) == pytest.approx(1.0)
    assert wait_of(lambda: request(q, 100.25)) == pytest.approx(0.75)
    request(q, 101.0)
    with pytest.raises(RateLimitError):
        request(q, 101.0)
    for _ in range(60):  # never more than one minute's worth, however long nobody came
        request(q, 1000.0)
    with pytest.raises(RateLimitError):
        request(q, 1000.0)


def test_output_may_go_into_debt_and_the_tenant_waits_for_it() -> None:
    q = quota(tokens_per_minute=600)
    with q.opened(100.0):
        q.take_prompt(590, 100.0)
        q.take_output(30)
    assert wait_of(lambda: request(q, 100.0)) == pytest.approx(2.1)
    request(q, 102.5)
    assert wait_of(lambda: q.take_prompt(105, 102.5)) == pytest.approx(10.0)


def test_a_prompt_over_the_limit_is_no_matter_of_waiting() -> None:
    with pytest.raises(RequestError, match="600 tokens per minute but got 601"):
        quota(tokens_per_minute=600).take_prompt(601, 100.0)


def test_open_requests_are_counted_to_their_end() -> None:
    q = quota(max_concurrent=1)
    with q.opened(100.0):
        assert wait_of(lambda: request(q, 100.0)) == 1.0
    request(q, 100.0)
    with pytest.raises(ZeroDivisionError), q.opened(100.0):
        raise ZeroDivisionError
    request(q, 100.0)


def test_headers_tell_what_is_left_and_only_of_limits_that_exist() -> None:
    assert quota().headers(100.0) == {}
    q = quota(requests_per_minute=60, tokens_per_minute=1200)
    with q.opened(100.0):
        q.take_prompt(1100, 100.0)
        q.take_output(200)
    assert q.headers(100.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1200",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m5s",
    }


def test_each_tenant_has_its_own_and_one_without_entry_the_sections() -> None:
    config = GatewayConfig(requests_per_minute=1, tenants={"acme": TenantLimits(requests_per_minute=2)})
    quotas = Quotas(config)
    request(quotas.of("globex", 0.0), 0.0)
    with pytest.raises(RateLimitError):
        request(quotas.of("globex", 0.0), 0.0)
    request(quotas.of("acme", 0.0), 0.0)
    request(quotas.of("acme", 0.0), 0.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.0191, "20ms"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (3.01, "4s")]
)
def test_durations_are_written_as_clients_know_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
