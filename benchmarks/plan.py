"""How many workers of which GPU a load needs, and what they would give: `python -m benchmarks.plan --rate 40`.

    workers  1, 2, 4 … until the promise is kept, then halved down to the least that keeps it
    answer   that number, one fewer beside it, latencies, roles, and how far the load may grow

The policy of policy/ decides on a simulated clock (benchmarks/sim): step times are fits of published measurements
(benchmarks/sim/devices.py), arrivals and lengths come from a trace. Exit code 0: there is an answer; 1: not within
--max-workers; 2: the question cannot be answered.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.console import progress_bars
from benchmarks.metrics import Slo, percentile
from benchmarks.result import Check, Result, Row, conclude, text_table
from benchmarks.sim.baton import Baton
from benchmarks.sim.cluster import Setup
from benchmarks.sim.devices import DEVICES, Device
from benchmarks.sim.experiments import Point, Run, baton, simulate
from benchmarks.sim.workloads import TRACES, Workload, trace_workload

MODELS = {"llama-3-8b": ("8b", 1), "llama-3-70b": ("70b-tp4", 4)}
"""What is fitted: the name of its step times and the GPUs of one worker."""
LEAST_SPAN_S = 10.0
"""Of arrivals: what is over sooner is a burst, which any cluster takes."""
GPUS = ("h100", "h200")


@dataclass(frozen=True, slots=True)
class Question:
    """`share`: of the offered requests that must keep the promise `slo`, at `rate` requests/s."""

    device: Device
    gpus_per_worker: int
    workload: Workload
    rate: float
    slo: Slo
    share: float
    seeds: tuple[int, ...]
    max_workers: int

    def setup(self, num_workers: int, seed: int) -> Setup:
        return Setup(self.device, num_workers, self.slo, seed)

    def runs(self, num_workers: int) -> list[Run]:
        system = baton()
        return [
            simulate(system, self.workload, self.rate, self.setup(num_workers, seed)) for seed in self.seeds
        ]


def fewest(question: Question, tell: Callable[[str], None]) -> tuple[int | None, dict[int, Row]]:
    """(the least number of workers whose median seed keeps the promise, or None: more than max_workers; a row for
    each number that was tried)."""
    seen: dict[int, Row] = {}

    def keeps(num_workers: int) -> bool:
        tell(f"{num_workers} workers")
        seen[num_workers] = row_of(question, num_workers, question.runs(num_workers))
        return bool(seen[num_workers]["attainment"] >= question.share)

    high = 1
    while not keeps(high):
        if high == question.max_workers:
            return None, seen
        high = min(2 * high, question.max_workers)
    low = high // 2  # too few, or 0
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high, seen


def row_of(question: Question, num_workers: int, runs: Sequence[Run]) -> Row:
    """What `num_workers` give at the asked rate, over all seeds."""
    ended = [request for run in runs for request in run.requests if request.first_token_s is not None]
    ttfts_ms = [1000 * ((request.first_token_s or 0.0) - request.arrived_s) for request in ended]
    tpots_ms = [1000 * request.tpot_s for request in ended if request.tpot_s is not None]
    shares = [run.attainment for run in runs]
    return {
        "workers": num_workers,
        "gpus": num_workers * question.gpus_per_worker,
        "attainment": median(shares),
        "attainment_min": min(shares),
        "attainment_max": max(shares),
        "refused": median(run.refused_share for run in runs),
        "p50_ttft_ms": percentile(ttfts_ms, 50),
        "p90_ttft_ms": percentile(ttfts_ms, 90),
        "p50_tpot_ms": percentile(tpots_ms, 50),
        "p90_tpot_ms": percentile(tpots_ms, 90),
        "readers": _mean_readers(runs[0]),
        "local_share": _local_share(runs[0]),
    }


def _mean_readers(run: Run) -> float:
    """Workers that read prompts for others and wrote nothing, averaged over the run's time; none before a plan."""
    assert isinstance(run.controller, Baton), "it was built here"
    area, since_s, readers = 0.0, 0.0, 0
    for time_s, now_reading in run.controller.roles:
        area += readers * (min(time_s, run.span_s) - since_s)
        since_s, readers = min(time_s, run.span_s), now_reading
    return (area + readers * (run.span_s - since_s)) / run.span_s


