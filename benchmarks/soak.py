"""Handoffs under load for a long time, with random cancels and kills: nothing grows, nothing stays behind.

    python -m benchmarks.soak [--seconds N] [--json FILE] [--seed N]

    this process: the coordinator's part ──► p0, d0: live through all of it, and are measured
                                         └─► p1, d1: killed (or stopped for a while) at random, and started again

Each request is a prompt with a prefix that others share: reserved at a decode worker, computed and handed over by a
prefill worker, sometimes cancelled at a random moment at either side. At the end everything must be back, and
resident memory and open files of p0 and d0 must not have grown with the number of requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import num_files, resident_kib
from benchmarks.result import Check, Result, conclude, text_table
from benchmarks.soak_worker import HOST, LAYOUT, NUM_BLOCKS, SECRET, run_worker
from contracts.blocks import prompt_hash
from contracts.messages import WorkerInfo
from contracts.ticket import Ticket, sign

NUM_AT_ONCE = 6
SHARE_CANCELLED = 0.2
KILL_PERIOD_S = 4.0
STOP_S = 0.5
SAMPLE_PERIOD_S = 0.5
PATIENCE_S = 30.0  # with one request: all its waits inside are shorter
START_S = 120.0  # the first one imports torch
PROMPT_TOKENS = (1, 400)
NUM_PREFIXES = 4
WARM_SHARE = 0.4  # of the run: caches, allocators and tombstones fill first
MOST_KIB_PER_REQUEST = 1.0
KIB_OF_NOISE = 4096.0  # what an allocator may take or give back at any time
MOST_MORE_FILES = 8  # connections that are being made or ended when it is counted


# Workers are forked from a process that has imported everything: a new life begins within milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.soak_worker"])


class Lost(Exception):
    """The worker was killed while something was expected of it."""


class Worker:
    """Our end of one worker process, in this life of it."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation = name, incarnation
        self._conn, theirs = _context.Pipe()
        self._process = _context.Process(target=run_worker, args=(theirs, name, incarnation), daemon=True)
        self._process.start()
        theirs.close()
        self._awaited: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self.peers: tuple[str, ...] = ()
        self.is_lost = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def start(self) -> None:
        """Until it listens."""
        asyncio.get_running_loop().add_reader(self._conn.fileno(), self._read)
        async with asyncio.timeout(START_S):
            self._port = await self.expect("started", "")

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(
            self.name, "decode", self.pid, self.incarnation, HOST, 0, self._port, "soak", LAYOUT, NUM_BLOCKS, 8, 8192
        )  # fmt: skip

    def tell(self, *command: Any) -> None:
        """Raises Lost."""
        if self.is_lost:
            raise Lost(self.name)
        try:
            self._conn.send(command)
        except OSError as error:
            raise Lost(self.name) from error

    def expect(self, event: str, key: str) -> asyncio.Future[Any]:
        """What will be told about `key`; Lost if it dies before."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.is_lost:
            future.set_exception(Lost(self.name))
        self._awaited[event, key] = future
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    async def wait(self, event: str, key: str) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self.expect(event, key)

    def kill(self) -> None:
        self._process.kill()

    async def end(self) -> None:
        with contextlib.suppress(Lost):
            self.tell("end")
        await asyncio.to_thread(self._process.join, 10.0)
        self._process.kill()
        self._lose()

    def _read(self) -> None:
        try:
            event, *rest = self._conn.recv()
        except (EOFError, OSError):
            self._lose()
            return
        if event == "peers":
            self.peers = rest[0]
            return
        key, value = ("", *rest) if event in ("started", "audit") else rest
        future = self._awaited.pop((event, key), None)
        if future is not None and not future.done():
            future.set_result(value)

    def _lose(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        asyncio.get_running_loop().remove_reader(self._conn.fileno())
        self._conn.close()
        for future in self._awaited.values():
            if not future.done():
                future.set_exception(Lost(self.name))


class Soak:
    """The run and what came of it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._workers: dict[str, Worker] = {}
        self._numbers = itertools.count(1)
        self._lives = itertools.count(1)
        self._end_s = 0.0
        self.ends: Counter[str] = Counter()  # how requests ended at decode
        self.num_kills = self.num_overdue = 0
        self.samples: list[tuple[str, int, int, int]] = []  # worker, requests so far, KiB, files
        self.left: dict[str, int] = {}

    async def run(self, seconds: float) -> None:
        await asyncio.gather(*(self._start(name) for name in ("p0", "p1", "d0", "d1")))
        self._introduce()
        self._end_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(self._load())
            group.create_task(self._trouble())
            group.create_task(self._sample())
        await self._look()
        await asyncio.gather(*(worker.end() for worker in self._workers.values()))

    def kill_all(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    # --- one request --------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        while time.monotonic() < self._end_s:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    self.ends[await self._request()] += 1
            except Lost:
                self.ends["killed"] += 1
            except TimeoutError:
                self.num_overdue += 1
            await asyncio.sleep(0.001)

    async def _request(self) -> str:
        """How it ended at decode. Raises Lost if one of its workers was killed."""
        source, target = self._choose()
        if target.name not in source.peers:
            await asyncio.sleep(0.02)
            return "no path"
        handoff_id = f"h{next(self._numbers)}"
        tokens = self._prompt()
        target.tell("expect", handoff_id, tokens)
        start: int | None = await target.expect("granted", handoff_id)
        if start is None:
            await asyncio.sleep(0.02)
            return "full"
        ticket = Ticket(
            handoff_id, handoff_id, source.name, source.incarnation, target.name, target.incarnation,
            len(tokens), prompt_hash(tokens),
        )  # fmt: skip
        arrived, sent = target.expect("arrived", handoff_id), source.expect("sent", handoff_id)
        with contextlib.suppress(Lost):  # the lease ends it
            source.tell("open", sign(ticket, SECRET), start, tokens)
        if self._random.random() < SHARE_CANCELLED:
            await asyncio.sleep(self._random.uniform(0.0, 0.02))
            with contextlib.suppress(Lost):
                self._random.choice((source, target)).tell("cancel", handoff_id)
        code: str = await arrived
        with contextlib.suppress(Lost):
            await sent
        return code

    def _choose(self) -> tuple[Worker, Worker]:
        workers = self._workers
        return workers[self._random.choice(("p0", "p1"))], workers[self._random.choice(("d0", "d1"))]

    def _prompt(self) -> list[int]:
        """A shared prefix of some length, then tokens of its own."""
        length = self._random.randint(*PROMPT_TOKENS)
        prefix = 1000 * (1 + self._random.randrange(NUM_PREFIXES))
        num_shared = self._random.randint(0, length)
        shared = [prefix + position for position in range(num_shared)]
        return shared + [self._random.randint(1, 900) for _ in range(length - num_shared)]

    # --- what happens meanwhile ---------------------------------------------------------------------------------------

    async def _trouble(self) -> None:
        while (left_s := self._end_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, KILL_PERIOD_S * self._random.uniform(0.5, 1.5)))
            if time.monotonic() > self._end_s:
                return
            victim = self._workers[self._random.choice(("p1", "d1"))]
            if self._random.random() < 0.3:
                os.kill(victim.pid, signal.SIGSTOP)
                await asyncio.sleep(STOP_S)
                os.kill(victim.pid, signal.SIGCONT)
                continue
            victim.kill()
            self.num_kills += 1
            await self._start(victim.name)
            self._introduce()

    async def _sample(self) -> None:
        while time.monotonic() < self._end_s:
            for name in ("p0", "d0"):
                pid = self._workers[name].pid
                self.samples.append((name, self.ends.total(), resident_kib(pid), num_files(pid)))
            await asyncio.sleep(SAMPLE_PERIOD_S)

    async def _start(self, name: str) -> None:
        worker = Worker(name, next(self._lives))
        await worker.start()
        self._workers[name] = worker

    def _introduce(self) -> None:
        """As a coordinator does when membership changes."""
        decodes = [self._workers[name].info for name in ("d0", "d1")]
        for name in ("p0", "p1"):
            with contextlib.suppress(Lost):
                self._workers[name].tell("peers", decodes)

    async def _look(self) -> None:
        """The audit, when everything has had the time that it may take; what is left is lost."""
        deadline_s = time.monotonic() + 15.0
        while True:
            self.left = {}
            for name, worker in self._workers.items():
                worker.tell("audit")
                for what, count in (await worker.wait("audit", "")).items():
                    self.left[f"{name} {what}"] = count
            if not any(self.left.values()) or time.monotonic() > deadline_s:
                return
            await asyncio.sleep(0.1)


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """Slope of the line of least squares through (x, y); 0 for fewer than two points."""
    if len({x for x, _ in samples}) < 2:
        return 0.0
    return statistics.linear_regression([x for x, _ in samples], [y for _, y in samples]).slope


