"""What the workers say while they load, shown by the launcher; and why one of them could not start.

    worker's stderr ─► <run folder>/session_*/logs/worker-*.err ─► WorkerLog.follow (a thread) ─► show(line)

Ray can forward its workers' output itself, but then all of it: Serve's, the libraries', every traceback. Here only
lines of Baton's own loggers pass, and only until `stop`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

_PERIOD_S = 0.2
_OWN_LINE = re.compile(r"^\S+ \S+ (INFO|WARNING|ERROR) baton\.\S+: (.*)$")
_RAISED = re.compile(r"^(?:ray::.*\s)?(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit)): (.+)$")


class WorkerLog:
    """Follows the log files of one run folder. A context manager: the thread ends with it."""

    def __init__(self, run_dir: Path, show: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._show = show
        self._read_bytes: dict[Path, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="worker-log", daemon=True)

    def __enter__(self) -> WorkerLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.read()

    def read(self) -> None:
        """Show the complete lines written since the last time."""
        for path in sorted(self._run_dir.glob("**/session_2*/logs/worker-*.err")):
            begin = self._read_bytes.get(path, 0)
            try:
                with path.open("rb") as file:
                    file.seek(begin)
                    text = file.read()
            except OSError:  # rotated away, or the run folder is being removed
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._read_bytes[path] = begin + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if found := _OWN_LINE.match(line):
                    self._show(found[2])

    def _follow(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self.read()


def reason_of(report: str) -> str:
    """One line of Serve's report on a replica that failed: the message of the exception that ended it.

    Serve passes a replica's exception on as the text of its traceback, whose last such line is the cause.
    """
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    raised = [found for line in lines if (found := _RAISED.match(line))]
    if raised:
        name, message = raised[-1].groups()
        return str(message) if name == "ConfigError" else f"{name}: {message}"
    return lines[-1] if lines else "no message"
