"""Products with 4- and 8-bit weights: codes are widened in registers, just before the tensor cores read them.

    grid (tile of tokens, tile of outputs); each walks the inputs, BLOCK_G groups of 32 at a time
        4 bits: the low halves of a group's bytes are its inputs 0 to 15, the high halves 16 to 31; instead of putting
        weights in order, the inputs are read in two parts, and two products are added

A weight is widened in float32 and rounded to what the tiles are multiplied in; sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from contracts.errors import EngineError
from engine.kernels.grouped import GroupedWeight
from engine.kernels.triton.launch import (
    check_last_contiguous,
    check_same_device,
    compute_dtype,
    launch,
)


@dataclass(frozen=True, slots=True)
class Tile:
    """BLOCK_M tokens, BLOCK_N outputs, BLOCK_G groups of inputs."""

    block_m: int
    block_n: int
    block_g: int
    num_warps: int
    num_stages: int


def tile_for(num_tokens: int, dtype: torch.dtype) -> Tile:
    """Tiles for which `tests/engine/kernels` finds no spills on any target."""
    if dtype == torch.float32:
        return Tile(16, 32, 2, 4, 2)
    if num_tokens <= 16:  # bound by the bytes of the weight: many small programs
        return Tile(16, 32, 4, 4, 4)
    return Tile(32 if num_tokens <= 64 else 64, 64, 2, 4, 3)


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """As reference.grouped_linear. Raises EngineError for shapes or devices that do not fit."""
    num_tokens, num_inputs = x.shape
    num_outputs = weight.scales.shape[0]
    if num_inputs != weight.num_inputs or (bias is not None and bias.shape != (num_outputs,)):
        raise EngineError(f"x: expected [T, {weight.num_inputs}] but got {list(x.shape)}")
    check_last_contiguous(x=x)
    if not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
        raise EngineError("codes, scales: expected contiguous tensors")
    check_same_device(x=x, codes=weight.codes, scales=weight.scales, minima=weight.minima, bias=bias)
    out = torch.empty(num_tokens, num_outputs, dtype=dtype or x.dtype, device=x.device)
    tile = tile_for(num_tokens, x.dtype)
    launch(
        _product,
        (triton.cdiv(num_tokens, tile.block_m), triton.cdiv(num_outputs, tile.block_n)),
        x, weight.codes, weight.scales, weight.minima, bias, out,
        num_tokens, num_outputs, weight.scales.shape[1], x.stride(0),
        BITS=weight.bits, HAS_MINIMA=weight.minima is not None, HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_G=tile.block_g, COMPUTE=compute_dtype(x.dtype, x.device),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _inputs(
    x: tl.tensor, tokens: tl.tensor, num_tokens: int, first: tl.tensor, num_groups: int, row_stride: int,
    half: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, WIDTH: tl.constexpr, COMPUTE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BLOCK_M, BLOCK_G * WIDTH]: of each group from `first` on, WIDTH inputs from number `half` on."""
    column = tl.arange(0, BLOCK_G * WIDTH)
    group = first + column // WIDTH
    at = tokens.to(tl.int64)[:, None] * row_stride + (group * 32 + half + column % WIDTH)[None, :]
    is_used = (tokens < num_tokens)[:, None] & (group < num_groups)[None, :]
    return tl.load(x + at, mask=is_used, other=0.0).to(COMPUTE)


@triton.jit
def _widened(
    codes: tl.tensor, scale: tl.tensor, minimum: tl.tensor, HAS_MINIMA: tl.constexpr, BITS: tl.constexpr,
    BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """codes [BLOCK_N, groups, width] -> weights [COLUMNS, BLOCK_N]."""
    values = codes.to(tl.float32)
    if BITS == 4 and not HAS_MINIMA:
        values = values - 8.0
    values = values * scale
    if HAS_MINIMA:
        values = values + minimum
    return tl.trans(tl.reshape(values.to(COMPUTE), [BLOCK_N, COLUMNS]))


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    x: tl.tensor, codes: tl.tensor, scales: tl.tensor, minima: tl.tensor, bias: tl.tensor, out: tl.tensor,
    num_tokens: int, num_outputs: int, num_groups: int, row_stride: int,
    BITS: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, COMPUTE: tl.constexpr,
) -> None:  # fmt: skip
    WIDTH: tl.constexpr = 32 if BITS == 8 else 16
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    at = outputs.to(tl.int64)[:, None, None] * num_groups + tl.arange(0, BLOCK_G)[None, :, None]
    byte = tl.arange(0, WIDTH)[None, None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_groups, BLOCK_G):
        is_group = (first + tl.arange(0, BLOCK_G) < num_groups)[None, :, None] & is_output[:, None, None]
        packed = tl.load(codes + (at + first) * WIDTH + byte, mask=is_group, other=0)
        scale = tl.load(scales + at + first, mask=is_group, other=0.0).to(tl.float32)
        minimum = scale
        if HAS_MINIMA:
            minimum = tl.load(minima + at + first, mask=is_group, other=0.0).to(tl.float32)
        low = _inputs(
            x, tokens, num_tokens, first, num_groups, row_stride, 0, BLOCK_M, BLOCK_G, WIDTH, COMPUTE
        )  # fmt: skip
        if BITS == 8:
            whole = _widened(packed, scale, minimum, False, 8, BLOCK_N, BLOCK_G * WIDTH, COMPUTE)
            total = tl.dot(low, whole, total, input_precision="ieee")
        else:
            high = _inputs(
                x, tokens, num_tokens, first, num_groups, row_stride, 16, BLOCK_M, BLOCK_G, WIDTH, COMPUTE
            )  # fmt: skip
            part = _widened(packed & 0xF, scale, minimum, HAS_MINIMA, 4, BLOCK_N, BLOCK_G * WIDTH, COMPUTE)
            total = tl.dot(low, part, total, input_precision="ieee")
            part = _widened(packed >> 4, scale, minimum, HAS_MINIMA, 4, BLOCK_N, BLOCK_G * WIDTH, COMPUTE)
            total = tl.dot(high, part, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    target = out + tokens.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    is_used = (tokens < num_tokens)[:, None] & is_output[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_used)
