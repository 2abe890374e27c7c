"""How many replicas each pool should have, and how Serve learns it.

    plan ──pool_sizes──► Orders(pool_size) ──► every worker of the pool ──its autoscaling stats──► Serve's controller
                                                    ──wanted_replicas──► more or fewer, after Serve's own delays

The way is the one that Serve documents for custom policies, so its delays and its bounds hold, and no coordinator has
to speak to Serve's controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contracts.messages import Role
from policy.planner import Plan

Bounds = tuple[int, int]
"""(fewest, most) replicas of a pool."""


def pool_sizes(plan: Plan, present: Mapping[Role, int], bounds: Mapping[Role, Bounds]) -> dict[Role, int]:
    """The plan's number of workers over both pools: by the split that it wants, else (all are mixed) as they are now.
    What does not fit into one pool goes into the other, since labels move.
    """
    num_live = max(sum(present.values()), 1)
    num_readers = plan.wanted_prefill or present.get("prefill", 0)
    prefill = _within(round(plan.num_workers * num_readers / num_live), bounds["prefill"])
    decode = _within(plan.num_workers - prefill, bounds["decode"])
    return {"prefill": _within(plan.num_workers - decode, bounds["prefill"]), "decode": decode}


def _within(count: int, bounds: Bounds) -> int:
    fewest, most = bounds
    return min(max(count, fewest), most)


def wanted_replicas(ctx: Any) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy of both pools (ray.serve.config.AutoscalingContext): what its workers heard last.

    NOTE: Serve ships this function by value into its controller, so it uses nothing of this module.
    """
    series = ctx.raw_metrics.get("wanted_replicas", {}).values()
    newest = max((points[-1] for points in series if points), key=lambda point: point.timestamp, default=None)
    if newest is None or newest.value < 1:
        return ctx.target_num_replicas, {}
    return int(newest.value), {}
