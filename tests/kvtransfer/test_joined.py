"""Ranks whose blocks nobody else can map, as on GPUs, over the same connection and in the same windows as there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contracts.blocks import KvLayout, head_ranges
from contracts.errors import ConfigError, EngineError, WorkerLostError
from engine.parallel.windows import FarBlocks, answer_copies
from engine.parallel.wire import Wire
from kvtransfer.joined import JoinedPages, pages_of
from kvtransfer.pages import Pages
from kvtransfer.reshard import Reshard
from tests.kvtransfer.test_reshard import cut, slab_of
from tests.kvtransfer.tools import LAYOUT, NUM_BLOCKS

WAIT_S = 20.0


@dataclass
class Rank:
    """What rank 0 has of one that keeps its blocks."""

    far: FarBlocks
    lost: list[str]


@contextmanager
def rank(pages: Pages, num_bytes: int) -> Iterator[Rank]:
    near, theirs = socket.socketpair()
    near.settimeout(WAIT_S)
    window = torch.zeros(num_bytes, dtype=torch.uint8)
    lost: list[str] = []
    answers = Wire(theirs)
    thread = threading.Thread(target=answer_copies, args=(answers, window, pages), daemon=True)
    thread.start()
    far = FarBlocks(Wire(near), window, None, lost.append)
    try:
        yield Rank(far, lost)
    finally:
        far.close()
        thread.join(WAIT_S)
        answers.close()
        assert not thread.is_alive()


@contextmanager
def group(slabs: Sequence[Tensor], layout: KvLayout, num_blocks: int = 2) -> Iterator[JoinedPages]:
    """Ranks with windows of `num_blocks` blocks."""
    held = head_ranges(layout.num_kv_heads, len(slabs))
    with ExitStack() as stack:
        others = []
        for slab, heads in zip(slabs[1:], held[1:], strict=True):
            part = replace(layout, num_kv_heads=len(heads))
            others.append(
                stack.enter_context(rank(Pages(slab, part), num_blocks * part.bytes_per_block + 5)).far
            )
        pages = pages_of([slabs[0], *others], layout)
        assert isinstance(pages, JoinedPages)
        yield pages


@settings(max_examples=40, deadline=None)
@given(
    st.data(), st.sampled_from([(4, 2), (3, 2), (3, 3), (2, 3)]), st.integers(1, 4),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
)  # fmt: skip
def test_they_gather_and_scatter_what_mapped_ranks_do(
    data: st.DataObject, sizes: tuple[int, int], num_blocks: int, dtype: str
) -> None:
    num_heads, degree = sizes
    layout = replace(LAYOUT, num_kv_heads=num_heads, dtype=dtype)
    ids = data.draw(st.permutations(range(NUM_BLOCKS)))[: data.draw(st.integers(1, 7))]
    low = data.draw(st.integers(0, len(ids) * layout.block_size - 1))
    high = data.draw(st.integers(low + 1, len(ids) * layout.block_size))
    slabs, blank = cut(slab_of(layout, 1), degree), cut(slab_of(layout, 2), degree)
    mapped, expected = Pages(slabs, layout), [slab.clone() for slab in blank]
    wire = torch.zeros(mapped.num_bytes(low, high), dtype=torch.uint8)
    mapped.gather(ids, low, high, wire)
    Pages(expected, layout).scatter(ids, low, high, wire)
    with group(slabs, layout, num_blocks) as source, group(blank, layout, num_blocks) as target:
        found = torch.zeros(len(wire) + 8, dtype=torch.uint8)
        source.gather(ids, low, high, found)
        assert torch.equal(found[:-8], wire)
        assert not found[-8:].any()
        target.scatter(ids, low, high, found)
        assert torch.equal(source.blocks(ids).view(torch.uint8), mapped.blocks(ids).view(torch.uint8))
    for slab, wanted in zip(blank, expected, strict=True):
        assert torch.equal(slab.view(torch.uint8), wanted.view(torch.uint8))


def test_a_sender_converts_for_another_layout() -> None:
    layout = replace(LAYOUT, num_kv_heads=3)
    theirs = replace(layout, block_size=2 * layout.block_size, dtype="bfloat16")
    slabs = cut(slab_of(layout, 1), 3)
    mapped = Reshard(Pages(slabs, layout), theirs)
    wire, found = (torch.zeros(mapped.num_bytes(3, 14), dtype=torch.uint8) for _ in range(2))
    mapped.gather([4, 5, 6, 2], 3, 14, wire)
    with group(slabs, layout) as pages:
        Reshard(pages, theirs).gather([4, 5, 6, 2], 3, 14, found)
        assert pages.in_place([4, 5], 0, 2 * layout.block_size) is None
    assert torch.equal(found, wire)


def test_a_copy_that_fails_on_a_rank_is_told_and_the_next_one_works() -> None:
    layout = replace(LAYOUT, num_kv_heads=2)
    slabs = cut(slab_of(layout, 1), 2)
    wire = torch.zeros(layout.bytes_per_block, dtype=torch.uint8)
    with group(slabs, layout) as pages:
        far = pages._holders[1]
        far.begin_gather([NUM_BLOCKS], 0, 1)
        with pytest.raises(EngineError, match=r"could not copy its blocks: .*Error"):
            far.finish()
        pages.gather([3], 0, layout.block_size, wire)
    expected = torch.zeros_like(wire)
    Pages(slabs, layout).gather([3], 0, layout.block_size, expected)
    assert torch.equal(wire, expected)


def test_a_rank_that_is_gone_is_told_to_its_worker() -> None:
    layout = replace(LAYOUT, num_kv_heads=1)
    with rank(Pages(slab_of(layout, 1), layout), layout.bytes_per_block) as one:
        one.far._wire.end()
        for lost_by in (partial(one.far.begin_gather, [0], 0, 1), one.far.finish):
            with pytest.raises(WorkerLostError):
                lost_by()
        assert ["does not copy its blocks" in reason for reason in one.lost] == [True, True]


def test_a_window_without_room_for_a_block_is_refused() -> None:
    layout = replace(LAYOUT, num_kv_heads=2)
    with (
        pytest.raises(ConfigError, match=r"room for a block in each but got \[0\]"),
        group(cut(slab_of(layout, 1), 2), layout, 0),
    ):
        pass
