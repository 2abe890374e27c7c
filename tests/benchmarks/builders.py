"""Records with hand-workable times, and a fake OpenAI server as a process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import Record


def make_record(
    scheduled_s: float = 0.0,
    times_s: Sequence[float] = (),
    tokens: Sequence[int] | None = None,
    **changes: Any,
) -> Record:
    """An ok request of one token a chunk that ended with its last chunk, but for `changes`."""
    counts = tuple(tokens) if tokens is not None else (1,) * len(times_s)
    fields: dict[str, Any] = {
        "request_id": "r0",
        "scheduled_s": scheduled_s,
        "sent_s": scheduled_s,
        "end_s": times_s[-1] if times_s else scheduled_s,
        "chunk_times_s": tuple(times_s),
        "chunk_tokens": counts,
        "completion_tokens": sum(counts),
        "status": 200,
        **changes,
    }
    return Record(**fields)


@contextlib.contextmanager
def fake_server(**script: Any) -> Iterator[str]:
    """The URL of fake_server.py with this script, in a process of its own that ends with the block."""
    path = Path(__file__).parent / "fake_server.py"
    with subprocess.Popen(
        [sys.executable, str(path), json.dumps(script)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def stamps(url: str) -> dict[str, dict[str, Any]]:
    """request id -> {"received_s", "chunks_s": [...], "body", "num_sent"}, times by the machine's monotonic clock.

    Of runs that used the same ids, the last one; of a request that was sent several times, the last time.
    """
    with urllib.request.urlopen(f"{url}/stamps", timeout=10) as answer:
        found: dict[str, dict[str, Any]] = json.loads(answer.read())
    return {name.split("-", 1)[1]: stamp for name, stamp in found.items()}


def wait_until(check: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Another process has no event to wait for, so it is asked, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not true within {timeout_s:g} s"
        time.sleep(0.02)
