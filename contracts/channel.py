"""A framed, mutually authenticated message connection: u32 length | msgpack map (wire.py), over asyncio TCP.

    both:   Hello{nonce} ->          nothing but Hello and Proof is read before the peer has proved the
    secret,
            <- Hello{nonce}          and nothing longer than 64 KiB
            Proof{mac} ->
            <- Proof{mac}            wrong mac, garbage, or HANDSHAKE_TIMEOUT_S: closed, nothing was allocated
            messages both ways until either side closes; EOF is the first sign of a peer's death

One reader task per channel (its owner); `send` may be called from any task of the same loop. A message for which
there is no memory, at either end, would be missing for ever: the connection ends instead, and its owner makes it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace

from contracts import wire
from contracts.errors import BatonError, ProtocolError, WorkerLostError, from_wire, to_wire
from contracts.messages import Hello, Message, Proof, Refusal

HANDSHAKE_TIMEOUT_S = 3.0
MAX_FRAME_BYTES = 64 << 20
MAX_UNPROVED_FRAME_BYTES = 64 << 10
MAX_OUTBOX_BYTES = 64 << 20
READ_BYTES = 64 << 10
UNACKNOWLEDGED_MS = 30_000

_LENGTH = struct.Struct(">I")


class Channel:
    """One established connection. `peer` is the other side's proven Hello."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._max_frame_bytes = MAX_UNPROVED_FRAME_BYTES
        self._inbox = bytearray()
        self._outbox: list[bytes] | None = None
        self._hearing: asyncio.Task[Message] | None = None
        self.peer = Hello("", 0, "", b"")

    def batch(self) -> None:
        """From now on, what is said within one turn of the event loop goes out in one piece at its end.

        Each write of its own wakes the peer, which on few cores takes the processor from whoever has more to say.
        """
        self._outbox = []

    def send(self, message: Message) -> None:
        """Queue one message, in order, without waiting.

        Raises WorkerLostError if the connection is closed, or if the peer has not read MAX_OUTBOX_BYTES
        or there is no memory (then it is closed).
        """
        if self._writer.is_closing():
            raise WorkerLostError(f"connection to {self.peer.sender_id or 'peer'} is closed")
        try:
            self._queue(wire.encode(message))
        except MemoryError as error:
            self._writer.transport.abort()
            raise WorkerLostError(f"no memory for a message to {self.peer.sender_id or 'peer'}") from error

    def _queue(self, payload: bytes) -> None:
        if self._writer.transport.get_write_buffer_size() > MAX_OUTBOX_BYTES:
            self._writer.transport.abort()
            raise WorkerLostError(f"{self.peer.sender_id} has left {MAX_OUTBOX_BYTES} bytes unread")
        frame = _LENGTH.pack(len(payload)) + payload
        if self._outbox is None:
            self._writer.write(frame)
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(frame)

    def _flush(self) -> None:
        if self._outbox:
            frames, self._outbox = self._outbox, []
            if not self._writer.is_closing():
                try:
                    self._writer.write(b"".join(frames))
                except MemoryError:
                    self._writer.transport.abort()

    async def receive(self) -> Message:
        """The next message. Raises WorkerLostError at EOF, reset or want of memory, ProtocolError on a frame that is
        not ours.
        """
        if self._hearing is not None:
            hearing, self._hearing = self._hearing, None
            return await hearing
        return await self._receive()

    def hear(self) -> asyncio.Task[Message]:
        """The next message, heard while its reader is busy with something else; `receive` gives the same one then."""
        if self._hearing is None:
            self._hearing = asyncio.create_task(self._receive())
            self._hearing.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # may be all there was
        return self._hearing

    async def _receive(self) -> Message:
        try:
            while (payload := self._next_frame()) is None:
                arrived = await self._reader.read(READ_BYTES)
                if not arrived:
                    raise WorkerLostError(f"connection to {self.peer.sender_id or 'peer'} ended")
                self._inbox += arrived
            return wire.decode(payload)
        except (OSError, MemoryError) as error:
            raise WorkerLostError(f"connection to {self.peer.sender_id or 'peer'} ended") from error

    def _next_frame(self) -> bytes | None:
        """The payload of the first frame in the inbox, if all of it is there."""
        if len(self._inbox) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._inbox)
        if length > self._max_frame_bytes:
            raise ProtocolError(f"expected a frame of at most {self._max_frame_bytes} bytes but got {length}")
        end = _LENGTH.size + length
        if len(self._inbox) < end:
            return None
        payload = bytes(memoryview(self._inbox)[_LENGTH.size : end])
        del self._inbox[:end]
        return payload

    @property
    def is_closed(self) -> bool:
        return self._writer.is_closing()

    def abort(self) -> None:
        """Close at once, dropping what is queued."""
        self._flush()
        self._writer.transport.abort()

    async def close(self) -> None:
        """Flush for at most a second and close."""
        self._flush()
        self._writer.close()
        with contextlib.suppress(TimeoutError, OSError):
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)
        self._writer.transport.abort()

    async def shake_hands(self, hello: Hello, secret: bytes, check: Callable[[Hello], None]) -> None:
        """Prove the secret both ways, then let `check` refuse the peer (its error is sent as a Refusal)."""
        hello = replace(hello, nonce=secrets.token_bytes(16))
        self.send(hello)
        peer = await self.receive()
        if not isinstance(peer, Hello):
            raise ProtocolError(f"expected hello but peer sent {type(peer).__name__}")
        self.send(Proof(_mac(secret, peer.nonce, hello)))
        proof = await self.receive()
        if not isinstance(proof, Proof) or not hmac.compare_digest(
            proof.mac, _mac(secret, hello.nonce, peer)
        ):
            raise ProtocolError(f"peer {peer.sender_id!r} did not prove the cluster secret")
        self.peer = peer
        self._max_frame_bytes = MAX_FRAME_BYTES
        try:
            if peer.purpose != hello.purpose:
                raise ProtocolError(
                    f"expected a {hello.purpose!r} connection but peer asked for {peer.purpose!r}"
                )
            check(peer)
        except BatonError as error:
            self.send(Refusal(to_wire(error)))
            await self.close()
            raise


