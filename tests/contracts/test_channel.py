"""Connections: both sides prove the secret before anything else; strangers, garbage and silence cost nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from contracts import channel as channels
from contracts.channel import Channel, ChannelServer, connect
from contracts.errors import BatonError, ConfigError, ProtocolError, WorkerLostError
from contracts.messages import Hello, Ping, Pong, Refusal

SECRET = b"s" * 32
HELLO = Hello("client", 1, "commands", b"")


async def echo(channel: Channel, _hello: Hello) -> None:
    while True:
        message = await channel.receive()
        assert isinstance(message, Ping)
        channel.send(Pong(message.number))


@contextlib.asynccontextmanager
async def serving(secret: bytes = SECRET) -> AsyncIterator[tuple[ChannelServer, int]]:
    server = ChannelServer(lambda: Hello("server", 9, "commands", b""), secret, echo)
    port = await server.start("127.0.0.1")
    try:
        yield server, port
    finally:
        await server.close()


async def test_messages_arrive_in_order_both_ways() -> None:
    async with serving() as (_, port):
        channel = await connect("127.0.0.1", port, HELLO, SECRET)
        assert (channel.peer.sender_id, channel.peer.incarnation) == ("server", 9)
        for number in range(100):
            channel.send(Ping(number))
        assert [await channel.receive() for _ in range(100)] == [Pong(n) for n in range(100)]
        await channel.close()


async def test_what_is_said_within_a_turn_goes_out_in_one_piece_and_is_not_lost_at_the_end() -> None:
    async with serving() as (_, port):
        channel = await connect("127.0.0.1", port, HELLO, SECRET)
        pieces: list[bytes] = []
        write = channel._writer.write
        channel._writer.write = lambda data: pieces.append(bytes(data)) or write(data)  # type: ignore[method-assign]
        channel.batch()
        for turn in range(2):
            for number in range(3):
                channel.send(Ping(number))
            assert len(pieces) == turn
            assert [await channel.receive() for _ in range(3)] == [Pong(n) for n in range(3)]
        assert len(pieces) == 2
        channel.send(Ping(9))
        await channel.close()
        assert len(pieces) == 3
        with pytest.raises(WorkerLostError):
            channel.send(Ping(10))


async def test_both_sides_give_up_a_network_that_swallows_what_they_send() -> None:
    """The kernel's word for it: no network can be cut within one test process."""
    timeouts_ms: list[int] = []

    def note(channel: Channel) -> None:
        sock = channel._writer.get_extra_info("socket")
        timeouts_ms.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

    async def serve(channel: Channel, _hello: Hello) -> None:
        note(channel)
        channel.send(Pong(1))
        await channel.receive()

    server = ChannelServer(lambda: Hello("server", 9, "commands", b""), SECRET, serve)
    channel = await connect("127.0.0.1", await server.start("127.0.0.1"), HELLO, SECRET)
    await channel.receive()
    note(channel)
    assert timeouts_ms == [channels.UNACKNOWLEDGED_MS] * 2
    await channel.close()
    await server.close()


async def test_a_wrong_secret_is_refused_on_both_sides() -> None:
    async with serving() as (_, port):
        with pytest.raises((ProtocolError, WorkerLostError)):
            await connect("127.0.0.1", port, HELLO, b"x" * 32)


async def test_another_purpose_is_told_why() -> None:
    async with serving() as (_, port):
        with pytest.raises(ProtocolError, match="expected a 'kv' connection but peer asked for 'commands'"):
            await connect("127.0.0.1", port, Hello("client", 1, "kv", b""), SECRET)


async def test_a_failed_check_reaches_the_peer_as_a_refusal() -> None:
    def refuse(_peer: Hello) -> None:
        raise ConfigError("expected block_size=16 but peer sent block_size=32")

    server = ChannelServer(lambda: Hello("server", 9, "commands", b""), SECRET, echo, refuse)
    port = await server.start("127.0.0.1")
    channel = await connect("127.0.0.1", port, HELLO, SECRET)
    message = await channel.receive()
    assert isinstance(message, Refusal)
    with pytest.raises(BatonError, match="block_size=32"):
        channels.raise_if_refused(message)
    channel.abort()
    await server.close()


async def test_garbage_is_disconnected_and_others_are_served() -> None:
    async with serving() as (_, port):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x02\x81\xa1"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(garbage)
            writer.write_eof()
            async with asyncio.timeout(channels.HANDSHAKE_TIMEOUT_S + 2):
                while await reader.read(4096):
                    pass
            writer.close()
        channel = await connect("127.0.0.1", port, HELLO, SECRET)
        channel.send(Ping(1))
        assert await channel.receive() == Pong(1)
        channel.abort()


async def test_a_silent_stranger_is_disconnected_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_TIMEOUT_S", 0.05)
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(5):
            while await reader.read(4096):
                pass
        writer.close()


async def test_nobody_listening_is_a_lost_worker() -> None:
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(WorkerLostError, match="cannot reach"):
        await connect("127.0.0.1", port, HELLO, SECRET)


async def test_the_peers_end_is_a_lost_worker() -> None:
    async with serving() as (server, port):
        channel = await connect("127.0.0.1", port, HELLO, SECRET)
        await server.close()
        with pytest.raises(WorkerLostError, match="connection to server ended"):
            await channel.receive()
        channel.abort()


async def test_closing_the_server_ends_all_its_tasks() -> None:
    before = asyncio.all_tasks()
    async with serving() as (_, port):
        opened = [await connect("127.0.0.1", port, HELLO, SECRET) for _ in range(5)]
    for channel in opened:
        channel.abort()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("is_batched", [False, True])
async def test_a_message_that_finds_no_memory_ends_the_connection(
    is_batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out in silence, it would be waited for for ever."""
    async with serving() as (_, port):
        channel = await connect("127.0.0.1", port, HELLO, SECRET)
        if is_batched:
            channel.batch()

            def write(_data: bytes) -> None:
                raise MemoryError

            channel._writer.write = write  # type: ignore[assignment,method-assign]
            channel.send(Ping(1))
        else:
            monkeypatch.setattr(channels.wire, "encode", fails)
            with pytest.raises(WorkerLostError, match="no memory"):
                channel.send(Ping(1))
        with pytest.raises(WorkerLostError):
            async with asyncio.timeout(5.0):
                await channel.receive()
        assert channel.is_closed


async def test_a_message_that_is_here_and_finds_no_memory_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as (_, port):
        channel = await connect("127.0.0.1", port, HELLO, SECRET)
        channel.send(Ping(1))
        with monkeypatch.context() as patch:
            patch.setattr(channel, "_next_frame", fails)
            with pytest.raises(WorkerLostError):
                await channel.receive()
        channel.abort()


def fails(*_arguments: object) -> bytes:
    raise MemoryError
