"""Gather, scatter and checksum against the plainest reference there is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contracts.errors import ConfigError
from kvtransfer.pages import Pages, checksum
from tests.kvtransfer.tools import LAYOUT, NUM_BLOCKS, make_slab

SIZE = LAYOUT.block_size
tables = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=8, unique=True)


def naive(slab: Tensor, block_ids: list[int], low: int, high: int) -> Tensor:
    """The bytes of tokens [low, high), block by block, one token range each."""
    parts = []
    for index, block in enumerate(block_ids):
        inside = [t for t in range(SIZE) if low <= index * SIZE + t < high]
        if inside:
            parts.append(slab[block][:, :, :, inside].contiguous().flatten())
    return torch.cat(parts).view(torch.uint8)


@settings(max_examples=60)
@given(st.data(), tables, st.sampled_from(["float32", "bfloat16"]))
def test_gather_is_the_reference_and_scatter_its_inverse(
    data: st.DataObject, block_ids: list[int], dtype: str
) -> None:
    low = data.draw(st.integers(0, len(block_ids) * SIZE - 1))
    high = data.draw(st.integers(low + 1, len(block_ids) * SIZE))
    layout = replace(LAYOUT, dtype=dtype)
    source, target = (make_slab(seed).to(getattr(torch, dtype)) for seed in (1, 2))
    before = target.clone()
    pages = Pages(source, layout)
    wire = torch.zeros(pages.num_bytes(low, high) + 8, dtype=torch.uint8)
    pages.gather(block_ids, low, high, wire)
    assert torch.equal(wire[:-8], naive(source, block_ids, low, high))
    assert not wire[-8:].any()

    Pages(target, layout).scatter(block_ids, low, high, wire)
    for block in range(NUM_BLOCKS):
        for token in range(SIZE):
            position = block_ids.index(block) * SIZE + token if block in block_ids else -1
            expected = source if low <= position < high else before
            assert torch.equal(target[block, :, :, :, token], expected[block, :, :, :, token])


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 4095, 4096, 4097, 8192, 20_001])
def test_checksum_takes_any_size_and_sees_every_byte(num_bytes: int) -> None:
    data = torch.randint(
        256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes)
    )
    right = checksum(data)
    assert 0 <= right < 1 << 64
    assert checksum(data.clone()) == right
    for place in {0, num_bytes // 2, num_bytes - 1} if num_bytes else ():
        wrong = data.clone()
        wrong[place] ^= 1
        assert checksum(wrong) != right
    if num_bytes:
        assert checksum(data[:-1]) != right


@pytest.mark.parametrize(
    "slab",
    [make_slab(1).to(torch.float16), make_slab(1)[:, :1], make_slab(1).transpose(0, 3), torch.zeros(4)],
)
def test_a_slab_of_another_layout_is_refused(slab: Tensor) -> None:
    with pytest.raises(ConfigError, match="kv slab: expected"):
        Pages(slab, LAYOUT)
