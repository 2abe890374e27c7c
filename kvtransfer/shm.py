"""The transport between two processes of one host: staging slots in memory that both have mapped.

    dialler ──Unix socket, token──► listener            abstract name, published over the control connection
            ◄──memfd, its measures──                    made for this link only, after the token was right
    sender writes a slot ──any message──► receiver reads it in place: nothing is copied in between

KV blocks are never in the mapping. What does not lie in a slot travels through the socket, as over TCP.

Fencing: the socket's end is the peer's death (or ours), seen at once; then the receiver lets go of the mapping and
never looks at it again. A peer that was stopped and writes on after it was fenced writes into memory that nobody reads:
each link has its own. The file has no name, so nothing is left behind, and it is sealed against shrinking, so that no
access to it can fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct

from contracts.errors import ConfigError
from kvtransfer.door import Door, closing_on_error
from kvtransfer.doorman import MAX_UNBOUND
from kvtransfer.stream import StreamLink
from kvtransfer.transport import Link, LinkClosed, OnBytes, Op

MAX_AREA_BYTES = 64 << 30  # of one link: what a peer may make us map

_MEASURES = struct.Struct(">QQ")  # num_slots, stride in bytes
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_PREFIX = "baton-kv-"


def is_available() -> bool:
    """Whether this system has what the transport needs (Linux has)."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class Area:
    """Slots in shared memory; `slots[i]` are their bytes."""

    def __init__(self, file: int, num_slots: int, stride: int) -> None:
        """Maps the whole of `file`, which may be closed afterwards."""
        self._mapping = mmap.mmap(file, num_slots * stride)
        whole = memoryview(self._mapping)
        self.slots = [whole[low : low + stride] for low in range(0, num_slots * stride, stride)]


def make_file(num_slots: int, slot_bytes: int) -> tuple[int, int]:
    """(file descriptor, stride): anonymous memory for the slots, which takes room only where it was written."""
    stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    file = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, num_slots * stride)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(file)
        raise
    return file, stride


def map_file(file: int, num_slots: int, stride: int) -> Area:
    """The peer's slots. Raises LinkClosed if `file` is not what a peer of ours would have made."""
    num_bytes = num_slots * stride
    if not 0 < num_bytes <= MAX_AREA_BYTES or stride % mmap.PAGESIZE or os.fstat(file).st_size != num_bytes:
        raise LinkClosed(
            f"expected a file of {num_slots} slots of {stride} bytes but it has {os.fstat(file).st_size}"
        )
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError as error:
        raise LinkClosed("expected a memfd but peer passed another file") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise LinkClosed("expected a file sealed against shrinking but peer passed one that is not")
    return Area(file, num_slots, stride)


class ShmLink:
    """A stream link, and slots beside it. The dialler writes the slots, the listener reads them."""

    def __init__(self, sock: socket.socket, area: Area) -> None:
        self._stream = StreamLink(sock)
        self._area: Area | None = area

    def staging(self, tag: int) -> memoryview | None:
        if self._area is None or not 0 <= tag < len(self._area.slots):
            return None
        return self._area.slots[tag]

    def post_recv(self, tag: int, buffer: memoryview, on_bytes: OnBytes | None = None) -> Op:
        return self._stream.post_recv(tag, buffer, on_bytes)

    def send(self, tag: int, buffer: memoryview) -> Op:
        return self._stream.send(tag, buffer)

    async def close(self) -> None:
        self._area = None
        await self._stream.close()


class ShmTransport:
    """Listens on an abstract Unix socket: it needs no folder and leaves no file. Same user only."""

    name = "shm"

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        """Of the areas of the links that are accepted here."""
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._door: Door | None = None

    async def listen(self) -> str:
        if not is_available():
            raise ConfigError(
                "transfer.transport: expected a system with memfd_create but shm is not available"
            )
        name = _PREFIX + secrets.token_hex(16)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.bind("\0" + name)
            sock.listen(MAX_UNBOUND)
        except BaseException:
            sock.close()
            raise
        self._door = Door(sock, _check_user)
        return "@" + name

    async def connect(self, address: str, token: bytes, timeout_s: float) -> Link:
        if not address.startswith("@" + _PREFIX):
            raise LinkClosed(f"expected a data address @{_PREFIX}… but peer published {address[:80]!r}")
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with closing_on_error(sock, address):
            sock.setblocking(False)
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(sock, "\0" + address[1:])
                await _check_user(sock)
                await loop.sock_sendall(sock, token)
                area = await _receive_area(loop, sock)
            return ShmLink(sock, area)

    async def accept(self, token: bytes, timeout_s: float) -> Link:
        assert self._door is not None, "accept comes after listen"
        sock = await self._door.accept(token, timeout_s)
        with closing_on_error(sock, "of the peer"):
            file, stride = make_file(self._num_slots, self._slot_bytes)
            try:
                area = Area(file, self._num_slots, stride)
                socket.send_fds(sock, [_MEASURES.pack(self._num_slots, stride)], [file])
            finally:
                os.close(file)
            return ShmLink(sock, area)

    async def close(self) -> None:
        if self._door is not None:
            await self._door.close()


async def _check_user(sock: socket.socket) -> None:
    """Raises PermissionError if the other end is another user's: an abstract name has no permissions of its own."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, user, _group = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise PermissionError(f"expected a peer of user {os.geteuid()} but it is user {user}")


async def _receive_area(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> Area:
    await _readable(loop, sock)
    measures, files, _flags, _address = socket.recv_fds(sock, _MEASURES.size, 1)
    try:
        if len(measures) != _MEASURES.size or len(files) != 1:
            raise LinkClosed("the peer closed the link instead of passing its slots")
        return map_file(files[0], *_MEASURES.unpack(measures))
    finally:
        for file in files:
            os.close(file)


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock.fileno(), tell)
    try:
        await ready
    finally:
        with contextlib.suppress(ValueError):
            loop.remove_reader(sock.fileno())
