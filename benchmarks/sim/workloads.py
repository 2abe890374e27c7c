"""Recorded and composed workloads at any rate.

A trace is brought to a rate by dividing its times, which keeps the shape of its bursts; lengths stay as recorded.

    bursty     Azure code as recorded: gaps vary 13 times their mean
    shifting   prompt-heavy (Azure code) and answer-heavy (ServeGen R1) in turns, each at a rate that costs the same
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sim.requests import SimRequest
from benchmarks.traces import TraceRequest, find_trace, read_trace

TRACES = {
    "azure-code": "azure_code",
    "azure-conv": "azure_conv",
    "mooncake": "mooncake_conversation",
    "servegen-r1": "servegen_r1",
}
MOONCAKE_GRAIN_S = 3.0


@dataclass(frozen=True, slots=True)
class Workload:
    """`make(rate, seed)` gives requests by arrival, at a mean of `rate` requests/s."""

    name: str
    make: Callable[[float, int], list[SimRequest]]


def trace_workload(
    name: str, num_requests: int, path: Path | None = None, max_tokens: int = 400_000
) -> Workload:
    """`num_requests` of a trace from a place the seed says; a shorter trace is used as a ring."""
    rows = read_trace(path or find_trace(TRACES.get(name, name)))
    rows = [row for row in rows if row.input_tokens + row.output_tokens <= max_tokens]
    if not rows or rows[0].time_s is None:
        raise ValueError(f"trace {name}: expected arrival times but got lengths only")

    def make(rate: float, seed: int) -> list[SimRequest]:
        return _at_rate(
            _slice(rows, num_requests, seed, MOONCAKE_GRAIN_S if name == "mooncake" else 0.0), rate
        )

    return Workload(name, make)


def shifting_workload(phase_s: float, num_phases: int, ratio: float) -> Workload:
    """`ratio`: requests of the prompt-heavy trace for one of the answer-heavy trace, in the same time. Arrivals are
    Poisson: what is tested is the shift, not bursts.
    """
    code = read_trace(find_trace(TRACES["azure-code"]))
    reasoning = read_trace(find_trace(TRACES["servegen-r1"]))

    def make(rate: float, seed: int) -> list[SimRequest]:
        rng = random.Random(seed)
        requests: list[SimRequest] = []
        for phase in range(num_phases):
            rows, share = (code, 2 * ratio / (1 + ratio)) if phase % 2 == 0 else (reasoning, 2 / (1 + ratio))
            now_s, end_s = phase * phase_s, (phase + 1) * phase_s
            while (now_s := now_s + rng.expovariate(rate * share)) < end_s:
                row = rows[rng.randrange(len(rows))]
                requests.append(SimRequest(len(requests), now_s, row.input_tokens, row.output_tokens))
        return requests

    return Workload("shifting", make)


def _slice(rows: Sequence[TraceRequest], num_requests: int, seed: int, grain_s: float) -> list[SimRequest]:
    rng = random.Random(seed)
    size = len(rows)
    span_s = (rows[-1].time_s or 0.0) * (size + 1) / size
    start = rng.randrange(size) if seed else 0
    requests = []
    for offset in range(num_requests):
        lap, position = divmod(start + offset, size)
        row = rows[position]
        time_s = (row.time_s or 0.0) + lap * span_s + rng.random() * grain_s
        # The same text again after a whole lap would be a gift to every cache.
        keys = tuple(key + (lap << 40) for key in row.block_ids[: row.input_tokens // row.block_tokens])
        requests.append(
            SimRequest(offset, time_s, row.input_tokens, row.output_tokens, keys, row.block_tokens)
        )
    requests.sort(key=lambda request: request.arrived_s)
    return requests


def _at_rate(requests: list[SimRequest], rate: float) -> list[SimRequest]:
    start_s = requests[0].arrived_s
    span_s = max(requests[-1].arrived_s - start_s, 1e-9)
    factor = (len(requests) - 1) / rate / span_s
    for number, request in enumerate(requests):
        request.number = number
        request.arrived_s = (request.arrived_s - start_s) * factor
    return requests
