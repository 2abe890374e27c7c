"""Does the service follow when the demand turns around? `python -m benchmarks.shifting URL --slo-ttft-ms 3000 …`

    0 ───────── prompts ─────────► shift ───────── answers ─────────► 2 × D
      long prompts, short answers         short prompts, long answers     open Poisson arrivals, D seconds each

Requests count in the window of 5 s in which they were scheduled. After the shift the service has recovered where a
window attains the target and so do all requests from it on to the end: a lucky window amid late ones is none. The
promises are judged here; the server is to be started with the same ones (slo), or it has nothing to plan by.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from benchmarks import console
from benchmarks.arrivals import poisson
from benchmarks.client import Client, RunClock, Target, named_model
from benchmarks.lag import Lag, LoopLag
from benchmarks.load import quiet_gc, run_async
from benchmarks.metrics import Slo, attainment, percentile, tpot_s, ttft_s
from benchmarks.options import add_server_options
from benchmarks.prompts import PromptBuilder, make_counter
from benchmarks.records import Record, write_jsonl
from benchmarks.result import Check, Result, Row, conclude, text_table
from benchmarks.runner import Runner, Session, StoppedError, Turn, prepare
from benchmarks.server_metrics import scrape

MAX_RECOVERED_S = 15.0
_GRACE_S = 30.0  # for the last answers; one that takes longer is cut off, which is not attained


@dataclass(frozen=True, slots=True)
class Half:
    """One side of the shift: requests per second, tokens of a prompt and of its answer."""

    name: str
    rate: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Shift:
    """Two halves of `half_s` seconds, seen in windows of `window_s`. `target`: attainment that counts as kept."""

    prompts: Half
    answers: Half
    slo: Slo
    half_s: float = 60.0
    window_s: float = 5.0
    target: float = 0.9
    seed: int = 0

    @property
    def halves(self) -> tuple[tuple[float, Half], ...]:
        """With the second at which each begins."""
        return (0.0, self.prompts), (self.half_s, self.answers)

    @property
    def end_s(self) -> float:
        return 2 * self.half_s


@dataclass(frozen=True, slots=True)
class Outcome:
    records: list[Record]
    rows: list[Row]
    checks: list[Check]


async def measure(
    target: Target, shift: Shift, stop: asyncio.Event | None = None, tokenizer: Path | None = None
) -> Outcome:
    """Raises ValueError if prompts cannot be built, aiohttp.ClientError or TimeoutError if nobody answers."""
    stop = stop or asyncio.Event()
    target = replace(target, model=await named_model(target))
    async with Client(target) as client:
        sessions = await prepare(_plan(client, shift, tokenizer), stop)
        before = await scrape(client)
        run = Runner(client, RunClock(), stop)
        with quiet_gc(), LoopLag() as loop_lag:
            await run.open(sessions, shift.end_s + _GRACE_S)
        after = await scrape(client)
    rows, checks = report(run.records, shift, loop_lag.lag(run.records))
    if before is not None and after is not None:
        name = "baton_flips_total"
        flips = after.sums.get(name, 0.0) - before.sums.get(name, 0.0)
        rows[-1] |= {"num_workers": after.num_ready, "num_flips": int(flips)}
    return Outcome(run.records, rows, checks)


def times_s(shift: Shift) -> list[tuple[float, Half]]:
    """Arrivals of the whole run, in order. Each half begins with one."""
    found = []
    for number, (start_s, half) in enumerate(shift.halves):
        count = max(1, round(half.rate * shift.half_s))
        offsets = poisson(half.rate, count, shift.seed + number)
        found += [(start_s + at_s, half) for at_s in offsets if at_s < shift.half_s]
    return found


async def _plan(client: Client, shift: Shift, tokenizer: Path | None) -> list[Session]:
    builder = await PromptBuilder.create(await make_counter(client, tokenizer))
    sessions = []
    for number, (at_s, half) in enumerate(times_s(shift)):
        prompt = await builder.exact(half.input_tokens, random.Random(f"{shift.seed}/{number}"))
        turn = Turn(prompt.text, half.output_tokens, prompt.num_tokens)
        sessions.append(Session(f"{half.name}{number}-{shift.seed}", (turn,), at_s, label=half.name))
    return sessions


def report(records: Sequence[Record], shift: Shift, lag: Lag) -> tuple[list[Row], list[Check]]:
    """A row per window, then one of the whole run; and the verdicts. Pure."""
    rows: list[Row] = []
    for number in range(math.ceil(shift.end_s / shift.window_s - 1e-9)):
        start_s = number * shift.window_s
        rows.append(_window(_within(records, start_s, start_s + shift.window_s), start_s, shift))
    recovered = recovered_s(records, shift)
    num_failed = sum(record.outcome in ("error", "timeout") for record in records)
    rows.append(
        {
            "half": "all",
            "offered": len(records),
            "attained_before": attainment(_within(records, 0.0, shift.half_s), shift.slo).both,
            "attained_after": attainment(_within(records, shift.half_s, shift.end_s), shift.slo).both,
            "recovered_s": recovered,
            "failed": num_failed,
            "seed": shift.seed,
            **lag.row(),
        }
    )
    checks = [
        Check("recovered_s", recovered, "<=", MAX_RECOVERED_S),
        Check("failed_requests", num_failed, "==", 0),
        *lag.checks(),
    ]
    return rows, checks


def recovered_s(records: Sequence[Record], shift: Shift) -> float | None:
    """Seconds from the shift to the window from which on the promises are kept; 0: they were never broken. None: not
    within the run.
    """
    start_s = shift.half_s
    while start_s < shift.end_s:
        window = attainment(_within(records, start_s, start_s + shift.window_s), shift.slo).both
        rest = attainment(_within(records, start_s, shift.end_s), shift.slo).both
        if window is not None and rest is not None and min(window, rest) >= shift.target:
            return start_s - shift.half_s
        start_s += shift.window_s
    return None


def _within(records: Sequence[Record], start_s: float, end_s: float) -> list[Record]:
    return [record for record in records if start_s <= record.scheduled_s < end_s]


def _window(records: Sequence[Record], start_s: float, shift: Shift) -> Row:
    kept = attainment(records, shift.slo)
    ttfts = [1000.0 * value for record in records if (value := ttft_s(record)) is not None]
    tpots = [1000.0 * value for record in records if (value := tpot_s(record)) is not None]
    return {
        "half": shift.prompts.name if start_s < shift.half_s else shift.answers.name,
        "start_s": start_s,
        "offered": kept.num_offered,
        "attained": kept.both,
        "attained_ttft": kept.ttft,
        "attained_tpot": kept.tpot,
        "ttft_p90_ms": percentile(ttfts, 90),
        "tpot_p90_ms": percentile(tpots, 90),
    }


async def _attended(target: Target, shift: Shift, tokenizer: Path | None) -> tuple[Outcome, bool]:
    stop = asyncio.Event()
    with console.stop_on_interrupt(stop):
        return await measure(target, shift, stop, tokenizer), stop.is_set()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shifting", description=(__doc__ or "").split("\n\n")[0]
    )
    add_server_options(parser)
    parser.add_argument("--slo-ttft-ms", type=float, required=True, help="as the server's slo.ttft_ms")
    parser.add_argument("--slo-tpot-ms", type=float, required=True, help="as the server's slo.itl_ms")
    parser.add_argument("--half-s", type=float, default=60.0, help="seconds before and after the shift")
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--target", type=float, default=0.9, help="attainment that counts as kept")
    # For the embedded model on two cores; a GPU takes a hundred times as much.
    parser.add_argument("--prompt-rate", type=float, default=0.8, help="requests/s before the shift")
    parser.add_argument("--prompt-tokens", type=int, default=160)
    parser.add_argument("--prompt-answer-tokens", type=int, default=8)
    parser.add_argument("--answer-rate", type=float, default=0.5, help="requests/s after the shift")
    parser.add_argument("--answer-prompt-tokens", type=int, default=24)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="folder for requests.jsonl")
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser


def _shift_from(args: argparse.Namespace) -> Shift:
    """Raises ValueError for numbers that make no run."""
    if not (args.half_s >= args.window_s > 0 and args.prompt_rate > 0 and args.answer_rate > 0):
        raise ValueError(
            "expected half_s >= window_s > 0 and rates above 0 but got "
            f"{args.half_s:g}, {args.window_s:g}, {args.prompt_rate:g}, {args.answer_rate:g}"
        )
    return Shift(
        Half("prompts", args.prompt_rate, args.prompt_tokens, args.prompt_answer_tokens),
        Half("answers", args.answer_rate, args.answer_prompt_tokens, args.answer_tokens),
        Slo(args.slo_ttft_ms / 1000.0, args.slo_tpot_ms / 1000.0),
        args.half_s,
        args.window_s,
        args.target,
        args.seed,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0: all checks hold; 1: one failed; 2: could not run; 130: stopped by Ctrl-C."""
    args = _parser().parse_args(argv)
    target = Target(args.url, args.model, args.endpoint, args.api_key, args.timeout_s, args.plain)
    try:
        shift = _shift_from(args)
        print(f"{len(times_s(shift))} requests in {shift.end_s:g} s, the shift at {shift.half_s:g} s …")
        outcome, is_stopped = run_async(_attended(target, shift, args.tokenizer))
    except (ValueError, aiohttp.ClientError, OSError, TimeoutError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    except (StoppedError, KeyboardInterrupt) as error:
        print(error or "interrupted", file=sys.stderr)
        return 130
    windows, whole = outcome.rows[:-1], outcome.rows[-1]
    print(text_table([list(row.values()) for row in windows], list(windows[0])) + "\n")
    print(text_table(list(whole.items()), ("", "value")) + "\n")
    print("\n".join(map(str, outcome.checks)))
    if reasons := console.failures(outcome.records):
        print("\n" + reasons)
    if args.out:
        write_jsonl(args.out / "requests.jsonl", outcome.records)
    result = Result("shifting", shift.seed, outcome.rows, outcome.checks)
    note = "Stopped before the end: the checks are of what was measured until then."
    return conclude(result, args.json, not is_stopped, note)


if __name__ == "__main__":
    sys.exit(main())