def _mac(secret: bytes, nonce: bytes, speaker: Hello) -> bytes:
    text = b"|".join((nonce, speaker.nonce, speaker.sender_id.encode(), str(speaker.incarnation).encode()))
    return hmac.new(secret, text, hashlib.sha256).digest()


def accept_any(_peer: Hello) -> None:
    """A `check` that refuses nobody."""


async def connect(
    host: str, port: int, hello: Hello, secret: bytes, check: Callable[[Hello], None] = accept_any
) -> Channel:
    """Dial and authenticate. Raises WorkerLostError (not reachable, too slow) or ProtocolError (not one of
    us).
    """
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            channel = Channel(reader, writer)
            try:
                _tune(writer)
                await channel.shake_hands(hello, secret, check)
            except BaseException:
                channel.abort()
                raise
            return channel
    except TimeoutError as error:
        raise WorkerLostError(f"no answer from {host}:{port} within {HANDSHAKE_TIMEOUT_S} s") from error
    except (OSError, MemoryError) as error:
        why = getattr(error, "strerror", None) or repr(error)
        raise WorkerLostError(f"cannot reach {host}:{port}: {why}") from error


class ChannelServer:
    """Accepts channels and runs `on_channel` for each, as a task it owns; `close` ends them all.

    `make_hello()` is called per connection (a fresh bind token, say); `on_channel(channel, hello)` gets
    what was sent.
    """

    def __init__(
        self,
        make_hello: Callable[[], Hello],
        secret: bytes,
        on_channel: Callable[[Channel, Hello], Awaitable[None]],
        check: Callable[[Hello], None] = accept_any,
    ) -> None:
        self._make_hello = make_hello
        self._secret = secret
        self._on_channel = on_channel
        self._check = check
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._accept, host, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening and end every channel's task."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._run(Channel(reader, writer), writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, channel: Channel, writer: asyncio.StreamWriter) -> None:
        hello = self._make_hello()
        try:
            _tune(writer)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await channel.shake_hands(hello, self._secret, self._check)
            await self._on_channel(channel, hello)
        except (BatonError, OSError, TimeoutError, MemoryError):
            pass  # the peer's trouble; whoever owned state for it cleaned up in on_channel
        finally:
            channel.abort()


def raise_if_refused(message: Message) -> Message:
    """`message`, or the error a peer refused us with."""
    if isinstance(message, Refusal):
        raise from_wire(message.error)
    return message


def _tune(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A worker speaks once a second. If the network swallows that, its coordinator is gone, and so are those requests;
    # the kernel's own patience is a quarter of an hour.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
