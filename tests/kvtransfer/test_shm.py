"""Staging slots that two processes have mapped: whose they are, and what is not accepted as such."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer import shm
from kvtransfer.connection import Connection
from kvtransfer.selftest import SelfTest
from kvtransfer.shm import ShmTransport, make_file, map_file
from kvtransfer.stream import StreamLink
from kvtransfer.transport import TOKEN_BYTES, Link, LinkClosed
from tests.kvtransfer import tools
from tests.kvtransfer.tools import TOKEN, WAIT_S, connected, make_config, until

NUM_SLOTS = 3


def linked() -> contextlib.AbstractAsyncContextManager[tuple[Link, Link]]:
    return tools.linked(ShmTransport(7, 4096), ShmTransport(NUM_SLOTS, 5000))


def areas_open() -> set[str]:
    """Descriptors of this process that are slots in shared memory."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if "baton-kv" in os.readlink(f"/proc/self/fd/{number}"):
                found.add(number)
    return found


def num_mapped() -> int:
    """Areas that this process has in its memory."""
    return sum("baton-kv" in line for line in Path("/proc/self/maps").read_text().splitlines())


def num_alive(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Within, what only the garbage collector would free stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_what_the_dialler_writes_the_listener_reads() -> None:
    async with linked() as (near, far):
        for tag in range(NUM_SLOTS):
            ours, theirs = near.staging(tag), far.staging(tag)
            assert ours is not None
            assert theirs is not None
            ours[:5000] = bytes([tag + 1]) * 5000
            assert theirs[:5000] == bytes([tag + 1]) * 5000
        assert near.staging(NUM_SLOTS) is far.staging(NUM_SLOTS) is near.staging(-1) is None


async def test_slots_of_two_links_are_not_the_same_memory() -> None:
    async with linked() as (one, _), linked() as (other, _):
        first, second = one.staging(0), other.staging(0)
        assert first is not None
        assert second is not None
        first[0], second[0] = 1, 2
        assert (first[0], second[0]) == (1, 2)


async def test_a_closed_link_has_no_slots_and_leaves_no_file() -> None:
    before = areas_open()
    async with linked() as (near, far):
        await far.close()
        assert far.staging(0) is None
        with pytest.raises(LinkClosed):
            async with asyncio.timeout(WAIT_S):
                await near.post_recv(
                    0, memoryview(bytearray(1))
                ).wait()  # the end of the socket is the peer's end
    assert areas_open() <= before


async def test_a_wrong_token_gets_no_memory() -> None:
    listener = ShmTransport(NUM_SLOTS, 4096)
    address = await listener.listen()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + address[1:])
        stranger.sendall(b"x" * TOKEN_BYTES)
        with pytest.raises(LinkClosed):
            await listener.accept(TOKEN, 0.05)
    await listener.close()


async def test_another_user_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = ShmTransport(NUM_SLOTS, 4096)
    address = await listener.listen()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(LinkClosed, match="expected a peer of user 12345"):
        await ShmTransport(1, 4096).connect(address, TOKEN, WAIT_S)
    await listener.close()


async def test_an_address_of_another_kind_is_refused() -> None:
    for address in ("127.0.0.1:80", "@other", "/tmp/x"):
        with pytest.raises(LinkClosed, match="expected a data address @baton-kv-"):
            await ShmTransport(1, 4096).connect(address, TOKEN, WAIT_S)


def test_a_file_that_a_peer_of_ours_would_not_make_is_refused() -> None:
    file, stride = make_file(2, 5000)
    assert stride == 2 * mmap.PAGESIZE
    for num_slots, size in [(3, stride), (2, stride + 1), (0, stride), (2, shm.MAX_AREA_BYTES)]:
        with pytest.raises(LinkClosed, match="expected a file of"):
            map_file(file, num_slots, size)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(file, stride)  # sealed: an access to the mapping cannot fault
    os.close(file)
    unsealed = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, mmap.PAGESIZE)
    with pytest.raises(LinkClosed, match="sealed against shrinking"):
        map_file(unsealed, 1, mmap.PAGESIZE)
    os.close(unsealed)


async def test_a_close_that_is_cancelled_closes_all_the_same() -> None:
    """A server that ends cancels whoever is closing a connection."""
    near, far = socket.socketpair()
    near.setblocking(False)
    link = StreamLink(near)
    await asyncio.sleep(0)
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await until(lambda: near.fileno() == -1)
    far.close()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "end", ["the target is gone", "the target is no peer any more", "the sender is gone"]
)
async def test_memory_of_a_link_that_is_over_goes_back_at_once(end: str) -> None:
    """It may be 128 MiB, and workers come and go; the collector of a worker that serves steadily hardly ever runs."""
    before = num_mapped()
    async with connected(make_config(transport="shm")) as pair:
        handoff = pair.handoff(num_tokens=40)
        handoff.expect()
        handoff.open()
        await handoff.outcome()
        assert num_mapped() == before + 2
        assert num_alive(SelfTest) == 0  # nor is the pattern kept that it sent
        if end == "the target is gone":
            await pair.decode.endpoint.close()
        elif end == "the target is no peer any more":
            pair.prefill.endpoint.set_peers([])
        else:
            await pair.prefill.endpoint.close()
        await until(lambda: num_mapped() == before, timeout_s=5.0)
        await until(lambda: num_alive(SelfTest) == num_alive(Connection) == 0, timeout_s=5.0)