def warm(samples: Sequence[Any]) -> Sequence[Any]:
    return samples[int(WARM_SHARE * len(samples)) :]


def checks_of(soak: Soak) -> list[Check]:
    slopes: list[float] = []
    more_files: list[int] = []
    for name in ("p0", "d0"):
        mine = warm([sample for sample in soak.samples if sample[0] == name])
        if len(mine) < 4:
            continue
        num_requests = max(mine[-1][1] - mine[0][1], 1)
        grown_kib = growth([(x, y) for _, x, y, _ in mine]) * num_requests
        slopes.append(max(grown_kib - KIB_OF_NOISE, 0.0) / num_requests)
        half = len(mine) // 2
        before, after = (
            statistics.median(files for *_, files in part) for part in (mine[:half], mine[half:])
        )
        more_files.append(int(after - before))
    return [
        Check("rss_slope", max(slopes, default=None), "<=", MOST_KIB_PER_REQUEST),
        Check("fds", max(more_files, default=None), "<=", MOST_MORE_FILES),
        Check("audit_zero", sum(soak.left.values()) if soak.left else None, "==", 0),
        Check("overdue", soak.num_overdue, "==", 0),
        Check("wrong", soak.ends["wrong"], "==", 0),
        Check("handed_over", soak.ends["ok"], ">=", 1),
    ]


async def measure(seconds: float, seed: int) -> Soak:
    soak = Soak(seed)
    try:
        await soak.run(seconds)
    finally:
        soak.kill_all()
    return soak


def main(argv: Sequence[str] | None = None) -> int:
    """0: all checks passed; 1: one failed; 2: it cannot be measured here."""
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1200.0, help="of load (default 1200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args(argv)
    if not Path("/proc/self/statm").exists():
        print("cannot measure: expected a system with /proc but there is none", file=sys.stderr)
        return 2
    soak = asyncio.run(measure(arguments.seconds, arguments.seed))
    rows: list[dict[str, Any]] = [{"end": end, "requests": count} for end, count in soak.ends.most_common()]
    rows.append({"end": "worker killed", "requests": soak.num_kills})
    rows += [
        {"worker": w, "requests": n, "rss_kib": kib, "files": files} for w, n, kib, files in soak.samples
    ]
    rows.append({"left": soak.left})
    result = Result("soak", arguments.seed, rows, checks_of(soak))
    print(text_table([[end, count] for end, count in soak.ends.most_common()], ("end", "requests")))
    print(f"{soak.num_kills} workers killed; left at the end: {sum(soak.left.values())}")
    for check in result.checks:
        print(check)
    return conclude(result, arguments.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
