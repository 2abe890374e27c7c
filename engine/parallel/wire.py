"""How rank 0 and the others talk outside of a step's sums: small frames over a Unix socket of the host.

    rank r ──HELLO token, rank──► rank 0
           ◄──NUMBER──►                     what all agree on: each says its own, rank 0 answers with the least
           ──SLAB + file descriptor──►      its KV blocks, in memory that rank 0 maps too; or, of a GPU,
           ──WINDOW scales + descriptor──►  host memory through which they are copied, and
           ──COPIES + descriptor──►         the other end of a connection that asks for it (windows.py)
           ◄──STEP──                        what to compute now; no answer, the step's sums are one
           ──FAILED text──►                 why it ends
    the end of the connection is the end of the peer

A frame is kind, length, payload; numbers are int64. The socket has no name in the file system, the token says who may
connect, and both ends are processes of one user on one host.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from contracts.errors import WorkerLostError
from engine.runner import StepItem

_HEAD = struct.Struct("<BQ")
_MAX_PAYLOAD_BYTES = 1 << 30


class Kind(IntEnum):
    HELLO = 1
    NUMBER = 2
    SLAB = 3
    STEP = 4
    FAILED = 5
    WINDOW = 6
    COPIES = 7
    GATHER = 8
    SCATTER = 9
    DONE = 10


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank `rank` of `size` finds rank 0: an abstract Unix socket and what to say there, and the port of the
    store through which the process group meets."""

    rank: int
    size: int
    address: str
    token: bytes
    store_port: int


class Wire:
    """One end. Sending and receiving may happen on two threads."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, kind: Kind, payload: bytes = b"", files: Sequence[int] = ()) -> None:
        """Raises WorkerLostError if the peer is gone, or takes nothing for the socket's time-out."""
        try:
            # The descriptor travels with the first byte.
            with memoryview(_HEAD.pack(kind, len(payload)) + payload) as frame:
                sent = socket.send_fds(self.socket, [frame[:1]], list(files)) if files else 0
                self.socket.sendall(frame[sent:])
        except OSError as error:
            raise WorkerLostError(f"expected a rank to take a frame but: {error}") from error

    def receive(self) -> tuple[Kind, bytes, int | None]:
        """(kind, payload, a file descriptor that came with it). Raises WorkerLostError at the end of the connection, or
        after the socket's time-out."""
        try:
            first, files, _, _ = socket.recv_fds(self.socket, 1, 1)
            kind, size = _HEAD.unpack(first + self._take(_HEAD.size - 1)) if first else (0, 0)
            if not first or size > _MAX_PAYLOAD_BYTES or kind not in set(Kind):
                raise WorkerLostError("the connection between two ranks has ended")
            return Kind(kind), self._take(size), files[0] if files else None
        except OSError as error:
            raise WorkerLostError(f"expected a frame of a rank but: {error}") from error

    def expect(self, wanted: Kind) -> tuple[bytes, int | None]:
        """The next frame, which must be `wanted`. Raises WorkerLostError, with the peer's reason if it gave one."""
        kind, payload, file = self.receive()
        if kind is wanted:
            return payload, file
        if file is not None:
            os.close(file)
        why = (
            payload.decode(errors="replace")
            if kind is Kind.FAILED
            else f"expected {wanted.name} but got {kind.name}"
        )
        raise WorkerLostError(why)

    def end(self) -> None:
        """Both ends see the end of the connection, also one that waits on another thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self.socket.close()

    def _take(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 1 << 20))
            if not part:
                raise WorkerLostError("the connection between two ranks has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def encode_step(items: Sequence[StepItem]) -> bytes:
    flat = array.array("q", [len(items)])
    for item in items:
        flat.extend(
            (len(item.token_ids), len(item.block_ids), item.start, item.want_logits, item.want_all_logits)
        )
        flat.extend(item.token_ids)
        flat.extend(item.block_ids)
    return flat.tobytes()


def decode_step(payload: bytes) -> list[StepItem]:
    flat = array.array("q")
    flat.frombytes(payload)
    items, at = [], 1
    for _ in range(flat[0]):
        num_tokens, num_blocks, start, want, want_all = flat[at : at + 5]
        middle = at + 5 + num_tokens
        at, tokens = middle + num_blocks, flat[at + 5 : middle]
        items.append(StepItem(tokens.tolist(), start, flat[middle:at].tolist(), bool(want), bool(want_all)))
    return items


def number(payload: bytes) -> int:
    return int.from_bytes(payload, "little", signed=True)


def as_payload(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)
