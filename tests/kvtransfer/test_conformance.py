"""What every transport promises (kvtransfer/transport.py). A new one is one more line in links.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from kvtransfer.transport import Link, LinkClosed, TransferTruncated, Transport
from tests.kvtransfer import tools
from tests.kvtransfer.links import MAKERS
from tests.kvtransfer.tools import TOKEN, WAIT_S, until

pytestmark = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def linked(make: Callable[[], Transport]) -> AbstractAsyncContextManager[tuple[Link, Link]]:
    return tools.linked(make(), make())


def view(size: int, fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * size)


@pytest.mark.parametrize("size", [0, 1, 4096, 3_000_001])
async def test_bytes_arrive_as_sent_both_ways(make: Callable[[], Transport], size: int) -> None:
    async with linked(make) as (near, far):
        for number, (one, other) in enumerate([(near, far), (far, near)]):
            buffer = view(size)
            received = other.post_recv(number, buffer)
            sent = one.send(number, view(size, 7))
            assert await received.wait() == size
            assert await sent.wait() == size
            assert buffer == view(size, 7)


async def test_messages_find_their_tag_in_any_order_of_posting(make: Callable[[], Transport]) -> None:
    async with linked(make) as (near, far):
        buffers = [view(8) for _ in range(5)]
        sends = [near.send(tag, view(8, tag)) for tag in range(5)]
        receives = [far.post_recv(tag, buffers[tag]) for tag in reversed(range(5))]
        assert [await op.wait() for op in [*sends, *receives]] == [8] * 10
        assert [bytes(buffer) for buffer in buffers] == [bytes([tag] * 8) for tag in range(5)]


async def test_whoever_waits_for_the_bytes_gets_them_before_the_end_is_told(
    make: Callable[[], Transport],
) -> None:
    async with linked(make) as (near, far):
        told: list[tuple[bytes, bool, bool]] = []
        buffer = view(100)

        def on_bytes(here: memoryview, is_all: bool) -> bool:
            told.append((bytes(here), is_all, received.final.done()))
            return False

        received = far.post_recv(1, buffer, on_bytes)
        near.send(1, view(10, 9))
        assert await received.wait() == 10
        assert told == [(bytes([9] * 10), True, False)]
        assert buffer[:10] == bytes([9] * 10)


@pytest.mark.parametrize("num_left", [0, 1, 2, 1000], ids="taken {} times not".format)
@pytest.mark.parametrize("size", [0, 1, 256 << 10, 3_000_001, 9 << 20])
async def test_bytes_are_taken_as_they_come(make: Callable[[], Transport], size: int, num_left: int) -> None:
    """What was not taken at first is there again, with what came since."""
    async with linked(make) as (near, far):
        taken, ends, calls = bytearray(), [], 0
        buffer, content = view(size), memoryview(random.Random(size).randbytes(size))

        def on_bytes(here: memoryview, is_all: bool) -> bool:
            nonlocal calls
            calls += 1
            ends.append(is_all)
            if calls <= num_left and not is_all:
                assert here == content[: len(here)]
                return False
            taken.extend(here)
            return True

        for _ in range(2):  # the next message of the same tag is its own
            taken.clear()
            ends.clear()
            calls = 0
            received = far.post_recv(1, buffer, on_bytes)
            near.send(1, content)
            assert await received.wait() == size
            assert taken == content
            assert ends == [False] * (calls - 1) + [True]


async def test_nobody_is_told_of_bytes_that_were_too_many_or_did_not_come(
    make: Callable[[], Transport],
) -> None:
    async with linked(make) as (near, far):
        told: list[bool] = []

        def on_bytes(_here: memoryview, is_all: bool) -> bool:
            told.append(is_all)
            return True

        too_many, never = far.post_recv(1, view(10), on_bytes), far.post_recv(2, view(10), on_bytes)
        near.send(1, view(200_000, 9))
        with pytest.raises(TransferTruncated):
            await too_many.wait()
        await far.close()
        with pytest.raises(LinkClosed):
            await never.wait()
        assert told == []


async def test_a_shorter_message_is_taken_and_its_length_told(make: Callable[[], Transport]) -> None:
    async with linked(make) as (near, far):
        buffer = view(100)
        received = far.post_recv(1, buffer)
        near.send(1, view(10, 9))
        assert await received.wait() == 10
        assert buffer == bytes([9] * 10 + [0] * 90)


@pytest.mark.parametrize("room", [0, 10, 2_000_000])
async def test_a_longer_message_fails_and_the_link_goes_on(make: Callable[[], Transport], room: int) -> None:
    async with linked(make) as (near, far):
        received = far.post_recv(1, view(room))
        near.send(1, view(5_000_000, 9))
        with pytest.raises(TransferTruncated, match=f"at most {room} bytes but peer sent 5000000"):
            await received.wait()
        again = far.post_recv(1, view(10))
        near.send(1, view(10))
        assert await again.wait() == 10


async def test_cancelling_a_waiter_leaves_the_transfer_alone(make: Callable[[], Transport]) -> None:
    async with linked(make) as (near, far):
        buffer = view(8)
        received = far.post_recv(1, buffer)
        waiter = asyncio.create_task(received.wait())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        near.send(1, view(8, 5))
        assert await received.wait() == 8
        assert buffer == view(8, 5)


@pytest.mark.parametrize("who", ["near", "far"])
async def test_close_of_either_side_ends_every_open_op(make: Callable[[], Transport], who: str) -> None:
    async with linked(make) as (near, far):
        ops = [far.post_recv(1, view(10)), near.post_recv(2, view(10)), far.send(3, view(30 << 20))]
        await (near if who == "near" else far).close()
        for op in ops:
            with pytest.raises(LinkClosed):
                async with asyncio.timeout(WAIT_S):
                    await op.wait()
        await until(lambda: near.post_recv(9, view(1)).final.done() and far.send(9, view(1)).final.done())


async def test_closing_twice_is_closing_once(make: Callable[[], Transport]) -> None:
    async with linked(make) as (near, _):
        await near.close()
        await near.close()
        with pytest.raises(LinkClosed):
            await near.send(1, view(1)).wait()


async def test_nobody_there_is_link_closed(make: Callable[[], Transport]) -> None:
    listener = make()
    address = await listener.listen()
    with pytest.raises(LinkClosed, match="no data link came"):
        await listener.accept(TOKEN, 0.01)
    await listener.close()
    dialler = make()
    with pytest.raises(LinkClosed):
        await dialler.connect(address, TOKEN, 0.5)
    # One dead address must not cost the others.
    living = make()
    address = await living.listen()
    near, far = await asyncio.gather(dialler.connect(address, TOKEN, 5.0), living.accept(TOKEN, 5.0))
    received = far.post_recv(0, view(3))
    await near.send(0, view(3)).wait()
    assert await received.wait() == 3
    for part in (near, far, dialler, living):
        await part.close()
