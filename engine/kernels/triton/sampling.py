"""Sampling without a sort: the borders of top-k and top-p are found by bisection over the bits of a logit.

    float32 logit ──► integer key of the same order ──► two bits of the border per walk over the row
        top-k border    the largest key with at least k logits at or above it
        top-p border    the largest key with at least p of the mass at or above it, among what top-k kept
    kept = above the border, and of those on it the first by id; then min-p; then the inverse CDF by id

One program per row; a row of 128k logits stays in the L2 cache during its walks. Counts are exact. Masses are float32
weights added in float64, so they do not depend on the order by more than what float64 rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from contracts.errors import EngineError
from engine.kernels.triton.launch import check_last_contiguous, check_same_device, launch

BLOCK = 2048


def sample(logits: Tensor, limits: Tensor, uniforms: Tensor) -> Tensor:
    """As reference.sample. Raises EngineError for shapes or dtypes that do not fit."""
    num_rows, num_vocab = logits.shape
    if logits.dtype != torch.float32 or limits.shape != (num_rows, 4) or uniforms.shape != (num_rows,):
        raise EngineError(
            f"expected float32 logits [R, V], limits [R, 4] and uniforms [R] but got {logits.dtype} "
            f"{list(logits.shape)}, {list(limits.shape)} and {list(uniforms.shape)}"
        )
    check_last_contiguous(logits=logits)
    check_same_device(logits=logits, limits=limits, uniforms=uniforms)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    launch(
        _sample, (num_rows,),
        logits, limits.float().contiguous(), uniforms.double().contiguous(), out, num_vocab, logits.stride(0),
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _key(values: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order; both zeros are one key."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key: tl.tensor) -> tl.tensor:
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(values: tl.tensor, highest: tl.tensor, inverse_temperature: tl.tensor) -> tl.tensor:
    return tl.exp((values - highest) * inverse_temperature)


@triton.jit
def _best(row: tl.tensor, num_vocab: int, BLOCK: tl.constexpr) -> tl.tensor:
    """The highest logit and the lowest id that has it."""
    highest = float("-inf")
    best = 0
    for low in range(0, num_vocab, BLOCK):
        ids = low + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < num_vocab, other=float("-inf"))
        here = tl.max(values, 0)
        at = tl.min(tl.where(values == here, ids, num_vocab), 0)
        best = tl.where(here > highest, at, best)
        highest = tl.maximum(highest, here)
    return highest, best


@triton.jit
def _measured(
    row: tl.tensor, num_vocab: int, highest: tl.tensor, inverse: tl.tensor, floor: tl.tensor, tied: tl.tensor,
    border: tl.tensor, step: tl.tensor, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What lies at or above `border`, + `step`, + 2 and + 3 of them: a number of logits, or the mass of the kept ones:
    above `floor` each by its weight, on the floor `tied` in all."""
    ACC: tl.constexpr = tl.float64 if BY_MASS else tl.int32
    a, b = tl.zeros([BLOCK], ACC), tl.zeros([BLOCK], ACC)
    c, d = tl.zeros([BLOCK], ACC), tl.zeros([BLOCK], ACC)
    for low in range(0, num_vocab, BLOCK):
        ids = low + tl.arange(0, BLOCK)
        values = tl.load(row + ids, mask=ids < num_vocab, other=float("-inf"))
        key = _key(values)
        if BY_MASS:
            counted = tl.where((ids < num_vocab) & (key > floor), _weight(values, highest, inverse), 0.0).to(
                ACC
            )
        else:
            counted = (ids < num_vocab).to(ACC)
        zero = tl.zeros([BLOCK], ACC)
        a += tl.where(key >= border, counted, zero)
        b += tl.where(key >= border + step, counted, zero)
        c += tl.where(key >= border + 2 * step, counted, zero)
        d += tl.where(key >= border + 3 * step, counted, zero)
    on_floor = tied.to(ACC)
    none = on_floor - on_floor
    return (
        tl.sum(a, 0) + tl.where(floor >= border, on_floor, none),
        tl.sum(b, 0) + tl.where(floor >= border + step, on_floor, none),
        tl.sum(c, 0) + tl.where(floor >= border + 2 * step, on_floor, none),
        tl.sum(d, 0) + tl.where(floor >= border + 3 * step, on_floor, none),
    )


