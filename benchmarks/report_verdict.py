"""Who wins where. Pure: rows of load runs in, verdicts out.

    rows ─► places (workload, load) ─► per arm and metric: median [min–max] over seeds ─► a winner, or a tie

An arm wins a place if its worst seed is better than every other arm's best seed, and its median by 5% or more. Where
ranges overlap or touch the difference is within the spread; below 5% it is what the same server shows on another
occasion. Either is a tie with the best. A run that is void, and an arm with a single seed, have no say.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from benchmarks.result import Row, text_table

TARGETS = (0.9, 0.99)
MIN_DIFFERENCE = 0.05


@dataclass(frozen=True, slots=True)
class Metric:
    """A key of a row, how to call it, and which direction is better."""

    key: str
    title: str
    is_lower_better: bool = True


METRICS = (
    Metric("attainment", "within the promise", is_lower_better=False),
    Metric("answered", "answered in full", is_lower_better=False),
    Metric("p50_ttft_ms", "TTFT p50, ms"),
    Metric("p90_ttft_ms", "TTFT p90, ms"),
    Metric("p50_itl_ms", "ITL p50, ms"),
    Metric("p99_itl_ms", "ITL p99, ms"),
    Metric("p50_e2el_ms", "whole request p50, ms"),
    Metric("output_throughput", "output tokens/s", is_lower_better=False),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one number over repetitions."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """None of nothing; what was not measured does not count."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known), len(known)) if known else None

    def is_like(self, other: Spread) -> bool:
        """The ranges overlap, or the medians differ by less than MIN_DIFFERENCE of the larger one."""
        if self.low <= other.high and other.low <= self.high:
            return True
        larger = max(abs(self.median), abs(other.median))
        return abs(self.median - other.median) < MIN_DIFFERENCE * larger

    def __str__(self) -> str:
        if self.count == 1:
            return f"{shown(self.median)} (one run)"
        return f"{shown(self.median)} ({shown(self.low)}–{shown(self.high)})"


