"""Pairs that differ in block size, dtype or number of ranks, against a dense reference; others are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contracts.blocks import KvLayout, head_ranges
from contracts.errors import ConfigError
from contracts.messages import HandoffState
from kvtransfer.pages import Pages
from kvtransfer.reshard import Reshard, check_layouts
from tests.kvtransfer.tools import (
    HOST,
    LAYOUT,
    NUM_BLOCKS,
    STATE,
    WAIT_S,
    Side,
    make_config,
    make_info,
    make_ticket,
    until,
)

DTYPES = ("float32", "bfloat16")


def slab_of(layout: KvLayout, seed: int) -> Tensor:
    shape = (NUM_BLOCKS, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, layout.dtype))


def dense(slab: Tensor, block_ids: list[int]) -> Tensor:
    """[tokens, L, 2, K, D]."""
    return slab[block_ids].permute(0, 4, 1, 2, 3, 5).flatten(0, 1).clone()


def cut(slab: Tensor, degree: int) -> list[Tensor]:
    """The slabs of `degree` ranks."""
    return [
        slab[:, :, :, heads.start : heads.stop].contiguous() for heads in head_ranges(slab.shape[3], degree)
    ]


def num_blocks_of(num_tokens: int, layout: KvLayout) -> int:
    return -(-num_tokens // layout.block_size)


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from([(2, 4), (4, 2), (4, 4), (1, 8), (8, 2)]),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
)
def test_a_target_scatters_what_was_gathered_for_it_as_its_own(
    data: st.DataObject, sizes: tuple[int, int], source_dtype: str, target_dtype: str
) -> None:
    ours = replace(LAYOUT, block_size=sizes[0], dtype=source_dtype)
    theirs = replace(LAYOUT, block_size=sizes[1], dtype=target_dtype)
    num_tokens = data.draw(st.integers(1, 3 * max(sizes)))
    low = data.draw(st.integers(0, num_tokens - 1))
    pick = st.permutations(range(NUM_BLOCKS))
    sources = data.draw(pick)[: num_blocks_of(num_tokens, ours)]
    targets = data.draw(pick)[: num_blocks_of(num_tokens, theirs)]
    source, target = slab_of(ours, 1), slab_of(theirs, 2)
    before = target.clone()
    pages = Reshard(Pages(source, ours), theirs)
    wire = torch.zeros(pages.num_bytes(low, num_tokens) + 8, dtype=torch.uint8)
    pages.gather(sources, low, num_tokens, wire)
    assert not wire[-8:].any()
    Pages(target, theirs).scatter(targets, low, num_tokens, wire)

    arrived, kept = dense(target, targets), dense(before, targets)
    wanted = dense(source, sources)[low:num_tokens].to(target.dtype)
    assert torch.equal(arrived[low:num_tokens], wanted)
    assert torch.equal(arrived[:low], kept[:low])
    assert torch.equal(arrived[num_tokens:], kept[num_tokens:])
    others = [block for block in range(NUM_BLOCKS) if block not in targets]
    assert torch.equal(target[others], before[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_equal_layout_gathers_the_same_bytes_as_plain_pages(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    pages = Pages(slab_of(layout, 1), layout)
    plain, other = (torch.zeros(pages.num_bytes(3, 18), dtype=torch.uint8) for _ in range(2))
    pages.gather([5, 6, 1, 9, 2], 3, 18, plain)
    Reshard(pages, layout).gather([5, 6, 1, 9, 2], 3, 18, other)
    assert torch.equal(plain, other)


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_every_head_is_held_and_ranks_are_as_even_as_can_be(num_heads: int, degree: int) -> None:
    ranges = head_ranges(num_heads, degree)
    assert {head for held in ranges for head in held} == set(range(num_heads))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    if degree <= num_heads:
        assert sum(map(len, ranges)) == num_heads


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("source_degree", [1, 2, 3])
@pytest.mark.parametrize("target_degree", [1, 2, 3])
@pytest.mark.parametrize("target_changes", [{}, {"block_size": 8, "dtype": "bfloat16"}])
def test_tensor_parallel_groups_of_any_degree_exchange_all_heads(
    num_heads: int, source_degree: int, target_degree: int, target_changes: dict[str, object]
) -> None:
    """Against the dense tensor: every target rank's slab gets its slice of it, and nothing else is written."""
    num_tokens, low, sources, targets = 14, 3, [4, 5, 6, 2], [8, 1, 2, 3]
    ours = replace(LAYOUT, num_kv_heads=num_heads)
    theirs = replace(ours, **target_changes)  # type: ignore[arg-type]
    full, other = slab_of(ours, 1), slab_of(theirs, 2)
    held = head_ranges(num_heads, target_degree)
    source = Pages(cut(full, source_degree), ours)
    slabs = cut(other, target_degree)
    target = Pages(slabs, theirs)
    part = source if ours == theirs else Reshard(source, theirs)
    wire = torch.empty(part.num_bytes(low, num_tokens), dtype=torch.uint8)
    part.gather(sources, low, num_tokens, wire)
    target.scatter(targets, low, num_tokens, wire)

    size = theirs.block_size
    for token, values in enumerate(dense(full, sources)[low:num_tokens].to(other.dtype), low):
        other[targets[token // size], :, :, :, token % size] = values
    for slab, heads in zip(slabs, held, strict=True):
        assert torch.equal(slab, other[:, :, :, heads.start : heads.stop])


def test_ranks_of_one_group_have_as_many_blocks() -> None:
    slabs = cut(slab_of(LAYOUT, 1), 2)
    with pytest.raises(ConfigError, match=f"{NUM_BLOCKS} blocks"):
        Pages([slabs[0], slabs[1][:-1]], LAYOUT)


def test_a_group_of_no_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="but got 3 and 0"):
        head_ranges(3, 0)


# --- a pair -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 3}, "num_layers=2 but peer has 3"),
        ({"num_kv_heads": 1}, "num_kv_heads=2 but peer has 1"),
        ({"head_dim": 16}, "head_dim=8 but peer has 16"),
        ({"block_size": 6}, "block_size=4, a multiple or a part of it, but peer has 6"),
        ({"dtype": "float16"}, r"dtype=float32 \(float32 and bfloat16 convert\) but peer has float16"),
    ],
)
def test_what_cannot_be_converted_is_named_with_both_values(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_layouts(LAYOUT, replace(LAYOUT, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("start", [0, 9])
@pytest.mark.parametrize(
    ("source_changes", "target_changes"),
    [
        ({}, {"block_size": 8}),
        ({"block_size": 8}, {}),
        ({"dtype": "bfloat16"}, {}),
        ({}, {"dtype": "bfloat16"}),
        ({"dtype": "bfloat16", "block_size": 2}, {"block_size": 8}),
    ],
)
async def test_a_pair_of_two_layouts_hands_over(
    transport: str, start: int, source_changes: dict[str, object], target_changes: dict[str, object]
) -> None:
    ours, theirs = replace(LAYOUT, **source_changes), replace(LAYOUT, **target_changes)  # type: ignore[arg-type]
    config, num_tokens = make_config(transport=transport, checksum="always"), 51
    sides = []
    for name, seed, layout in (("p", 1, ours), ("d", 2, theirs)):
        side = Side(name, seed, config, layout)
        side.slab.copy_(slab_of(layout, seed))
        sides.append(side)
    prefill, decode = sides
    port = await decode.endpoint.start(HOST)
    await prefill.endpoint.start(HOST)
    prefill.endpoint.set_peers([replace(make_info(port), layout=theirs)])
    await until(lambda: prefill.endpoint.peer_statuses()[0].is_ready)
    sources, targets = (
        list(range(num_blocks_of(num_tokens, ours))),
        list(range(num_blocks_of(num_tokens, theirs))),
    )
    ticket = make_ticket(num_tokens)
    ends: list[object] = []
    decode.endpoint.expect(
        ticket.handoff_id, ticket.request_id, b"prompt", num_tokens, start, targets, on_done=ends.append
    )  # fmt: skip
    done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    out = prefill.endpoint.open(ticket, start, done.set_result)
    out.ready(20, sources)
    out.ready(num_tokens, sources)
    out.finish(HandoffState(STATE.first_token, STATE.num_cached_tokens))
    async with asyncio.timeout(WAIT_S):
        result = await done
    assert result.error is None  # type: ignore[attr-defined]
    assert result.num_bytes == (num_tokens - start) * theirs.bytes_per_token  # type: ignore[attr-defined]
    assert ends == [STATE]
    wanted = dense(prefill.slab, sources)[start:num_tokens].to(decode.slab.dtype)
    assert torch.equal(dense(decode.slab, targets)[start:num_tokens], wanted)
    await prefill.endpoint.close()
    await decode.endpoint.close()
    assert prefill.is_at_rest
    assert decode.is_at_rest


def test_copies_of_a_gpus_blocks_are_over_when_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of their own: neither does the engine's step hold them up, nor does it read what is not there yet."""
    told: list[str] = []

    class Stream:
        def synchronize(self) -> None:
            told.append("synchronized")

    @contextmanager
    def stream(_stream: object) -> Iterator[None]:
        told.append("on")
        yield
        told.append("off")

    monkeypatch.setattr(torch.cuda, "stream", stream)
    layout = KvLayout(1, 1, 2, 4, "float32")
    pages = Pages(torch.zeros(3, 1, 2, 1, 4, 2), layout)
    pages._stream = Stream()  # type: ignore[assignment]
    wire = torch.empty(1000, dtype=torch.uint8)
    for sender in (pages, Reshard(pages, replace(layout, block_size=8))):
        sender.gather([1, 2], 0, 5, wire)
    pages.scatter([1, 2], 0, 5, wire)
    assert told == ["on", "off", "synchronized"] * 3
