"""The files of a checkpoint, read side by side: a disk, and more so a network, gives several readers more than one.

add(file, read) ─► … ─► run(): one thread for each file, its tensors in the order in which they were added

Files are mapped, and what was read is given back: as pages of the process it would be a second copy of the model.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

_MAX_READERS = 8
_LIBC = ctypes.CDLL(None)


class Reads:
    """What is to be read, by the number of the file that holds it."""

    def __init__(self) -> None:
        self._by_file: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self._has_failed = False

    def add(self, file: int, read: Callable[[], None]) -> None:
        self._by_file[file].append(read)

    def run(self) -> None:
        """Return when all is read. Raises the first error of a read; the other files are then left where they are."""
        with ThreadPoolExecutor(_MAX_READERS, thread_name_prefix="reader") as pool:
            for file in as_completed(
                [pool.submit(self._one_file, reads) for reads in self._by_file.values()]
            ):
                file.result()

    def _one_file(self, reads: list[Callable[[], None]]) -> None:
        for read in reads:
            if self._has_failed:
                return
            try:
                read()
            except BaseException:
                self._has_failed = True
                raise


def give_back(address: int, num_bytes: int) -> None:
    """Whole pages of a mapped file that were read; they are there again when they are looked at.

    NOTE: memory that is no file's would lose what it holds.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
