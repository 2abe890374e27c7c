"""Prefill and decode in two processes, brought to a state of a handoff: for the fault matrix and the network.

RESERVED    decode expects it, nobody has opened it          RECEIVING   60 of 100 tokens are there
RECEIVED    all tokens are there, prefill has not finished   DELIVERED   decode has taken over
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from contracts.messages import PROTOCOL_VERSION
from tests.kvtransfer.peers import Place, Process, Processes, processes
from tests.kvtransfer.wires import Wire, wires

NUM_TOKENS = 100
NUM_READY = 60
SILENCE_S = 2.0
LIMIT_S = 25.0  # from the fault to the survivor's typed error, on a machine that does other things as well
STATES = ("reserved", "receiving", "received", "delivered")
VICTIMS = ("prefill", "decode")
OTHER = {"prefill": "decode", "decode": "prefill"}


async def at_once(check: Callable[..., Coroutine[None, None, None]], *choices: Sequence[str]) -> None:
    """`check` with one of each of `choices`, in all ways, each with processes of its own: most of a case is waiting."""

    async def named(chosen: tuple[str, ...]) -> None:
        try:
            await check(*chosen)
        except BaseException as error:
            error.add_note(f"at {', '.join(chosen)}")
            raise

    async with asyncio.TaskGroup() as group:
        for chosen in itertools.product(*choices):
            group.create_task(named(chosen))


@dataclass
class Scene:
    """Both processes and the wires between them."""

    started: Processes
    transport: str
    prefill: Process
    decode: Process
    wires: list[Wire]
    port: int
    prefill_life: int = 1
    decode_life: int = 1

    def at(self, role: str) -> Process:
        return self.prefill if role == "prefill" else self.decode

    async def reach(self, state: str, handoff_id: str) -> None:
        await self.decode.ask("expect", handoff_id, NUM_TOKENS)
        if state == "reserved":
            return
        await self.open(handoff_id, NUM_READY if state == "receiving" else NUM_TOKENS)
        await self.decode.ask("arrived", handoff_id, NUM_READY if state == "receiving" else NUM_TOKENS)
        if state == "delivered":
            await self.finish(handoff_id)

    async def open(self, handoff_id: str, num_ready: int) -> None:
        lives = self.prefill_life, self.decode_life
        await self.prefill.ask("open", handoff_id, NUM_TOKENS, num_ready, *lives)

    async def finish(self, handoff_id: str) -> None:
        await self.prefill.ask("finish", handoff_id)
        assert await self.decode.ask("outcome", handoff_id) == "ok"
        assert await self.prefill.ask("result", handoff_id) == "ok"
        await self.decode.ask("arrived", handoff_id, NUM_TOKENS)

    async def check_again(self, num_connections: int) -> None:
        """The pair has found together (again), and hands over."""
        await self.prefill.ask("connected", num_connections)
        await self.reach("delivered", "again")
        await self.rest()

    async def rest(self) -> None:
        await self.prefill.ask("rest")
        await self.decode.ask("rest")

    async def restart(self, victim: str) -> None:
        """A new life at the same address."""
        await self.start_anew(victim)
        await self.prefill.ask("peer", self.port, self.decode_life)

    async def start_anew(self, victim: str, version: int = PROTOCOL_VERSION) -> None:
        """It is there, and nobody has connected yet."""
        if victim == "prefill":
            self.prefill_life = 2
            self.prefill, _, _ = await self.started.endpoint("p", 2, version, transport=self.transport)
        else:
            self.decode_life = 2
            self.decode, port, address = await self.started.endpoint(
                "d", 2, version, transport=self.transport
            )
            self.wires[0].lead(port)
            if self.transport == "tcp":
                self.wires[1].lead(int(address.rpartition(":")[2]))


@contextlib.asynccontextmanager
async def scene(transport: str, peer_timeout_s: float = 60.0) -> AsyncIterator[Scene]:
    # A handoff ends by the fault, never because a busy machine has stopped for a while.
    changes = {
        "transport": transport, "peer_timeout_s": peer_timeout_s, "progress_timeout_s": 2 * LIMIT_S,
        "connect_timeout_s": 15.0,
    }  # fmt: skip
    async with processes() as started:
        decode, port, address = await started.endpoint("d", **changes)
        prefill, _, _ = await started.endpoint("p", **changes)
        async with wires(port, address) as (made, port, address):
            await decode.ask("publish", address)
            await prefill.ask("peer", port)
            yield Scene(started, transport, prefill, decode, made, port)


async def check_survivor(scene: Scene, survivor: str, state: str) -> None:
    """What the one that is left makes of handoff "h"."""
    begun_s = time.monotonic()
    if survivor == "prefill":
        if state == "reserved":
            await scene.open("h", NUM_TOKENS)
        if state != "delivered":
            assert await scene.prefill.ask("result", "h") == "WorkerLostError"
        await scene.prefill.ask("rest")
    else:
        if state == "reserved":
            assert await scene.decode.ask("is_pending", "h")  # another prefill worker may still come
            await scene.decode.ask("expire", "h")
        elif state != "delivered":
            assert await scene.decode.ask("outcome", "h") == "WorkerLostError"
        await scene.decode.ask("rest")
    assert time.monotonic() - begun_s < LIMIT_S


@contextlib.asynccontextmanager
async def scene_between(prefill_at: Place, decode_at: Place, **changes: Any) -> AsyncIterator[Scene]:
    """Without wires, over whatever network is between the two places."""
    async with processes() as started:
        decode, port, _ = await started.endpoint("d", place=decode_at, **changes)
        prefill, _, _ = await started.endpoint("p", place=prefill_at, **changes)
        await prefill.ask("peer", port, 1, decode_at.host)
        yield Scene(started, changes["transport"], prefill, decode, [], port)
