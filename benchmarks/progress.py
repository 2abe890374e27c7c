"""Progress of a command that makes many runs: lines of what happens, and two bars below them.

On a terminal the bars are drawn; elsewhere (a log, a pipe) the lines alone tell the story. All of it goes to stderr.
"""

from __future__ import annotations

import asyncio
import signal
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from benchmarks import console
from benchmarks.load import LoadRun, measure, run_async
from benchmarks.records import Record
from benchmarks.spec import LoadSpec


class Board:
    """`with Board("runs", 12) as board:` then `board.measure(spec, "…")` for each. Belongs to the main thread.

    Within the block SIGTERM is a KeyboardInterrupt too, so that servers that were started are stopped.
    """

    def __init__(self, title: str, total: int | None = None) -> None:
        self._console = Console(stderr=True)
        self._progress = console.progress_bars(self._console)
        self._all = self._progress.add_task(title, total=total, note="")
        self._one: TaskID | None = None
        self._num_tokens = self._num_failed = 0

    def __enter__(self) -> Self:
        self._before: Any = signal.signal(signal.SIGTERM, _interrupted)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        signal.signal(signal.SIGTERM, self._before)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def quote(self, line: str) -> None:
        """A line of somebody else's, e.g. a launcher's."""
        self._console.print(f"[dim]  │ {escape(line)}[/dim]", highlight=False, soft_wrap=True)

    def total(self, count: int) -> None:
        self._progress.update(self._all, total=count)

    def advance(self, count: int = 1) -> None:
        self._progress.update(self._all, advance=count)

    def measure(self, spec: LoadSpec, title: str) -> LoadRun:
        """One load run with its own bar. The first Ctrl-C ends it (`is_whole` False), a second one interrupts."""
        return run_async(self._measure(spec, title))

    async def _measure(self, spec: LoadSpec, title: str) -> LoadRun:
        self._num_tokens = self._num_failed = 0
        self._one = self._progress.add_task(f"  {title}", total=None, note="preparing prompts")
        stop = asyncio.Event()
        try:
            with console.stop_on_interrupt(stop):
                return await measure(spec, self._on_record, stop, self._on_start)
        finally:
            self._progress.remove_task(self._one)

    def _on_start(self, num_requests: int) -> None:
        assert self._one is not None
        self._progress.reset(self._one, total=num_requests, note="")

    def _on_record(self, record: Record) -> None:
        assert self._one is not None
        self._num_tokens += record.num_output_tokens
        self._num_failed += record.outcome != "ok"
        note = f"{self._num_tokens:,} tokens" + (f", {self._num_failed} failed" if self._num_failed else "")
        self._progress.update(self._one, advance=1, note=note)


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
