"""A worker of several ranks: rank 0 is the worker itself, the others are processes that compute what it tells them.

    Worker ──RankTask──► StartRank (Ray, a test) ──► run_rank, in a process of its own
       └──────────engine.parallel: steps, sums, KV blocks──────────┘

They live and die together: a rank that is gone ends the worker (`failure`, which its watchdog sees), a worker that is
gone ends its ranks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from contracts.blocks import KvLayout
from contracts.config import BatonConfig
from contracts.errors import ConfigError
from contracts.messages import Role
from engine.kv import KvSlab, SlabPlan, shared_bytes, shared_file, shared_slab, whole_layout
from engine.parallel.follower import Follower
from engine.parallel.group import Ranks
from engine.parallel.leader import Leader
from engine.parallel.shards import Shard
from engine.parallel.windows import FarBlocks, answer_copies
from engine.parallel.wire import Rendezvous
from engine.runner import StepItem
from kvtransfer.pages import Pages
from worker.loading import load_engine

logger = logging.getLogger("baton.worker")

MEET_TIMEOUT_S = 120.0
"""Longest wait for a rank's process to start and import what it needs."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """All that a further rank of a worker needs to know; picklable. `keeps_blocks`: rank 0 does not map them, as it
    cannot on GPUs; for tests."""

    config: BatonConfig
    role: Role
    worker_id: str
    model_path: Path
    place: Rendezvous
    keeps_blocks: bool = False


class RankProcess(Protocol):
    """A rank that was started. It ends when this is dropped, or with the process that started it, at the latest."""

    def trouble(self) -> str | None:
        """Why it will never say hello, or None."""


StartRank = Callable[[RankTask], RankProcess]


class RankZero:
    """Rank 0's `worker.loading.Company`, and what the worker asks of it beyond."""

    def __init__(self, leader: Leader, processes: Sequence[RankProcess], shard: Shard) -> None:
        self.shard = shard
        self._leader = leader
        self._processes = processes  # held for as long as they shall live

    @property
    def failure(self) -> str | None:
        return self._leader.failure

    def group(self, device: torch.device) -> Ranks:
        return self._leader.group(device)

    def agree(self, mine: int, timeout_s: float) -> int:
        return self._leader.agree(mine, timeout_s)

    def slab(self, plan: SlabPlan) -> KvSlab:
        return plan.allocate()

    def slabs(self, mine: KvSlab) -> tuple[Tensor | FarBlocks, ...]:
        """Those of all ranks, in their order; FarBlocks of one whose blocks this process cannot reach."""
        return self._leader.slabs(mine)

    def step(self, items: Sequence[StepItem]) -> AbstractContextManager[None]:
        return self._leader.step(items)

    def close(self) -> None:
        self._leader.close()


def gather_ranks(
    config: BatonConfig, role: Role, worker_id: str, path: Path, start: StartRank | None
) -> RankZero:
    """Start the further ranks of a worker and wait until they are here.

    Raises ConfigError if one does not come, or if nobody can start any.
    """
    size = config.pool(role).tensor_parallel_size
    if start is None:
        raise ConfigError(
            f"{role}.tensor_parallel_size: expected 1, since nobody starts ranks here, but got {size}"
        )
    leader = Leader(size, config.engine.stall_timeout_s)
    try:
        processes = [start(RankTask(config, role, worker_id, path, place)) for place in leader.rendezvous]

        def trouble() -> str | None:
            return next((reason for process in processes if (reason := process.trouble()) is not None), None)

        leader.meet(trouble, MEET_TIMEOUT_S)
    except BaseException:
        leader.close()
        raise
    return RankZero(leader, processes, Shard(0, size))


def layout_of(mine: KvSlab, slabs: Sequence[Tensor | FarBlocks], num_kv_heads: int) -> KvLayout:
    """Of the slabs of all ranks together; `mine` is the first."""
    others = [slab.scales if isinstance(slab, FarBlocks) else None for slab in slabs[1:]]
    return whole_layout(mine, [mine.scales, *others], num_kv_heads)


class _Member:
    """Another rank's `worker.loading.Company`."""

    def __init__(self, follower: Follower, task: RankTask) -> None:
        self._follower = follower
        self._keeps_blocks = task.keeps_blocks
        self._window_bytes = task.config.transfer.slot_bytes // task.place.size
        self.shard = follower.shard
        self.group = follower.group
        self.agree = follower.agree

    def slab(self, plan: SlabPlan) -> KvSlab:
        if plan.device.type != "cpu" or self._keeps_blocks:
            return self._own_slab(plan)
        file = plan.shared_file()
        try:
            slab = shared_slab(file, plan.shape, plan.dtype)
            self._follower.share(file)
        finally:
            os.close(file)
        return slab

    def _own_slab(self, plan: SlabPlan) -> KvSlab:
        """No other process can map a GPU's memory: rank 0 copies through a window of the host's."""
        slab = plan.allocate()
        file = shared_file(max(self._window_bytes, slab.bytes_per_block))
        try:
            window = shared_bytes(file)
            wire = self._follower.share_window(file, slab.scales)
        finally:
            os.close(file)
        pages = Pages(slab.data, slab.layout)
        threading.Thread(target=answer_copies, args=(wire, window, pages), name="copies", daemon=True).start()
        return slab

    def step(self, items: Sequence[StepItem]) -> AbstractContextManager[None]:
        return nullcontext()


def run_rank(task: RankTask) -> None:
    """A rank's whole life, in a process of its own: rank 0's end ends the process. Raises what went wrong here."""
    follower = Follower(task.place, task.config.engine.stall_timeout_s)
    try:
        engine = load_engine(task.config, task.model_path, _Member(follower, task))
        place = task.place
        logger.info("%s: rank %d of %d is process %d", task.worker_id, place.rank, place.size, os.getpid())
        follower.run(engine.runner)
    except BaseException as error:  # the outer edge: rank 0 hears why it loses this one
        follower.fail(error)
        raise
