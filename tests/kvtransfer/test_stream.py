"""Links over stream sockets: what only they can do wrong."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer.stream import StreamLink
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport import LinkClosed
from tests.kvtransfer.tools import HOST, WAIT_S, linked


@pytest.mark.parametrize("at", ["_filled", "_write_some"])
async def test_a_link_that_finds_no_memory_ends(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever waits for the bytes would wait for ever."""

    def fails(_link: StreamLink) -> None:
        raise MemoryError

    async with linked(TcpTransport(HOST), TcpTransport(HOST)) as (near, far):
        received = far.post_recv(1, memoryview(bytearray(8)))
        monkeypatch.setattr(StreamLink, at, fails)
        near.send(1, memoryview(bytes(8)))
        with pytest.raises(LinkClosed):
            async with asyncio.timeout(WAIT_S):
                await received.wait()
