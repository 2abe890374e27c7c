"""A prefill or decode worker driven by hand in a process of its own: it holds the secret and says what it likes.

It first does everything right up to a state of the handoff, then says one thing that is wrong, then goes on rightly
if it is still heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import msgpack
import torch

from contracts import wire
from contracts.channel import Channel, ChannelServer
from contracts.errors import BatonError, HandoffError, WorkerLostError, to_wire
from contracts.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortOk,
    ChunkDone,
    Commit,
    Data,
    Fin,
    Grant,
    Hello,
    Keep,
    Message,
    Open,
    Ping,
    Pong,
    Want,
)
from kvtransfer.pages import Pages, checksum
from kvtransfer.transport import Link, Transport
from tests.kvtransfer.links import make_transport
from tests.kvtransfer.peers import CALM_S, obey
from tests.kvtransfer.tools import (
    FINGERPRINT,
    HOST,
    LAYOUT,
    SECRET,
    SLOT_TOKENS,
    STATE,
    TOKEN,
    WAIT_S,
    RawSender,
    make_slab,
    make_ticket,
    raw_sender,
    until,
)

NUM_TOKENS = 24
CHUNKS = ((0, SLOT_TOKENS), (SLOT_TOKENS, NUM_TOKENS))
NUM_CHUNKS = {"reserved": 0, "receiving": 1, "received": 2, "delivered": 2}


def raw_frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


BROKEN_FRAMES: dict[str, bytes] = {
    "truncated": struct.pack(">I", 100) + b"half of it",
    "garbage": raw_frame(b"\xc1" * 40),
    "huge": struct.pack(">I", 0xFFFF_FFFF) + b"x",
    "other version": raw_frame(msgpack.packb({"v": PROTOCOL_VERSION + 1, "kind": "ping", "number": 1})),
    "unknown kind": raw_frame(msgpack.packb({"v": PROTOCOL_VERSION, "kind": "surrender"})),
    "wrong types": raw_frame(
        msgpack.packb({"v": PROTOCOL_VERSION, "kind": "want", "handoff_id": 7, "num_chunks": "all"})
    ),
    "of a coordinator": raw_frame(wire.encode(Hello("p", 1, "commands", b""))),
}


ENDING = ("link closed", *BROKEN_FRAMES)


def send_broken(channel: Channel, name: str) -> None:
    channel._writer.write(BROKEN_FRAMES[name])
    if name == "truncated":
        channel._writer.write_eof()


# --- a hostile prefill ------------------------------------------------------------------------------------------------


class Sender:
    """Of handoff "h", over a connection of its own."""

    def __init__(self, raw: RawSender, handoff_id: str) -> None:
        self._raw = raw
        self._ticket = make_ticket(NUM_TOKENS, handoff_id)
        self._id = handoff_id
        self._slab = make_slab(1)
        self._num_wanted = 0
        self._left = list(range(len(CHUNKS)))
        self._credits: list[int] = []
        self._said: list[Message] = []
        self._is_open = False

    async def reach(self, state: str) -> None:
        if state != "reserved":
            await self._open()
        for _ in range(NUM_CHUNKS[state]):
            await self._chunk()
        if state == "delivered":
            await self._fin()

    async def complete(self) -> None:
        """Everything that is missing."""
        await self._open()
        while self._left:
            await self._chunk()
        await self._fin()

    async def say(self, name: str) -> str:
        """ "lives": the connection does; "ended": it does not."""
        if name in ENDING:
            if name in BROKEN_FRAMES:
                send_broken(self._raw.channel, name)
            else:
                await self._raw.link.close()
            with contextlib.suppress(WorkerLostError):
                while True:
                    await self._raw.hear()
            return "ended"
        await getattr(self, name)()
        await self._raw.ask()
        return "lives"

    async def hold(self, is_announcing: bool) -> None:
        """Two credits; in the first, if `is_announcing`, bytes are due that do not come."""
        await self._open()
        (grant,) = await self._ask(Want(self._id, 2))
        assert isinstance(grant, Grant)
        self._credits += grant.slots
        if is_announcing:
            head, _ = self._data(0, grant.slots[0])
            assert await self._raw.ask(head) == []

    async def let_go(self) -> None:
        """What was announced comes, and the rest is given back."""
        if self._raw.link.staging(0) is None:
            _, content = self._data(0, self._credits[0])
            self._raw.link.send(self._credits[0], memoryview(content.numpy()))
        await self._raw.ask(AbortOk(self._id))

    async def talk(self) -> None:
        """Until the connection ends."""
        with contextlib.suppress(WorkerLostError):
            while True:
                await self._raw.ask()
                await asyncio.sleep(0.1)

    async def complete_behind(self) -> bool:
        """Everything that is missing, behind bytes on the data link that nobody awaits. Whether that went through."""
        self._raw.link.send(999, memoryview(bytes(100)))
        try:
            await self.complete()
        except WorkerLostError:
            return False
        return True

    # What is wrong.

    async def duplicate(self) -> None:
        await self._raw.ask(*self._said)

    async def duplicate_bytes(self) -> None:
        """The first chunk again, bytes and all, if a slot is granted for it."""
        self._num_wanted += 1
        for answer in await self._raw.ask(Want(self._id, self._num_wanted)):
            if isinstance(answer, Grant):
                self._raw.send_data(*self._data(0, answer.slots[0]))
                assert (await self._raw.hear()).is_ok  # type: ignore[union-attr]

    async def reordered(self) -> None:
        """Words before those that they follow, an answer to what was not said; then the last chunk first."""
        if not self._is_open:
            early = Fin(self._id, 2, STATE), Data(self._id, 0, 0, *CHUNKS[0], 4096, 0), Want(self._id, 1)
            assert await self._raw.ask(*early) == []
        await self._raw.ask(AbortOk(self._id))
        self._credits.clear()  # so it says
        self._left.reverse()

    async def open_after_abort(self) -> None:
        """Of words that overtook each other, say. What is over stays over."""
        await self._raw.ask(Abort(self._id, to_wire(HandoffError("changed my mind"))), Open(self._ticket, 0))
        self._is_open = True

    async def stale(self) -> None:
        """Words about a handoff that is long over."""
        old = replace(self._ticket, handoff_id="old")
        answers = await self._raw.ask(
            Open(old, 0),
            Want("old", 2),
            Data("old", 0, 0, 0, 4, 1024, 0),
            Fin("old", 1, STATE),
            AbortOk("old"),
        )
        assert [type(answer) for answer in answers] == [Abort, Abort]

    async def stale_slot(self) -> None:
        """Data for slots that are not granted (any more)."""
        for slot in range(-1, 6):
            await self._raw.ask(Data(self._id, 0, slot, *CHUNKS[0], 4096, 0))

    async def forged(self) -> None:
        for changes in ({"mac": b"x" * 32}, {"num_tokens": 99}, {"request_id": "another"}):
            await self._raw.ask(Open(replace(self._ticket, **changes), 0))  # type: ignore[arg-type]

    async def early_fin(self) -> None:
        await self._raw.ask(Fin(self._id, 2, STATE))

    async def wrong_range(self) -> None:
        await self._data_of(SLOT_TOKENS, NUM_TOKENS + 1, 9 * LAYOUT.bytes_per_token)

    async def wrong_size(self) -> None:
        await self._data_of(*CHUNKS[1], 17)

    async def negative(self) -> None:
        await self._data_of(-8, -4, -1024)
        await self._raw.ask(Want(self._id, -5), Fin(self._id, -1, STATE))

    async def another_range(self) -> None:
        """The first chunk's number, other tokens."""
        await self._data_of(4, 8, 4 * LAYOUT.bytes_per_token, chunk=0)

    async def damaged(self) -> None:
        """A chunk whose bytes are not what its checksum says is asked for again."""
        self._num_wanted += 1
        for answer in await self._raw.ask(Want(self._id, self._num_wanted)):
            if isinstance(answer, Grant):
                head, content = self._data(1, answer.slots[0])
                self._raw.send_data(replace(head, chunk=9, checksum=head.checksum ^ 2), content)
                assert not (await self._raw.hear()).is_ok  # type: ignore[union-attr]

    async def all_slots(self) -> None:
        """Asks for more than there are."""
        for answer in await self._raw.ask(Want(self._id, 1 << 40)):
            assert isinstance(answer, Grant)
            self._credits += answer.slots

    async def keeps(self) -> None:
        """Asks for slots to keep, in any number, and does not use them."""
        for num_slots in (-1, 1 << 40, 0, 2):
            for answer in await self._raw.ask(Keep(num_slots)):
                assert isinstance(answer, Grant)
                assert answer.handoff_id == ""

    # What is right.

    async def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            await self._ask(Open(self._ticket, 0))

    async def _chunk(self) -> None:
        if not self._credits:
            self._num_wanted += 1
            (grant,) = await self._ask(Want(self._id, self._num_wanted))
            assert isinstance(grant, Grant)
            self._credits += grant.slots
        chunk = self._left[0]
        head, content = self._data(chunk, self._credits.pop())
        self._raw.send_data(head, content)
        self._said.append(head)
        answer = await self._raw.hear()
        assert isinstance(answer, ChunkDone)
        assert (answer.chunk, answer.slot, answer.is_ok) == (chunk, head.slot, True)
        self._credits += answer.granted
        self._left.remove(chunk)

    async def _fin(self) -> None:
        answers = await self._ask(Fin(self._id, len(CHUNKS), STATE))
        assert answers == [Commit(self._id)], answers

    async def _ask(self, *messages: Message) -> list[Message]:
        self._said.extend(messages)
        return await self._raw.ask(*messages)

    async def _data_of(self, low: int, high: int, num_bytes: int, chunk: int = 1) -> None:
        """Announced for a granted slot, if there is one; as many bytes as fit follow, so that the link goes on."""
        self._num_wanted += 1
        for answer in await self._raw.ask(Want(self._id, self._num_wanted)):
            if isinstance(answer, Grant):
                content = torch.zeros(64, dtype=torch.uint8)
                self._raw.send_data(Data(self._id, chunk, answer.slots[0], low, high, num_bytes, 0), content)

    def _data(self, chunk: int, slot: int) -> tuple[Data, torch.Tensor]:
        low, high = CHUNKS[chunk]
        content = torch.empty((high - low) * LAYOUT.bytes_per_token, dtype=torch.uint8)
        Pages(self._slab, LAYOUT).gather(range(6), low, high, content)
        return Data(self._id, chunk, slot, low, high, content.numel(), checksum(content)), content


