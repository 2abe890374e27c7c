"""A worker on a real socket that does what a test scripts: no engine, no KV, the real protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from contracts.blocks import BlockAudit, KvLayout
from contracts.channel import Channel, ChannelServer
from contracts.errors import WireError
from contracts.messages import (
    AskAudit,
    AuditReply,
    Cancel,
    Ended,
    HandedOff,
    Hello,
    Message,
    Migrate,
    Peers,
    PeerStatus,
    Prefill,
    Reserve,
    Reserved,
    Role,
    Status,
    Tokens,
    WorkerInfo,
)
from contracts.request import Finished, Token
from contracts.roles import Duty, Orders
from contracts.steps import StepReport

SECRET = b"k" * 32
LAYOUT = KvLayout(2, 1, 8, 16, "float32")


def next_token(known: int) -> int:
    """The fake model: the token at a position depends on the position alone."""
    return 1000 + known


class FakeWorker:
    """`on_reserve` and `on_prefill` are the script; `heard` is every command in order."""

    def __init__(
        self, role: Role, worker_id: str, num_blocks: int = 100, peers: tuple[str, ...] = ()
    ) -> None:
        self.role = role
        self.worker_id = worker_id
        self.num_blocks = num_blocks
        self.peers = peers
        self.is_draining = False
        self.num_free = num_blocks
        self.heard: list[Message] = []
        self.channels: list[Channel] = []
        self.coordinators: list[str] = []
        self.duty = Duty(role, 0)
        self.steps: StepReport | None = None
        self._changed = asyncio.Event()
        self.on_reserve: Callable[[Channel, Reserve], None] = self.grant
        self.on_prefill: Callable[[Channel, Prefill], None] = lambda _channel, _command: None
        self.on_migrate: Callable[[Channel, Migrate], None] = lambda _channel, _command: None
        self._server = ChannelServer(lambda: Hello(worker_id, 1, "commands", b""), SECRET, self._serve)

    async def start(self) -> WorkerInfo:
        port = await self._server.start("127.0.0.1")
        return WorkerInfo(
            self.worker_id,
            self.role,
            1,
            1,
            "127.0.0.1",
            port,
            0,
            "fp",
            LAYOUT,
            self.num_blocks,
            8,
            512,
            self.worker_id,
        )

    async def kill(self) -> None:
        """Gone: every connection breaks and nobody listens any more."""
        await self._server.close()

    async def wait_for(self, matches: Callable[[Message], bool]) -> Message:
        """The first command that `matches`, as soon as it is there; fails after 5 s."""
        async with asyncio.timeout(5):
            while True:
                for message in self.heard:
                    if matches(message):
                        return message
                self._changed.clear()
                await self._changed.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Whoever comes or leaves, and every command, is a reason to look again; fails after 5 s."""
        async with asyncio.timeout(5):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    def status(self, num_free: int | None = None) -> Status:
        free = self.num_free if num_free is None else num_free
        audit = BlockAudit(self.num_blocks, free, 0, self.num_blocks - free, 0, 0, 0)
        peers = tuple(PeerStatus(peer, True, "memory", 1.0) for peer in self.peers)
        coordinators = tuple(sorted(self.coordinators))
        return Status(
            self.worker_id,
            1,
            True,
            0.0,
            0,
            0,
            audit,
            peers,
            steps=self.steps,
            duty=self.duty,
            coordinators=coordinators,
            is_draining=self.is_draining,
        )

    def tell(self) -> None:
        """Its status, to everybody."""
        for channel in self.channels:
            channel.send(self.status())

    def grant(self, channel: Channel, command: Reserve) -> None:
        channel.send(Reserved(command.request.request_id, 0))

    def refuse(self, channel: Channel, command: Reserve) -> None:
        channel.send(Ended(command.request.request_id, error=WireError("overloaded", "no room", 1.0)))

    async def _serve(self, channel: Channel, _hello: Hello) -> None:
        self.channels.append(channel)
        self.coordinators.append(channel.peer.sender_id)
        channel.send(self.status())
        try:
            await self._converse(channel)
        finally:
            self.channels.remove(channel)
            self.coordinators.remove(channel.peer.sender_id)
            self._changed.set()

    async def _converse(self, channel: Channel) -> None:
        while True:
            message = await channel.receive()
            self.heard.append(message)
            self._changed.set()
            match message:
                case Reserve():
                    self.on_reserve(channel, message)
                case Prefill():
                    self.on_prefill(channel, message)
                case Migrate():
                    self.on_migrate(channel, message)
                case AskAudit(call_id):
                    channel.send(AuditReply(call_id, self.status().audit))
                case Orders(duty):
                    if duty is not None and duty.epoch > self.duty.epoch:
                        self.duty = duty
                        self.tell()
                case _:
                    assert isinstance(message, Cancel | Peers)


def send_tokens(channel: Channel, request_id: str, *indexes: int) -> None:
    channel.send(Tokens.of([(request_id, Token(i, next_token(i))) for i in indexes]))


def finish(channel: Channel, request_id: str, reason: str = "length") -> None:
    channel.send(Ended(request_id, finished=Finished(reason)))


def hand_off(channel: Channel, request_id: str) -> None:
    channel.send(HandedOff(request_id, 1024, 0.001))
