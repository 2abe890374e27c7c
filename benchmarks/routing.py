"""What one placement costs: `python -m benchmarks.routing [--quick] [--json PATH]`.

One core, one process: requests come at `--rate`; each looks up its prompt in an index of `--blocks` cached blocks, is
placed among `--workers` workers and counted. `place_*_us` is this thread's CPU time for all of that; `latency_*_us` is
wall time from the request's scheduled arrival to its placement, so that a placer that falls behind shows.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.metrics import percentile
from benchmarks.result import Check, Result, conclude, text_table
from benchmarks.sim.devices import DEVICES
from policy.chunks import Cadence
from policy.fleet import FleetView, WorkerState
from policy.link_model import LinkModel
from policy.place import Job, Placer, PlaceRules, dispatch, released
from policy.prefix import PrefixIndex

MAX_PLACE_P99_US = 200.0
MAX_BYTES_PER_BLOCK = 200.0
CHAIN = 64  # blocks of one conversation
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Load:
    num_workers: int = 1000
    num_blocks: int = 1_000_000
    num_requests: int = 50_000
    rate: float = 10_000.0
    seed: int = 0


def fill_index(load: Load, rng: random.Random) -> tuple[PrefixIndex, list[list[int]]]:
    """Chains of CHAIN blocks, each at one worker; every eighth at a few; and some of the chains, to ask for."""
    index = PrefixIndex(max_blocks=load.num_blocks * 2)
    asked = []
    for number in range(load.num_blocks // CHAIN):
        keys = [rng.getrandbits(64) for _ in range(CHAIN)]
        for _ in range(1 if number % 8 else 3):
            index.add(f"w{rng.randrange(load.num_workers)}", keys)
        if number % max(1, load.num_blocks // CHAIN // 1000) == 0:
            asked.append(keys)
    return index, asked


def bytes_per_block(load: Load) -> float:
    """Traced allocations of a filled index over its blocks."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index, asked = fill_index(load, random.Random(load.seed))
        del asked
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / len(index)


def make_fleet(load: Load, rng: random.Random) -> FleetView:
    device = DEVICES["h200-8b"]
    workers = []
    for number in range(load.num_workers):
        streams = rng.randrange(20, 120)
        worker = WorkerState(
            f"w{number}",
            device.step_model(rng.uniform(-0.1, 0.1)),
            "prefill" if number % 3 == 0 else "decode",
            device.kv_tokens,
            512,
        )
        if worker.role == "decode":
            worker.running_streams, worker.running_context = streams, streams * 1000
            worker.used_tokens, worker.gap_s = streams * 1200, 0.02
        workers.append(worker)
    return FleetView(workers)


def measure(load: Load) -> tuple[list[float], list[float]]:
    """(latencies, work) of each placement, in microseconds."""
    rng = random.Random(load.seed)
    index, asked = fill_index(load, rng)
    fleet = make_fleet(load, rng)
    placer = Placer(PlaceRules(), LinkModel(0.001, 45e9), rng)
    cadence = Cadence(0.02)
    lived: list[tuple[WorkerState, Job]] = []
    latencies, work = [], []
    gc.collect()
    gc.freeze()  # as Serve does in a replica that has started: nothing here is garbage
    gc.disable()
    try:
        began_s = time.perf_counter()
        for number in range(load.num_requests):
            due_s = began_s + number / load.rate
            while (now_s := time.perf_counter()) < due_s:
                pass
            began_ns = time.thread_time_ns()
            keys = asked[number % len(asked)]
            longest = index.longest(keys)
            held = {worker: blocks * BLOCK_TOKENS for worker, blocks in longest.items()}
            job = Job(str(number), CHAIN * BLOCK_TOKENS + 100, 200, now_s + 1.0, cadence, held)
            chosen = placer.place(job, fleet, now_s).chosen
            if chosen is not None:
                dispatch(chosen, job, fleet, now_s)
                lived.append((fleet.workers[chosen.decode_id], job))
            work.append((time.thread_time_ns() - began_ns) / 1e3)
            latencies.append((time.perf_counter() - due_s) * 1e6)
            if len(lived) > load.num_workers * 4:
                worker, old = lived.pop(0)
                released(worker, old, cadence.tpot_s, was_promised=True)
    finally:
        gc.enable()
        gc.unfreeze()
    return latencies, work


def run(load: Load) -> Result:
    latencies, work = measure(load)
    size = bytes_per_block(load)
    row = {
        "workers": load.num_workers,
        "blocks": load.num_blocks,
        "offered_per_s": load.rate,
        "place_p50_us": percentile(work, 50),
        "place_p99_us": percentile(work, 99),
        "latency_p50_us": percentile(latencies, 50),
        "latency_p99_us": percentile(latencies, 99),
        "served_per_s": 1e6 * len(work) / sum(work),
        "bytes_per_block": size,
    }
    checks = [
        Check("place_p99_us", row["place_p99_us"], "<=", MAX_PLACE_P99_US),
        Check("bytes_per_block", size, "<=", MAX_BYTES_PER_BLOCK),
    ]
    return Result("routing", load.seed, [row], checks)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--rate", type=float, default=10_000.0, help="requests offered per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="10,000 requests")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    num_requests = 10_000 if args.quick else args.requests
    result = run(Load(args.workers, args.blocks, num_requests, args.rate, args.seed))
    print(text_table(result.rows[0].items(), ("what", "value")))
    for check in result.checks:
        print(check)
    return conclude(result, args.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
