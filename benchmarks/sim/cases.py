"""Where systems are compared: a workload, a promise, a number of workers and a seed, as plain data.

Windows are sized in time: minutes of arrivals at the rates that come out, longer than most answers last, so that
streams of before weigh on those of later. What arrives in the first fifth is simulated and not counted (RAMP_SHARE).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.metrics import Slo
from benchmarks.result import Row
from benchmarks.sim.cluster import Setup
from benchmarks.sim.devices import DEVICES
from benchmarks.sim.experiments import READER_BUDGETS, Point, System, baselines
from benchmarks.sim.workloads import TRACES, shifting_workload, trace_workload

BURSTY, SHIFTING = "azure-code", "shifting"
BUDGETS = (128, 256, 512, 1024, 2048, 4096)
QUICK_BUDGETS = (512, 1024, 2048)
PHASES, PHASE_S = 4, 45.0

_CHAT = (Slo(0.6, 0.03), Slo(1.0, 0.04), Slo(2.0, 0.1))
PROMISES = {
    "azure-code": _CHAT,
    "azure-conv": _CHAT,
    "servegen-r1": (Slo(1.0, 0.03), Slo(2.0, 0.04), Slo(4.0, 0.1)),
    "mooncake": (Slo(5.0, 0.03), Slo(10.0, 0.04), Slo(30.0, 0.1)),
    SHIFTING: _CHAT,
}
"""From strict to loose. First tokens of Mooncake's long prompts as in its paper: 30 s at most."""
_MIDDLE_FIRST = (1, 0, 2)

_STARTS = {"azure-code": 1.8, "azure-conv": 10.5, "servegen-r1": 9.0, "mooncake": 1.0, SHIFTING: 5.0}
"""Requests/s of one worker where the search begins; the answer does not depend on it."""
_LIKELY_READERS = {
    "azure-code": 0.85,
    "azure-conv": 0.7,
    "servegen-r1": 0.45,
    "mooncake": 0.78,
    SHIFTING: 0.8,
}
"""Of the best static split: where the search for it begins."""
_PER_WORKER = {"azure-code": 551, "azure-conv": 500, "servegen-r1": 800, "mooncake": 135}
_MOST = {"azure-code": 8819, "mooncake": 12031}
"""Requests per worker, at most one whole trace of those two."""
_FILES = {
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "azure-conv": "AzureLLMInferenceTrace_conv.csv",
    "servegen-r1": "deepseek_r1_1h.csv",
    "mooncake": "conversation_trace.jsonl",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison; it crosses into a process of its own. `start`: requests/s to search from, `rival_starts` those of
    the two kinds of rivals (0: ours). `likely_readers`: share of readers in the split to begin with. `num_requests`: of
    a trace; the shifting mix lasts as long as its phases. `budgets`, `reader_budgets`: what the rivals are tuned over.
    """

    workload: str
    device: str
    num_workers: int
    slo: Slo
    start: float
    num_requests: int = 0
    phase_s: float = PHASE_S
    seed: int = 0
    budgets: tuple[int, ...] = BUDGETS
    reader_budgets: tuple[int, ...] = READER_BUDGETS
    tolerance: float = 0.01
    file: Path | None = None
    rival_starts: tuple[float, float] = (0.0, 0.0)
    likely_readers: float = 0.0

    def point(self) -> Point:
        if self.workload == SHIFTING:
            # At this ratio both halves cost about the same device time.
            workload = shifting_workload(self.phase_s, PHASES, ratio=4.0)
        else:
            workload = trace_workload(self.workload, self.num_requests, self.file)
        setup = Setup(DEVICES[self.device], self.num_workers, self.slo)
        return Point(workload, setup, (self.seed,), self.tolerance)

    def rivals(self, gives_up: bool = False) -> list[list[System]]:
        likely = self.likely_readers or _LIKELY_READERS[self.workload]
        return baselines(self.num_workers, self.budgets, self.reader_budgets, gives_up, likely)

    def head(self) -> Row:
        return {
            "workload": self.workload,
            "device": self.device,
            "workers": self.num_workers,
            "slo_ttft_ms": 1000 * (self.slo.ttft_s or 0),
            "slo_tpot_ms": 1000 * (self.slo.tpot_s or 0),
            "seed": self.seed,
        }


def quick_cases() -> list[Case]:
    """One promise, 8 workers, excerpts, fewer budgets."""
    sizes = {"azure-code": 3000, "azure-conv": 4000, "servegen-r1": 6000, "mooncake": 800, SHIFTING: 0}
    return [
        Case(
            name,
            "h200-70b-tp4",
            8,
            PROMISES[name][1],
            8 * _STARTS[name],
            size,
            phase_s=36.0,
            budgets=QUICK_BUDGETS,
            reader_budgets=READER_BUDGETS[-1:],
            tolerance=0.02,
        )
        for name, size in sizes.items()
    ]


def table_cases(
    sizes: Sequence[tuple[str, int]], seeds: Sequence[int], traces: Path | None = None
) -> Iterator[Case]:
    """For each (device, workers) and seed all workloads and promises: whole tables first, more seeds later."""
    for seed in seeds:
        for device, num_workers in sizes:
            for strictness in _MIDDLE_FIRST:
                for name in (*TRACES, SHIFTING):
                    yield Case(
                        name,
                        device,
                        num_workers,
                        PROMISES[name][strictness],
                        num_workers * _STARTS[name],
                        min(_PER_WORKER.get(name, 0) * num_workers, _MOST.get(name, 1 << 30)),
                        seed=seed,
                        file=_whole(name, traces),
                    )


def _whole(name: str, traces: Path | None) -> Path | None:
    """Raises ValueError where the folder does not have it."""
    if traces is None or name not in _FILES:
        return None
    found = next(traces.rglob(_FILES[name]), None)
    if found is None:
        raise ValueError(f"--traces: expected {_FILES[name]} in {traces} but found none")
    return found
