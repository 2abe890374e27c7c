"""Which process of a Baton on this machine grows? All of them are looked at, for as long as each lives.

    workers (/debug/kv) ──know──► their node process (raylet) ──look──► launcher, coordinator, workers, Ray's own
    a life: WARM_S, in which what is bounded fills ──► JUDGED_S at least ──► its row; the checks name the worst one

Memory is what is a process's own: anonymous and shared. Pages of files are the kernel's, which brings and takes them as
it likes (a worker's libraries alone are 100 MB).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, ClassVar

from benchmarks.processes import command_of, num_files, own_kib, parent, parents
from benchmarks.result import Check, Row, text_table

WARM_S = 60.0
JUDGED_S = 60.0  # a life that goes on for less behind its warm-up tells nothing
MOST_GROWTH_MB = 48.0  # what an allocator may take within a run, however long that is
MOST_MORE_FILES = 16.0  # connections to workers that are just coming or going
_REPLICA = "ray::ServeReplica:"


@dataclass(frozen=True, slots=True)
class Sample:
    """A process at `at_s` of the run's clock."""

    at_s: float
    kib: int
    files: int


@dataclass(slots=True)
class Life:
    """One process. `incarnation` None: it is no worker, or none that was known while it lived."""

    pid: int
    role: str = ""
    worker_id: str = ""
    incarnation: int | None = None
    samples: list[Sample] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.worker_id or self.role


@dataclass(frozen=True, slots=True)
class Growth:
    """Of a life behind its warm-up: medians of the first and the last quarter, and the slope of a straight line."""

    HEADER: ClassVar = (
        "process", "role", "pid", "incarnation",
        "life_s", "first_mb", "last_mb", "grown_mb", "mb_per_hour", "more_files",
    )  # fmt: skip

    life: Life
    first_mb: float
    last_mb: float
    mb_per_hour: float
    more_files: float

    @property
    def grown_mb(self) -> float:
        return self.last_mb - self.first_mb

    @property
    def who(self) -> str:
        return f"{self.life.name} (pid {self.life.pid})"

    def row(self) -> Row:
        """Its keys are HEADER."""
        life = self.life
        who = (life.name, life.role, life.pid, life.incarnation)
        life_s = life.samples[-1].at_s - life.samples[0].at_s
        grown = (self.first_mb, self.last_mb, self.grown_mb, self.mb_per_hour, self.more_files)
        return dict(zip(Growth.HEADER, (*who, life_s, *grown), strict=True))


class Watcher:
    """Looks at the processes of the instance that a known worker belongs to."""

    def __init__(self) -> None:
        self._lives: dict[int, Life] = {}
        self._root: int | None = None

    @property
    def lives(self) -> Sequence[Life]:
        return tuple(self._lives.values())

    def know(self, workers: Iterable[dict[str, Any]]) -> None:
        """`workers` as /debug/kv tells of them."""
        for worker in workers:
            life = self._life(int(worker["pid"]))
            life.role, life.worker_id = worker["role"], worker["worker_id"]
            life.incarnation = int(worker["incarnation"])
            if self._root is None:
                with contextlib.suppress(OSError):
                    node = parent(life.pid)
                    # Ray that was started by itself has nobody above its node process.
                    self._root = node if parent(node) == 1 else parent(node)

    def look(self, at_s: float) -> None:
        """A sample of each process that lives now."""
        for pid in () if self._root is None else _family(self._root):
            with contextlib.suppress(OSError):
                sample = Sample(at_s, own_kib(pid), num_files(pid))
                life = self._life(pid)
                life.samples.append(sample)
                if life.incarnation is None:  # a replica gets its name when it has started
                    life.role = role_of(command_of(pid)) or life.role

    def _life(self, pid: int) -> Life:
        return self._lives.setdefault(pid, Life(pid))


def _family(root: int) -> Iterator[int]:
    """`root` and all that descend from it."""
    above = parents()
    members = {root}
    left = set(above)
    while found := {pid for pid in left if above[pid] in members}:
        members |= found
        left -= found
    yield from members


# --- what it means; pure ----------------------------------------------------------------------------------------------


def role_of(command: str) -> str:
    """What a process is for, by its command line; for a replica, its deployment."""
    if "-m coordinator.launch" in command:
        return "launcher"
    word = command.partition(" ")[0]
    if word.startswith(_REPLICA):
        return word.rpartition(":")[2].lower()
    return word.removeprefix("ray::").partition(".")[0] if word.startswith("ray::") else PurePath(word).name


def growth_of(life: Life) -> Growth | None:
    """None if it was not seen for long enough to tell."""
    mine = [sample for sample in life.samples if sample.at_s >= life.samples[0].at_s + WARM_S]
    if len(mine) < 4 or mine[-1].at_s - mine[0].at_s < JUDGED_S:
        return None
    quarter = len(mine) // 4
    first, last = mine[:quarter], mine[-quarter:]
    megabytes = [sample.kib * 1024 / 1e6 for sample in mine]
    slope = statistics.linear_regression([sample.at_s for sample in mine], megabytes).slope
    return Growth(
        life,
        statistics.median(megabytes[:quarter]),
        statistics.median(megabytes[-quarter:]),
        3600.0 * slope,
        statistics.median(s.files for s in last) - statistics.median(s.files for s in first),
    )


def growths_of(lives: Iterable[Life]) -> list[Growth]:
    """Of all that lived long enough, the largest first."""
    found = [growth for life in lives if (growth := growth_of(life)) is not None]
    return sorted(found, key=lambda growth: -growth.grown_mb)


def growth_table(growths: Sequence[Growth]) -> str:
    """To be read; ids are no quantities."""
    rows = (growth.row() | {"pid": str(growth.life.pid)} for growth in growths)
    shown = [name for name in Growth.HEADER if name != "incarnation"]  # a worker_id is of one life only
    return text_table(([row[name] for name in shown] for row in rows), shown)


def growth_checks(growths: Sequence[Growth]) -> list[Check]:
    """Each names the process that it is about."""

    def check(name: str, value: Callable[[Growth], float], most: float) -> Check:
        worst = max(growths, key=value, default=None)
        return (
            Check(name, None, "<=", most)
            if worst is None
            else Check(name, value(worst), "<=", most, worst.who)
        )

    return [
        check("rss_growth_mb", lambda growth: growth.grown_mb, MOST_GROWTH_MB),
        check("more_files", lambda growth: growth.more_files, MOST_MORE_FILES),
    ]
