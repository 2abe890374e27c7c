"""Cores of their own for a worker's threads that compute on a CPU: its engine thread, and those that torch adds to it.

    claim: an flock per core ──► pin ──► release, or the end of the process, however sudden
      └─► not so many are free: the engine thread floats, for its whole life

Left alone, the kernel now and then runs the engine threads of two workers on one core for some 10 ms while another is
idle, and a step takes twice its time. So a worker claims `engine.compute_threads` cores and keeps its engine thread to
them; torch starts its further threads from there, and they inherit the cores, together. All other threads of the
process, and the ranks of a worker beyond the first, go wherever the kernel puts them.

What is locked is the kernel's own folder of a core: there for every process, whoever runs it and wherever its temporary
files are, and nothing to clean up. Processes of other containers do not see the claims. Hence nobody pins where a
quota says that there are others, and each begins to look at a random core.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
from collections import Counter
from pathlib import Path

logger = logging.getLogger("baton.worker")

CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""A container's own, of cgroup v2: microseconds of all cores or `max`, and in how many. Not there outside of one."""


class OwnCores:
    """A worker's."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._claims: list[int] = []  # open files, which no child inherits

    def pin(self, num_cores: int) -> None:
        """Keep the calling thread, and what it starts from now on, to `num_cores` cores that no other worker has.

        Without them it floats as before. The log says which; nothing is raised.
        """
        try:
            cores = self._pinned(num_cores)
        except (OSError, ValueError) as error:
            self.release()
            logger.info("%s: its engine thread floats: %s", self._worker_id, error)
        else:
            names = ", ".join(f"core {cpu}" for cpu in sorted(cores))
            logger.info("%s: its engine thread keeps to %s", self._worker_id, names)

    def _pinned(self, num_cores: int) -> set[int]:
        """Raises OSError or ValueError with the reason if it cannot be."""
        if not hasattr(os, "sched_setaffinity"):
            raise OSError("this system keeps no thread to a core")
        allowed = os.sched_getaffinity(0)
        if not _are_all_ours(len(allowed)):
            raise OSError(
                f"expected a quota of all {len(allowed)} cores but {QUOTA} has less: others use them"
            )
        cores = self.claim(num_cores, allowed)
        if not cores:
            raise OSError(f"expected {num_cores} unclaimed of {len(allowed)} cores")
        os.sched_setaffinity(0, cores)  # 0: the calling thread
        return cores

    def claim(self, num_cores: int, among: set[int]) -> set[int]:
        """Those that are this worker's now; empty, and none is, if not so many are free. Raises OSError."""
        claimed: set[int] = set()
        for cpu in _in_order(among):
            file = os.open(CPUS / f"cpu{cpu}", os.O_RDONLY)
            self._claims.append(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._claims.pop())
                continue
            claimed.add(cpu)
            if len(claimed) == num_cores:
                return claimed
        self.release()
        return set()

    def release(self) -> None:
        """Give up the claims; a thread that is pinned stays so."""
        while self._claims:
            os.close(self._claims.pop())


def _are_all_ours(num_cores: int) -> bool:
    try:
        quota, period = QUOTA.read_text().split()
    except FileNotFoundError:
        return True
    return quota == "max" or int(quota) >= num_cores * int(period)


def _in_order(cpus: set[int]) -> list[int]:
    """From a random one on, but first one of each core whose hardware threads the kernel shows as several CPUs."""
    num_before: Counter[str] = Counter()
    turns: dict[int, int] = {}
    for cpu in sorted(cpus):
        siblings = (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        turns[cpu] = num_before[siblings]
        num_before[siblings] += 1
    start = random.choice(sorted(cpus))
    return sorted(cpus, key=lambda cpu: (turns[cpu], cpu < start, cpu))
