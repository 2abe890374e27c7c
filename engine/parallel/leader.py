"""Rank 0's side: it waits for the others, agrees with them, and tells them each step. They belong to its life.

    listening ──all said hello──► met ──sums pass──► group ──agree──► slabs reached ──► watching
    a rank's connection ends, or a step fails on one ──► lost: `failure` says why; this worker is over
    close ──► every connection ends, and with it every other rank

Ranks that lost one another cannot be joined again: who watches `failure` ends the process, and its replacement brings
new ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from contracts.errors import ConfigError, WorkerLostError
from engine.kv import KvSlab, shared_bytes, shared_slab
from engine.parallel.group import LOOPBACK, Group
from engine.parallel.shards import Shard
from engine.parallel.windows import FarBlocks
from engine.parallel.wire import Kind, Rendezvous, Wire, as_payload, encode_step, number
from engine.runner import StepItem

_LOOK_PERIOD_S = 0.5
_HELLO_TIMEOUT_S = 5.0


class Leader:
    """All but `step`, `failure` and `close` is for one thread, in the order above."""

    def __init__(self, size: int, timeout_s: float) -> None:
        """`timeout_s`: the longest wait for a rank within a step."""
        self._size = size
        self._timeout_s = timeout_s
        self._token = secrets.token_bytes(32)
        self._address = f"\0baton-ranks-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._address)
        self._listener.listen(size)
        self._store = TCPStore(
            LOOPBACK, 0, size, True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self._wires: dict[int, Wire] = {}
        self._far: list[FarBlocks] = []
        self._is_closed = False
        self.failure: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def rendezvous(self) -> list[Rendezvous]:
        """For each rank but this one."""
        port = self._store.port
        return [
            Rendezvous(rank, self._size, self._address, self._token, port) for rank in range(1, self._size)
        ]

    def meet(self, trouble: Callable[[], str | None], timeout_s: float) -> None:
        """Wait until all ranks are connected. `trouble` says, when asked now and then, that one will never be.

        Raises ConfigError with that, or after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        self._listener.settimeout(_LOOK_PERIOD_S)
        while len(self._wires) < self._size - 1:
            with contextlib.suppress(TimeoutError):
                self._greet(self._listener.accept()[0])
                continue
            if (reason := trouble()) is not None:
                raise ConfigError(f"a rank did not start: {reason}")
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"expected {self._size} ranks within {timeout_s:.0f} s but got {1 + len(self._wires)}"
                )
        self._listener.close()

    def group(self, device: torch.device) -> Group:
        return Group(Shard(0, self._size), self._store, device, self._timeout_s)

    def agree(self, mine: int, timeout_s: float) -> int:
        """The least of all ranks' numbers, which all get. Waits for those that still load.

        Raises ConfigError with the reason of a rank that ended instead.
        """
        try:
            for wire in self._wires.values():
                wire.socket.settimeout(timeout_s)
            least = min([mine, *(number(wire.expect(Kind.NUMBER)[0]) for wire in self._wires.values())])
            for wire in self._wires.values():
                wire.send(Kind.NUMBER, as_payload(least))
        except WorkerLostError as error:
            raise ConfigError(f"a rank did not start: {error.message}") from error
        return least

    def slabs(self, mine: KvSlab) -> tuple[Tensor | FarBlocks, ...]:
        """The KV blocks of all ranks, in their order. Then the watch begins. Raises ConfigError as `agree`."""
        try:
            others = [self._blocks_of(wire, mine) for _, wire in sorted(self._wires.items())]
        except WorkerLostError as error:
            raise ConfigError(f"a rank did not start: {error.message}") from error
        for wire in self._wires.values():
            wire.socket.settimeout(self._timeout_s)
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()
        return mine.data, *others

    def _blocks_of(self, wire: Wire, mine: KvSlab) -> Tensor | FarBlocks:
        _, file = wire.expect(Kind.SLAB)
        if file is not None:
            slab = shared_slab(file, tuple(mine.storage.shape), mine.dtype).data
            os.close(file)
            return slab
        payload, file = wire.expect(Kind.WINDOW)
        _, end = wire.expect(Kind.COPIES)
        assert file is not None, "comes with it"
        assert end is not None, "comes with it"
        window = shared_bytes(file)
        os.close(file)
        copies = socket.socket(fileno=end)
        copies.settimeout(self._timeout_s)
        scales = (
            torch.frombuffer(bytearray(payload), dtype=torch.float32).view(mine.num_layers, 2, -1)
            if payload
            else None
        )
        self._far.append(FarBlocks(Wire(copies), window, scales, self._lose))
        return self._far[-1]

    @contextlib.contextmanager
    def step(self, items: Sequence[StepItem]) -> Iterator[None]:
        """Tell the others what this rank computes within. What fails within leaves them out of step for good.

        Raises WorkerLostError: the requests of the step may go on elsewhere.
        """
        if self.failure is not None:
            raise WorkerLostError(self.failure)
        payload = encode_step(items)
        try:
            for wire in self._wires.values():
                wire.send(Kind.STEP, payload)
            yield
        except Exception as error:
            self._lose(f"a step failed on rank 0 of {self._size}: {error!r}")
            raise WorkerLostError(self.failure or "closed") from error

    def close(self) -> None:
        """End all other ranks. Blocks for as long as one look takes."""
        self._is_closed = True
        self._listener.close()
        for wire in self._wires.values():
            wire.end()
        if self._thread is not None:
            self._thread.join()
        for wire in self._wires.values():
            wire.close()
        for far in self._far:
            far.close()

    def _greet(self, end: socket.socket) -> None:
        wire = Wire(end)
        end.settimeout(_HELLO_TIMEOUT_S)
        try:
            said, _ = wire.expect(Kind.HELLO)
        except WorkerLostError:
            wire.close()
            return
        token, rank = said[:-8], number(said[-8:])
        if not secrets.compare_digest(token, self._token) or not 0 < rank < self._size or rank in self._wires:
            wire.close()
            return
        self._wires[rank] = wire

    def _watch(self) -> None:
        """A rank says nothing unless it ends."""
        with selectors.DefaultSelector() as selector:
            for rank, wire in self._wires.items():
                selector.register(wire.socket, selectors.EVENT_READ, (rank, wire))
            while not self._is_closed:
                for key, _ in selector.select(_LOOK_PERIOD_S):
                    rank, wire = key.data
                    try:
                        _, payload, _ = wire.receive()
                        why = payload.decode(errors="replace")
                    except WorkerLostError as error:
                        why = error.message
                    self._lose(f"rank {rank} of {self._size} is gone: {why}")
                    return

    def _lose(self, reason: str) -> None:
        if not self._is_closed and self.failure is None:
            self.failure = reason
