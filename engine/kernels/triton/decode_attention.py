"""Decode attention over paged KV: one new token per sequence, its context split over programs (Flash-Decoding).

    grid (sequence, kv head, split): the G query heads of a kv head are the rows of one tile, so keys and values are
    read once; a split walks its share of the context, tile by tile, with a running softmax
        ├─ one split    writes the output
        └─ several      write (sum of values, maximum, sum of weights) each ──► `_merge` weighs and adds them

Every sequence cuts its own context into equal shares, so ragged batches leave no split with more than its part. The
number of splits follows from shapes, never from what `context_lens` holds: nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton import fp8
from engine.kernels.triton.launch import (
    check_last_contiguous,
    check_layer,
    check_same_device,
    compute_dtype,
    launch,
    num_processors,
    padded,
)
from engine.spec import AttentionRule

MAX_SPLITS = 128
PROGRAMS_PER_PROCESSOR = 4
MIN_SPLIT_TOKENS = 256
"""A shorter share costs more in the merge than it gains."""


@dataclass(frozen=True, slots=True)
class Tile:
    """BLOCK_N positions of a context at a time."""

    block_n: int
    num_warps: int
    num_stages: int


def tile_for(block_d: int, dtype: torch.dtype) -> Tile:
    """Tiles for which `tests/engine/kernels` finds no spills on any target."""
    if dtype == torch.float32:
        return Tile(16, 4, 2)
    return Tile(64, 4, 3) if block_d <= 128 else Tile(32, 4, 3)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    rule: AttentionRule,
    scales: Tensor | None = None,
) -> Tensor:
    """As reference.paged_attention. Raises EngineError for shapes, strides or devices that do not fit."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, num_slots = kv.shape[2], kv.shape[3]
    check_layer(kv, num_heads, head_dim)
    check_last_contiguous(q=q, block_table=block_table)
    check_same_device(q=q, kv=kv, block_table=block_table, context_lens=context_lens, scales=scales)
    out = torch.empty(
        q.shape, dtype=q.dtype if kv.dtype == torch.float8_e4m3fn else kv.dtype, device=q.device
    )
    num_splits = num_splits_for(
        num_seqs * num_kv_heads, block_table.shape[1] * num_slots, num_processors(q.device)
    )
    partial, stats = out, out
    if num_splits > 1:
        partial = torch.empty(num_seqs, num_heads, num_splits, head_dim, device=q.device)
        stats = torch.empty(num_seqs, num_heads, num_splits, 2, device=q.device)
    group = num_heads // num_kv_heads
    tile = tile_for(padded(head_dim), kv.dtype)
    launch(
        _decode, (num_seqs, num_kv_heads, num_splits),
        q, fp8.address(kv), scales, block_table, context_lens, partial, stats,
        rule.scale, rule.cap or 0.0, rule.window or 0, q.stride(0), q.stride(1), kv.stride(0), block_table.stride(0),
        HEADS=num_heads, GROUP=group, DIM=head_dim, SLOTS=num_slots, BLOCK_G=padded(group),
        BLOCK_N=tile.block_n, BLOCK_D=padded(head_dim), HAS_WINDOW=rule.window is not None,
        HAS_CAP=rule.cap is not None, IS_WHOLE=num_splits == 1, FP8=fp8.mode(kv),
        COMPUTE=compute_dtype(kv.dtype, kv.device),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        launch(
            _merge, (num_seqs, num_heads), partial, stats, out, num_splits,
            HEADS=num_heads, DIM=head_dim, BLOCK_S=8, BLOCK_D=padded(head_dim), num_warps=4,
        )  # fmt: skip
    return out


def num_splits_for(num_programs: int, max_context: int, num_processors: int) -> int:
    """Enough programs to fill the device, each with enough to do."""
    wanted = triton.cdiv(num_processors * PROGRAMS_PER_PROCESSOR, max(num_programs, 1))
    return int(max(1, min(wanted, max_context // MIN_SPLIT_TOKENS, MAX_SPLITS)))


@triton.jit
def capped(scores: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """cap * tanh(scores / cap), by an exponential that cannot overflow."""
    shrunk = tl.exp2(tl.abs(scores) * (-2.0 * 1.4426950408889634 / cap))
    size = cap * (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(scores < 0.0, -size, size)


@triton.jit(do_not_specialize=["window", "table_row"])
def _decode(
    q: tl.tensor, kv: tl.tensor, scales: tl.tensor, table: tl.tensor, lens: tl.tensor, partial: tl.tensor,
    stats: tl.tensor, scale: float, cap: float, window: int, q_seq: int, q_head: int, kv_block: int, table_row: int,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    IS_WHOLE: tl.constexpr, FP8: tl.constexpr, COMPUTE: tl.constexpr,
) -> None:  # fmt: skip
    seq, kv_head, split, num_splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    heads, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    is_head, is_dim = heads < GROUP, dims < DIM
    rows = q + seq.to(tl.int64) * q_seq + (kv_head * GROUP + heads[:, None]) * q_head
    is_used = is_head[:, None] & is_dim[None, :]
    queries = tl.load(rows + dims[None, :], mask=is_used, other=0.0).to(COMPUTE)
    if FP8:
        scale *= tl.load(scales + kv_head)
    if not HAS_CAP:
        scale *= 1.4426950408889634
    context = tl.load(lens + seq).to(tl.int32)
    first = tl.maximum(context - window, 0) if HAS_WINDOW else 0
    low, end = first // BLOCK_N, tl.cdiv(context, BLOCK_N)
    share = tl.cdiv(end - low, num_splits)
    low += split * share
    base = kv + kv_head * (SLOTS * DIM)
    value_side = HEADS // GROUP * SLOTS * DIM
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for tile in range(low, tl.minimum(low + share, end)):
        positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_seen = (positions < context) & (positions >= first)
        blocks = tl.load(table + seq.to(tl.int64) * table_row + positions // SLOTS, mask=is_seen, other=0)
        at = base + blocks.to(tl.int64) * kv_block + (positions % SLOTS) * DIM
        is_read = is_seen[:, None] & is_dim[None, :]
        keys = fp8.decoded(tl.load(at[:, None] + dims[None, :], mask=is_read, other=0.0), COMPUTE, FP8)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if HAS_CAP:
            scores = capped(scores, cap) * 1.4426950408889634
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        # Every tile holds at least one position that is seen: `higher` is a number.
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        values = tl.load(at[:, None] + (value_side + dims)[None, :], mask=is_read, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(COMPUTE), fp8.decoded(values, COMPUTE, FP8), input_precision="ieee")
        top = higher
    if FP8:
        mixed *= tl.load(scales + HEADS // GROUP + kv_head)
    row = seq.to(tl.int64) * HEADS + kv_head * GROUP + heads
    if IS_WHOLE:
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            partial + row[:, None] * DIM + dims[None, :], mixed.to(partial.dtype.element_ty), mask=is_used
        )
    else:
        row = row * num_splits + split
        tl.store(partial + row[:, None] * DIM + dims[None, :], mixed, mask=is_used)
        tl.store(stats + row * 2, top, mask=is_head)
        tl.store(stats + row * 2 + 1, total, mask=is_head)


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    partial: tl.tensor, stats: tl.tensor, out: tl.tensor, num_splits: int,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    highest = float("-inf")
    total = 0.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for low in range(0, num_splits, BLOCK_S):
        splits = low + tl.arange(0, BLOCK_S)
        is_split = splits < num_splits
        at = row * num_splits + splits
        tops = tl.load(stats + at * 2, mask=is_split, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(tops, 0))
        # A context shorter than the splits leaves some, or all, with nothing: their maximum is -inf.
        against = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(tops - against)
        sums = tl.load(stats + at * 2 + 1, mask=is_split, other=0.0)
        parts = tl.load(
            partial + at[:, None] * DIM + dims[None, :],
            mask=is_split[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        shrink = tl.exp2(highest - against)
        total = total * shrink + tl.sum(weights * sums, 0)
        mixed = mixed * shrink + tl.sum(weights[:, None] * parts, 0)
        highest = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + dims, mixed.to(out.dtype.element_ty), mask=dims < DIM)