@triton.jit
def _border(
    row: tl.tensor, num_vocab: int, highest: tl.tensor, inverse: tl.tensor, floor: tl.tensor, tied: tl.tensor,
    target: tl.tensor, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The largest key with at least `target` at or above it, and what is above it."""
    border = tl.full([], -2147483648, tl.int32)
    for walk in range(16):
        step = tl.full([], 1, tl.int32) << (30 - 2 * walk)
        _, b, c, d = _measured(
            row, num_vocab, highest, inverse, floor, tied, border, step, BY_MASS, BLOCK
        )  # fmt: skip
        num_steps = (b >= target).to(tl.int32) + (c >= target).to(tl.int32) + (d >= target).to(tl.int32)
        border += num_steps * step
    _, above, _, _ = _measured(row, num_vocab, highest, inverse, floor, tied, border, 1, BY_MASS, BLOCK)
    return border, above


@triton.jit
def _kept(
    row: tl.tensor, low: int, num_vocab: int, highest: tl.tensor, inverse: tl.tensor, floor: tl.tensor,
    num_tied: tl.tensor, num_before: tl.tensor, min_p: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The weights of a tile, zero for what is cut, and how many on the floor lie in it."""
    ids = low + tl.arange(0, BLOCK)
    values = tl.load(row + ids, mask=ids < num_vocab, other=float("-inf"))
    key = _key(values)
    is_tied = ((ids < num_vocab) & (key == floor)).to(tl.int32)
    is_first = (num_before + tl.cumsum(is_tied, 0)) <= num_tied
    weights = _weight(values, highest, inverse)
    is_kept = (ids < num_vocab) & ((key > floor) | ((key == floor) & is_first)) & (weights >= min_p)
    return tl.where(is_kept, weights, 0.0).to(tl.float64), tl.sum(is_tied, 0)


@triton.jit
def _drawn(
    row: tl.tensor, num_vocab: int, highest: tl.tensor, inverse: tl.tensor, floor: tl.tensor, num_tied: tl.tensor,
    min_p: tl.tensor, uniform: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The first id whose cumulated weight passes `uniform` of the sum; if rounding lets none, the last with any."""
    total = tl.full([], 0.0, tl.float64)
    num_before = 0
    for low in range(0, num_vocab, BLOCK):
        weights, num_here = _kept(
            row, low, num_vocab, highest, inverse, floor, num_tied, num_before, min_p, BLOCK
        )  # fmt: skip
        total += tl.sum(weights, 0)
        num_before += num_here
    goal = uniform * total
    passed = tl.full([], 0.0, tl.float64)
    num_before = 0
    first, last = num_vocab, 0
    for low in range(0, num_vocab, BLOCK):
        ids = low + tl.arange(0, BLOCK)
        weights, num_here = _kept(
            row, low, num_vocab, highest, inverse, floor, num_tied, num_before, min_p, BLOCK
        )  # fmt: skip
        is_past = (passed + tl.cumsum(weights, 0) > goal) & (weights > 0.0)
        first = tl.minimum(first, tl.min(tl.where(is_past, ids, num_vocab), 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, ids, 0), 0))
        passed += tl.sum(weights, 0)
        num_before += num_here
    return tl.minimum(first, last)


@triton.jit
def _sample(
    logits: tl.tensor, limits: tl.tensor, uniforms: tl.tensor, out: tl.tensor, num_vocab: int, row_stride: int,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * row_stride
    temperature, top_k = tl.load(limits + number * 4), tl.load(limits + number * 4 + 1)
    top_p, min_p = tl.load(limits + number * 4 + 2), tl.load(limits + number * 4 + 3)
    highest, token = _best(row, num_vocab, BLOCK)
    if temperature > 0.0:
        inverse = 1.0 / temperature
        floor = tl.full([], -2147483648, tl.int32)
        num_tied = tl.full([], 0, tl.int32)
        if (top_k > 0.0) & (top_k < num_vocab):
            wanted = top_k.to(tl.int32)
            floor, above = _border(row, num_vocab, highest, inverse, floor, num_tied, wanted, False, BLOCK)
            num_tied = wanted - above
        if top_p < 1.0:
            each = _weight(_value(floor), highest, inverse).to(tl.float64)
            tied = tl.where(num_tied > 0, each * num_tied, 0.0)
            total, _, _, _ = _measured(
                row, num_vocab, highest, inverse, floor, tied, -2147483648, 0, True, BLOCK
            )  # fmt: skip
            goal = total * top_p
            border, mass = _border(row, num_vocab, highest, inverse, floor, tied, goal, True, BLOCK)
            each = _weight(_value(border), highest, inverse).to(tl.float64)
            # As many on the border as reach the goal; of those on the old border no more than were kept.
            missing = tl.where(each > 0.0, tl.ceil((goal - mass) / each), 1.0)
            most = tl.where(border == floor, num_tied, num_vocab).to(tl.float64)
            num_tied = tl.minimum(tl.maximum(missing, 1.0), most).to(tl.int32)
            floor = border
        token = _drawn(
            row, num_vocab, highest, inverse, floor, num_tied, min_p, tl.load(uniforms + number), BLOCK
        )  # fmt: skip
    tl.store(out + number, token.to(tl.int64))