@dataclass(frozen=True, slots=True)
class Judgement:
    """`leaders`: the arm with the best median first, then those it cannot be told from. Nobody: nothing to compare."""

    leaders: tuple[str, ...]
    num_arms: int

    @property
    def winner(self) -> str | None:
        return self.leaders[0] if len(self.leaders) == 1 and self.num_arms > 1 else None

    @property
    def is_tie(self) -> bool:
        return len(self.leaders) > 1


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where arms meet: the same work at the same load."""

    workload: str
    load: float

    @classmethod
    def of(cls, row: Row) -> Self | None:
        """None for a row that is not of a load run."""
        arrival = row.get("arrival")
        load = row.get("concurrency") if arrival == "closed" else row.get("rate")
        if arrival == "trace":
            load = row.get("time_scale")
        if arrival is None or load is None:
            return None
        work = row.get("trace") or f"{row.get('input_tokens')}/{row.get('output_tokens')} tokens"
        if row.get("prefix_tokens"):
            work += f" behind {row['prefix_tokens']} shared"
        if (row.get("num_turns") or 1) > 1:
            work += f", {row['num_turns']} turns"
        name = f"gamma of shape {row['burstiness']:g}" if arrival == "gamma" else arrival
        return cls(f"{work}, {name}", float(load))

    @property
    def unit(self) -> str:
        if self.workload.endswith("closed"):
            return "streams"
        return "× the trace's rate" if self.workload.endswith("trace") else "requests/s"

    def __str__(self) -> str:
        return f"{self.workload}, {self.load:g} {self.unit}"


Grid = dict[Place, dict[str, list[Row]]]


def arm_of(row: Row) -> str:
    return str(row.get("arm") or row.get("url") or "server")


def grid_of(rows: Iterable[Row]) -> Grid:
    """Valid rows of load runs by place and arm, places in order, arms in order of appearance."""
    found: defaultdict[Place, dict[str, list[Row]]] = defaultdict(dict)
    for row in rows:
        place = Place.of(row)
        if place is not None and not row.get("is_void"):
            found[place].setdefault(arm_of(row), []).append(row)
    return {place: found[place] for place in sorted(found)}


def arms_of(grid: Grid) -> list[str]:
    return list(dict.fromkeys(arm for arms in grid.values() for arm in arms))


def value_of(row: Row, key: str) -> float | None:
    if key == "answered":
        offered = row.get("offered")
        return (row["completed"] - (row.get("wrong_length") or 0)) / offered if offered else None
    value = row.get(key)
    return None if value is None else float(value)


def spreads_of(arms: Mapping[str, Sequence[Row]], key: str) -> dict[str, Spread]:
    """Arm -> spread over its seeds; arms without a value are left out."""
    found = {arm: Spread.of(value_of(row, key) for row in rows) for arm, rows in arms.items()}
    return {arm: spread for arm, spread in found.items() if spread is not None}


def judge(spreads: Mapping[str, Spread], is_lower_better: bool) -> Judgement:
    """Arms with one seed are left out: they have no spread to be judged by."""
    able = {arm: spread for arm, spread in spreads.items() if spread.count > 1}
    sign = 1 if is_lower_better else -1
    order = sorted(able, key=lambda arm: sign * able[arm].median)
    return Judgement(tuple(arm for arm in order if able[arm].is_like(able[order[0]])), len(able))


def metrics_in(grid: Grid) -> list[Metric]:
    """Those that some row has a value for."""
    rows = [row for arms in grid.values() for found in arms.values() for row in found]
    return [metric for metric in METRICS if any(value_of(row, metric.key) is not None for row in rows)]


def goodput_of(grid: Grid, workload: str, arm: str, target: float) -> float | None:
    """Highest measured rate at which, and below which, the median attainment reaches `target`; 0 if none, None if
    attainment was not measured. Of open arrivals only: at a closed loop nothing is offered.
    """
    best: float | None = None
    for place, arms in grid.items():
        if place.workload != workload or place.unit != "requests/s":
            continue
        spread = spreads_of(arms, "attainment").get(arm)
        if spread is None:
            continue
        if spread.median < target:
            return best or 0.0
        best = place.load
    return best


def sentences(grid: Grid) -> list[str]:
    """The verdict to be read first: per workload where servers met, who wins what at which loads."""
    found = []
    for workload in dict.fromkeys(place.workload for place in grid):
        places = [place for place in grid if place.workload == workload]
        wins: defaultdict[str, list[str]] = defaultdict(list)
        num_ties = num_judged = 0
        for metric in metrics_in(grid):
            at: defaultdict[str, list[float]] = defaultdict(list)
            for place in places:
                judgement = judge(spreads_of(grid[place], metric.key), metric.is_lower_better)
                num_ties += judgement.is_tie
                num_judged += judgement.num_arms > 1
                if judgement.winner is not None:
                    at[judgement.winner].append(place.load)
            for arm, loads in at.items():
                everywhere = len(loads) == len(places)
                where = "everywhere" if everywhere else "at " + ", ".join(f"{load:g}" for load in loads)
                wins[arm].append(f"{metric.title.split(',')[0]} {where}")
        if not num_judged:
            continue
        parts = [f"{arm} wins {', '.join(wins[arm])}" for arm in arms_of(grid) if wins[arm]]
        parts.append(f"{num_ties} of {num_judged} comparisons are ties")
        found.append(f"{workload} ({places[0].unit}): " + "; ".join(parts))
    return found or ["nothing to compare: one server, or one seed"]


def text_verdict(rows: Iterable[Row]) -> str:
    """For a terminal: the table of spreads with the winner of each line, then the sentences."""
    grid = grid_of(rows)
    if not grid:
        return "No valid load run yet: no verdict."
    arms = arms_of(grid)
    lines = []
    for place in grid:
        for number, metric in enumerate(metrics_in(grid)):
            spreads = spreads_of(grid[place], metric.key)
            judgement = judge(spreads, metric.is_lower_better)
            lines.append(
                (
                    str(place) if number == 0 else "",
                    metric.title,
                    *(str(spreads.get(arm, "–")) for arm in arms),
                    verdict_word(judgement),
                )
            )
    table = text_table(lines, ("", "", *arms, "wins"))
    num_seeds = {len(found) for by_arm in grid.values() for found in by_arm.values()}
    note = (
        f"median (min–max) over {'/'.join(map(str, sorted(num_seeds)))} seeds; "
        f"a tie: ranges overlap, or medians differ by less than {MIN_DIFFERENCE:.0%}"
    )
    return "\n".join([table, note, "", "VERDICT", *(f"  {sentence}" for sentence in sentences(grid))])


def verdict_word(judgement: Judgement) -> str:
    if judgement.winner is not None:
        return judgement.winner
    return "tie" if judgement.is_tie else "–"


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
