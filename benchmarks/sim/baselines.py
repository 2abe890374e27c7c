"""What Baton is measured against, with the same devices, memory and links.

    RoundRobin     colocated, fixed token budget per step (Sarathi-Serve), workers in turn
    CacheAware     colocated, the same step, least (new prompt tokens incl. queue) · (streams + 1): LMetric, 2603.15202
    StaticSplit    fixed readers and writers; least queued prompt tokens after prefix hits, then least streams

All serve first come, first served and refuse nobody, as the public systems do by default.
"""

from __future__ import annotations

from benchmarks.sim.cluster import Cluster
from benchmarks.sim.requests import SimRequest
from benchmarks.sim.worker import Reading, SimWorker
from policy.chunks import StepPlan
from policy.step_model import Work


class BudgetChunker:
    """Decodes first, prompts in order with what the budget leaves."""

    def __init__(self, budget: int) -> None:
        self.gap_s = 0.0
        self._budget = budget

    def plan(self, worker: SimWorker, decodes: Work, now_s: float) -> StepPlan:
        left = self._budget - decodes.num_decodes
        chunks = []
        work = decodes
        for reading in worker.prompts:
            if left <= 0:
                break
            taken = min(left, reading.left)
            work = work.plus_chunk(taken, reading.past)
            chunks.append(taken)
            left -= taken
        return StepPlan(tuple(chunks), work, 0.0)

    def observe(self, worker: SimWorker, work: Work, step_s: float) -> None:
        """Learns nothing."""


class RoundRobin:
    def __init__(self) -> None:
        self._workers: list[SimWorker] = []
        self._next = 0

    def start(self, cluster: Cluster) -> None:
        self._workers = cluster.workers

    def arrive(self, request: SimRequest, now_s: float) -> None:
        worker = self._workers[self._next % len(self._workers)]
        self._next += 1
        worker.read(Reading(request, is_local=True), now_s)

    def prompt_read(self, worker: SimWorker, reading: Reading, now_s: float) -> None:
        """The worker goes on with it."""

    def worker_changed(self, worker: SimWorker, ended: SimRequest | None, now_s: float) -> None:
        """Nothing to decide."""


class CacheAware(RoundRobin):
    def arrive(self, request: SimRequest, now_s: float) -> None:
        def load(worker: SimWorker) -> tuple[int, int]:
            hit = worker.memory.hit_tokens(request.keys, request.key_tokens, request.prompt_tokens)
            new = worker.pending_tokens + request.prompt_tokens - hit
            return new * (worker.num_held + 1), worker.num_held

        self._next += 1
        turn = self._next % len(self._workers)
        worker = min(self._workers[turn:] + self._workers[:turn], key=load)
        worker.read(Reading(request, is_local=True), now_s)


class StaticSplit:
    def __init__(self, num_readers: int) -> None:
        self._num_readers = num_readers
        self._readers: list[SimWorker] = []
        self._writers: list[SimWorker] = []
        self._chunk = 0
        self._next = 0

    def start(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._readers = cluster.workers[: self._num_readers]
        self._writers = cluster.workers[self._num_readers :]

    def arrive(self, request: SimRequest, now_s: float) -> None:
        def load(worker: SimWorker) -> int:
            hit = worker.memory.hit_tokens(request.keys, request.key_tokens, request.prompt_tokens)
            return worker.pending_tokens - hit

        self._next += 1
        turn = self._next % len(self._readers)
        reader = min(self._readers[turn:] + self._readers[:turn], key=load)
        reader.read(Reading(request, is_local=False), now_s)

    def prompt_read(self, worker: SimWorker, reading: Reading, now_s: float) -> None:
        request = reading.request
        if request.output_tokens < 2:
            worker.memory.release(reading.blocks, request.keys, request.key_tokens)
            request.end(now_s)
            return
        arrives_s = self._cluster.transfer_s(worker, request.prompt_tokens, 4096, now_s)
        self._cluster.call(arrives_s, self._hand_over, worker, reading)

    def _hand_over(self, reader: SimWorker, reading: Reading, now_s: float) -> None:
        reader.free(reading, now_s)
        writer = min(self._writers, key=lambda worker: (worker.num_held, worker.context))
        writer.queue_stream(reading.request, now_s)

    def worker_changed(self, worker: SimWorker, ended: SimRequest | None, now_s: float) -> None:
        """Nothing to decide."""
