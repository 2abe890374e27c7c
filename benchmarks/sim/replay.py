"""Recorded requests once more, on the simulated clock, and how far the times are from those that were measured.

timelines ──► the same arrivals and lengths ──► Cluster ──► TTFT and gaps, p50 and p90, simulated ÷ measured
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.metrics import percentile
from benchmarks.result import Check, Row
from benchmarks.sim.cluster import Cluster, Controller, Setup
from benchmarks.sim.fit import Timeline
from benchmarks.sim.requests import SimRequest
from benchmarks.sim.worker import Chunker

MAX_ERROR = 0.15
PERCENTILES = (50, 90)


def replayed(
    timelines: Sequence[Timeline], setup: Setup, system: tuple[Controller, Callable[[int], Chunker]]
) -> list[SimRequest]:
    """The requests, each ended. `timelines`: by arrival."""
    requests = [
        SimRequest(number, timeline.arrived_s, timeline.prompt_tokens, timeline.output_tokens)
        for number, timeline in enumerate(timelines)
    ]
    Cluster(setup, *system).run(requests)
    return requests


def compared(name: str, timelines: Sequence[Timeline], requests: Sequence[SimRequest]) -> list[Row]:
    """A row for TTFT and one for the gap between tokens, over those requests that ended in both worlds."""
    pairs = [
        (timeline, request)
        for timeline, request in zip(timelines, requests, strict=True)
        if request.end_s is not None
    ]
    ttfts = [(t.ttft_s, (r.first_token_s or 0.0) - r.arrived_s) for t, r in pairs]
    gaps = [(t.tpot_s, r.tpot_s) for t, r in pairs if r.tpot_s is not None]
    return [_row(name, "ttft", ttfts), _row(name, "itl", gaps)]


def checks_of(rows: Sequence[Row], prefix: str = "") -> list[Check]:
    """Ratios of every row within MAX_ERROR of 1."""
    return [
        Check(
            f"{prefix}{row['metric']}_p{percent}_error", abs(row[f"p{percent}_ratio"] - 1.0), "<=", MAX_ERROR
        )
        for row in rows
        for percent in PERCENTILES
    ]


def _row(name: str, metric: str, pairs: Sequence[tuple[float, float]]) -> Row:
    row: Row = {"run": name, "metric": metric, "requests": len(pairs)}
    for percent in PERCENTILES:
        measured = percentile([pair[0] for pair in pairs], percent) or 0.0
        simulated = percentile([pair[1] for pair in pairs], percent) or 0.0
        row[f"p{percent}_measured_ms"] = 1000 * measured
        row[f"p{percent}_simulated_ms"] = 1000 * simulated
        row[f"p{percent}_ratio"] = simulated / measured if measured else float("inf")
    return row
