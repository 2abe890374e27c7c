"""The side of every rank but 0: it does what rank 0 says, and ends with it.

    connect ──► group ──► agree ──► share ──► run: one step after the other, until the connection ends

A thread of its own reads the connection, so that its end is seen while a step runs, or waits for a sum that never
comes: the process ends at once, whatever it is in. It holds nothing that needs a farewell.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from contracts.errors import WorkerLostError
from engine.parallel.group import LOOPBACK, Group
from engine.parallel.shards import Shard
from engine.parallel.wire import Kind, Rendezvous, Wire, as_payload, decode_step, number
from engine.runner import Runner, StepItem


class Follower:
    """Raises WorkerLostError if rank 0 is not there."""

    def __init__(self, place: Rendezvous, timeout_s: float) -> None:
        self._place = place
        self._timeout_s = timeout_s
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.settimeout(timeout_s)
        self._wire = Wire(end)
        try:
            end.connect(place.address)
        except OSError as error:
            end.close()
            raise WorkerLostError(f"expected rank 0 at its socket but: {error}") from error
        self._wire.send(Kind.HELLO, place.token + as_payload(place.rank))
        self._steps: queue.SimpleQueue[list[StepItem]] = queue.SimpleQueue()

    @property
    def shard(self) -> Shard:
        return Shard(self._place.rank, self._place.size)

    def group(self, device: torch.device) -> Group:
        timeout = timedelta(seconds=self._timeout_s)
        store = TCPStore(LOOPBACK, self._place.store_port, self._place.size, False, timeout=timeout)
        return Group(self.shard, store, device, self._timeout_s)

    def agree(self, mine: int, timeout_s: float) -> int:
        """As Leader.agree. Raises WorkerLostError if rank 0 has ended."""
        self._wire.send(Kind.NUMBER, as_payload(mine))
        self._wire.socket.settimeout(timeout_s)
        return number(self._wire.expect(Kind.NUMBER)[0])

    def share(self, file: int) -> None:
        """The memory of this rank's slab."""
        self._wire.send(Kind.SLAB, files=[file])

    def share_window(self, file: int, scales: Tensor | None) -> Wire:
        """Instead of `share`, where the slab is for this process alone: host memory to copy through, and the connection
        on which rank 0 will ask for it (`windows.answer_copies`)."""
        mine, theirs = socket.socketpair()
        self._wire.send(Kind.SLAB)
        self._wire.send(
            Kind.WINDOW, b"" if scales is None else scales.float().cpu().numpy().tobytes(), [file]
        )
        self._wire.send(Kind.COPIES, files=[theirs.fileno()])
        theirs.close()
        return Wire(mine)

    def fail(self, error: BaseException) -> None:
        """Tell rank 0 why this one ends."""
        reason = getattr(error, "message", "") or repr(error)
        self._wire.send(Kind.FAILED, reason.encode())

    def run(self, runner: Runner, on_end: Callable[[], None] = lambda: os._exit(0)) -> None:
        """Compute until rank 0 ends; then `on_end`, on a thread of its own. Returns only by an error of a step."""
        self._wire.socket.settimeout(None)  # idle for as long as rank 0 is: its end ends the wait
        threading.Thread(target=self._read, args=(on_end,), name="rank-0", daemon=True).start()
        while True:
            runner.execute(self._steps.get())

    def _read(self, on_end: Callable[[], None]) -> None:
        try:
            while True:
                payload, _ = self._wire.expect(Kind.STEP)
                self._steps.put(decode_step(payload))
        except WorkerLostError:
            on_end()
