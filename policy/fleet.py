"""What placement believes about each worker. The coordinator makes it anew from its views for each decision; the
simulator keeps it, and counts at dispatch, as a report is always older than the last decision:

    dispatch(): promised grows, prefill_free_s moves
    joined():   promised -> running                       released():  the stream ended, or never began
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from contracts.roles import RoleLabel
from policy.step_model import StepModel


@dataclass(slots=True)
class WorkerState:
    """One worker. `running_*`: as reported; `promised_*`: placed on it and not yet decoding; `used_tokens`: KV that
    running and promised streams may grow to; `prefill_free_s`: when its accepted prompts will be read; `gap_s`: the
    tightest planned token gap among its streams.
    """

    worker_id: str
    model: StepModel
    role: RoleLabel = "mixed"
    kv_tokens: int = 1 << 20
    max_streams: int = 256
    epoch: int = 0
    is_open: bool = True  # ready, listed and not draining
    running_streams: int = 0
    running_context: int = 0
    promised_streams: int = 0
    promised_tokens: int = 0
    used_tokens: int = 0
    prefill_free_s: float = 0.0
    num_prompts: int = 0
    gap_s: float = math.inf

    @property
    def num_streams(self) -> int:
        return self.running_streams + self.promised_streams

    @property
    def context_tokens(self) -> int:
        return self.running_context + self.promised_tokens

    def backlog_s(self, now_s: float) -> float:
        return max(self.prefill_free_s - now_s, 0.0)


class FleetView:
    """All workers, by role. Roles change through `set_roles` only."""

    def __init__(self, workers: Iterable[WorkerState] = ()) -> None:
        self.workers: dict[str, WorkerState] = {worker.worker_id: worker for worker in workers}
        self.prefills: list[WorkerState] = []
        self.decodes: list[WorkerState] = []
        self.refresh()

    def refresh(self) -> None:
        """After a worker came, left, opened, closed or changed its role."""
        live = [worker for worker in self.workers.values() if worker.is_open]
        self.prefills = [worker for worker in live if worker.role != "decode"]
        self.decodes = [worker for worker in live if worker.role != "prefill"]

    def set_role(self, worker_id: str, role: RoleLabel, epoch: int) -> bool:
        """False, and nothing changes, for an epoch that is not newer: a late order must not undo a newer one."""
        return self.set_roles([(worker_id, role, epoch)]) == 1

    def set_roles(self, orders: Iterable[tuple[str, RoleLabel, int]]) -> int:
        """How many of the orders were new."""
        num_new = 0
        for worker_id, role, epoch in orders:
            worker = self.workers[worker_id]
            if epoch > worker.epoch:
                worker.role, worker.epoch = role, epoch
                num_new += 1
        if num_new:
            self.refresh()
        return num_new


def drawn(workers: list[WorkerState], limit: int, rng: random.Random) -> Iterator[WorkerState]:
    """Up to `limit` of them in a random order, nobody twice: whoever takes the first of equals breaks ties at random,
    and the best of a few is close to the best of all (Mitzenmacher, 2001).
    """
    size = len(workers)
    if not size:
        return
    position = int(rng.random() * size)
    # A stride without a common factor visits no worker twice.
    stride = 1 + int(rng.random() * (size - 1))
    while math.gcd(stride, size) != 1:
        stride = stride % (size - 1) + 1
    for _ in range(min(limit, size)):
        yield workers[position]
        position += stride
        if position >= size:
            position -= size
