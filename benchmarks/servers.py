"""Our own launcher, started in a mode, watched until it is ready, and stopped.

    Arm ─► configuration ─► `python -m coordinator.launch` ─► "Baton is ready …" ─► URL ─► SIGTERM, wait
                                      └ its lines, as they come

A mode is compared with another at equal cost: where one has P prefill and D decode workers, colocated has P + D
workers that do both. local-only has P and D, but every prompt is read by a decode worker: what the handoff is good for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from contracts.config import load_config
from contracts.errors import ConfigError

MODES = ("disaggregated", "colocated", "local-only")
READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 90.0

_READY = re.compile(r"^Baton is ready after .*: (http\S+)$")
_NUM_LAST_LINES = 6

OnLine = Callable[[str], None]


class ServerError(Exception):
    """A server that we started did not become ready, or did not end."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to spend workers. `num_prefills` is 0 where decode workers read prompts themselves."""

    mode: str
    num_prefills: int
    num_decodes: int

    @classmethod
    def of(cls, mode: str, split: str = "1:1") -> Self:
        """`split`: P:D workers. Raises ValueError for a mode or a split that there is not."""
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)} but got {mode!r}")
        match = re.fullmatch(r"(\d+):(\d+)", split)
        if match is None or min(map(int, match.groups())) < 1:
            raise ValueError(f"split: expected P:D with at least one worker each but got {split!r}")
        num_prefills, num_decodes = map(int, match.groups())
        if mode == "colocated":
            return cls(mode, 0, num_prefills + num_decodes)
        return cls(mode, num_prefills, num_decodes)

    @classmethod
    def parse(cls, text: str) -> Self:
        """`MODE` or `MODE:P:D`."""
        mode, _, split = text.partition(":")
        return cls.of(mode, split or "1:1")

    @property
    def split(self) -> str:
        return f"{self.num_prefills}:{self.num_decodes}"

    @property
    def name(self) -> str:
        return f"{self.mode} {self.split}"

    def overrides(self) -> dict[str, Any]:
        """Dotted keys of Baton's configuration."""
        sizes = {"prefill.num_replicas": self.num_prefills, "decode.num_replicas": self.num_decodes}
        return {**sizes, "coordinator.placement": "local"} if self.mode == "local-only" else sizes


@dataclass(frozen=True, slots=True)
class Launch:
    """What is common to all starts. `settings`: dotted keys of Baton's configuration, over those of `config`."""

    model: str = ""
    config: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = (sys.executable, "-m", "coordinator.launch")

    def tree(self, arm: Arm | None = None) -> dict[str, Any]:
        """The whole configuration as far as somebody set it. Raises ValueError naming the key that is wrong."""
        overrides = {**self.settings, **(arm.overrides() if arm else {})}
        if self.model:
            overrides["model.path"] = self.model
        try:
            tree = load_config(self.config, overrides).model_dump(mode="json", exclude_unset=True)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return dict(tree)


class Host(Protocol):
    """Gives the URL of a server for as long as the block lasts."""

    def open(self, arm: Arm | None) -> contextlib.AbstractContextManager[str]: ...


@dataclass(frozen=True, slots=True)
class OurHost:
    """Starts Baton for each arm, stops it at the block's end."""

    launch: Launch
    on_line: OnLine

    @contextlib.contextmanager
    def open(self, arm: Arm | None) -> Iterator[str]:
        assert arm is not None, "only a server that runs already has no arm"
        with running(arm, self.launch, self.on_line) as url:
            yield url


@dataclass(frozen=True, slots=True)
class GivenHost:
    """A server that somebody else started and will stop."""

    url: str

    @contextlib.contextmanager
    def open(self, arm: Arm | None) -> Iterator[str]:
        yield self.url


@contextlib.contextmanager
def running(arm: Arm, launch: Launch, on_line: OnLine) -> Iterator[str]:
    """A Baton of its own on a free port. Raises ServerError if it does not become ready, with its last words."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        file = Path(folder) / "baton.yaml"
        file.write_text(json.dumps(launch.tree(arm)), encoding="utf-8")  # JSON is YAML
        command = [*launch.command, "--port", str(port), "--config", str(file)]
        on_line(f"starting {arm.name} on port {port}")
        # A session of its own: Ctrl-C ends the measurement, which then ends the server, in this order.
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            reader = _Reader(process, on_line)
            try:
                yield reader.url(READY_TIMEOUT_S)
            finally:
                _stop(process, port)
                reader.join()


class _Reader:
    """Passes on what the launcher prints; knows the URL once it is there. Its thread ends with the output."""

    def __init__(self, process: subprocess.Popen[str], on_line: OnLine) -> None:
        self._process = process
        self._on_line = on_line
        self._last: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._decided = threading.Event()
        self._url: str | None = None
        self._thread = threading.Thread(target=self._read, name="launcher-output", daemon=True)
        self._thread.start()

    def url(self, timeout_s: float) -> str:
        if not self._decided.wait(timeout_s):
            raise ServerError(
                f"expected Baton to be ready within {timeout_s:g} s but it was not{self._words()}"
            )
        if self._url is None:
            raise ServerError(f"expected Baton to become ready but it ended{self._words()}")
        return self._url

    def join(self) -> None:
        self._thread.join(timeout=5.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.rstrip()
            if not line:
                continue
            self._last.append(line)
            # What follows the ready line is for a person who wants to talk to it.
            if self._url is None:
                self._on_line(line)
            if match := _READY.match(line):
                self._url = match.group(1)
                self._decided.set()
        self._decided.set()

    def _words(self) -> str:
        return "".join(f"\n  {line}" for line in self._last)


def _stop(process: subprocess.Popen[str], port: int) -> None:
    """Raises ServerError if it takes too long; its claim then names what is left."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise ServerError(
            f"expected Baton on port {port} to end within {STOP_TIMEOUT_S:g} s; it was killed"
        ) from None


def _free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])
