"""What does the death of a worker cost its streams? `python -m benchmarks.failover URL --kill decode`

    round 1  S streams at once, undisturbed                       the right answers, and the usual gaps
    round 2  the same, and once all of them have a quarter of their tokens, SIGKILL to a worker of the role
             (`--stop`: SIGSTOP, and SIGCONT at the end)           each pause is the longest gap of one stream

Round 2 must give the same answers. Workers' process ids come from /debug/kv, so this runs on the server's own machine,
on a server that serves nobody else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import aiohttp

from benchmarks.client import Call, Client, RunClock, Target, Trail, named_model
from benchmarks.load import run_async
from benchmarks.metrics import percentile
from benchmarks.result import Check, Result, Row, conclude, text_table

ROLES = ("decode", "prefill")
_READY_TIMEOUT_S = 180.0
_SUBJECTS = (
    "a lighthouse",
    "the first train",
    "a lost key",
    "winter",
    "two rivers",
    "an old clock",
    "bread",
    "the moon",
)


@dataclass(frozen=True, slots=True)
class Round:
    """What came of one round. `ready_s`: until /ready said yes again after the signal; None: nobody was signalled."""

    trails: list[Trail]
    ready_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """`roles`: one worker of each gets the signal at the same moment."""

    num_streams: int = 8
    num_tokens: int = 96
    roles: tuple[str, ...] = ("decode",)
    number: signal.Signals = signal.SIGKILL

    def calls(self) -> list[Call]:
        return [
            Call(f"s{i}", f"Write story number {i} about {_SUBJECTS[i % len(_SUBJECTS)]}.", self.num_tokens)
            for i in range(self.num_streams)
        ]


async def measure(target: Target, plan: Plan) -> tuple[Row, list[Check]]:
    """Raises ValueError if there is no such worker, aiohttp.ClientError or TimeoutError if nobody answers."""
    target = replace(target, model=await named_model(target))
    async with Client(target) as client:
        usual = await _round(client, plan, ())
        return report(plan, usual, await _round(client, plan, plan.roles))


async def _round(client: Client, plan: Plan, roles: tuple[str, ...]) -> Round:
    clock = RunClock()
    trails = [Trail(call, 0.0, is_length_fixed=True) for call in plan.calls()]
    pids = [await _pid_of(client, role) for role in roles]
    ready_s = None
    try:
        async with asyncio.TaskGroup() as group:
            for trail in trails:
                group.create_task(client.stream(trail, clock))
            if pids:
                await _all_have(trails, plan.num_tokens // 4)
                for pid in pids:
                    os.kill(pid, plan.number)
                ready_s = await _ready_again(client, clock)
    finally:
        if plan.number == signal.SIGSTOP:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # Serve has replaced it
                    os.kill(pid, signal.SIGCONT)
    return Round(trails, ready_s)


async def _all_have(trails: Sequence[Trail], num_chunks: int) -> None:
    while not all(len(trail.texts) >= num_chunks or trail.end_s is not None for trail in trails):
        await asyncio.sleep(0.01)


async def _ready_again(client: Client, clock: RunClock) -> float:
    """Seconds until a worker was missed and /ready says yes all the same; workers are missed within seconds."""
    begun_s = clock.now_s()
    has_missed = False
    async with asyncio.timeout(_READY_TIMEOUT_S):
        while True:
            status, _ = await client.get("/ready")
            has_missed |= status != 200
            elapsed_s = clock.now_s() - begun_s
            if status == 200 and (has_missed or elapsed_s > 10.0):
                return elapsed_s
            await asyncio.sleep(0.1)


async def _pid_of(client: Client, role: str) -> int:
    status, content = await client.get("/debug/kv")
    workers = json.loads(content)["workers"] if status == 200 else []
    for worker in workers:
        if worker["role"] == role:
            return int(worker["pid"])
    raise ValueError(f"/debug/kv: expected a {role} worker but got HTTP {status} with {len(workers)} workers")


def report(plan: Plan, usual: Round, broken: Round) -> tuple[Row, list[Check]]:
    """The numbers and the verdicts. Pure."""
    pauses_ms = _longest_gaps_ms(broken.trails)
    num_failed = sum(trail.outcome != "ok" for trail in usual.trails + broken.trails)
    texts = [trail.text for trail in usual.trails]
    num_changed = sum(text != trail.text for text, trail in zip(texts, broken.trails, strict=True))
    row: Row = {
        "signal": f"{plan.number.name} to {' and '.join(plan.roles)}",
        "num_streams": plan.num_streams,
        "output_tokens": plan.num_tokens,
        "usual_gap_max_ms": max(_longest_gaps_ms(usual.trails), default=None),
        "pause_p50_ms": percentile(pauses_ms, 50),
        "pause_max_ms": max(pauses_ms, default=None),
        "ready_again_s": broken.ready_s,
    }
    return row, [
        Check("failed_requests", num_failed, "==", 0),
        Check("changed_answers", num_changed, "==", 0),
    ]


def _longest_gaps_ms(trails: Sequence[Trail]) -> list[float]:
    found = []
    for trail in trails:
        times_s = trail.record().chunk_times_s
        gaps_s = [late - early for early, late in pairwise(times_s)]
        if gaps_s:
            found.append(1000.0 * max(gaps_s))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0: all checks hold; 1: one failed; 2: could not run; 130: stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.failover", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("url", help="of a Baton on this machine")
    parser.add_argument("--kill", choices=(*ROLES, "both"), default="decode", help="whose worker")
    parser.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args(argv)
    roles = ROLES if args.kill == "both" else (args.kill,)
    plan = Plan(args.streams, args.tokens, roles, signal.SIGSTOP if args.stop else signal.SIGKILL)
    try:
        row, checks = run_async(measure(Target(args.url), plan))
    except (ValueError, aiohttp.ClientError, OSError, TimeoutError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(text_table(list(row.items()), ("", "value")) + "\n")
    print("\n".join(map(str, checks)))
    return conclude(Result("failover", 0, [row], checks), args.json, True, "")


if __name__ == "__main__":
    sys.exit(main())
