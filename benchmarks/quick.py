"""What `make bench` runs: five minutes on a laptop that tell where two pools help and where they do not.

    for each mode: start Baton ─► load run (first mode only) ─► interference probe ─► a small sweep ─► stop
                                    └ how much this machine can do decides the sweep's rates, the same for all modes
    then: the table, the verdict, the checks, where the report lies

The numbers are of short runs: good for a first look, not for a claim (docs/benchmarks.md says how to measure those).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks import interference, report
from benchmarks.client import Target
from benchmarks.interference import Probe
from benchmarks.load import run_async
from benchmarks.progress import Board
from benchmarks.records import write_jsonl
from benchmarks.report_verdict import text_verdict
from benchmarks.result import Result, text_table
from benchmarks.servers import Arm, GivenHost, Host, OurHost, ServerError
from benchmarks.spec import LoadSpec
from benchmarks.sweep import Folder, run_sweep
from benchmarks.sweep_plan import Cell, Sweep, cells, parse_lengths
from contracts.config import cache_dir

SWEEP = Sweep(
    lengths=("128/24",),
    num_requests=4,
    duration_s=10.0,
    num_warmups=1,
    slo_ttft_ms=1000.0,
    slo_tpot_ms=50.0,
    timeout_s=15.0,  # on a slow machine requests fail instead of the five minutes growing
    interleave=False,  # each mode is started once: a start costs as much as all its runs
)
PROBE = Probe(duration_s=15.0, warmup_s=3.0)
NUM_LOAD_REQUESTS = 16
LOAD_CONCURRENCY = 4
SHARES = (0.4, 0.8)
"""The sweep's rates, of what the first mode answered per second at a closed loop."""


@dataclass(slots=True)
class Tour:
    """The measurements of all modes, and what they left. `is_whole` False: Ctrl-C ended it."""

    folder: Path
    host: Host
    board: Board
    sweep: Sweep
    probe: Probe
    results: list[tuple[str, Result]] = field(default_factory=list)
    grid: list[Cell] = field(default_factory=list)
    is_whole: bool = False

    @property
    def cells(self) -> Folder:
        return Folder(self.folder / "sweep")

    def run(self) -> None:
        """Raises ServerError, aiohttp.ClientError, OSError, TimeoutError, ValueError when it cannot be measured."""
        try:
            self.is_whole = all(self._mode(arm) for arm in self.sweep.arms())
        except KeyboardInterrupt:
            self.is_whole = False

    def _mode(self, arm: Arm) -> bool:
        with self.host.open(arm) as url:
            if not self.grid:
                rate = self._load(arm, url)
                if rate is None:
                    return False
                self.sweep = fitted(self.sweep, rate)
                self.cells.adopt(self.sweep.identity("launcher"))
                self.grid = cells(self.sweep)
                self.board.total(len(self.grid))
            self._interference(arm, url)
            mine = [cell for cell in self.grid if cell.arm == arm]
            return run_sweep(self.sweep, mine, self.cells, GivenHost(url), self.board)

    def _load(self, arm: Arm, url: str) -> float | None:
        """Requests answered per second; None if Ctrl-C ended it."""
        input_tokens, output_tokens = parse_lengths(self.sweep.lengths[0])
        spec = LoadSpec(
            url,
            arrival="closed",
            concurrency=LOAD_CONCURRENCY,
            num_requests=NUM_LOAD_REQUESTS,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            slo=self.sweep.slo,
            num_warmups=self.sweep.num_warmups,
            timeout_s=self.sweep.timeout_s,
        )
        self.board.say(f"{arm.name}: {NUM_LOAD_REQUESTS} requests, {LOAD_CONCURRENCY} at a time")
        run = self.board.measure(spec, f"{arm.name}, load")
        self._keep("load", arm, Result("load", spec.seed, [{"arm": arm.name, **run.row}], run.checks))
        write_jsonl(self.folder / f"load-{arm.mode}.jsonl", run.records)
        return float(run.row["request_throughput"] or 0.0) if run.is_whole else None

    def _interference(self, arm: Arm, url: str) -> None:
        probe = self.probe
        self.board.say(
            f"{arm.name}: {probe.num_streams} steady streams while a prompt of {probe.long_input_tokens} tokens comes "
            f"every {probe.period_s:g} s, for {probe.end_s:g} s"
        )
        outcome = run_async(interference.measure(Target(url), probe))
        row = {"arm": arm.name, **outcome.row}
        self._keep("interference", arm, Result("interference", probe.seed, [row], outcome.checks))
        write_jsonl(self.folder / f"interference-{arm.mode}.jsonl", outcome.records)

    def _keep(self, kind: str, arm: Arm, result: Result) -> None:
        result.write(self.folder / f"{kind}-{arm.mode}.json")
        self.results.append((arm.name, result))

    def story(self) -> str:
        """Writes the report; tables, verdict and checks for a terminal."""
        result = self.cells.summarize(self.grid)
        file = self.folder / "report.html"
        singles = sorted(self.folder.glob("*.json"))
        report.write(file, report.read_sources([self.cells.path, *singles]), "Baton: five minutes")
        parts = [
            text_interference(self.results),
            text_verdict(result.rows),
            text_checks([*self.results, ("all runs", result)]),
            f"report: {file}",
        ]
        return "\n\n".join(part for part in parts if part)


def fitted(sweep: Sweep, rate: float) -> Sweep:
    """With rates that this machine can answer, but none so low that a run outlasts its duration.

    Raises ValueError if it answered nothing.
    """
    if rate <= 0:
        raise ValueError(f"expected an answer within {sweep.timeout_s:g} s but this machine gave none")
    least = sweep.num_requests / sweep.duration_s if sweep.duration_s else 0.0
    loads = (float(f"{max(share * rate, least):.2g}") for share in SHARES)
    return sweep.model_copy(update={"loads": tuple(dict.fromkeys(loads))})


def text_interference(results: Sequence[tuple[str, Result]]) -> str:
    """Mode against mode; empty if no probe was finished."""
    probes = [(name, result.rows[0]) for name, result in results if result.benchmark == "interference"]
    if not probes:
        return ""
    keys = ("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "tokens_per_s", "long_ttft_p50_ms")
    lines = [(key, *(row[key] for _, row in probes)) for key in keys]
    title = "INTERFERENCE: steady streams beside long prompts"
    return title + "\n" + text_table(lines, ("", *(name for name, _ in probes)))


def text_checks(results: Sequence[tuple[str, Result]]) -> str:
    lines = [f"  {result.benchmark}, {name}: {check}" for name, result in results for check in result.checks]
    return "CHECKS\n" + "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured, whatever the checks say; 2: could not run; 130: stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quick", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, help="folder (default: a new one in ~/.cache/baton/bench)")
    parser.add_argument("--model", help="what Baton serves (default: the embedded model)")
    parser.add_argument("--config", help="Baton's configuration file")
    args = parser.parse_args(argv)
    folder = args.out or cache_dir() / "bench" / time.strftime("%Y%m%d-%H%M%S")
    given = {key: value for key in ("model", "config") if (value := getattr(args, key))}
    started = time.monotonic()
    try:
        sweep = SWEEP.model_copy(update=given)
        with Board("runs of the sweep") as board:
            tour = Tour(folder, OurHost(sweep.launch, board.quote), board, sweep, PROBE)
            tour.run()
        text = tour.story()
    except (ValueError, ServerError, aiohttp.ClientError, OSError, TimeoutError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    print(f"\n{text}\ntook {time.monotonic() - started:.0f} s")
    if not tour.is_whole:
        print("Stopped before the end: this is what was measured until then.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
