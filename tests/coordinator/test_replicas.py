"""How many replicas: the plan's number over two pools within their bounds, and the way to Serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from contracts.config_planner import PlannerConfig
from contracts.config_pools import PoolConfig, PrefillPoolConfig
from coordinator.handles import worker_options
from coordinator.replicas import pool_sizes, wanted_replicas
from policy.planner import Plan


def plan(num_workers: int, wanted_prefill: int) -> Plan:
    return Plan((), wanted_prefill, wanted_prefill, num_workers, {}, "gain", "")


@pytest.mark.parametrize(
    ("wanted", "present", "bounds", "sizes"),
    [
        (plan(8, 2), (2, 2), ((1, 9), (1, 9)), (4, 4)),  # as the plan splits
        (plan(8, 0), (1, 3), ((1, 9), (1, 9)), (2, 6)),  # all mixed: as they are
        (plan(8, 2), (2, 2), ((1, 9), (2, 2)), (6, 2)),  # the other pool takes what one cannot
        (plan(8, 2), (2, 2), ((2, 2), (1, 9)), (2, 6)),
        (plan(80, 2), (2, 2), ((1, 9), (1, 5)), (9, 5)),
        (plan(2, 2), (4, 4), ((1, 9), (1, 9)), (1, 1)),
        (plan(2, 7), (4, 4), ((3, 9), (2, 9)), (3, 2)),
        (plan(2, 0), (0, 0), ((1, 9), (1, 9)), (1, 1)),
    ],
)
def test_the_plans_number_is_split_within_the_bounds(
    wanted: Plan, present: tuple[int, int], bounds: tuple[Any, Any], sizes: tuple[int, int]
) -> None:
    found = pool_sizes(
        wanted,
        {"prefill": present[0], "decode": present[1]},
        {"prefill": bounds[0], "decode": bounds[1]},
    )
    assert (found["prefill"], found["decode"]) == sizes


def test_a_pool_whose_number_is_fixed_has_it_as_both_bounds() -> None:
    assert PoolConfig(num_replicas=3).replica_bounds == (3, 3)
    assert PoolConfig(num_replicas=3, min_replicas=2, max_replicas=5).replica_bounds == (2, 5)


def context(*points: tuple[float, float]) -> SimpleNamespace:
    series = {f"r{n}": [SimpleNamespace(timestamp=at, value=v)] for n, (at, v) in enumerate(points)}
    return SimpleNamespace(raw_metrics={"wanted_replicas": series} if points else {}, target_num_replicas=4)


def test_serve_follows_the_newest_word_of_any_worker() -> None:
    assert wanted_replicas(context((1.0, 3.0), (5.0, 6.0), (2.0, 9.0))) == (6, {})


@pytest.mark.parametrize("ctx", [context(), context((1.0, 0.0))])
def test_without_a_word_the_number_stays(ctx: SimpleNamespace) -> None:
    assert wanted_replicas(ctx) == (4, {})


def test_serve_takes_the_policy_and_its_bounds() -> None:
    """Its own models check it; the policy that comes out is ours."""
    import ray.serve.config as serve_config

    pool = PrefillPoolConfig(num_replicas=2, min_replicas=1, max_replicas=4)
    options = worker_options(pool, PlannerConfig(upscale_delay_s=3.0, downscale_delay_s=60.0))
    assert "num_replicas" not in options
    config = serve_config.AutoscalingConfig(**options["autoscaling_config"])
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 2, 4)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (3.0, 60.0)
    assert config.policy.get_policy()(context((1.0, 3.0))) == (3, {})
    assert worker_options(PoolConfig(num_replicas=2))["num_replicas"] == 2
