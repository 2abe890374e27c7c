"""Other processes of this machine, as /proc shows them. Everything raises OSError for one that is gone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def resident_kib(pid: int) -> int:
    pages = int((_PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def own_kib(pid: int) -> int:
    """Resident memory that is no file's: anonymous, and shared with other processes."""
    lines = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def cpu_seconds(pid: int) -> float:
    """User and system time since its start, in ticks of 10 ms on most machines."""
    ticks = _stat(pid)[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def num_files(pid: int) -> int:
    """Open file descriptors."""
    return len(os.listdir(_PROC / str(pid) / "fd"))


def parent(pid: int) -> int:
    return int(_stat(pid)[1])


def name_of(pid: int) -> str:
    """Of its program, 15 characters at most."""
    return (_PROC / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").strip()


def all_processes() -> Iterator[int]:
    """Some may be gone when they are looked at."""
    yield from (int(name) for name in os.listdir(_PROC) if name.isdecimal())


def command_of(pid: int) -> str:
    """Its command line, or what it has made of it."""
    return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def parents() -> dict[int, int]:
    """Of all processes."""
    found = {}
    for pid in all_processes():
        with contextlib.suppress(OSError):
            found[pid] = parent(pid)
    return found


def children(pid: int) -> Iterator[int]:
    """Those that live; some may be gone when they are looked at."""
    yield from (each for each, above in parents().items() if above == pid)


def _stat(pid: int) -> list[str]:
    """The fields from the third one on."""
    # The second field is the name in brackets, which may hold anything.
    return (
        (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    )
