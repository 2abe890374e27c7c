"""How a class and promises are asked for, and whether they were kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from contracts.config import load_config
from contracts.config_slo import SloConfig
from contracts.errors import BatonError, PermissionDenied, RequestError
from contracts.service import CLASSES, Service, ServiceClass
from coordinator.promises import Account, Tier, read_service


def slo(**fields: object) -> SloConfig:
    base = {"ttft_ms": 500.0, "itl_ms": 50.0}
    return load_config(overrides={f"slo.{name}": value for name, value in (base | fields).items()}).slo


def read(
    config: SloConfig,
    headers: dict[str, str] | None = None,
    tier: Tier | None = None,
    model: str = "m",
    allowed: Sequence[ServiceClass] = CLASSES,
) -> Service:
    return read_service(config, headers or {}, tier, model, "t", allowed)


def test_who_asks_for_nothing_is_interactive_with_the_promises_of_the_configuration() -> None:
    assert read(slo()) == Service("interactive", 0.5, 0.05, "t")
    assert read(load_config().slo) == Service(tenant="t")


@pytest.mark.parametrize(
    ("headers", "tier", "allowed", "expected"),
    [
        ({"x-baton-class": "batch"}, None, CLASSES, "batch"),
        ({}, "flex", CLASSES, "best_effort"),
        ({}, "priority", CLASSES, "interactive"),
        ({}, "auto", ("batch", "interactive"), "batch"),
        ({}, "default", CLASSES, "interactive"),
        ({"x-baton-class": "interactive"}, "flex", CLASSES, "interactive"),
    ],
)
def test_the_header_goes_before_the_body_and_both_before_the_key(
    headers: dict[str, str], tier: Tier | None, allowed: Sequence[ServiceClass], expected: str
) -> None:
    assert read(slo(), headers, tier, allowed=allowed).service_class == expected


def test_a_class_that_the_key_has_not_is_refused_whoever_named_it() -> None:
    with pytest.raises(
        PermissionDenied, match=r"x-baton-class: expected a class of this key \(interactive\)"
    ):
        read(slo(), {"x-baton-class": "batch"}, allowed=("interactive",))
    with pytest.raises(PermissionDenied, match="service_tier: expected"):
        read(slo(), {}, "flex", allowed=("interactive",))


def test_promises_are_those_of_the_model_then_of_the_class_then_the_defaults() -> None:
    config = slo(
        classes={"interactive": {"ttft_ms": 400}, "batch": {"ttft_ms": 60_000}},
        models={"fast": {"ttft_ms": 100, "itl_ms": 20}, "calm": {"itl_ms": 99}},
    )
    assert read(config) == Service("interactive", 0.4, 0.05, "t")
    assert read(config, model="fast") == Service("interactive", 0.1, 0.02, "t")
    assert read(config, model="calm") == Service("interactive", 0.4, 0.099, "t")
    assert read(config, {"x-baton-class": "batch"}, model="fast") == Service("batch", 60.0, None, "t")
    assert read(config, {"x-baton-class": "best_effort"}) == Service("best_effort", None, None, "t")
    assert config.tightest_itl_s == 0.02


@pytest.mark.parametrize(
    ("fields", "header", "value", "promise_s"),
    [
        ({}, "x-baton-ttft-ms", "500", 0.5),
        ({}, "x-baton-ttft-ms", "1e4", 10.0),
        ({"min_ttft_ms": 100}, "x-baton-ttft-ms", "100", 0.1),
        ({"max_ttft_ms": 900}, "x-baton-ttft-ms", "900", 0.9),
        ({"min_itl_ms": 10}, "x-baton-itl-ms", "10.5", 0.0105),
    ],
)
def test_a_header_moves_a_promise_within_its_limits(
    fields: dict[str, float], header: str, value: str, promise_s: float
) -> None:
    service = read(slo(**fields), {header: value})
    assert promise_s == pytest.approx(service.ttft_s if "ttft" in header else service.itl_s)


@pytest.mark.parametrize(
    ("fields", "headers", "message"),
    [
        (
            {},
            {"x-baton-class": "gold"},
            "x-baton-class: expected one of interactive, batch, best_effort but",
        ),
        ({}, {"x-baton-class": "batch, interactive"}, "x-baton-class: expected one of"),
        (
            {},
            {"x-baton-ttft-ms": "499"},
            "x-baton-ttft-ms: expected milliseconds, at least 500, but got '499'",
        ),
        (
            {"max_itl_ms": 90},
            {"x-baton-itl-ms": "91"},
            "x-baton-itl-ms: expected milliseconds, from 50 to 90, but",
        ),
        ({}, {"x-baton-itl-ms": "nan"}, "x-baton-itl-ms: expected milliseconds"),
        ({}, {"x-baton-itl-ms": "1_000"}, "x-baton-itl-ms: expected milliseconds"),
        ({}, {"x-baton-itl-ms": "inf"}, "x-baton-itl-ms: expected milliseconds"),
        ({}, {"x-baton-ttft-ms": ""}, "x-baton-ttft-ms: expected milliseconds"),
        (
            {"ttft_ms": None, "itl_ms": None},
            {"x-baton-ttft-ms": "5"},
            "x-baton-ttft-ms: expected a server that makes promises, but this one has no slo.ttft_ms",
        ),
    ],
)
def test_what_is_outside_the_limits_is_refused_with_the_name_of_the_header(
    fields: dict[str, object], headers: dict[str, str], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        read(slo(**fields), headers)
    assert caught.value.message.startswith(message)
    assert len(caught.value.message) < 200


PROMISED = Service(ttft_s=1.0, itl_s=0.1)


@pytest.mark.parametrize(
    ("token_times_s", "met"),
    [
        ([0.9, 1.0, 1.09], "both"),
        ([0.9], "both"),
        ([0.9, 1.2, 1.4], "ttft"),
        ([1.1, 1.2, 1.29], "itl"),
        ([1.1, 1.4, 1.7], "none"),
    ],
)
def test_the_first_token_and_the_mean_gap_are_what_was_promised(token_times_s: list[float], met: str) -> None:
    account = Account(PROMISED, arrived_s=0.0)
    for time_s in token_times_s:
        account.tokens(1, time_s, time_s)
    assert account.met(9.0, has_failed=False) == met
    assert account.met(9.0, has_failed=True) == "none"


def test_who_leaves_in_time_says_nothing_and_who_leaves_late_has_waited_too_long() -> None:
    assert Account(PROMISED, 0.0).met(0.9, has_failed=False) is None
    assert Account(PROMISED, 0.0).met(1.1, has_failed=False) == "none"
    assert Account(Service(), 0.0).met(math.inf, has_failed=True) is None


def test_one_promise_alone_is_kept_or_not() -> None:
    account = Account(Service("batch", ttft_s=5.0), 0.0)
    for time_s in (4.0, 99.0):
        account.tokens(1, time_s, time_s)
    assert account.met(99.0, has_failed=False) == "both"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"slo.ttft_ms": 1}, "slo.itl_ms: expected a number beside slo.ttft_ms but got none"),
        ({"slo.refuse": True}, "slo.refuse: expected slo.ttft_ms and slo.itl_ms beside it but got none"),
        (
            {"slo.ttft_ms": 1, "slo.itl_ms": 1, "slo.min_itl_ms": 3, "slo.max_itl_ms": 2},
            "slo.max_itl_ms: expected at least slo.min_itl_ms=3 but got 2",
        ),
        (
            {"slo.ttft_ms": 1, "slo.itl_ms": 1, "slo.classes": {"gold": {}}},
            "slo.classes.gold: expected 'interactive', 'batch' or 'best_effort' but got 'gold'",
        ),
        (
            {"slo.ttft_ms": 1, "slo.itl_ms": 1, "slo.classes.batch.ttft": 3},
            "slo.classes.batch.ttft: unknown key",
        ),
        ({"gateway.classes": []}, "gateway.classes: expected"),
    ],
)
def test_a_configuration_that_contradicts_itself_names_the_key(
    overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(BatonError) as caught:
        load_config(overrides=overrides)
    assert caught.value.message.startswith(message)
