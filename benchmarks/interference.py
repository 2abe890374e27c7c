"""Does somebody's long prompt stall everybody's stream? `python -m benchmarks.interference URL`

    steady   S streams, closed loop, answers of 200 tokens      ITL and tokens/s of these are measured
    long     a prompt of 1,500 tokens every P seconds           TTFT of these, from the scheduled moment

Two loads at once for D seconds, after a warm-up of the same kind that does not count. Gaps count by when they ended, so
a stream that is cut off at the end counts; the gap that is open then counts towards the longest as far as it went.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from benchmarks import console
from benchmarks.client import Client, RunClock, Target, named_model
from benchmarks.lag import Lag, LoopLag
from benchmarks.load import quiet_gc, run_async
from benchmarks.metrics import itls_s, percentile, tokens_between, ttft_s
from benchmarks.options import add_server_options
from benchmarks.prompts import PromptBuilder, make_counter
from benchmarks.records import Record, write_jsonl
from benchmarks.result import Check, Result, Row, conclude, text_table
from benchmarks.runner import Runner, Session, StoppedError, Turn, prepare

MAX_ITL_P99_OVER_P50 = 2.0
MAX_ITL_MS = 100.0
MIN_TOKENS_PER_S = 200.0
MAX_LONG_TTFT_P50_MS = 1200.0
"""What one prefill core and one decode core must show with SmolLM2-135M, S=4, P=3 s, D=30 s."""

_STEADY, _LONG = "steady", "long"
# A few seconds of a short prompt are never repeated within what a prefix cache of a small machine holds.
_NUM_STEADY_PROMPTS = 256
# For the last long prompts to be answered. One that takes longer is cut off, which fails the run.
_GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class Probe:
    """The two loads. Durations in seconds, lengths in tokens."""

    num_streams: int = 4
    period_s: float = 3.0
    duration_s: float = 30.0
    warmup_s: float = 6.0
    steady_input_tokens: int = 48
    steady_output_tokens: int = 200
    long_input_tokens: int = 1500
    long_output_tokens: int = 8
    seed: int = 0

    @property
    def end_s(self) -> float:
        return self.warmup_s + self.duration_s

    def long_times_s(self) -> list[float]:
        """Every period, half a period after the start, so that warm-up and measurement hold whole periods."""
        count = int(self.end_s / self.period_s)
        return [(index + 0.5) * self.period_s for index in range(count)]


@dataclass(frozen=True, slots=True)
class Outcome:
    records: list[Record]
    row: Row
    checks: list[Check]


async def measure(
    target: Target, probe: Probe, stop: asyncio.Event | None = None, tokenizer: Path | None = None
) -> Outcome:
    """Raises ValueError if prompts cannot be built, aiohttp.ClientError or TimeoutError if nobody answers."""
    stop = stop or asyncio.Event()
    target = replace(target, model=await named_model(target))
    async with Client(target) as client:
        steady, longs = await prepare(_plan(client, probe, tokenizer), stop)
        clock = RunClock()
        steady_run, long_run = Runner(client, clock, stop), Runner(client, clock, stop)
        with quiet_gc(), LoopLag() as loop_lag:
            async with asyncio.TaskGroup() as group:
                group.create_task(steady_run.closed(_again(steady), probe.num_streams, probe.end_s))
                group.create_task(long_run.open(longs, probe.end_s + _GRACE_S))
    records = steady_run.records + long_run.records
    row, checks = report(records, probe, loop_lag.lag(records))
    return Outcome(records, {"url": target.url, "model": target.model, **row}, checks)


async def _plan(client: Client, probe: Probe, tokenizer: Path | None) -> tuple[list[Session], list[Session]]:
    builder = await PromptBuilder.create(await make_counter(client, tokenizer))
    num_steady = min(_NUM_STEADY_PROMPTS, probe.num_streams * (int(probe.end_s) + 1))
    steady = [await _session(builder, probe, _STEADY, index, 0.0) for index in range(num_steady)]
    times_s = probe.long_times_s()
    return steady, [await _session(builder, probe, _LONG, index, at_s) for index, at_s in enumerate(times_s)]


def report(records: Sequence[Record], probe: Probe, lag: Lag) -> tuple[Row, list[Check]]:
    """The numbers of one probe and the verdicts. Pure."""
    start_s, end_s = probe.warmup_s, probe.end_s
    steady = [record for record in records if record.label == _STEADY]
    longs = [record for record in records if record.label == _LONG and record.scheduled_s >= start_s]
    gaps_ms = [1000.0 * gap for record in steady for gap in itls_s(record, start_s, end_s)]
    open_ms = [1000.0 * gap for record in steady if (gap := _open_gap_s(record, end_s)) is not None]
    long_ttfts_ms = [1000.0 * ttft for record in longs if (ttft := ttft_s(record)) is not None]
    p50, p99 = percentile(gaps_ms, 50), percentile(gaps_ms, 99)
    row: Row = {
        "num_streams": probe.num_streams,
        "period_s": probe.period_s,
        "duration_s": probe.duration_s,
        "long_input_tokens": probe.long_input_tokens,
        "seed": probe.seed,
        "itl_p50_ms": p50,
        "itl_p90_ms": percentile(gaps_ms, 90),
        "itl_p99_ms": p99,
        "itl_max_ms": max([*gaps_ms, *open_ms], default=None) if gaps_ms else None,
        "itl_p99_over_p50": p99 / p50 if p50 and p99 is not None else None,
        "tokens_per_s": tokens_between(steady, start_s, end_s) / probe.duration_s,
        "steady_ttft_p50_ms": percentile(
            [1000.0 * ttft for record in steady if (ttft := ttft_s(record)) is not None], 50
        ),
        "long_ttft_p50_ms": percentile(long_ttfts_ms, 50),
        "long_ttft_max_ms": max(long_ttfts_ms, default=None),
        "num_long": len(longs),
        "num_failed": sum(record.outcome in ("error", "timeout") for record in records),
        **lag.row(),
    }
    # A long prompt that got no answer has no TTFT to judge, so it fails the run instead.
    checks = [
        Check("itl_p99_over_p50", row["itl_p99_over_p50"], "<=", MAX_ITL_P99_OVER_P50),
        Check("itl_max_ms", row["itl_max_ms"], "<=", MAX_ITL_MS),
        Check("tokens_per_s", row["tokens_per_s"], ">=", MIN_TOKENS_PER_S),
        Check("long_ttft_p50_ms", row["long_ttft_p50_ms"], "<=", MAX_LONG_TTFT_P50_MS),
        Check("failed_requests", row["num_failed"] + len(longs) - len(long_ttfts_ms), "==", 0),
        *lag.checks(),
    ]
    return row, checks


def _open_gap_s(record: Record, end_s: float) -> float | None:
    """From the last token of a stream that was cut off until then."""
    if record.outcome != "cancelled" or not record.chunk_times_s or record.end_s is None:
        return None
    return min(record.end_s, end_s) - record.chunk_times_s[-1]


def _again(sessions: Sequence[Session]) -> Iterator[Session]:
    """Without end; ids stay unique."""
    number = 0
    while True:
        session = sessions[number % len(sessions)]
        yield replace(session, session_id=f"{session.session_id}-{number}")
        number += 1


async def _session(builder: PromptBuilder, probe: Probe, label: str, index: int, at_s: float) -> Session:
    is_long = label == _LONG
    num_tokens = probe.long_input_tokens if is_long else probe.steady_input_tokens
    num_output = probe.long_output_tokens if is_long else probe.steady_output_tokens
    prompt = await builder.exact(num_tokens, random.Random(f"{probe.seed}/{label}/{index}"))
    turn = Turn(prompt.text, num_output, prompt.num_tokens)
    return Session(f"{label}{index}-{probe.seed}", (turn,), at_s, label=label)


async def _attended(target: Target, probe: Probe, tokenizer: Path | None) -> tuple[Outcome, bool]:
    stop = asyncio.Event()
    with console.stop_on_interrupt(stop):
        return await measure(target, probe, stop, tokenizer), stop.is_set()


def main(argv: Sequence[str] | None = None) -> int:
    """0: all checks hold; 1: one failed; 2: could not run; 130: stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interference", description=(__doc__ or "").split("\n\n")[0]
    )
    add_server_options(parser)
    parser.add_argument("--streams", type=int, default=4, help="steady streams (S)")
    parser.add_argument("--period-s", type=float, default=3.0, help="between two long prompts (P)")
    parser.add_argument("--duration-s", type=float, default=30.0)
    parser.add_argument("--warmup-s", type=float, default=6.0)
    parser.add_argument("--long-tokens", type=int, default=1500)
    parser.add_argument("--out", type=Path, help="folder for requests.jsonl")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args(argv)
    target = Target(args.url, args.model, args.endpoint, args.api_key, args.timeout_s, args.plain)
    probe = Probe(
        num_streams=args.streams,
        period_s=args.period_s,
        duration_s=args.duration_s,
        warmup_s=args.warmup_s,
        long_input_tokens=args.long_tokens,
        seed=args.seed,
    )
    print(
        f"{probe.num_streams} steady streams, a long prompt every {probe.period_s:g} s, {probe.end_s:g} s …"
    )
    try:
        outcome, is_stopped = run_async(_attended(target, probe, args.tokenizer))
    except (ValueError, aiohttp.ClientError, OSError, TimeoutError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    except (StoppedError, KeyboardInterrupt) as error:
        print(error or "interrupted", file=sys.stderr)
        return 130
    result = Result("interference", probe.seed, [outcome.row], outcome.checks)
    print(text_table(list(outcome.row.items()), ("", "value")) + "\n")
    print("\n".join(map(str, outcome.checks)))
    if reasons := console.failures(outcome.records):
        print("\n" + reasons)
    if args.out:
        write_jsonl(args.out / "requests.jsonl", outcome.records)
    note = "Stopped before the end: the checks are of what was measured until then."
    return conclude(result, args.json, not is_stopped, note)


if __name__ == "__main__":
    sys.exit(main())
