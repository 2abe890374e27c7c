"""A whole Baton instance (`python -m coordinator.launch`) as a test sees it: a URL, a process, and what it printed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0

Found = TypeVar("Found")


@dataclass
class Running:
    url: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=10.0)

    def workers(self) -> list[dict[str, Any]]:
        """/debug/kv; every audit adds up."""
        workers: list[dict[str, Any]] = self.get("/debug/kv").json()["workers"]
        for worker in workers:
            states = ("free", "cached", "running", "reserved", "in_handoff", "quarantined")
            assert sum(worker[state] for state in states) == worker["total"], worker
        return workers

    def is_idle(self) -> bool:
        """Nobody holds a block on any worker of either pool."""
        workers = self.workers()
        busy = sum(worker[state] for worker in workers for state in ("running", "reserved", "in_handoff"))
        return busy == 0 and {worker["role"] for worker in workers} == {"prefill", "decode"}

    def pid_of(self, role: str) -> int:
        return next(int(worker["pid"]) for worker in self.workers() if worker["role"] == role)

    def is_ready(self) -> bool:
        return bool(self.get("/ready").status_code == 200)


def wait_until(check: Callable[[], Found], timeout_s: float, what: str) -> Found:
    """The first true result of `check`. Another process has no event to wait for, so it is asked, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.HTTPError, StopIteration):
            if found := check():
                return found
        assert time.monotonic() < deadline, f"expected {what} within {timeout_s} s"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(folder: Path, config: dict[str, Any]) -> Iterator[Running]:
    """Ready, its summary printed to the last line; stopped with SIGTERM, which must leave nothing behind."""
    file = folder / "baton.yaml"
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator.launch", "--port", str(port), "--config", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    instance = Running(f"http://127.0.0.1:{port}", process)
    reader = threading.Thread(target=_read, args=(process, instance.lines), daemon=True)
    reader.start()
    try:
        wait_until(
            lambda: process.poll() is not None or any("stops it." in line for line in instance.lines),
            START_TIMEOUT_S,
            "the instance to start",
        )
        assert process.poll() is None, "".join(instance.lines)
        yield instance
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            reader.join(5.0)
            assert process.stdout is not None
            process.stdout.close()
    assert process.returncode == 0, "".join(instance.lines)


def _read(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
