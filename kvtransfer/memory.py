"""The transport within one process: a send is copied straight into the posted buffer. For tests and single-process use.

A send waits, like on any other transport, until its tag is posted; both Ops are final right after the copy.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TypeVar

from kvtransfer.transport import Link, LinkClosed, OnBytes, Op, TransferTruncated

_What = TypeVar("_What")

_numbers = itertools.count()
_listening: dict[str, MemoryTransport] = {}


class MemoryLink:
    """One end of a pair. What is sent here lands in the other end's posted buffers."""

    def __init__(self) -> None:
        self._other: MemoryLink = self
        self._posted: dict[int, tuple[tuple[memoryview, OnBytes | None], Op]] = {}
        self._sending: dict[int, tuple[memoryview, Op]] = {}
        self._is_closed = False

    @classmethod
    def pair(cls) -> tuple[MemoryLink, MemoryLink]:
        left, right = cls(), cls()
        left._other, right._other = right, left
        return left, right

    def post_recv(self, tag: int, buffer: memoryview, on_bytes: OnBytes | None = None) -> Op:
        op = self._put(self._posted, tag, (buffer, on_bytes))
        self._other._match(tag)
        return op

    def send(self, tag: int, buffer: memoryview) -> Op:
        op = self._put(self._sending, tag, buffer)
        self._match(tag)
        return op

    def staging(self, tag: int) -> memoryview | None:
        return None

    async def close(self) -> None:
        for end in (self, self._other):
            end._end()

    def _put(self, table: dict[int, tuple[_What, Op]], tag: int, what: _What) -> Op:
        op = Op()
        if self._is_closed:
            op.fail(LinkClosed("link is closed"))
        else:
            assert tag not in table, f"tag {tag} is in use"
            table[tag] = (what, op)
        return op

    def _match(self, tag: int) -> None:
        if tag not in self._sending or tag not in self._other._posted:
            return
        source, sent = self._sending.pop(tag)
        (target, on_bytes), received = self._other._posted.pop(tag)
        sent.finish(len(source))
        if len(source) > len(target):
            received.fail(
                TransferTruncated(f"expected at most {len(target)} bytes but peer sent {len(source)}")
            )
            return
        target[: len(source)] = source
        if on_bytes is not None:
            on_bytes(target[: len(source)], True)
        received.finish(len(source))

    def _end(self) -> None:
        self._is_closed = True
        for _what, op in (*self._posted.values(), *self._sending.values()):
            op.fail(LinkClosed("link is closed"))
        self._posted.clear()
        self._sending.clear()


class MemoryTransport:
    """Found by other transports of the same process through a table of addresses."""

    name = "memory"

    def __init__(self) -> None:
        self._address = f"memory:{next(_numbers)}"
        self._dialled: dict[bytes, MemoryLink] = {}
        self._awaited: dict[bytes, asyncio.Future[MemoryLink]] = {}

    async def listen(self) -> str:
        _listening[self._address] = self
        return self._address

    async def connect(self, address: str, token: bytes, timeout_s: float) -> Link:
        peer = _listening.get(address)
        if peer is None:
            raise LinkClosed(f"nobody listens at {address!r} in this process")
        near, far = MemoryLink.pair()
        waiter = peer._awaited.pop(token, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(far)
        else:
            peer._dialled[token] = far
        return near

    async def accept(self, token: bytes, timeout_s: float) -> Link:
        link = self._dialled.pop(token, None)
        if link is not None:
            return link
        waiter: asyncio.Future[MemoryLink] = asyncio.get_running_loop().create_future()
        self._awaited[token] = waiter
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError as error:
            raise LinkClosed(f"no data link came within {timeout_s} s") from error
        finally:
            self._awaited.pop(token, None)

    async def close(self) -> None:
        _listening.pop(self._address, None)
        for link in self._dialled.values():
            await link.close()
        self._dialled.clear()
