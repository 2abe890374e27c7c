"""The compiled kernels: built once per machine, source and compiler, then loaded from the cache.

    library() ─► <cache>/native/<key>.so there? ── yes ──► loaded
                 no ─► lock ─► compile into a scratch folder ─► renamed into place ─► loaded
                 no compiler, an error, too slow ─► one warning, None: callers use plain torch

The key is a hash of the sources, the flags and the compiler's predefined macros, which tell its version and every
instruction set of this CPU: another CPU over a shared home directory gets a build of its own. The functions have a C
interface without torch's headers: that compiles in a third of the time, and no version of torch can break it.

    python -m engine.kernels.native.build     builds now and says what it does; always exits with 0
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from contracts.config import cache_dir

logger = logging.getLogger("baton.engine.native")

_FOLDER = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
_WIDE = (
    "-mprefer-vector-width=512",
)  # understood by both compilers, and only there where registers are so wide
_THREADS = ("-fopenmp",)
_PROBE_TIMEOUT_S = 20.0
_COMPILE_TIMEOUT_S = 300.0

Progress = Callable[[str], None]


class BuildError(Exception):
    """Why there is no library."""


@dataclass(frozen=True, slots=True)
class Library:
    """The same functions twice: `long` calls let other Python threads run meanwhile, `short` ones do not, since handing
    the interpreter over and back takes longer than they do."""

    long: ctypes.CDLL
    short: ctypes.PyDLL


@cache
def library() -> Library | None:
    """The kernels, compiled first if need be (about 15 s); None, after one warning, where that cannot be done."""
    try:
        path = build(lambda message: logger.info("%s", message))
        return Library(ctypes.CDLL(str(path)), ctypes.PyDLL(str(path)))
    except (BuildError, OSError) as error:
        logger.warning(
            "native kernels: %s; the slower kernels of torch are used, and quantized weights are expanded",
            error,
        )
        return None


def build(progress: Progress, folder: Path | None = None) -> Path:
    """The library's file in `folder` (default: <baton cache>/native). Raises BuildError, or OSError for the cache."""
    compiler = _compiler()
    flags, macros = _flags_and_macros(compiler)
    place = folder if folder is not None else cache_dir() / "native"
    target = place / f"{_key(flags, macros)}.so"
    if target.is_file():
        return target
    place.mkdir(parents=True, exist_ok=True)
    with (place / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its holder has a deadline, and the kernel frees it when it dies
        if not target.is_file():
            _compile(compiler, flags, target, progress)
    return target


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        if found := shutil.which(name):
            return found
    raise BuildError(f"expected a C++ compiler but found none of {wanted or ', '.join(_COMPILERS)}")


def _flags_and_macros(compiler: str) -> tuple[tuple[str, ...], bytes]:
    """The most that the compiler understands: not every clang has OpenMP, not every CPU so wide registers."""
    for more in (_WIDE + _THREADS, _THREADS, ()):
        command = [compiler, *_FLAGS, *more, "-dM", "-E", "-x", "c++", os.devnull]
        macros = _run(command, _PROBE_TIMEOUT_S)
        if isinstance(macros, bytes) and (more != _WIDE + _THREADS or b"__AVX512F__" in macros):
            return _FLAGS + more, macros
    raise BuildError(f"expected {compiler} to know {' '.join(_FLAGS)} but it does not")


def _key(flags: Sequence[str], macros: bytes) -> str:
    digest = hashlib.sha256("\0".join(flags).encode() + macros)
    for source in sorted(_FOLDER.glob("*.[ch]*")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _compile(compiler: str, flags: Sequence[str], target: Path, progress: Progress) -> None:
    sources = sorted(_FOLDER.glob("*.cpp"))
    progress(f"compiling the native kernels ({compiler}, once, about 15 s)")
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        partial = Path(scratch) / target.name
        command = [compiler, *flags, "-shared", *map(str, sources), "-o", str(partial)]
        done = _run(command, _COMPILE_TIMEOUT_S)
        if isinstance(done, str):
            raise BuildError(f"{compiler}: {done}")
        partial.replace(target)
    progress(f"native kernels are in {target} ({time.monotonic() - begun_s:.0f} s)")


def _run(command: Sequence[str], timeout_s: float) -> bytes | str:
    """What it printed, or why it failed."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"expected it to end in {timeout_s:.0f} s"
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return next((line for line in lines if "error" in line), f"exit status {done.returncode}")
    return done.stdout


def main() -> None:
    try:
        print(f"native kernels: {build(print)}")
    except (BuildError, OSError) as error:
        print(f"native kernels: {error}; Baton runs without them, slower")


if __name__ == "__main__":
    main()
