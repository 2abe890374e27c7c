"""What Baton is measured against, with the same devices, memory and links.

    RoundRobin     colocated, fixed token budget per step (Sarathi-Serve), workers in turn
    CacheAware     colocated, the same step, least (new prompt tokens incl. queue) · (streams + 1): LMetric, 2603.15202
    StaticSplit    fixed readers and writers; least queued prompt tokens after prefix hits, then least streams

All serve first come, first served. As the public systems do by default they refuse nobody; with `gives_up` they refuse
a prompt as soon as it could not be read in time even if it were begun now, which is the rule of Baton's own queue.
"""

from __future__ import annotations

import math

from benchmarks.metrics import Slo
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
        if worker.prompts[0].deadline_s < math.inf:
            _give_up(worker, now_s)
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


def _give_up(worker: SimWorker, now_s: float) -> None:
    """Refuse whoever is hopeless; that may let others in, who may be hopeless, too."""
    device = worker.device
    is_over = False
    while not is_over:
        is_over = True
        for reading in worker.prompts[:]:
            past, size = reading.request.hit_tokens, reading.request.prompt_tokens
            if reading.past > past:
                continue
            if now_s + device.step_s(size - past, size * size - past * past, 0, 0) > reading.deadline_s:
                worker.give_up(reading, now_s)
                is_over = False


class RoundRobin:
    """`gives_up`: the promise whose hopeless prompts are refused; None: nobody is."""

    def __init__(self, gives_up: Slo | None = None) -> None:
        self._patience_s = math.inf if gives_up is None or gives_up.ttft_s is None else gives_up.ttft_s
        self._workers: list[SimWorker] = []
        self._next = 0

    def start(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._workers = cluster.workers

    def arrive(self, request: SimRequest, now_s: float) -> None:
        worker = self._workers[self._next % len(self._workers)]
        self._next += 1
        self._read(worker, request, is_local=True, now_s=now_s)

    def prompt_read(self, worker: SimWorker, reading: Reading, now_s: float) -> None:
        """The worker goes on with it."""

    def worker_changed(self, worker: SimWorker, ended: SimRequest | None, now_s: float) -> None:
        """Nothing to decide."""

    def _read(self, worker: SimWorker, request: SimRequest, is_local: bool, now_s: float) -> None:
        worker.read(Reading(request, is_local, request.arrived_s + self._patience_s), now_s)

    def _hits(self, request: SimRequest) -> dict[str, int]:
        """Prompt tokens that workers hold."""
        if not request.keys:
            return {}
        longest, most = self._cluster.index.longest(request.keys), request.prompt_tokens - 1
        return {worker_id: min(depth * request.key_tokens, most) for worker_id, depth in longest.items()}


class CacheAware(RoundRobin):
    def arrive(self, request: SimRequest, now_s: float) -> None:
        hits, size = self._hits(request), request.prompt_tokens

        def load(worker: SimWorker) -> tuple[int, int]:
            new = worker.pending_tokens + size - (hits.get(worker.worker_id, 0) if hits else 0)
            return new * (worker.num_held + 1), worker.num_held

        self._next += 1
        turn = self._next % len(self._workers)
        worker = min(self._workers[turn:] + self._workers[:turn], key=load)
        self._read(worker, request, is_local=True, now_s=now_s)


class StaticSplit(RoundRobin):
    def __init__(self, num_readers: int, gives_up: Slo | None = None) -> None:
        super().__init__(gives_up)
        self._num_readers = num_readers
        self._readers: list[SimWorker] = []
        self._writers: list[SimWorker] = []

    def start(self, cluster: Cluster) -> None:
        super().start(cluster)
        self._readers = cluster.workers[: self._num_readers]
        self._writers = cluster.workers[self._num_readers :]

    def arrive(self, request: SimRequest, now_s: float) -> None:
        hits = self._hits(request)

        def load(worker: SimWorker) -> int:
            return worker.pending_tokens - (hits.get(worker.worker_id, 0) if hits else 0)

        self._next += 1
        turn = self._next % len(self._readers)
        reader = min(self._readers[turn:] + self._readers[:turn], key=load)
        self._read(reader, request, is_local=False, now_s=now_s)

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
        writer = min(self._writers, key=_streams)
        writer.queue_stream(reading.request, now_s)


def _streams(worker: SimWorker) -> tuple[int, int]:
    return worker.num_held, worker.context
