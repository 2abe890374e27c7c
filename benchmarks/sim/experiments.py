"""Goodput of simulated systems: the highest rate at which nine of ten offered requests keep both promises.

The best baseline is found as champions are: whoever fails at the champion's rate is out after one run, whoever passes
is measured from there. So a table may try every static split without a search for each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.metrics import Slo
from benchmarks.sim.baselines import BudgetChunker, CacheAware, RoundRobin, StaticSplit
from benchmarks.sim.baton import Baton, Features
from benchmarks.sim.cluster import Cluster, Controller, Setup
from benchmarks.sim.requests import SimRequest
from benchmarks.sim.worker import Chunker
from benchmarks.sim.workloads import Workload

TARGET = 0.9
RAMP_SHARE = 0.2  # of the requests: an empty cluster flatters everybody
READER_BUDGETS = (2048, 8192)
PATIENCE = 6
FIRST_STEP, LAST_STEP = 1.05, 1.5
WHOLE_SIZE = 16  # workers up to which every split is a candidate from the beginning


@dataclass(frozen=True, slots=True)
class System:
    """`build(setup)` gives a fresh controller and what sizes the steps of each worker. `num_readers`, `budget`: of a
    static split; no readers otherwise.
    """

    name: str
    build: Callable[[Setup], tuple[Controller, Callable[[int], Chunker]]]
    num_readers: int = 0
    budget: int = 0


@dataclass(slots=True)
class Run:
    """What one run showed. `speed`: simulated seconds of arrivals per second of one core."""

    system: str
    rate: float
    attainment: float
    ttft_share: float
    tpot_share: float
    refused_share: float
    span_s: float
    cpu_s: float
    num_events: int
    controller: Controller
    requests: list[SimRequest] = field(repr=False)

    @property
    def speed(self) -> float:
        return self.span_s / self.cpu_s


def simulate(system: System, workload: Workload, rate: float, setup: Setup) -> Run:
    """One run to the end of the last request. Raises RuntimeError if a request did not end exactly once."""
    requests = workload.make(rate, setup.seed)
    began_s = time.process_time()
    controller, chunker = system.build(setup)
    cluster = Cluster(setup, controller, chunker)
    cluster.run(requests)
    cpu_s = time.process_time() - began_s
    lost = [request.number for request in requests if request.num_ends != 1]
    if lost:
        raise RuntimeError(f"{system.name}: expected one end per request but {len(lost)} had another number")
    counted = requests[_counted_from(requests) :]
    size, slo = len(counted), setup.slo
    return Run(
        system.name,
        rate,
        sum(request.is_good(slo) for request in counted) / size,
        sum(request.is_prompt(slo) for request in counted) / size,
        sum(request.tpot_s is None or request.tpot_s <= (slo.tpot_s or 1e9) for request in counted) / size,
        sum(request.is_refused for request in counted) / size,
        requests[-1].arrived_s,
        cpu_s,
        cluster.num_events,
        controller,
        requests,
    )


def is_attained(system: System, workload: Workload, rate: float, setup: Setup) -> bool:
    """Whether `simulate` would find TARGET attained. Stops as soon as so many missed that it is not."""
    requests = workload.make(rate, setup.seed)
    first = _counted_from(requests)
    cluster = Cluster(setup, *system.build(setup))
    cluster.misses_left = math.floor((1.0 - TARGET) * (len(requests) - first) + 1e-9)
    cluster.run(requests, first)
    return cluster.misses_left >= 0


def _counted_from(requests: Sequence[SimRequest]) -> int:
    return int(len(requests) * RAMP_SHARE)


@dataclass(frozen=True, slots=True)
class Point:
    """Where systems are compared."""

    workload: Workload
    setup: Setup
    seeds: tuple[int, ...] = (0,)
    tolerance: float = 0.02

    def attains(self, system: System, rate: float) -> bool:
        """On most of the seeds."""
        setup = self.setup
        passed = 0
        for number, seed in enumerate(self.seeds):
            passed += is_attained(system, self.workload, rate, replace(setup, seed=seed))
            if passed * 2 > len(self.seeds) or (number + 1 - passed) * 2 > len(self.seeds):
                break
        return passed * 2 > len(self.seeds)

    def goodput(self, system: System, start: float, is_known_good: bool = False) -> float:
        """Requests/s, to within `tolerance`; 0 where nothing above a thousandth of `start` attains.

        Raises ValueError where a thousand times `start` still attains: the workload is over before it is a load.
        """
        low, high = (start, 0.0) if is_known_good else (0.0, 0.0)
        step = FIRST_STEP  # a start that is nearly right costs little, one that is far off not much more
        rate = start * step if is_known_good else start
        while not low or not high:
            if self.attains(system, rate):
                low, rate = rate, rate * step
            else:
                high, rate = rate, rate / step
            step = min(step * step, LAST_STEP)
            if rate < start / 1000:
                return 0.0
            if rate > start * 1000:
                raise ValueError(
                    f"{self.workload.name}: expected more requests than anybody can serve at once"
                )
        while high / low > 1.0 + self.tolerance:
            rate = (low * high) ** 0.5
            if self.attains(system, rate):
                low = rate
            else:
                high = rate
        return low

    def best(
        self,
        lines: Iterable[Sequence[System]],
        start: float,
        champion: System | None = None,
        record: float = 0.0,
    ) -> tuple[System | None, float]:
        """(best system, its goodput), the first found first. Along a line goodput has one peak, so that the rest of it
        is left out after PATIENCE systems that did not beat the best so far, which is `champion` at first.
        """
        for line in lines:
            num_beaten = 0
            for system in line:
                challenge = record * (1.0 + self.tolerance / 2) or start / 1000
                if champion is None:
                    record, champion = self.goodput(system, start), system
                elif self.attains(system, challenge):
                    record, champion = self.goodput(system, challenge, is_known_good=True), system
                    num_beaten = 0
                else:
                    num_beaten += 1
                    if num_beaten == PATIENCE:
                        break
        return champion, record

    def best_rival(
        self, lines: Iterable[Sequence[System]], start: float, gives_up: bool = False
    ) -> tuple[System | None, float]:
        """`best` of the lines, and of the splits between those of the lines, closer and closer around the best."""
        size = self.setup.num_workers
        champion, record = self.best(lines, start)
        stride = split_stride(size)
        while stride > 1 and champion is not None and champion.num_readers:
            stride //= 2
            near = (champion.num_readers - stride, champion.num_readers + stride)
            line = [static_split(n, champion.budget, gives_up) for n in near if 0 < n < size]
            champion, record = self.best([line], start, champion, record)
        return champion, record


def split_stride(num_workers: int) -> int:
    """Readers between two splits of the first look."""
    return max(1, num_workers // WHOLE_SIZE)


def baton(features: Features | None = None, name: str = "baton") -> System:
    chosen = features or Features()

    def build(setup: Setup) -> tuple[Controller, Callable[[int], Chunker]]:
        slo = setup.slo
        controller = Baton(chosen, slo.ttft_s or 1e9, slo.tpot_s or 1.0, setup.seed)

        def chunker(number: int) -> Chunker:
            return controller.chunker(number, setup.device.step_model(chosen.model_error))

        return controller, chunker

    return System(name, build)


def round_robin(budget: int, gives_up: bool = False) -> System:
    name = f"colocated round robin, {budget} tokens"
    return _rival(name, gives_up, RoundRobin, budget)


def cache_aware(budget: int, gives_up: bool = False) -> System:
    name = f"colocated cache-aware, {budget} tokens"
    return _rival(name, gives_up, CacheAware, budget)


def static_split(num_readers: int, budget: int = READER_BUDGETS[-1], gives_up: bool = False) -> System:
    name = f"static split, {num_readers} readers of {budget} tokens"
    found = _rival(name, gives_up, partial(StaticSplit, num_readers), budget)
    return replace(found, num_readers=num_readers, budget=budget)


def _rival(name: str, gives_up: bool, make: Callable[[Slo | None], Controller], budget: int) -> System:
    def build(setup: Setup) -> tuple[Controller, Callable[[int], Chunker]]:
        return make(setup.slo if gives_up else None), lambda _: BudgetChunker(budget)

    return System(name + (", giving up" if gives_up else ""), build)


def baselines(
    num_workers: int,
    budgets: Sequence[int],
    reader_budgets: Sequence[int],
    gives_up: bool = False,
    likely_readers: float = 0.6,
) -> list[list[System]]:
    """Static splits, every one where there are up to WHOLE_SIZE workers, and both colocated systems at every budget, in
    lines along which goodput has one peak: more readers, fewer readers, and each colocated system by itself.
    `likely_readers`: share of them in the split to begin with.
    """
    first = min(max(1, round(likely_readers * num_workers)), num_workers - 1)
    stride = split_stride(num_workers)
    sides = (range(first, num_workers, stride), range(first - stride, 0, -stride))
    lines = [[static_split(n, budget, gives_up) for n in side for budget in reader_budgets] for side in sides]
    alone = [[make(budget, gives_up)] for budget in budgets for make in (cache_aware, round_robin)]
    return [*lines, *alone]
