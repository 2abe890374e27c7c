"""Goodput of Baton against colocated and statically split systems, simulated: `python -m benchmarks.simulate`.

    --quick        four traces and the shifting mix, 8 workers, one promise each; at most 5 minutes on two cores
    (default)      four traces × three promises × --workers, every static split, --seeds seeds: hours
    --ablations    Baton without one idea at a time, at the quick points
    --speed        only how much faster than real time 1,000 workers run

Exit code 0: all checks hold; 1: one fails. The table says where Baton does not win.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.metrics import Slo
from benchmarks.result import Check, Result, Row, conclude, text_table
from benchmarks.sim.baton import Baton, Features
from benchmarks.sim.cluster import Setup
from benchmarks.sim.devices import DEVICES
from benchmarks.sim.experiments import Point, baselines, baton, simulate
from benchmarks.sim.workloads import TRACES, shifting_workload, trace_workload

MIN_RATIO, MIN_BURSTY, MIN_SHIFTING, MIN_SPEED = 0.98, 1.10, 1.10, 20.0
BURSTY, SHIFTING = "azure-code", "shifting"
BUDGETS = (256, 512, 1024, 2048, 4096)
QUICK_BUDGETS = (512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison, as plain data: it crosses into a process of its own. `start`: requests/s to search from."""

    workload: str
    device: str
    num_workers: int
    slo: Slo
    num_requests: int
    start: float
    seeds: tuple[int, ...] = (0,)
    budgets: tuple[int, ...] = QUICK_BUDGETS
    tolerance: float = 0.02
    file: Path | None = None

    def point(self) -> Point:
        if self.workload == SHIFTING:
            # As many phases as the requests last at the expected rate; both halves cost about the same device time.
            phase_s = self.num_requests / self.start / 4
            workload = shifting_workload(phase_s, 4, ratio=4.0)
        else:
            workload = trace_workload(self.workload, self.num_requests, self.file)
        setup = Setup(DEVICES[self.device], self.num_workers, self.slo)
        return Point(workload, setup, self.seeds, self.tolerance)

    def head(self) -> Row:
        return {
            "workload": self.workload,
            "device": self.device,
            "workers": self.num_workers,
            "slo_ttft_ms": 1000 * (self.slo.ttft_s or 0),
            "slo_tpot_ms": 1000 * (self.slo.tpot_s or 0),
        }


# Promises per trace, from strict to loose; first tokens of Mooncake's long prompts as in its paper (30 s at most).
_PROMISES = {
    "azure-code": (Slo(0.6, 0.03), Slo(1.0, 0.04), Slo(2.0, 0.1)),
    "azure-conv": (Slo(0.6, 0.03), Slo(1.0, 0.04), Slo(2.0, 0.1)),
    "servegen-r1": (Slo(1.0, 0.03), Slo(2.0, 0.04), Slo(4.0, 0.1)),
    "mooncake": (Slo(5.0, 0.03), Slo(10.0, 0.04), Slo(30.0, 0.1)),
}
_STARTS = {"azure-code": 1.4, "azure-conv": 10.5, "servegen-r1": 13.0, "mooncake": 1.2, SHIFTING: 5.2}


def quick_cases() -> list[Case]:
    sizes = {"azure-code": 3000, "azure-conv": 4000, "servegen-r1": 6000, "mooncake": 800}
    cases = [
        Case(name, "h200-70b-tp4", 8, _PROMISES[name][1], size, 8 * _STARTS[name])
        for name, size in sizes.items()
    ]
    return [*cases, Case(SHIFTING, "h200-70b-tp4", 8, Slo(1.0, 0.04), 6000, 8 * _STARTS[SHIFTING])]


