"""The planner at work: every second the split of the fleet is weighed against the demand, and changed if it pays.

    demand of the last seconds + what steps cost ──policy/planner.py──► Plan ─┬─► Orders(duty) to who changes its label
                                                                              └─► Orders(pool_size), for Serve
    nothing to do, or not my turn ──► a record that says why

With several ingress replicas the one with the lowest id plans (the workers tell who is connected, so all agree; for
the moment in which they do not, nobody plans). Orders carry epochs above all that any worker has seen, so those of a
replica that planned before are dropped wherever they come late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from contracts.config import BatonConfig
from contracts.errors import WorkerLostError
from contracts.messages import Role
from contracts.roles import Duty, RoleLabel
from coordinator.demand import DemandMeter
from coordinator.fleet import Fleet
from coordinator.learned import step_model, whole_reports
from coordinator.placement import WorkerView
from coordinator.replicas import pool_sizes
from policy.fleet import WorkerState
from policy.planner import Mix, Plan, Planner, PlanRules

logger = logging.getLogger("baton.coordinator")

NUM_PLANS = 64


class FlipObserver(Protocol):
    """What metrics want to know."""

    def flipped(self, from_role: RoleLabel, to_role: RoleLabel, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """One look at the fleet. `plan` None: there was none, `verdict` says why; else `verdict` is its cause. `num_times`:
    looks in a row that did nothing for the same cause; the newest of them is shown.
    """

    at_s: float
    verdict: str
    plan: Plan | None = None
    mix: Mix | None = None
    num_times: int = 1

    @property
    def is_idle(self) -> bool:
        return self.plan is None or not self.plan.flips


class Planning:
    """One per ingress replica; `run` is its owner task. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        config: BatonConfig,
        fleet: Fleet,
        demand: DemandMeter,
        observer: FlipObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._demand = demand
        self._observer = observer
        self._clock = clock
        self._planner: Planner | None = None
        self.records: deque[PlanRecord] = deque(maxlen=NUM_PLANS)
        """Newest last."""

    @property
    def demand(self) -> DemandMeter:
        return self._demand

    async def run(self) -> None:
        """Plan every `interval_s` until cancelled."""
        while True:
            try:
                self.step()
            except Exception:  # the task's outer edge: one bad look must not be the last
                logger.exception("a plan failed; roles stay as they are")
            await asyncio.sleep(self._config.planner.interval_s)

    def step(self) -> PlanRecord:
        """One look, carried out and remembered."""
        record = self._look()
        if self.records:
            last = self.records[-1]
            if last.is_idle and record.is_idle and last.verdict == record.verdict:
                self.records.pop()
                record = replace(record, num_times=last.num_times + 1)
        self.records.append(record)
        return record

    def _look(self) -> PlanRecord:
        now_s = self._clock()
        mix = self._demand.mix(self._fleet.num_coordinators)
        if not self._fleet.is_leader:
            return PlanRecord(now_s, "another ingress replica plans")
        views = self._fleet.all_views()
        states = self._states(views, now_s)
        if not states:
            verdict = "no worker is ready" if not views else "the workers are still learning what steps cost"
            return PlanRecord(now_s, verdict, mix=mix)
        plan = self._planner_for(states).plan(mix, states, now_s)
        self._carry_out(plan, {view.worker_id: view for view in views})
        return PlanRecord(now_s, plan.cause, plan, mix)

    def _states(self, views: Sequence[WorkerView], now_s: float) -> list[WorkerState]:
        """None of them while nobody knows what a kind of step costs."""
        reports = whole_reports(views) or {}
        states = []
        for view in views if reports else ():
            model = step_model(reports[view.worker_id])
            kv_tokens = view.num_blocks * self._config.engine.block_size
            state = WorkerState(view.worker_id, model, view.role, kv_tokens, view.max_num_seqs, view.epoch)
            state.running_streams = view.num_streams
            backlog_s = (
                model.prefill_s(view.num_tokens, 0, self._config.engine.max_chunk_tokens)
                if view.num_tokens
                else 0.0
            )
            state.prefill_free_s = now_s + backlog_s
            states.append(state)
        return states

    def _planner_for(self, states: Sequence[WorkerState]) -> Planner:
        if self._planner is None:
            config = self._config
            rules = PlanRules(
                dead_band=config.planner.dead_band,
                cool_down_s=config.planner.cool_down_s,
                prefill_chunk=config.engine.max_chunk_tokens,
                max_streams=config.engine.max_num_seqs,
            )
            self._planner = Planner(rules, min(state.kv_tokens for state in states))
        return self._planner

    def _carry_out(self, plan: Plan, views: dict[str, WorkerView]) -> None:
        for flip in plan.flips:
            before = views[flip.worker_id].role
            try:
                self._fleet.order(flip.worker_id, Duty(flip.role, flip.epoch))
            except WorkerLostError:
                continue  # the next look will find it gone, or as it was
            logger.info("%s: %s -> %s (%s)", flip.worker_id, before, flip.role, plan.reason)
            self._observer.flipped(before, flip.role, plan.cause)
        roles: tuple[Role, Role] = ("prefill", "decode")
        pools = {role: self._config.pool(role) for role in roles}
        if any(pool.max_replicas is not None for pool in pools.values()):
            present = {role: self._fleet.num_ready(role) for role in roles}
            bounds = {role: pools[role].replica_bounds for role in roles}
            for role, size in pool_sizes(plan, present, bounds).items():
                self._fleet.order_size(role, size)


def make_planning(config: BatonConfig, fleet: Fleet, observer: FlipObserver) -> Planning | None:
    """None where labels never move: without promises, or without prefill workers."""
    if not config.is_planned or config.slo.itl_ms is None:
        return None
    demand = DemandMeter(config.slo.itl_ms / 1000.0, config.planner.window_s)
    return Planning(config, fleet, demand, observer)


@asynccontextmanager
async def running(planning: Planning | None) -> AsyncIterator[None]:
    """`run` is under way within."""
    if planning is None:
        yield
        return
    task = asyncio.create_task(planning.run(), name="planning")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
