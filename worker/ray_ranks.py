"""Ranks as Ray actors, in the placement group of the replica that they belong to.

Serve makes the group with one bundle per rank, all on one node, and starts the replica in the first; actors that the
replica starts are captured by its group. They are the replica's: Ray ends them with it, as their connection does.
"""

from __future__ import annotations

from typing import Any

import ray

from worker.ranks import RankProcess, RankTask, run_rank


class RankActor:
    """One rank's process."""

    def run(self, task: RankTask) -> None:
        """Returns never, or with what went wrong."""
        from worker.serving import log_to_stderr
        from worker.sigterm import drain_on_sigterm

        log_to_stderr()
        # A signal to the whole group reaches it, too: rank 0 drains first, and this rank ends with its connection.
        drain_on_sigterm(lambda: None)
        run_rank(task)


class _RayRank:
    """Implements RankProcess."""

    def __init__(self, actor: Any, task: RankTask) -> None:
        self._actor = actor
        self._end = actor.run.remote(task)

    def trouble(self) -> str | None:
        ended, _ = ray.wait([self._end], timeout=0)
        if not ended:
            return None
        try:
            ray.get(self._end)
        except Exception as error:  # whatever Ray says of an actor that died
            return str(error)
        return "it has ended"


def start_rank(task: RankTask) -> RankProcess:
    """A `worker.ranks.StartRank`."""
    pool = task.config.pool(task.role)
    actor = ray.remote(RankActor).options(num_cpus=pool.num_cpus, num_gpus=pool.num_gpus, max_restarts=0)
    return _RayRank(actor.remote(), task)