def full_cases(args: argparse.Namespace) -> list[Case]:
    cases = []
    for num_workers in args.workers:
        for name in TRACES:
            file = next(args.traces.rglob(_FILES[name]), None) if args.traces else None
            for slo in _PROMISES[name]:
                start = num_workers * _STARTS[name]
                size = args.requests * num_workers // 8
                cases.append(
                    Case(
                        name,
                        args.device,
                        num_workers,
                        slo,
                        size,
                        start,
                        tuple(args.seeds),
                        BUDGETS,
                        0.01,
                        file,
                    )
                )
        case = Case(SHIFTING, args.device, num_workers, Slo(1.0, 0.04), args.requests * num_workers // 8, 0.0)
        cases.append(
            replace(case, start=num_workers * _STARTS[SHIFTING], seeds=tuple(args.seeds), budgets=BUDGETS)
        )
    return cases


_FILES = {
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "azure-conv": "AzureLLMInferenceTrace_conv.csv",
    "servegen-r1": "deepseek_r1_1h.csv",
    "mooncake": "conversation_trace.jsonl",
}


def compare(case: Case) -> Row:
    """Goodput of Baton and of the best baseline, and what Baton did at its own."""
    point = case.point()
    ours = point.goodput(baton(), case.start)
    row = case.head() | {"goodput": ours}
    if ours:
        row |= _shown(point, ours)
    champion, best = point.best(baselines(case.num_workers, case.budgets), ours or case.start)
    return row | {
        "best_baseline": champion.name if champion else "",
        "best_goodput": best,
        "ratio": ours / best if best else None,
    }


def _shown(point: Point, rate: float) -> Row:
    run = simulate(baton(), point.workload, rate, replace(point.setup, seed=point.seeds[0]))
    controller = run.controller
    assert isinstance(controller, Baton), "it was built here"
    placed = controller.decisions.get("local", 0) + controller.decisions.get("remote", 0)
    return {
        "attainment": run.attainment,
        "attainment_ttft": run.ttft_share,
        "attainment_tpot": run.tpot_share,
        "refused": run.refused_share,
        "local_share": controller.decisions.get("local", 0) / max(placed, 1),
        "readers": [[round(time_s, 1), readers] for time_s, readers in controller.roles],
        "simulated_s": run.span_s,
    }


ABLATIONS = {
    "all of it": Features(),
    "fixed chunks of 512": Features(has_deadline_chunks=False),
    "no deflection": Features(can_deflect=False),
    "early binding": Features(is_late_binding=False),
    "models 30% wrong, not learning": Features(is_learning=False, model_error=-0.3),
    "no flips": Features(has_flips=False),
    "no affinity": Features(has_affinity=False),
    "no admission": Features(has_admission=False),
}


def ablate(case: Case) -> Row:
    """Goodput without one idea at a time, as a share of that with all."""
    point = case.point()
    whole = point.goodput(baton(), case.start)
    row = case.head() | {"goodput": whole}
    for name, features in list(ABLATIONS.items())[1:]:
        row[name] = point.goodput(baton(features, name), whole) / whole if whole else None
    return row


def measure_speed(num_workers: int = 1000, num_requests: int = 4000) -> Row:
    """`num_workers` under the Azure conversation excerpt at SPEED_RATE, nine times the recorded one."""
    setup = Setup(DEVICES["h200-70b-tp4"], num_workers, Slo(1.0, 0.04))
    run = simulate(baton(), trace_workload("azure-conv", num_requests), SPEED_RATE, setup)
    return {
        "workload": "speed: azure-conv",
        "device": setup.device.name,
        "workers": num_workers,
        "requests_per_s": SPEED_RATE,
        "simulated_s": run.span_s,
        "events_per_s": run.num_events / run.cpu_s,
        "attainment": run.attainment,
        "speed_vs_real_time": run.speed,
    }


SPEED_RATE = 50.0


def checks_of(rows: Sequence[Row]) -> list[Check]:
    ratios = [row["ratio"] for row in rows if row.get("ratio") is not None]
    compared = [row for row in rows if "ratio" in row]

    def least(workload: str) -> float | None:
        found = [row["ratio"] for row in compared if row["workload"] == workload]
        return min(found) if found and None not in found else None

    speeds = [row["speed_vs_real_time"] for row in rows if "speed_vs_real_time" in row]
    return [
        Check(
            "goodput_min_ratio", min(ratios) if len(ratios) == len(compared) > 0 else None, ">=", MIN_RATIO
        ),
        Check("goodput_bursty_ratio", least(BURSTY), ">", MIN_BURSTY),
        Check("goodput_shifting_ratio", least(SHIFTING), ">", MIN_SHIFTING),
        Check("speed_vs_real_time", speeds[0] if speeds else None, ">=", MIN_SPEED),
    ]


def _in_parallel(task: Callable[[Case], Row], cases: Sequence[Case], num_processes: int) -> list[Row]:
    """Rows in the order of the cases; each case computes alone, so the number of processes changes nothing."""
    if num_processes < 2:
        return [task(case) for case in cases]
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(task, cases))


def _print(rows: Sequence[Row], columns: Sequence[str]) -> None:
    print(text_table([[row.get(column) for column in columns] for row in rows], columns))


_COLUMNS = (
    "workload", "device", "workers", "slo_ttft_ms", "slo_tpot_ms", "goodput", "best_goodput", "ratio",
    "best_baseline", "attainment", "refused", "local_share",
)  # fmt: skip


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true")
    kind.add_argument("--ablations", action="store_true")
    kind.add_argument("--speed", action="store_true")
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--device", choices=sorted(DEVICES), default="h200-70b-tp4")
    parser.add_argument("--traces", type=Path, help="folder with the whole traces; default: excerpts")
    parser.add_argument("--requests", type=int, default=6000, help="per 8 workers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    if args.speed:
        rows = [measure_speed()]
        result = Result("simulate", 0, rows, [checks_of(rows)[-1]])
        _print(rows, list(rows[0]))
    elif args.ablations:
        rows = _in_parallel(ablate, quick_cases(), args.processes)
        result = Result("simulate-ablations", 0, rows)
        _print(rows, ("workload", "goodput", *list(ABLATIONS)[1:]))
    else:
        cases = quick_cases() if args.quick else full_cases(args)
        rows = _in_parallel(compare, cases, args.processes)
        _print(rows, _COLUMNS)
        rows.append(measure_speed())
        result = Result("simulate", 0 if args.quick else list(args.seeds), rows, checks_of(rows))
    for check in result.checks:
        print(check)
    return conclude(result, args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
