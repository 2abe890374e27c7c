"""Attention kernels, under Triton's interpreter, against `reference`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contracts.errors import EngineError
from engine.kernels import reference
from engine.kernels.triton import decode_attention, fp8, launch, prefill_attention
from engine.spec import AttentionRule
from tests.engine.kernels.layers import (
    FP8,
    IDS,
    NUM_BLOCKS,
    SHAPES,
    assert_equal,
    make_layer,
    make_rule,
    make_scales,
)

LENS = torch.tensor([150, 0, 1, 17])  # longer than a tile, empty, a single token, one slot into a block
RULES = {
    "window of one": AttentionRule(0.1, window=1),
    "window": AttentionRule(0.1, window=70),
    "cap": AttentionRule(0.3, cap=3.0),
    "window and cap": AttentionRule(0.3, window=20, cap=3.0),
}


def make_table(num_seqs: int, num_blocks: int) -> Tensor:
    """[B, M] of scattered blocks; sequences may share some."""
    generator = torch.Generator().manual_seed(5)
    return torch.stack(
        [torch.randperm(NUM_BLOCKS, generator=generator)[:num_blocks] for _ in range(num_seqs)]
    )


@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads", "dtype"), SHAPES, ids=IDS)
def test_decode_attention_of_a_ragged_batch(
    head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    layer, scales = make_layer(num_kv_heads, head_dim, dtype), make_scales(num_kv_heads, dtype)
    q, table = torch.randn(4, num_heads, head_dim), make_table(4, 10)
    got = decode_attention.paged_attention(q, layer, table, LENS, make_rule(head_dim), scales)
    expected = reference.paged_attention(q, layer, table, LENS, make_rule(head_dim), scales)
    assert_equal(got, expected, dtype)
    assert not got[1].any(), "an empty context gives zeros"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_attention_by_rule_and_number_of_splits(
    rule: AttentionRule, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "num_splits_for", lambda *_: num_splits)
    layer, q, table = make_layer(1, 64, torch.float32), torch.randn(3, 3, 64), make_table(3, 10)
    lens = LENS[:3]
    got = decode_attention.paged_attention(q, layer, table, lens, rule)
    assert_equal(got, reference.paged_attention(q, layer, table, lens, rule), torch.float32)


def test_splits_fill_the_device_but_are_not_small() -> None:
    assert decode_attention.num_splits_for(1000, 100_000, 100) == 1
    assert decode_attention.num_splits_for(8, 1024, 100) == 4
    assert decode_attention.num_splits_for(8, 100_000, 100) == 50
    assert decode_attention.num_splits_for(0, 0, 100) == 1


@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads", "dtype"), SHAPES, ids=IDS)
def test_prefill_attention_of_a_chunk_behind_a_prefix(
    head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    layer, scales = make_layer(num_kv_heads, head_dim, dtype), make_scales(num_kv_heads, dtype)
    q, block_ids = torch.randn(37, num_heads, head_dim), make_table(1, 6)[0]
    got = prefill_attention.prefill_attention(q, layer, block_ids, 50, make_rule(head_dim), scales)
    expected = reference.prefill_attention(q, layer, block_ids, 50, make_rule(head_dim), scales)
    assert_equal(got, expected, dtype)


@pytest.mark.parametrize("rule", [make_rule(64), *RULES.values()], ids=["plain", *RULES])
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 70), (95, 33), (31, 1)])
def test_prefill_attention_by_rule_start_and_length(rule: AttentionRule, start: int, num_tokens: int) -> None:
    layer, q, block_ids = (
        make_layer(1, 64, torch.float32),
        torch.randn(num_tokens, 2, 64),
        make_table(1, 8)[0],
    )
    got = prefill_attention.prefill_attention(q, layer, block_ids, start, rule)
    expected = reference.prefill_attention(q, layer, block_ids, start, rule)
    assert_equal(got, expected, torch.float32)


def test_a_long_chunk_has_tiles_that_need_no_mask() -> None:
    layer, q, block_ids = make_layer(1, 64, torch.bfloat16), torch.randn(130, 1, 64), make_table(1, 24)[0]
    got = prefill_attention.prefill_attention(q, layer, block_ids, 200, make_rule(64))
    assert_equal(got, reference.prefill_attention(q, layer, block_ids, 200, make_rule(64)), torch.bfloat16)


def test_nothing_to_do_is_nothing_done() -> None:
    layer, none = make_layer(1, 64, torch.float32), torch.empty(0, 2, 64)
    table = torch.empty(0, 3, dtype=torch.int64)
    lens = torch.empty(0, dtype=torch.int64)
    assert decode_attention.paged_attention(none, layer, table, lens, make_rule(64)).shape == (0, 2, 64)
    assert prefill_attention.prefill_attention(none, layer, lens, 0, make_rule(64)).shape == (0, 2, 64)
    assert reference.prefill_attention(none, layer, lens, 0, make_rule(64)).shape == (0, 2, 64)


def test_what_no_query_sees_is_not_read() -> None:
    layer, table = make_layer(1, 64, torch.float32), torch.arange(8)
    layer[:2] = torch.nan  # positions 0 to 31, before the window
    layer[6, :, :, 5:] = torch.nan  # from position 101 on
    layer[7] = torch.nan
    rule = AttentionRule(0.1, window=40)
    lens = torch.tensor([101])
    assert (
        decode_attention.paged_attention(torch.randn(1, 1, 64), layer, table[None], lens, rule)
        .isfinite()
        .all()
    )
    assert (
        prefill_attention.prefill_attention(torch.randn(20, 1, 64), layer, table, 81, rule).isfinite().all()
    )


def test_float8_of_newer_gpus_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, scales = make_layer(1, 64, FP8), make_scales(1, FP8)
    q, table, lens = torch.randn(1, 2, 64), make_table(1, 3), torch.tensor([40])
    by_bits = decode_attention.paged_attention(q, layer, table, lens, make_rule(64), scales)
    monkeypatch.setattr(fp8, "capability", lambda device: (9, 0))
    native = decode_attention.paged_attention(q, layer, table, lens, make_rule(64), scales)
    assert torch.equal(native, by_bits)


def test_a_layer_that_does_not_fit_is_refused() -> None:
    layer, table, lens = make_layer(2, 64, torch.float32), make_table(1, 3), torch.tensor([40])
    with pytest.raises(EngineError, match="expected heads of size 64, a multiple of 2, but got 3 of 64"):
        decode_attention.paged_attention(torch.randn(1, 3, 64), layer, table, lens, make_rule(64))
    with pytest.raises(EngineError, match="expected a layer"):
        decode_attention.paged_attention(torch.randn(1, 2, 64), layer.mT, table, lens, make_rule(64))
    with pytest.raises(EngineError, match="contiguous last dimension"):
        decode_attention.paged_attention(torch.randn(1, 64, 2).mT, layer, table, lens, make_rule(64))
    with pytest.raises(EngineError, match="on one device"):
        launch.check_same_device(q=layer, table=torch.empty(1, device="meta"), scales=None)
