"""How far the simulator is from the real thing: `python -m benchmarks.validate recorded`, `… live URL --rate 1 …`.

    recorded  vLLM's published runs of one workload on four machines: step costs are learnt from the first half of each
              run's requests, the run is simulated, and the other half is compared
    live      this server under a load run; its workers' own step costs, and what one request at a time takes on top,
              go into the simulator, which gets the same arrivals and lengths and decides by the same policy

Exit code 0: TTFT and gaps, p50 and p90, are within 15%; 1: one is not, or the live run was void; 2: it could not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from benchmarks.live_model import Glances, LiveModel, learn
from benchmarks.load import LoadRun, measure, run_async
from benchmarks.metrics import Slo
from benchmarks.options import add_load_options, spec_from
from benchmarks.records import Record
from benchmarks.result import Check, Result, Row, conclude, text_table
from benchmarks.sim.baselines import BudgetChunker, RoundRobin
from benchmarks.sim.baton import Baton, Features
from benchmarks.sim.cluster import Controller, Setup
from benchmarks.sim.devices import Device
from benchmarks.sim.fit import Timeline, fit_device, read_timelines
from benchmarks.sim.replay import checks_of, compared, replayed
from benchmarks.sim.worker import Chunker
from benchmarks.spec import LoadSpec
from benchmarks.traces import DATA

NUM_PROBES = 8


@dataclass(frozen=True, slots=True)
class Recording:
    """A run of vLLM: its limits, and what the simulator lacks to follow it, "" if nothing."""

    name: str
    max_streams: int
    kv_tokens: int = 10_000_000
    num_engines: int = 1
    caveat: str = ""


RECORDINGS = (
    Recording("rtxpro6000_llama_8b", 128),
    Recording("rtxpro6000_qwen3_32b_tp2", 128),
    Recording("rtxpro6000_qwen3_30b_a3b_dp2", 128, num_engines=2, caveat="its two ranks step together"),
    Recording("rtx4090_llama_8b", 256, 41_408, caveat="its KV is full, and it preempts"),
)
STEP_TOKENS = 2048  # max_num_batched_tokens of all four


def recorded() -> Result:
    """Checks are of the recordings without a caveat; rows of all."""
    rows: list[Row] = []
    checks: list[Check] = []
    for recording in RECORDINGS:
        timelines = read_timelines(DATA / "vllm" / f"{recording.name}.csv")
        num_learnt = len(timelines) // 2
        engine = Device(
            recording.name, 0, 0, 0, 0, 0, 0, 0, 1, recording.kv_tokens, 1e12, recording.max_streams
        )
        device = fit_device(timelines, num_learnt, engine, recording.num_engines)
        setup = Setup(device, recording.num_engines, Slo(None, None), noise=0.0)
        requests = replayed(timelines, setup, (RoundRobin(), lambda _: BudgetChunker(STEP_TOKENS)))
        found = compared(recording.name, timelines[num_learnt:], requests[num_learnt:])
        rows += [row | {"caveat": recording.caveat} for row in found]
        if not recording.caveat:
            checks += checks_of(found, f"{recording.name}_")
    return Result("validate-recorded", 0, rows, checks)


async def live(spec: LoadSpec) -> Result:
    """Raises ValueError for a spec that cannot be replayed or a server that is no Baton, and what `measure` raises."""
    if spec.slo is None or spec.slo.ttft_s is None or spec.slo.tpot_s is None:
        raise ValueError("--slo-ttft-ms, --slo-tpot-ms: expected those that the server has as its slo")
    if spec.prefix is not None or spec.turns.num_turns > 1:
        raise ValueError(
            "--prefix-tokens, --turns: expected prompts that share nothing: no cache is replayed"
        )
    probe = replace(
        spec, arrival="closed", concurrency=1, num_requests=NUM_PROBES, seed=spec.seed + 1000, trace=None
    )
    before, during = Glances(), Glances()
    async with before.looking(spec.target):
        alone = await measure(probe, on_start=lambda _: before.begin())
    async with during.looking(spec.target):
        loaded = await measure(replace(spec, num_warmups=0), on_start=lambda _: during.begin())
    model = await learn(spec.target, alone.records, before, during)
    timelines = _timelines(loaded.records)
    requests = replayed(timelines, model.setup(spec.slo, spec.seed), _system(model, spec.slo, spec.seed))
    rows = compared("live", timelines, requests)
    failed = len(loaded.records) - len(timelines)
    checks = [*_run_checks(loaded, failed), *checks_of(rows)]
    return Result("validate-live", spec.seed, [*rows, model.row()], checks)


def _system(model: LiveModel, slo: Slo, seed: int) -> tuple[Controller, Callable[[int], Chunker]]:
    features = Features(has_admission=False, has_flips=False, is_learning=False, model_error=0.0)
    controller = Baton(features, slo.ttft_s or 0.0, slo.tpot_s or 0.0, seed, model.layout)
    return controller, lambda number: controller.chunker(number, model.step_model())


def _timelines(records: Sequence[Record]) -> list[Timeline]:
    """By arrival, of those that were answered in full."""
    found = [
        Timeline(
            record.scheduled_s,
            record.num_input_tokens,
            record.num_output_tokens,
            record.scheduled_s,
            record.chunk_times_s[0],
            record.chunk_times_s[-1],
        )
        for record in records
        if record.is_good and record.chunk_times_s
    ]
    return sorted(found, key=lambda timeline: timeline.arrived_s)


def _run_checks(run: LoadRun, num_failed: int) -> list[Check]:
    return [Check("void_runs", run.lag.is_void, "==", 0), Check("failed", num_failed, "==", 0)]


_COLUMNS = (
    "run", "metric", "requests", "p50_measured_ms", "p50_simulated_ms", "p50_ratio", "p90_measured_ms",
    "p90_simulated_ms", "p90_ratio", "caveat",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    published = kinds.add_parser("recorded", help="against vLLM's published runs")
    server = kinds.add_parser("live", help="against a Baton that runs")
    add_load_options(server)
    for kind in (published, server):
        kind.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    try:
        result = recorded() if args.kind == "recorded" else run_async(live(spec_from(args)))
    except (ValueError, aiohttp.ClientError, OSError, TimeoutError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    rows = [row for row in result.rows if "metric" in row]
    print(text_table([[row.get(column) for column in _COLUMNS] for row in rows], _COLUMNS))
    for check in result.checks:
        print(check)
    return conclude(result, args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
