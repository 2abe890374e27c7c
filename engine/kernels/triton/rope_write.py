"""Rotation and KV write in one pass: q, k and v are read once; q goes on, k and v go to their slots.

One program per token and HEADS_PER_PROGRAM of its H + 2 * K heads; both halves of a head are in registers, for the
rotation and for the head norm of the models that have one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from contracts.errors import EngineError
from engine.kernels.triton import fp8
from engine.kernels.triton.launch import (
    check_last_contiguous,
    check_layer,
    check_same_device,
    launch,
    padded,
)

HEADS_PER_PROGRAM = 8


def rope_write(
    heads: Tensor,
    rotation: tuple[Tensor, Tensor],
    kv: Tensor,
    at: tuple[Tensor, Tensor],
    norm: tuple[Tensor, float] | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """As reference.rope_write. Raises EngineError for shapes, strides or devices that do not fit."""
    num_tokens, num_all, head_dim = heads.shape
    num_kv_heads, num_slots = kv.shape[2], kv.shape[3]
    num_heads = num_all - 2 * num_kv_heads
    check_layer(kv, num_heads, head_dim)
    cos, sin = (part.view(num_tokens, head_dim // 2) for part in rotation)
    weight, eps = norm if norm is not None else (None, 0.0)
    if weight is not None and weight.shape != (num_heads + num_kv_heads, head_dim):
        raise EngineError(
            f"norm: expected {[num_heads + num_kv_heads, head_dim]} but got {list(weight.shape)}"
        )
    block_ids, slots = at
    check_last_contiguous(heads=heads, block_ids=block_ids, slots=slots)
    check_same_device(heads=heads, cos=cos, kv=kv, block_ids=block_ids, slots=slots, scales=scales)
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    launch(
        _rope_write, (num_tokens, triton.cdiv(num_all, HEADS_PER_PROGRAM)),
        heads, cos, sin, weight, scales, q, fp8.address(kv), block_ids, slots, eps,
        heads.stride(0), heads.stride(1), kv.stride(0),
        HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=head_dim, SLOTS=num_slots, BLOCK_H=HEADS_PER_PROGRAM,
        HALF=padded(head_dim // 2), HAS_NORM=norm is not None, FP8=fp8.mode(kv), num_warps=4,
    )  # fmt: skip
    return q


def write_kv(
    kv: Tensor, k: Tensor, v: Tensor, block_ids: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """As reference.write_kv. Raises EngineError for shapes, strides or devices that do not fit."""
    num_tokens, num_kv_heads, head_dim = k.shape
    check_layer(kv, num_kv_heads, head_dim)
    check_last_contiguous(k=k, v=v, block_ids=block_ids, slots=slots)
    check_same_device(k=k, v=v, kv=kv, block_ids=block_ids, slots=slots, scales=scales)
    launch(
        _write, (num_tokens, 2),
        k, v, scales, fp8.address(kv), block_ids, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv.stride(0), KV_HEADS=num_kv_heads, DIM=head_dim, SLOTS=kv.shape[3], BLOCK_H=padded(num_kv_heads, 1),
        BLOCK_D=padded(head_dim), FP8=fp8.mode(kv), num_warps=4,
    )  # fmt: skip


@triton.jit
def _rope_write(
    heads: tl.tensor, cos: tl.tensor, sin: tl.tensor, weight: tl.tensor, scales: tl.tensor, q: tl.tensor, kv: tl.tensor,
    block_ids: tl.tensor, slots: tl.tensor, eps: float, token_stride: int, head_stride: int, kv_block: int,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, BLOCK_H: tl.constexpr,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr, FP8: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, HALF)
    is_dim = dims < DIM // 2
    is_used = (number < HEADS + 2 * KV_HEADS)[:, None] & is_dim[None, :]
    is_turned = (number < HEADS + KV_HEADS)[:, None]
    source = heads + token * token_stride + number[:, None] * head_stride + dims[None, :]
    low = tl.load(source, mask=is_used, other=0.0).to(tl.float32)
    high = tl.load(source + DIM // 2, mask=is_used, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM
        factor = (1.0 / tl.sqrt(mean + eps))[:, None]
        of = weight + number[:, None] * DIM + dims[None, :]
        is_weight = is_turned & is_dim[None, :]
        low = tl.where(is_turned, low * factor * tl.load(of, mask=is_weight, other=0.0), low)
        high = tl.where(is_turned, high * factor * tl.load(of + DIM // 2, mask=is_weight, other=0.0), high)
    cosines = tl.load(cos + token * (DIM // 2) + dims, mask=is_dim, other=0.0)[None, :]
    sines = tl.load(sin + token * (DIM // 2) + dims, mask=is_dim, other=0.0)[None, :]
    turned_low = tl.where(is_turned, low * cosines - high * sines, low)
    turned_high = tl.where(is_turned, high * cosines + low * sines, high)
    is_query = (number < HEADS)[:, None] & is_dim[None, :]
    target = q + (token * HEADS + number[:, None]) * DIM + dims[None, :]
    tl.store(target, turned_low.to(q.dtype.element_ty), mask=is_query)
    tl.store(target + DIM // 2, turned_high.to(q.dtype.element_ty), mask=is_query)
    # Keys, then values: the order of the heads is the order of a block's planes.
    is_kept = (number >= HEADS)[:, None] & is_used
    plane = number - HEADS
    if FP8:
        scale = tl.load(scales + plane, mask=(plane >= 0) & (plane < 2 * KV_HEADS), other=1.0)[:, None]
        turned_low, turned_high = turned_low / scale, turned_high / scale
    row = kv + tl.load(block_ids + token).to(tl.int64) * kv_block + tl.load(slots + token) * DIM
    slot = row + plane[:, None] * (SLOTS * DIM) + dims[None, :]
    tl.store(slot, fp8.encoded(turned_low, FP8).to(kv.dtype.element_ty), mask=is_kept)
    tl.store(slot + DIM // 2, fp8.encoded(turned_high, FP8).to(kv.dtype.element_ty), mask=is_kept)


@triton.jit
def _write(
    k: tl.tensor, v: tl.tensor, scales: tl.tensor, kv: tl.tensor, block_ids: tl.tensor, slots: tl.tensor,
    k_token: int, k_head: int, v_token: int, v_head: int, kv_block: int, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr,
) -> None:  # fmt: skip
    token, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_used = (heads < KV_HEADS)[:, None] & (dims < DIM)[None, :]
    if side == 0:
        rows = tl.load(k + token * k_token + heads[:, None] * k_head + dims[None, :], mask=is_used, other=0.0)
        rows = rows.to(tl.float32)  # v may be of another dtype
    else:
        rows = tl.load(v + token * v_token + heads[:, None] * v_head + dims[None, :], mask=is_used, other=0.0)
        rows = rows.to(tl.float32)
    plane = side * KV_HEADS + heads
    if FP8:
        scale = tl.load(scales + plane, mask=heads < KV_HEADS, other=1.0)[:, None]
        stored = fp8.encoded(rows / scale, FP8)
    else:
        stored = rows.to(kv.dtype.element_ty)
    at = kv + tl.load(block_ids + token).to(tl.int64) * kv_block + tl.load(slots + token) * DIM
    tl.store(at + plane[:, None] * (SLOTS * DIM) + dims[None, :], stored, mask=is_used)
