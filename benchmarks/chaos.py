"""Does anybody notice when workers die all the time? `python -m benchmarks.chaos --minutes 30`

    reference   each of a few prompts once, undisturbed                  the right answers
    chaos       S closed loops over the same prompts, as told by ever new tenants, so that no cache knows
                them and their KV is handed over each time; every E seconds a random worker is
                  killed       SIGKILL
                  stopped      SIGSTOP, and SIGCONT after some seconds, if it is still there
                  restarted    SIGTERM
    rest        the open requests end, then nobody may hold a block
    all along   the memory of every process of the instance      which one grew, and how fast (growth.py)

It starts a Baton of its own (`--split P:D` workers), or disturbs that of `--url` on this machine, which must serve
nobody else. A request that was refused before it began (503) is none that was accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.client import Call, Client, RunClock, Target, Trail, named_model
from benchmarks.growth import Growth, Life, Watcher, growth_checks, growth_table, growths_of
from benchmarks.load import run_async
from benchmarks.metrics import percentile
from benchmarks.result import Check, Result, Row, conclude, text_table
from benchmarks.server_metrics import Snapshot, scrape
from benchmarks.servers import Arm, GivenHost, Launch, OurHost, ServerError

NUM_STORIES = 4
NUM_CALLS = 3  # of a story: each prompt goes on from the one before
OUTPUT_TOKENS = (16, 96)
PROMPT_WORDS = (8, 100)  # more than the call before
STOP_S = (0.5, 15.0)
PATIENCE_S = 240.0  # with one request: several lost workers, each of whose replacements takes its time
REST_S = 60.0
SAMPLE_PERIOD_S = 2.0
MIN_COMPLETED = 0.995
# While the one prefill worker of the default split is away, decode workers read for themselves.
MIN_HANDOFFS_EACH = 0.25
# What a worker takes when it is first written, not when it starts: so little that all of it is in use within WARM_S.
SMALL = {"engine.kv_cache_bytes": 48 << 20, "transfer.slot_bytes": 1 << 20}
DEEDS = ("killed", "stopped", "restarted")
_WORDS = (
    "winter", "river", "clock", "bread", "moon", "train", "light", "house", "garden", "paper", "stone", "music",
)  # fmt: skip
_COUNTERS = {
    "handoffs": "baton_handoff_exposed_seconds_count",  # prompts whose KV prefill handed to decode
    "continuations": "baton_continuations_total",
    "migrations": "baton_migrations_total",
}
_HELD = ("running", "reserved", "in_handoff", "quarantined")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done to whom. Durations in seconds."""

    duration_s: float = 1800.0
    every_s: float = 20.0
    num_streams: int = 4
    seed: int = 0

    def stories(self) -> list[list[Call]]:
        """Prompts of many lengths, answers of many lengths, the same for the same seed."""
        rng = random.Random(self.seed)
        stories = []
        for number in range(NUM_STORIES):
            prompt, calls = f"Tell story {number} of:", []
            for turn in range(NUM_CALLS):
                prompt = " ".join([prompt, *rng.choices(_WORDS, k=rng.randint(*PROMPT_WORDS))])
                calls.append(Call(f"c{number}.{turn}", prompt, rng.randint(*OUTPUT_TOKENS)))
            stories.append(calls)
        return stories

    def told(self, rng: random.Random) -> Iterator[Call]:
        """Stories without end, each under a salt of its own: what was asked before is in no cache for it, and the
        answer is the same.
        """
        stories = self.stories()
        while True:
            salt = f"{rng.getrandbits(64):x}"
            for call in rng.choice(stories):
                yield replace(call, more={"cache_salt": salt})


@dataclass(slots=True)
class Seen:
    """All that came of a run."""

    expected: dict[str, str] = field(default_factory=dict)  # text by request id
    trails: list[Trail] = field(default_factory=list)
    deeds: Counter[str] = field(default_factory=Counter)
    lives: Sequence[Life] = ()
    held: int | None = (
        None  # blocks that somebody holds at the end; None: the audits did not come or not add up
    )
    counters: dict[str, float] = field(default_factory=dict)


