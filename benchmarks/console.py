"""What a person at a terminal sees: a progress bar, Ctrl-C as an end instead of a crash, and tables."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.records import Record
from benchmarks.result import Check, Row, text_table

_MAX_REASONS = 5
_LATENCIES = (
    ("ttft", "time to first token"),
    ("ttst", "first to second token"),
    ("tpot", "time per output token"),
    ("itl", "between tokens"),
    ("tbt", "worst 10% of gaps"),
    ("e2el", "whole request"),
)
_COUNTS = (
    "offered", "completed", "rejected", "timed_out", "cancelled", "wrong_length", "duration", "request_throughput",
    "output_throughput", "steady_output_throughput", "output_throughput_per_worker",
    "prefix_hit_ratio", "ideal_prefix_hit_ratio", "kv_transfer_ms_p50",
    "attainment", "attainment_ttft", "attainment_tpot", "request_goodput", "p99_send_lag_ms", "p99_loop_lag_ms",
)  # fmt: skip


@contextlib.contextmanager
def stop_on_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C sets `stop`; the second one is an ordinary KeyboardInterrupt."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def progress_bars(console: Console) -> Progress:
    """Bars with a `note` at their end, drawn only where somebody looks at them."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=4,  # drawing takes the client's time
    )


class RunProgress:
    """A bar of finished requests on stderr, only where somebody looks at it."""

    def __init__(self) -> None:
        self._progress = progress_bars(Console(stderr=True))
        self._num_tokens = self._num_failed = 0
        self._task = self._progress.add_task("preparing prompts", total=None, note="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_start(self, num_requests: int) -> None:
        self._progress.reset(self._task, total=num_requests, description="requests", note="")

    def on_record(self, record: Record) -> None:
        self._num_tokens += record.num_output_tokens
        self._num_failed += record.outcome != "ok"
        note = f"{self._num_tokens:,} tokens" + (f", {self._num_failed} failed" if self._num_failed else "")
        self._progress.update(self._task, advance=1, note=note)


def failures(records: Sequence[Record]) -> str:
    """How many failed for which reason, the most frequent first; empty if none did."""
    reasons = Counter(record.error for record in records if record.outcome in ("error", "timeout"))
    return "\n".join(f"{count} failed: {reason}" for reason, count in reasons.most_common(_MAX_REASONS))


def load_report(row: Row, checks: Sequence[Check], is_whole: bool) -> str:
    """The tables that end a load run."""
    shown = ("mean", "p50", "p90", "p99", "max")
    latencies = text_table(
        [(title, *(row.get(f"{kind}_{key}_ms") for kind in shown)) for key, title in _LATENCIES],
        ("ms", *shown),
    )
    counts = text_table([(name, row[name]) for name in _COUNTS if row.get(name) is not None], ("", "value"))
    parts = [latencies, counts, "\n".join(map(str, checks))]
    if not is_whole:
        parts.append("Stopped before the end: these are the requests until then.")
    if row.get("is_void"):
        parts.append("VOID: the client was late, so these numbers measure the client.")
    if row.get("wrong_input_length"):
        parts.append(
            f"{row['wrong_input_length']} prompts were not as long as planned (tokenizer: {row['tokenizer']})."
        )
    return "\n\n".join(parts)
