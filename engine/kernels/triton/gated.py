"""SwiGLU and GeGLU: the gate's activation times the other half, read once, written in the dtype that comes next."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from contracts.errors import EngineError
from engine.kernels.triton.launch import check_last_contiguous, launch

BLOCK = 1024


def swiglu(gate_up: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As reference.swiglu."""
    return _gated(gate_up, dtype, is_gelu=False)


def geglu(gate_up: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As reference.geglu."""
    return _gated(gate_up, dtype, is_gelu=True)


def _gated(gate_up: Tensor, dtype: torch.dtype, is_gelu: bool) -> Tensor:
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise EngineError(f"gate_up: expected [T, 2 * inner] but got {list(gate_up.shape)}")
    check_last_contiguous(gate_up=gate_up)
    num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, inner, dtype=dtype, device=gate_up.device)
    launch(
        _gate, (num_tokens, triton.cdiv(inner, BLOCK)),
        gate_up, out, inner, gate_up.stride(0), IS_GELU=is_gelu, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _gate(
    gate_up: tl.tensor,
    out: tl.tensor,
    inner: int,
    row_stride: int,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_used = at < inner
    gate = tl.load(gate_up + row * row_stride + at, mask=is_used, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + inner + at, mask=is_used, other=0.0).to(tl.float32)
    if IS_GELU:  # tanh(z / 2) = 2 * sigmoid(z) - 1, so the tanh form of GELU is a sigmoid as well
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        slope = gate
    # By an exponential that cannot overflow.
    shrunk = tl.exp(-tl.abs(slope))
    share = tl.where(slope < 0.0, shrunk, 1.0) / (1.0 + shrunk)
    tl.store(out + row * inner + at, (gate * share * up).to(out.dtype.element_ty), mask=is_used)