class Chaos:
    """One run against one server."""

    def __init__(self, client: Client, plan: Plan) -> None:
        self._client = client
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._clock = RunClock()
        self._end_s = 0.0
        self._watcher = Watcher()
        self.seen = Seen()

    async def run(self) -> Seen:
        """Raises ValueError if a prompt is not answered before anything was disturbed."""
        seen = self.seen
        for call in chain.from_iterable(self._plan.stories()):
            trail = await self._ask(call)
            if trail.outcome != "ok":
                raise ValueError(f"expected an answer to {call.request_id} but got {trail.error}")
            seen.expected[call.request_id] = trail.text
        before = await scrape(self._client)
        self._end_s = self._clock.now_s() + self._plan.duration_s
        async with asyncio.TaskGroup() as group:
            sampling = group.create_task(self._sample())
            async with asyncio.TaskGroup() as load:
                for _ in range(self._plan.num_streams):
                    load.create_task(self._load(random.Random(self._rng.random())))
                load.create_task(self._disturb(load))
            seen.held = await self._rest()
            sampling.cancel()
        seen.counters = _grown(before, await scrape(self._client))
        seen.lives = self._watcher.lives
        return seen

    async def _ask(self, call: Call) -> Trail:
        trail = Trail(call, self._clock.now_s(), is_length_fixed=True)
        await self._client.stream(trail, self._clock)
        return trail

    async def _load(self, rng: random.Random) -> None:
        for call in self._plan.told(rng):
            if self._clock.now_s() >= self._end_s:
                break
            trail = await self._ask(call)
            self.seen.trails.append(trail)
            if trail.status != 200:
                await asyncio.sleep(1.0)  # as Retry-After says at least

    async def _disturb(self, load: asyncio.TaskGroup) -> None:
        while (left_s := self._end_s - self._clock.now_s()) > 0:
            await asyncio.sleep(min(left_s, self._plan.every_s))
            workers = await self._workers()
            if not workers or self._clock.now_s() >= self._end_s:
                continue
            victim, deed = self._rng.choice(workers), self._rng.choice(DEEDS)
            pid = int(victim["pid"])
            with contextlib.suppress(ProcessLookupError):
                if deed == "stopped":
                    os.kill(pid, signal.SIGSTOP)
                    # Not in the way of the next deed: several may be away at once.
                    load.create_task(_wake(pid, self._rng.uniform(*STOP_S)))
                else:
                    os.kill(pid, signal.SIGKILL if deed == "killed" else signal.SIGTERM)
                self.seen.deeds[f"{victim['role']} {deed}"] += 1

    async def _workers(self) -> list[dict[str, Any]]:
        """/debug/kv; a worker that is stopped does not answer, and is left out."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            status, content = await self._client.get("/debug/kv")
            if status == 200:
                workers: list[dict[str, Any]] = json.loads(content)["workers"]
                self._watcher.know(workers)
                return workers
        return []

    async def _sample(self) -> None:
        await self._workers()
        while True:
            self._watcher.look(self._clock.now_s())
            await asyncio.sleep(SAMPLE_PERIOD_S)

    async def _rest(self) -> int | None:
        """Blocks still held when everything has had the time that it may take; None without an audit."""
        deadline_s = self._clock.now_s() + REST_S
        held: int | None = None
        while self._clock.now_s() < deadline_s:
            if workers := await self._workers():
                if not all(_is_balanced(worker) for worker in workers):
                    return None
                held = sum(int(worker[state]) for worker in workers for state in _HELD)
                if held == 0:
                    break
            await asyncio.sleep(0.5)
        return held


def _is_balanced(worker: dict[str, Any]) -> bool:
    return sum(int(worker[state]) for state in ("free", "cached", *_HELD)) == int(worker["total"])


async def _wake(pid: int, after_s: float) -> None:
    """Also if the run is broken off: nobody else would."""
    try:
        await asyncio.sleep(after_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # Serve has replaced it
            os.kill(pid, signal.SIGCONT)


def _grown(before: Snapshot | None, after: Snapshot | None) -> dict[str, float]:
    """The coordinator's own counters; workers' begin anew with each life."""
    if before is None or after is None:
        return {}
    return {name: after.sums.get(key, 0.0) - before.sums.get(key, 0.0) for name, key in _COUNTERS.items()}


# --- what it means; pure ----------------------------------------------------------------------------------------------


def checks_of(seen: Seen, growths: Sequence[Growth]) -> list[Check]:
    accepted = [trail for trail in seen.trails if trail.status == 200]
    completed = [trail for trail in accepted if trail.outcome == "ok"]
    same = [trail for trail in completed if trail.text == seen.expected[trail.call.request_id]]
    ended_once = [trail for trail in accepted if trail.num_ends == 1]
    return [
        Check("completed_share", _share(completed, accepted), ">=", MIN_COMPLETED),
        Check("same_outputs", _share(same, completed), "==", 1.0),
        Check("one_end", _share(ended_once, accepted), "==", 1.0),
        Check("audit_blocks", seen.held, "==", 0),
        Check(
            "handoffs_per_request", _each(seen.counters.get("handoffs"), completed), ">=", MIN_HANDOFFS_EACH
        ),
        *growth_checks(growths),
    ]


def _share(part: Sequence[Trail], whole: Sequence[Trail]) -> float | None:
    return len(part) / len(whole) if whole else None


def _each(count: float | None, trails: Sequence[Trail]) -> float | None:
    return count / len(trails) if count is not None and trails else None


def summary(plan: Plan, seen: Seen) -> Row:
    gaps_ms = [
        1000.0 * max(late - early for early, late in pairwise(times_s))
        for trail in seen.trails
        if trail.outcome == "ok" and len(times_s := trail.record().chunk_times_s) > 1
    ]
    return {
        "minutes": plan.duration_s / 60.0,
        "num_streams": plan.num_streams,
        "requests": len(seen.trails),
        "refused": sum(trail.status != 200 for trail in seen.trails),
        **{f"deed: {deed}": count for deed, count in sorted(seen.deeds.items())},
        **seen.counters,
        "longest_gap_p50_ms": percentile(gaps_ms, 50),
        "longest_gap_max_ms": max(gaps_ms, default=None),
    }


def failures(seen: Seen) -> list[Row]:
    """One row for each request that is not as it should be."""
    rows: list[Row] = []
    for trail in seen.trails:
        is_same = trail.text == seen.expected[trail.call.request_id]
        if trail.status == 200 and (trail.outcome != "ok" or not is_same or trail.num_ends != 1):
            row = {"call": trail.call.request_id, "at_s": trail.scheduled_s, "end_s": trail.end_s}
            row |= {"outcome": trail.outcome, "error": trail.error, "ends": trail.num_ends}
            rows.append(row | {"text": trail.text, "expected": seen.expected[trail.call.request_id]})
    return rows


async def measure(target: Target, plan: Plan) -> Seen:
    """Raises ValueError if it is no Baton on this machine, aiohttp.ClientError or TimeoutError if nobody answers."""
    target = replace(target, model=await named_model(target))
    async with Client(target) as client:
        return await Chaos(client, plan).run()


def main(argv: Sequence[str] | None = None) -> int:
    """0: all checks hold; 1: one failed; 2: could not run; 130: stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--url", help="of a Baton on this machine; default: one of its own")
    parser.add_argument("--split", default="1:2", help="P:D workers of its own Baton (default 1:2)")
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (default 30)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two deeds (default 20)")
    parser.add_argument("--streams", type=int, default=4, help="requests at once (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args(argv)
    plan = Plan(60.0 * args.minutes, args.every, args.streams, args.seed)
    try:
        ours = Launch(settings=SMALL)
        host = GivenHost(args.url) if args.url else OurHost(ours, lambda line: print(line, file=sys.stderr))
        with host.open(None if args.url else Arm.of("disaggregated", args.split)) as url:
            seen = run_async(measure(Target(url, timeout_s=PATIENCE_S), plan))
    except (ValueError, aiohttp.ClientError, OSError, TimeoutError, ServerError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    growths = growths_of(seen.lives)
    checks = checks_of(seen, growths)
    rows = [summary(plan, seen), *(growth.row() for growth in growths), *failures(seen)]
    print(text_table(list(rows[0].items()), ("", "value")) + "\n")
    print(growth_table(growths) + "\n")
    for failure in failures(seen):
        print(failure)
    print("\n".join(map(str, checks)))
    return conclude(Result("chaos", plan.seed, rows, checks), args.json)


if __name__ == "__main__":
    sys.exit(main())
