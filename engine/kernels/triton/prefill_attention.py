"""Attention of a prompt chunk over paged KV that already holds its keys (FlashAttention-2, arXiv:2307.08691).

    grid (query tile, query head); longest tiles first, so that short ones fill the end
        tiles that every query sees    no mask, only positions to look up in the block ids
        the rest                       masked: the causal border, and both borders of a window

Keys and values are read through the block ids of the one sequence, a row of D numbers at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton import fp8
from engine.kernels.triton.decode_attention import capped
from engine.kernels.triton.launch import (
    check_last_contiguous,
    check_layer,
    check_same_device,
    compute_dtype,
    launch,
    padded,
)
from engine.spec import AttentionRule


@dataclass(frozen=True, slots=True)
class Tile:
    """BLOCK_M queries against BLOCK_N positions at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def tile_for(num_tokens: int, block_d: int, dtype: torch.dtype, fp8_mode: int) -> Tile:
    """Tiles for which `tests/engine/kernels` finds no spills on any target."""
    if dtype == torch.float32:
        return Tile(16, 16, 4, 2)
    if fp8_mode == fp8.BITS:
        return Tile(64 if block_d <= 128 else 32, 32, 4, 2)
    if num_tokens <= 64:
        return Tile(32, 64, 4, 2) if block_d <= 128 else Tile(64, 32, 4, 2)
    return Tile(128, 64, 8, 3) if block_d <= 128 else Tile(64, 32, 4, 2)


def prefill_attention(
    q: Tensor, kv: Tensor, block_ids: Tensor, start: int, rule: AttentionRule, scales: Tensor | None = None
) -> Tensor:
    """As reference.prefill_attention. Raises EngineError for shapes, strides or devices that do not fit."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_slots = kv.shape[2], kv.shape[3]
    check_layer(kv, num_heads, head_dim)
    check_last_contiguous(q=q, block_ids=block_ids)
    check_same_device(q=q, kv=kv, block_ids=block_ids, scales=scales)
    out = torch.empty(
        q.shape, dtype=q.dtype if kv.dtype == torch.float8_e4m3fn else kv.dtype, device=q.device
    )
    tile = tile_for(num_tokens, padded(head_dim), kv.dtype, fp8.mode(kv))
    launch(
        _prefill, (triton.cdiv(num_tokens, tile.block_m), num_heads),
        q, fp8.address(kv), scales, block_ids, out, num_tokens, start,
        rule.scale, rule.cap or 0.0, rule.window or 0, q.stride(0), q.stride(1), kv.stride(0),
        KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, DIM=head_dim, SLOTS=num_slots, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_D=padded(head_dim), HAS_WINDOW=rule.window is not None,
        HAS_CAP=rule.cap is not None, FP8=fp8.mode(kv), COMPUTE=compute_dtype(kv.dtype, kv.device),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _walk(
    queries: tl.tensor, top: tl.tensor, total: tl.tensor, mixed: tl.tensor, base: tl.tensor, block_ids: tl.tensor,
    at: tl.tensor, low: int, first: int, end: int, scale: float, cap: float, window: int, kv_block: int,
    VALUE_SIDE: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, FP8: tl.constexpr, COMPUTE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The running softmax over tiles from `low` to `end`, without positions before `first`.

    What nobody sees is not read: its block may be gone, and a weight of zero does not undo a NaN.
    """
    dims = tl.arange(0, BLOCK_D)
    for begin in range(low, end, BLOCK_N):
        positions = begin + tl.arange(0, BLOCK_N)
        is_read = (dims < DIM)[None, :]
        if IS_MASKED:
            is_there = (positions < end) & (positions >= first)
            is_read = is_read & is_there[:, None]
            blocks = tl.load(block_ids + positions // SLOTS, mask=is_there, other=0)
        else:
            blocks = tl.load(block_ids + positions // SLOTS)
        rows = base + blocks.to(tl.int64) * kv_block + (positions % SLOTS) * DIM
        keys = fp8.decoded(tl.load(rows[:, None] + dims[None, :], mask=is_read, other=0.0), COMPUTE, FP8)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if HAS_CAP:
            scores = capped(scores, cap) * 1.4426950408889634
        if IS_MASKED:
            is_seen = positions[None, :] <= at[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (positions[None, :] > at[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        against = higher
        if IS_MASKED and HAS_WINDOW:  # a tile may lie before the window of some queries
            against = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - against[:, None])
        shrink = tl.exp2(top - against)
        values = tl.load(rows[:, None] + (VALUE_SIDE + dims)[None, :], mask=is_read, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(COMPUTE), fp8.decoded(values, COMPUTE, FP8), mixed, input_precision="ieee")
        top = higher
    return top, total, mixed


@triton.jit(do_not_specialize=["num_tokens", "start", "window"])
def _prefill(
    q: tl.tensor, kv: tl.tensor, scales: tl.tensor, block_ids: tl.tensor, out: tl.tensor, num_tokens: int, start: int,
    scale: float, cap: float, window: int, q_token: int, q_head: int, kv_block: int,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    FP8: tl.constexpr, COMPUTE: tl.constexpr,
) -> None:  # fmt: skip
    VALUE_SIDE: tl.constexpr = KV_HEADS * SLOTS * DIM
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1)
    tokens, dims = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_used = (tokens < num_tokens)[:, None] & (dims < DIM)[None, :]
    at = q + tokens.to(tl.int64)[:, None] * q_token + head * q_head + dims[None, :]
    queries = tl.load(at, mask=is_used, other=0.0).to(COMPUTE)
    if FP8:
        scale *= tl.load(scales + head // GROUP)
    if not HAS_CAP:
        scale *= 1.4426950408889634
    base = kv + head // GROUP * (SLOTS * DIM)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = start + tl.minimum(begin + BLOCK_M, num_tokens)
    if HAS_WINDOW:
        first = tl.maximum(start + begin - window + 1, 0)
        low = first // BLOCK_N * BLOCK_N
    else:
        first = 0
        low = (start + begin + 1) // BLOCK_N * BLOCK_N
        top, total, mixed = _walk(
            queries, top, total, mixed, base, block_ids, start + tokens, 0, first, low, scale, cap, window, kv_block,
            VALUE_SIDE, DIM, SLOTS, BLOCK_N, BLOCK_D, False, False, HAS_CAP, FP8, COMPUTE,
        )  # fmt: skip
    top, total, mixed = _walk(
        queries, top, total, mixed, base, block_ids, start + tokens, low, first, end, scale, cap, window, kv_block,
        VALUE_SIDE, DIM, SLOTS, BLOCK_N, BLOCK_D, True, HAS_WINDOW, HAS_CAP, FP8, COMPUTE,
    )  # fmt: skip
    if FP8:
        mixed *= tl.load(scales + KV_HEADS + head // GROUP)
    # Rows past the chunk see every position, or none if a window ends before them.
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    row = tokens.to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(out + row[:, None] * DIM + dims[None, :], mixed.to(out.dtype.element_ty), mask=is_used)
