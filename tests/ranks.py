"""Ranks as plain processes, without Ray; whoever starts them sees that none is left."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess

from worker.ranks import RankTask, run_rank

END_TIMEOUT_S = 30.0


@dataclass(eq=False)
class ProcessRank:
    process: SpawnProcess

    def trouble(self) -> str | None:
        return None if self.process.is_alive() else f"it ended with {self.process.exitcode}"


@dataclass(eq=False)
class Starter:
    """`start` is a `worker.ranks.StartRank`."""

    keeps_blocks: bool = False
    """As on GPUs: rank 0 cannot map the blocks of those that are started."""
    ranks: list[ProcessRank] = field(default_factory=list)

    def start(self, task: RankTask) -> ProcessRank:
        task = dataclasses.replace(task, keeps_blocks=self.keeps_blocks)
        process = multiprocessing.get_context("spawn").Process(target=run_rank, args=(task,), daemon=True)
        process.start()
        self.ranks.append(ProcessRank(process))
        return self.ranks[-1]

    def exit_codes(self) -> list[int | None]:
        """After all have ended; None for one that did not in time."""
        for rank in self.ranks:
            rank.process.join(END_TIMEOUT_S)
        return [rank.process.exitcode for rank in self.ranks]


@contextlib.contextmanager
def starter(keeps_blocks: bool = False) -> Iterator[Starter]:
    """When the test is through, all have ended by themselves."""
    made = Starter(keeps_blocks)
    try:
        yield made
        assert None not in made.exit_codes()
    finally:
        for rank in made.ranks:
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
