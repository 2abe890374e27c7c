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


def num_files(pid: int) -> int:
    """Open file descriptors."""
    return len(os.listdir(_PROC / str(pid) / "fd"))


def parent(pid: int) -> int:
    # The second field is the name in brackets, which may hold anything.
    after_name = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    return int(after_name.split()[1])


def command_of(pid: int) -> str:
    """Its command line, or what it has made of it."""
    return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def children(pid: int) -> Iterator[int]:
    """Those that live; some may be gone when they are looked at."""
    for name in os.listdir(_PROC):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if parent(int(name)) == pid:
                    yield int(name)
