"""One load run: `python -m benchmarks.load URL --arrival poisson --rate 2 --num-requests 200 --out DIR`.

    spec ─► prompts, counted by the server ─► warm-ups ─► run ─► records ─► row, checks ─► DIR/requests.jsonl, result

The run is void, and its checks fail, if the client itself was late. Ctrl-C ends the run and reports what was measured
until then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import uvloop

from benchmarks import console, server_metrics
from benchmarks.client import Client, RunClock, named_model
from benchmarks.lag import Lag, LoopLag
from benchmarks.metrics import Window, summarize
from benchmarks.options import add_load_options, spec_from
from benchmarks.prompts import PromptBuilder, make_counter
from benchmarks.records import Record, write_jsonl
from benchmarks.result import Check, Result, Row, conclude
from benchmarks.runner import OnRecord, Runner, Session, StoppedError, prepare
from benchmarks.spec import LoadSpec, build_sessions, plan_requests
from benchmarks.traces import ideal_hit_ratio

_MAX_WARMUP_CONCURRENCY = 8
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What one run left. `spec` has its model's name filled in. `is_whole` False: it was stopped."""

    spec: LoadSpec
    records: list[Record]
    row: Row
    checks: list[Check]
    lag: Lag
    is_whole: bool


async def measure(
    spec: LoadSpec,
    on_record: OnRecord | None = None,
    stop: asyncio.Event | None = None,
    on_start: Callable[[int], None] | None = None,
) -> LoadRun:
    """Runs `spec` against its server. `on_start(number of requests)` when the run's clock starts.

    Raises ValueError for a spec that cannot be run there, aiohttp.ClientError or TimeoutError if nobody answers,
    StoppedError if it is stopped before its clock starts.
    """
    stop = stop or asyncio.Event()
    spec = replace(spec, model=await named_model(spec.target))
    async with Client(spec.target) as client:
        plan = await prepare(_plan(spec, client), stop)
        spec = replace(spec, num_requests=len(plan.sessions))
        sessions, warmups = plan.sessions, plan.warmups
        await Runner(client, RunClock(), stop).closed(
            warmups, min(len(warmups), _MAX_WARMUP_CONCURRENCY) or 1
        )
        before = await server_metrics.scrape(client)
        if on_start is not None:
            on_start(sum(len(session.turns) for session in sessions))
        with quiet_gc():
            records, lag = await _run(spec, client, sessions, stop, on_record)
        after = await server_metrics.scrape(client)
    window = Window.trimmed(records, spec.ramp_s, spec.drain_s)
    server = server_metrics.changes(before, after)
    num_workers = server.pop("num_workers", None)
    row: Row = {
        **spec.row(),
        "tokenizer": plan.tokenizer,
        "ideal_prefix_hit_ratio": plan.ideal_hit_ratio,
        **summarize(records, spec.slo, window, int(num_workers) if num_workers else None),
        **server,
        **lag.row(),
        "is_whole": not stop.is_set(),
    }
    return LoadRun(spec, records, row, _checks(row, lag), lag, not stop.is_set())


@dataclass(frozen=True, slots=True)
class _Plan:
    sessions: list[Session]
    warmups: list[Session]
    tokenizer: str
    ideal_hit_ratio: float | None


async def _plan(spec: LoadSpec, client: Client) -> _Plan:
    builder = await PromptBuilder.create(await make_counter(client, spec.tokenizer))
    requests = plan_requests(spec)
    sessions = await build_sessions(spec, builder, requests)
    warmups = await build_sessions(spec, builder, requests[: spec.num_warmups], "warm")
    has_prefixes = any(request.block_ids for request in requests)
    return _Plan(sessions, warmups, builder.counter.name, ideal_hit_ratio(requests) if has_prefixes else None)


async def _run(
    spec: LoadSpec,
    client: Client,
    sessions: Sequence[Session],
    stop: asyncio.Event,
    on_record: OnRecord | None,
) -> tuple[list[Record], Lag]:
    with LoopLag() as loop_lag:
        runner = Runner(client, RunClock(), stop, on_record)
        if spec.arrival == "closed":
            await runner.closed(sessions, spec.concurrency)
        else:
            await runner.open(sessions)
    return runner.records, loop_lag.lag(runner.records)


@contextlib.contextmanager
def quiet_gc() -> Iterator[None]:
    """What was planned lives as long as the run: without this a collection would walk it while tokens arrive."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _checks(row: Row, lag: Lag) -> list[Check]:
    return [*lag.checks(), Check("completed", row["completed"], ">", 0)]


def run_async(work: Coroutine[Any, Any, _Answer]) -> _Answer:
    """On the fast loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _attended(spec: LoadSpec) -> LoadRun:
    """With a progress bar, and Ctrl-C as the end of the run."""
    stop = asyncio.Event()
    with console.stop_on_interrupt(stop), console.RunProgress() as progress:
        return await measure(spec, progress.on_record, stop, progress.on_start)


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured and all checks hold; 1: a check failed; 2: could not run; 130: stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load", description=(__doc__ or "").split("\n\n")[0]
    )
    add_load_options(parser)
    parser.add_argument("--out", type=Path, help="folder for requests.jsonl and result.json")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args(argv)
    try:
        spec = spec_from(args)
        run = run_async(_attended(spec))
    except (ValueError, aiohttp.ClientError, OSError, TimeoutError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    except (StoppedError, KeyboardInterrupt) as error:
        print(error or "interrupted", file=sys.stderr)
        return 130
    result = Result("load", spec.seed, [run.row], run.checks)
    print(console.load_report(run.row, run.checks, run.is_whole))
    if reasons := console.failures(run.records):
        print("\n" + reasons)
    if args.out:
        write_jsonl(args.out / "requests.jsonl", run.records)
        result.write(args.out / "result.json")
        print(f"\n{args.out / 'requests.jsonl'}: {len(run.records)} records")
    return conclude(result, args.json, run.is_whole)


if __name__ == "__main__":
    sys.exit(main())
