"""What does the surface cost, beside the engine? `python -m benchmarks.surface URL`

    first byte   N requests, one after the other     client's time to first token less the server's own account of it
    ingress      S streams at once                   processor time of coordinator and proxy per chunk while all of them
                                                     run, less what both take when nobody asks
    grammar      8 streams, R times without and with a JSON Schema, in turns     mean gap with, over mean gap without

The first two are of an idle server's own machine, with one ingress replica: the coordinator tells its processor time in
`/metrics`, and HAProxy's is read from /proc, of all processes of that name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import processes, server_metrics
from benchmarks.client import Call, Client, RunClock, Target, Trail, named_model
from benchmarks.load import quiet_gc, run_async
from benchmarks.records import Record
from benchmarks.result import Check, Result, Row, conclude, text_table

MAX_FIRST_BYTE_MS = 10.0
MAX_CHUNK_US = 150.0
MAX_GRAMMAR_RATIO = 1.05
NUM_GRAMMAR_STREAMS = 8
_CPU = "baton_coordinator_cpu_seconds_total"
_PROXY = "haproxy"
_PROMPT = "Tell a long story about story number {}."
# Nothing that a model writes in a few hundred tokens satisfies it, so no answer ends early.
_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 64,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "count": {"type": "integer"},
            "is_new": {"type": "boolean"},
        },
        "required": ["name", "count", "is_new"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Plan:
    num_requests: int = 30
    num_streams: int = 32
    num_tokens: int = 96
    num_rounds: int = 5
    idle_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Spent:
    """Processor seconds until some moment."""

    at_s: float
    coordinator_s: float
    proxy_s: float

    def since(self, before: Spent) -> Spent:
        return Spent(
            self.at_s - before.at_s, self.coordinator_s - before.coordinator_s, self.proxy_s - before.proxy_s
        )


async def measure(target: Target, plan: Plan) -> tuple[list[Row], list[Check]]:
    """Raises ValueError if the server does not tell what is needed, aiohttp.ClientError or TimeoutError if nobody
    answers.
    """
    target = replace(target, model=await named_model(target))
    async with Client(target) as client:
        await _streams(client, 2, 8)  # connections, caches, the grammar's compiler
        await _streams(client, 1, 8, {"structured_outputs": {"json": _SCHEMA}})
        first = [(await _streams(client, 1, 2, number=n))[0] for n in range(plan.num_requests)]
        idle, busy, records = await _ingress(client, plan)
        gaps_s = await _grammar(client, plan)
    rows = [first_byte(first), ingress(idle, busy, records), grammar(gaps_s)]
    return rows, checks(rows)


async def _streams(
    client: Client, num_streams: int, num_tokens: int, more: Mapping[str, Any] | None = None, number: int = 0
) -> list[Record]:
    """All at once. Raises ValueError for one that failed: nothing is measured of what did not work."""
    clock = RunClock()
    trails = _trails(clock, num_streams, num_tokens, more, number)
    async with asyncio.TaskGroup() as group:
        for trail in trails:
            group.create_task(client.stream(trail, clock))
    return _good(trails)


def _trails(
    clock: RunClock, num_streams: int, num_tokens: int, more: Mapping[str, Any] | None = None, number: int = 0
) -> list[Trail]:
    numbers = range(number, number + num_streams)
    calls = [Call(f"s{n}", _PROMPT.format(n), num_tokens, more=more or {}) for n in numbers]
    return [Trail(call, clock.now_s(), is_length_fixed=True) for call in calls]


def _good(trails: Sequence[Trail]) -> list[Record]:
    records = [trail.record() for trail in trails]
    for record in records:
        if not record.is_good:
            told = record.error or f"{record.num_output_tokens} of them"
            raise ValueError(f"expected {record.asked_output_tokens} tokens but got {told}")
    return records


async def _ingress(client: Client, plan: Plan) -> tuple[Spent, Spent, list[Record]]:
    """Of an idle time, and of streams while all of them run: chunks before and after are left out of the records."""
    clock = RunClock()
    begun = await _spent(client, clock)
    await asyncio.sleep(plan.idle_s)
    rested = await _spent(client, clock)
    trails = _trails(clock, plan.num_streams, plan.num_tokens)
    async with asyncio.TaskGroup() as group:
        for trail in trails:
            group.create_task(client.stream(trail, clock))
        while not all(trail.texts or trail.end_s is not None for trail in trails):
            await asyncio.sleep(0.01)
        streaming = await _spent(client, clock)
        while not any(trail.end_s is not None for trail in trails):
            await asyncio.sleep(0.01)
        ended = await _spent(client, clock)
    kept = [_within(record, streaming.at_s, ended.at_s) for record in _good(trails)]
    return rested.since(begun), ended.since(streaming), kept


def _within(record: Record, from_s: float, to_s: float) -> Record:
    chunks = list(zip(record.chunk_times_s, record.chunk_tokens, strict=True))
    kept = [chunk for chunk in chunks if from_s < chunk[0] <= to_s]
    times_s, tokens = zip(*kept, strict=True) if kept else ((), ())
    return replace(record, chunk_times_s=times_s, chunk_tokens=tokens)


async def _spent(client: Client, clock: RunClock) -> Spent:
    told = await server_metrics.scrape(client)
    if told is None or _CPU not in told.sums:
        raise ValueError(f"/metrics: expected {_CPU} but it is not there")
    proxy_s = 0.0
    for pid in processes.all_processes():
        with contextlib.suppress(OSError):  # gone meanwhile
            if processes.name_of(pid) == _PROXY:
                proxy_s += processes.cpu_seconds(pid)
    return Spent(clock.now_s(), told.sums[_CPU], proxy_s)


async def _grammar(client: Client, plan: Plan) -> list[tuple[float, float]]:
    """(mean gap without, mean gap with) of each round."""
    found = []
    for _ in range(plan.num_rounds):
        gaps_s = []
        for more in ({}, {"structured_outputs": {"json": _SCHEMA}}):
            gaps_s.append(mean_gap_s(await _streams(client, NUM_GRAMMAR_STREAMS, plan.num_tokens, more)))
        found.append((gaps_s[0], gaps_s[1]))
    return found


def mean_gap_s(records: Sequence[Record]) -> float:
    """Between two tokens of one answer."""
    times = [record.chunk_times_s for record in records]
    spans = [
        (each[-1] - each[0], record.num_output_tokens - 1)
        for each, record in zip(times, records, strict=True)
    ]
    return sum(span_s for span_s, _ in spans) / sum(count for _, count in spans)


def first_byte(records: Sequence[Record]) -> Row:
    """Raises ValueError if the server does not tell its stages."""
    found_ms = []
    for record in records:
        if record.stages is None or record.sent_s is None:
            raise ValueError("usage.timings_ms: expected the server's own account of a request")
        own_s = record.stages.get("queue", 0.0) + record.stages.get("prefill", 0.0)
        found_ms.append(1000.0 * (record.chunk_times_s[0] - record.sent_s - own_s))
    return {
        "what": "first byte",
        "num_requests": len(records),
        "first_byte_overhead_p50_ms": statistics.median(found_ms),
        "first_byte_overhead_max_ms": max(found_ms),
    }


def ingress(idle: Spent, busy: Spent, records: Sequence[Record]) -> Row:
    """Per chunk with text, as the client got them: the server merges what a slow reader has not taken."""
    num_chunks = sum(len(record.chunk_times_s) for record in records)
    share = busy.at_s / idle.at_s
    own_us = 1e6 * (busy.coordinator_s - share * idle.coordinator_s) / num_chunks
    proxy_us = 1e6 * (busy.proxy_s - share * idle.proxy_s) / num_chunks
    return {
        "what": "ingress",
        "num_streams": len(records),
        "num_chunks": num_chunks,
        "num_tokens": sum(sum(record.chunk_tokens) for record in records),
        "chunks_per_s": num_chunks / busy.at_s,
        "idle_coordinator_share": idle.coordinator_s / idle.at_s,
        "coordinator_us_per_chunk": own_us,
        "proxy_us_per_chunk": proxy_us,
        "ingress_us_per_chunk": own_us + proxy_us,
    }


def grammar(gaps_s: Sequence[tuple[float, float]]) -> Row:
    """A ratio is of one round: what changes slowly on the machine cancels."""
    ratios = [with_s / without_s for without_s, with_s in gaps_s]
    return {
        "what": "grammar",
        "num_streams": NUM_GRAMMAR_STREAMS,
        "num_rounds": len(ratios),
        "itl_mean_ms": 1000.0 * statistics.mean(without_s for without_s, _ in gaps_s),
        "grammar_itl_ratio": statistics.median(ratios),
        "grammar_itl_ratio_min": min(ratios),
        "grammar_itl_ratio_max": max(ratios),
    }


def checks(rows: Sequence[Row]) -> list[Check]:
    first, cost, shape = rows
    return [
        Check("first_byte_overhead_p50_ms", first["first_byte_overhead_p50_ms"], "<=", MAX_FIRST_BYTE_MS),
        Check("ingress_us_per_chunk", cost["ingress_us_per_chunk"], "<=", MAX_CHUNK_US),
        Check("grammar_itl_ratio", shape["grammar_itl_ratio"], "<=", MAX_GRAMMAR_RATIO),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """0: all checks hold; 1: one failed; 2: could not run; 130: stopped by Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.surface", description=(__doc__ or "").split("\n\n")[0]
    )
    plain = Plan()
    parser.add_argument("url", help="of a Baton on this machine")
    parser.add_argument("--requests", type=int, default=plain.num_requests, help="for the first byte")
    parser.add_argument("--streams", type=int, default=plain.num_streams, help="at once, for the ingress")
    parser.add_argument("--tokens", type=int, default=plain.num_tokens, help="of each stream")
    parser.add_argument("--rounds", type=int, default=plain.num_rounds, help="without and with a grammar")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args(argv)
    plan = Plan(args.requests, args.streams, args.tokens, args.rounds)
    try:
        with quiet_gc():
            rows, verdicts = run_async(measure(Target(args.url), plan))
    except (ValueError, aiohttp.ClientError, OSError, TimeoutError) as error:
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for row in rows:
        print(text_table(list(row.items())[1:], (str(row["what"]), "value")) + "\n")
    print("\n".join(map(str, verdicts)))
    return conclude(Result("surface", 0, rows, verdicts), args.json, True, "")


if __name__ == "__main__":
    sys.exit(main())
