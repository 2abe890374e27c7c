"""Peers come and go; of those that are gone an endpoint keeps nothing, however many: no memory, no file, no thread."""

from __future__ import annotations

import pytest

from kvtransfer import receiver
from kvtransfer.endpoint import KvEndpoint
from tests.held import held_by
from tests.kvtransfer.tools import HOST, Held, Pair, Side, decode_side, make_config, make_info, until

NUM_LIVES = 12
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp", "ucx"])


async def handed_over(prefill: Side, decode: Side, port: int) -> None:
    """A first connection, and one handoff over it."""
    target_id, incarnation = decode.endpoint._identity
    prefill.endpoint.set_peers([make_info(port, target_id, incarnation)])
    await until(lambda: any(peer.is_ready for peer in prefill.endpoint.peer_statuses()))
    source_id, source_incarnation = prefill.endpoint._identity
    lives = {
        "source_id": source_id,
        "source_incarnation": source_incarnation,
        "target_incarnation": incarnation,
    }
    handoff = Pair(prefill, decode, port).handoff(40, **lives)
    handoff.expect()
    handoff.open()
    assert not isinstance(await handoff.outcome(), Exception)
    await handoff.result()


async def settled(endpoint: KvEndpoint, sizes: list[int]) -> None:
    """It comes to hold no more than after the first lives, when what is on its way out has left."""
    assert len(sizes) == NUM_LIVES
    await until(lambda: held_by([endpoint]).total() <= min(sizes[2:6]))
    assert held_by([endpoint])["Receiver"] == 1  # it was looked at


@TRANSPORTS
async def test_of_targets_that_are_gone_a_sender_keeps_nothing(transport: str) -> None:
    prefill, sizes = Side("p", 1, make_config(transport=transport)), []
    await prefill.endpoint.start(HOST)
    for life in range(1, NUM_LIVES + 1):
        decode = Side("d", 2, make_config(transport=transport), incarnation=life)
        await handed_over(prefill, decode, await decode.endpoint.start(HOST))
        await decode.endpoint.close()
        prefill.endpoint.set_peers([])
        sizes.append(held_by([prefill.endpoint]).total())
        if life == 2:
            held = Held.now()
    await settled(prefill.endpoint, sizes)
    await held.again()
    await prefill.endpoint.close()


@TRANSPORTS
async def test_of_senders_that_are_gone_a_target_keeps_nothing_but_their_last_handoffs(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "NUM_TOMBSTONES", 2)
    async with decode_side(make_config(transport=transport)) as (decode, port):
        sizes = []
        for life in range(1, NUM_LIVES + 1):
            prefill = Side("p", 1, make_config(transport=transport), incarnation=life)
            await prefill.endpoint.start(HOST)
            await handed_over(prefill, decode, port)
            await prefill.endpoint.close()
            sizes.append(held_by([decode.endpoint]).total())
            if life == 2:
                held = Held.now()
        await settled(decode.endpoint, sizes)
        await held.again()
