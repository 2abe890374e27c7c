"""Residual addition and RMSNorm in one pass: hidden and what is added are read once, sum and norm written once.

One program per token; a row stays in registers between the mean and the scaling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from contracts.errors import EngineError
from engine.kernels.triton.launch import check_last_contiguous, check_same_device, launch, padded

MAX_HIDDEN = 16384
"""Numbers that one program holds without spilling."""


def add_rms_norm(
    hidden: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As reference.add_rms_norm. Raises EngineError for a row longer than MAX_HIDDEN."""
    num_tokens, num_hidden = hidden.shape
    if num_hidden > MAX_HIDDEN or added.shape != hidden.shape or weight.shape != (num_hidden,):
        raise EngineError(
            f"expected two [T, n] and a weight [n], n <= {MAX_HIDDEN}, but got {list(hidden.shape)}, "
            f"{list(added.shape)} and {list(weight.shape)}"
        )
    check_last_contiguous(hidden=hidden, added=added, weight=weight)
    check_same_device(hidden=hidden, added=added, weight=weight)
    total = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
    normed = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    block = padded(num_hidden)
    launch(
        _add_rms_norm, (num_tokens,),
        hidden, added, weight, total, normed, hidden.stride(0), added.stride(0), eps,
        SIZE=num_hidden, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return total, normed


@triton.jit
def _add_rms_norm(
    hidden: tl.tensor, added: tl.tensor, weight: tl.tensor, total: tl.tensor, normed: tl.tensor,
    hidden_row: int, added_row: int, eps: float, SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_used = at < SIZE
    sums = tl.load(hidden + row * hidden_row + at, mask=is_used, other=0.0).to(tl.float32)
    sums += tl.load(added + row * added_row + at, mask=is_used, other=0.0).to(tl.float32)
    tl.store(total + row * SIZE + at, sums, mask=is_used)
    scaled = sums * (1.0 / tl.sqrt(tl.sum(sums * sums, 0) / SIZE + eps))
    scaled *= tl.load(weight + at, mask=is_used, other=0.0).to(tl.float32)
    tl.store(normed + row * SIZE + at, scaled.to(normed.dtype.element_ty), mask=is_used)
