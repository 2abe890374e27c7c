"""Handoffs of sequences that grow while they are copied: what is drawn meanwhile arrives too, and nothing beyond."""

from __future__ import annotations

import signal

import pytest

from contracts.errors import HandoffError
from tests.kvtransfer.scene import scene
from tests.kvtransfer.tools import LAYOUT, Growing, connected, make_config, until

SIZE = LAYOUT.block_size
both = pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])


@both
@pytest.mark.parametrize("num_known", [1, SIZE, 3 * SIZE + 1])
@pytest.mark.parametrize("num_more", [0, 1, SIZE, 5 * SIZE + 2])
async def test_what_is_drawn_meanwhile_arrives_too(transport: str, num_known: int, num_more: int) -> None:
    async with connected(make_config(transport=transport)) as pair:
        handoff = Growing(pair, num_known, num_known + num_more)
        handoff.expect()
        out = handoff.open()
        for num_tokens in range(num_known, num_known + num_more + 1):
            handoff.ready(num_tokens)
        full = (num_known + num_more) // SIZE * SIZE
        await until(lambda: handoff.arrived >= full and handoff.num_caught_up == 1)
        out.finish(handoff.state)
        result, outcome = await handoff.result(), await handoff.outcome()
        assert result.error is None
        assert outcome == handoff.state
        assert handoff.arrived == num_known + num_more
        assert handoff.num_caught_up == 1


async def test_tokens_that_the_target_holds_are_not_sent() -> None:
    async with connected(make_config()) as pair:
        handoff = Growing(pair, 5 * SIZE, 7 * SIZE, start=4 * SIZE)
        handoff.expect()
        out = handoff.open()
        handoff.ready(7 * SIZE)
        out.finish(handoff.state)
        assert (await handoff.result()).num_bytes == 3 * SIZE * LAYOUT.bytes_per_token
        assert await handoff.outcome() == handoff.state


@pytest.mark.parametrize("num_more", [0, SIZE - 1])
async def test_more_tokens_than_there_is_room_for_are_refused(num_more: int) -> None:
    """By their range when they come, or by the count that the end tells."""
    async with connected(make_config()) as pair:
        handoff = Growing(pair, 2 * SIZE, 3 * SIZE)
        handoff.expect(num_more)
        out = handoff.open()
        out.finish(handoff.state)
        outcome = await handoff.outcome()
        assert isinstance(outcome, Exception)
        assert (await handoff.result()).error is not None


async def test_an_end_that_names_more_tokens_than_came_is_refused() -> None:
    async with connected(make_config()) as pair:
        handoff = pair.handoff(2 * SIZE)  # a prompt's handoff has one length
        handoff.expect()
        grown = Growing(pair, 2 * SIZE, 2 * SIZE + 1)
        handoff.open(0)
        assert handoff.outgoing is not None
        handoff.outgoing.finish(grown.state)
        assert isinstance(await handoff.outcome(), Exception)
        assert (await handoff.result()).error is not None


async def test_a_migration_may_end_before_it_has_caught_up_or_come_to_nothing() -> None:
    async with connected(make_config()) as pair:
        for error in (None, HandoffError("preempted")):
            handoff = Growing(pair, 60, 100)
            handoff.expect()
            out = handoff.open()
            out.abort(error)
            assert (await handoff.result()).error is error
            outcome = await handoff.outcome()
            assert (outcome is None) == (error is None)
            await pair.rest()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_between_two_processes_that_go_on_drawing(transport: str) -> None:
    async with scene(transport) as s:
        await s.decode.ask("expect_growing", "m", 50, 100)
        await s.prefill.ask("migrate", "m", 50, 100)
        assert await s.decode.ask("outcome", "m") == "ok"
        assert await s.prefill.ask("result", "m") == "ok"
        await s.decode.ask("arrived", "m", 100)
        await s.rest()
        await s.decode.ask("expect_growing", "lost", 50, 100)
        s.decode.signal(signal.SIGKILL)
        await s.prefill.ask("migrate", "lost", 50, 100)
        assert await s.prefill.ask("result", "lost") == "WorkerLostError"
        await s.prefill.ask("rest")
