"""Whatever ends a connection's task, at whichever of its awaits: each handoff has one end, and nothing is left behind.

The task is cancelled, or its connections are cut, at its first await, then in a new pair at its second, and so on until
one pair hands over untouched. In between are the handshake, the data link, the self-test and all of the handoff.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

from contracts.channel import ChannelServer
from contracts.errors import BatonError
from kvtransfer import sender
from kvtransfer.sender import Sender
from tests.kvtransfer.tools import HOST, Held, Pair, Side, decode_side, make_config, make_info, until
from tests.kvtransfer.wires import Wire, wires

NUM_TOKENS = 100  # seven chunks in four slots
transports = pytest.mark.parametrize("transport", ["memory", "tcp", "shm"])


@dataclass
class Driver:
    """Runs the first coroutine that it gets, and makes trouble at its await `number`."""

    role: str
    trouble: str
    number: int
    wires: list[Wire] = field(default_factory=list)
    num_awaits: int = 0
    num_driven: int = 0
    is_hit: bool = False

    async def drive(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        self.num_driven += 1
        await (_Driven(self, work(*arguments)) if self.num_driven == 1 else work(*arguments))

    def awaits(self) -> None:
        self.num_awaits += 1
        if self.num_awaits != self.number:
            return
        self.is_hit = True
        if self.trouble == "cancelled":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        for wire in self.wires if self.trouble == "cut off" else ():
            wire.reset()


class _Driven(Awaitable[None]):
    def __init__(self, driver: Driver, work: Coroutine[Any, Any, None]) -> None:
        self._driver, self._work = driver, work

    def __await__(self) -> Generator[Any, Any, None]:
        inside = self._work.__await__()
        try:
            awaited = next(inside)
            while True:
                self._driver.awaits()
                try:
                    given = yield awaited
                except BaseException as error:
                    awaited = inside.throw(error)
                else:
                    awaited = inside.send(given)
        except StopIteration:
            return


def drive(monkeypatch: pytest.MonkeyPatch, role: str, driver: Driver) -> None:
    """The task of the first connection, at prefill's end or at decode's."""
    owner: Any = Sender if role == "prefill" else ChannelServer
    name = "run" if role == "prefill" else "_run"
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: driver.drive(real, *arguments))


async def hand_over(pair: Pair) -> bool:
    """Whether it went well. If not, the error is one of ours, and decode's blocks are free at once."""
    handoff = pair.handoff(NUM_TOKENS)
    incoming = handoff.expect()
    handoff.open()
    error = (await handoff.result()).error
    if error is not None:
        assert isinstance(error, BatonError)
        incoming.cancel(None)
        return False
    assert not isinstance(await handoff.outcome(), Exception)
    assert handoff.arrived == NUM_TOKENS
    return True


async def check(transport: str, driver: Driver) -> None:
    config = make_config(transport=transport)
    async with decode_side(config) as (decode, port), wires(port, decode.endpoint._address) as way:
        driver.wires, port, decode.endpoint._address = way
        prefill = Side("p", 1, config)
        await prefill.endpoint.start(HOST)

        def is_ready() -> bool:
            return any(peer.is_ready for peer in prefill.endpoint.peer_statuses())

        prefill.endpoint.set_peers([make_info(port)])
        await until(lambda: is_ready() or driver.is_hit)
        pair = Pair(prefill, decode, port)
        is_well = await hand_over(pair)
        assert is_well or driver.is_hit
        if driver.is_hit and (driver.role, driver.trouble) == ("prefill", "cancelled"):
            await until(lambda: not prefill.endpoint._tasks)  # the sender's own: it has to be made again
            prefill.endpoint.set_peers([])
            prefill.endpoint.set_peers([make_info(port)])
        while not is_well:
            await until(is_ready)
            is_well = await hand_over(pair)
        await pair.rest()
        await prefill.endpoint.close()


@transports
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("trouble", ["cancelled", "cut off"])
async def test_whatever_ends_a_connection_nothing_is_left(
    transport: str, role: str, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "FIRST_BACK_OFF_S", 0.0)
    await check(transport, Driver(role, trouble, sys.maxsize))
    held = Held.now()  # with what a library keeps for good
    number, is_hit = 0, True
    while is_hit:
        number += 1
        driver = Driver(role, trouble, number)
        with monkeypatch.context() as patch:
            drive(patch, role, driver)
            try:
                await check(transport, driver)
                await held.again()
            except BaseException as error:
                error.add_note(f"at await {number}")
                raise
        is_hit = driver.is_hit
    assert number > 8