def run_sender(conn: Connection, port: int, handoff_id: str) -> None:
    async def run() -> None:
        async with raw_sender(port) as raw:
            conn.send("connected")
            await obey(conn, Sender(raw, handoff_id))

    asyncio.run(run())


# --- a hostile decode -------------------------------------------------------------------------------------------------


class Receiver:
    """Takes one connection and answers its handoff "h"."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._server = ChannelServer(self._make_hello, SECRET, self._serve)
        self._address = ""
        self._connected: asyncio.Future[tuple[Channel, Link]] = asyncio.get_running_loop().create_future()
        self._heard: list[Message] = []
        self._said: list[Message] = []
        self._is_gone = asyncio.Event()

    async def start(self) -> int:
        self._address = f"{self._transport.name}={await self._transport.listen()}"
        return await self._server.start(HOST)

    async def close(self) -> None:
        await self._server.close()
        await self._transport.close()

    def _make_hello(self) -> Hello:
        return Hello("d", 1, "kv", b"", FINGERPRINT, LAYOUT, self._address, TOKEN, SLOT_TOKENS * 256)

    async def _serve(self, channel: Channel, hello: Hello) -> None:
        link = await self._transport.accept(hello.bind_token, WAIT_S)
        self._connected.set_result((channel, link))
        try:
            while True:
                message = await channel.receive()
                if isinstance(message, Ping):
                    channel.send(Pong(message.number))
                else:
                    self._heard.append(message)
        except BatonError:
            self._is_gone.set()
        finally:
            await link.close()

    async def reach(self, state: str) -> None:
        """With "receiving" the first of two chunks is acknowledged; with "received" both."""
        if state == "reserved":
            await self._hear(Open, 1)
            return
        for number in range(NUM_CHUNKS[state]):
            await self._grant(number)
        if state == "delivered":
            await self._hear(Fin, 1)
            await self._tell(Commit("h"))

    async def complete(self, num_done: int) -> None:
        for number in range(num_done, 2):
            await self._grant(number)
        await self._hear(Fin, 1)
        await self._tell(Commit("h"))

    async def say(self, name: str) -> None:
        channel, link = await self._connected
        if name in BROKEN_FRAMES:
            send_broken(channel, name)
            return
        if name == "link closed":
            await link.close()
            return
        unasked = Grant("h", (0, 1, 2, 3))
        frames: dict[str, Callable[[], tuple[Message, ...]]] = {
            "grant for nobody": lambda: (Grant("old", (0, 1)), ChunkDone("old", 0, 0, True), Commit("old")),
            "grant of no slot": lambda: (Grant("h", (-1,)), Grant("h", (1 << 40,))),
            "chunks that were not sent": lambda: (ChunkDone("h", 77, 0, True), ChunkDone("h", -1, 0, False)),
            "duplicates": lambda: tuple(self._said),
            "early commit": lambda: (Commit("h"),),
            "unasked grant": lambda: (unasked, unasked),
            "abort of an old one": lambda: (Abort("old"), Abort("old"), AbortOk("h")),
            "abort": lambda: (Abort("h"), Abort("h")),
        }
        await self._tell(*frames[name]())

    async def gone(self) -> None:
        """Until the sender has ended the connection."""
        async with asyncio.timeout(WAIT_S):
            await self._is_gone.wait()

    async def _grant(self, number: int) -> None:
        """One slot; the chunk that comes in it is acknowledged."""
        await self._hear(Want, 1)
        _, link = await self._connected
        await self._tell(Grant("h", (number % 4,)))
        await self._hear(Data, number + 1)
        data = next(m for m in self._heard if isinstance(m, Data) and m.chunk == number)
        if link.staging(data.slot) is None:
            async with asyncio.timeout(WAIT_S):
                await link.post_recv(data.slot, memoryview(bytearray(1 << 16))).wait()
        await self._tell(ChunkDone("h", data.chunk, data.slot, True))

    async def _hear(self, kind: type, count: int) -> None:
        await until(
            lambda: sum(isinstance(message, kind) for message in self._heard) >= count, pause_s=CALM_S
        )

    async def _tell(self, *messages: Message) -> None:
        channel, _ = await self._connected
        self._said.extend(messages)
        for message in messages:
            channel.send(message)


def run_receiver(conn: Connection, transport: str) -> None:
    async def run() -> None:
        receiver = Receiver(make_transport(transport))
        conn.send(await receiver.start())
        await obey(conn, receiver)
        await receiver.close()

    asyncio.run(run())
