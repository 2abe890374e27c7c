"""Chunks that are stored part by part, as their bytes come."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from contracts.messages import Data, Fin
from kvtransfer import stream, ucx_transfer
from kvtransfer.filling import Filling
from kvtransfer.incoming import Incoming
from kvtransfer.pages import checksum
from tests.kvtransfer.test_handoff import damage
from tests.kvtransfer.tools import LAYOUT, STATE, connected, make_config

CONTENT = random.Random(1).randbytes(1000)


def make(summed: int, num_bytes: int = len(CONTENT)) -> tuple[Filling, list[memoryview]]:
    runs = [memoryview(bytearray(size)) for size in (1, 400, 599)]
    return Filling(runs, Data("h", 0, 0, 0, 1, num_bytes, summed)), runs


@pytest.mark.parametrize("size", [1, 7, 400, 999, 1000])
@pytest.mark.parametrize("is_summed", [False, True])
def test_bytes_go_where_whole_chunks_would(size: int, is_summed: bool) -> None:
    filling, runs = make(checksum(memoryview(CONTENT)) if is_summed else 0)
    for low in range(0, len(CONTENT), size):
        assert not filling.is_whole
        filling.add(memoryview(CONTENT)[low : low + size])
    assert filling.is_whole
    assert b"".join(runs) == CONTENT


def test_another_sum_and_another_number_of_bytes_are_damage() -> None:
    filling, _ = make(checksum(memoryview(CONTENT)) ^ 2)
    filling.add(memoryview(CONTENT))
    assert not filling.is_whole
    filling, runs = make(0)
    filling.add(memoryview(CONTENT))
    filling.add(memoryview(b"more"))
    assert not filling.is_whole
    assert b"".join(runs) == CONTENT


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
@pytest.mark.parametrize("num_damaged", [0, 2])
async def test_a_handoff_in_parts_is_the_same(
    transport: str, num_damaged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PART_BYTES", 100)
    monkeypatch.setattr(ucx_transfer, "PART_BYTES", 100)
    real, num_parts = Incoming.store_part, 0

    def counted(self: Incoming, data: Data, filling: Filling, here: memoryview) -> object:
        nonlocal num_parts
        num_parts += 1
        return real(self, data, filling, here)

    monkeypatch.setattr(Incoming, "store_part", counted)
    async with connected(make_config(transport=transport, checksum="always")) as pair:
        if num_damaged:
            damage(monkeypatch, num_damaged)
        handoff = pair.handoff(100)
        handoff.expect()
        handoff.open()
        assert (await handoff.result()).error is None
        assert await handoff.outcome() == STATE
        assert handoff.arrived == 100
        assert pair.decode.endpoint.num_damaged_chunks == num_damaged
        await pair.rest()
    assert num_parts > 2 * 100 // LAYOUT.block_size


async def test_nothing_is_committed_while_a_chunk_that_has_written_a_part_is_not_whole() -> None:
    async with connected(make_config()) as pair:
        handoff = pair.handoff(32)
        incoming = handoff.expect()
        incoming.open(0)
        num_bytes = 32 * LAYOUT.bytes_per_token
        content = torch.full((num_bytes,), 3, dtype=torch.uint8)
        good = Data("h", 0, 0, 0, 32, num_bytes, checksum(content))
        assert incoming.stored(good, incoming.store(good, content))
        again = replace(good, chunk=1)  # of the same tokens: nonsense, but they are in the blocks already
        filling = incoming.begin(again)
        assert filling is not None
        incoming.store_part(again, filling, memoryview(bytes(num_bytes // 2)))
        fin = Fin(incoming.reservation.handoff_id, 1, STATE)
        assert not incoming.finish(fin, num_coming=1)
        damaged = incoming.store_part(again, filling, memoryview(bytes(num_bytes // 2)))
        assert damaged is False
        assert not incoming.stored(again, damaged)
        assert not incoming.finish(fin, num_coming=0)
        assert incoming.stored(again, incoming.store(again, content))
        duplicate = incoming.begin(good)
        assert duplicate is not None
        assert incoming.store_part(good, duplicate, memoryview(bytes(num_bytes))) is True
        assert incoming.finish(replace(fin, num_chunks=2), num_coming=0)
        assert pair.decode.slab[handoff.targets].view(torch.uint8).eq(3).all()