def _local_share(run: Run) -> float:
    assert isinstance(run.controller, Baton), "it was built here"
    local, remote = (run.controller.decisions.get(kind, 0) for kind in ("local", "remote"))
    return local / max(local + remote, 1)


def run(question: Question, tell: Callable[[str], None]) -> Result:
    """Rows of all numbers tried; the check `workers` holds the answer, None if there is none."""
    least, seen = fewest(question, tell)
    rows = [row | {"is_answer": number == least} for number, row in sorted(seen.items())]
    if least is not None:
        tell(f"how far {least} workers go")
        point = Point(question.workload, question.setup(least, 0), question.seeds, tolerance=0.05)
        answer = next(row for row in rows if row["is_answer"])
        answer["goodput_90"] = point.goodput(baton(), question.rate)
    return Result("plan", list(question.seeds), rows, [Check("workers", least, "<=", question.max_workers)])


def question_from(args: argparse.Namespace) -> Question:
    """Raises ValueError naming the option that is wrong."""
    if args.model not in MODELS:
        raise ValueError(
            f"--model: expected one whose steps were measured ({', '.join(MODELS)}) but got {args.model!r}"
        )
    requests = max(2000, round(60 * args.rate)) if args.requests is None else args.requests
    for name in ("rate", "max_workers", "slo_ttft_ms", "slo_tpot_ms"):
        if getattr(args, name) <= 0:
            raise ValueError(
                f"--{name.replace('_', '-')}: expected a number above 0 but got {getattr(args, name):g}"
            )
    least = max(100, round(LEAST_SPAN_S * args.rate))
    if requests < least:
        raise ValueError(
            f"--requests: expected {least} at least ({LEAST_SPAN_S:g} s of them) but got {requests}"
        )
    if not 0 < args.share < 1:
        raise ValueError(f"--share: expected a number between 0 and 1 but got {args.share:g}")
    size, gpus_per_worker = MODELS[args.model]
    return Question(
        DEVICES[f"{args.gpu}-{size}"],
        gpus_per_worker,
        trace_workload(args.trace, requests),
        args.rate,
        Slo(args.slo_ttft_ms / 1000, args.slo_tpot_ms / 1000),
        args.share,
        tuple(args.seeds),
        args.max_workers,
    )


def told(question: Question, result: Result) -> str:
    """The answer in words."""
    answer = next((row for row in result.rows if row["is_answer"]), None)
    promise = (
        f"{question.rate:g} requests/s of {question.workload.name}, {question.share:.0%} of them in time"
    )
    if answer is None:
        most = result.rows[-1]
        return (
            f"{promise}: not with {_counted(most['workers'], 'worker')}, which keep {most['attainment']:.1%}. "
            "A looser promise, or more workers (--max-workers), may do."
        )
    workers, gpus = _counted(answer["workers"], "worker"), _counted(answer["gpus"], "GPU")
    spread = f"{answer['attainment_min']:.1%} to {answer['attainment_max']:.1%} over seeds"
    return (
        f"{promise}: {workers} ({gpus}). They keep {answer['attainment']:.1%} ({spread}), with "
        f"{answer['readers']:.1f} reading for the others on average, and keep 90% up to "
        f"{answer['goodput_90']:.3g} requests/s."
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_COLUMNS = (
    "workers", "gpus", "attainment", "refused", "p50_ttft_ms", "p90_ttft_ms", "p50_tpot_ms", "p90_tpot_ms",
    "readers", "local_share", "is_answer",
)  # fmt: skip


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="llama-3-8b", help=", ".join(MODELS))
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--trace", default="azure-conv", help=", ".join(TRACES) + "; or a file")
    parser.add_argument("--rate", type=float, required=True, help="requests/s")
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=40.0)
    parser.add_argument(
        "--share", type=float, default=0.9, help="of the offered requests, in time (default 0.9)"
    )
    parser.add_argument(
        "--requests", type=int, help="simulated per run (default: a minute's, 2,000 at least)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-workers", type=int, default=256)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    try:
        question = question_from(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with progress_bars(Console(stderr=True)) as bars:
        task = bars.add_task("simulating", total=None, note="")
        result = run(question, lambda note: bars.update(task, note=note))
    print(text_table([[row.get(column) for column in _COLUMNS] for row in result.rows], _COLUMNS))
    print(f"\n{told(question, result)}\n")
    for check in result.checks:
        print(check)
    return conclude(result, args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
