"""float8 e4m3 inside kernels: in hardware from compute capability 8.9 on, by bits before it.

    stored byte = e4m3(clamp(x / scale, -448, 448)), round to nearest even;   loaded value = e4m3 * scale

By bits, a byte's sign, exponent and mantissa are moved to their places in float16, which gives the value times 2^-8
(the exponents' biases are 7 and 15), also for subnormals. Our kernels never store the one NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import capability

NONE = 0
BITS = 1
NATIVE = 2


def mode(kv: Tensor) -> int:
    """How kernels read and write this slab."""
    if kv.dtype != torch.float8_e4m3fn:
        return NONE
    return NATIVE if capability(kv.device) >= (8, 9) else BITS


def address(kv: Tensor) -> Tensor:
    """What a kernel gets for `kv`: without hardware support the type is unknown to the compiler, so bytes."""
    return kv.view(torch.uint8) if mode(kv) == BITS else kv


@triton.jit
def decoded(values: tl.tensor, dtype: tl.constexpr, FP8: tl.constexpr) -> tl.tensor:
    """What was loaded from the slab, as `dtype`, still to be multiplied by its scale."""
    if FP8 == 1:
        bits = values.to(tl.int16)
        halves = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    else:
        return values.to(dtype)


@triton.jit
def encoded(values: tl.tensor, FP8: tl.constexpr) -> tl.tensor:
    """float32, already divided by its scale, as what the slab holds."""
    if FP8 == 0:
        return values
    else:
        clamped = tl.minimum(tl.maximum(values, -448.0), 448.0)
        if FP8 == 2:
            return clamped.to(tl.float8e4nv)
        else:
            bits = clamped.to(tl.int32, bitcast=True)
            sign = (bits >> 24) & 0x80
            size = bits & 0x7FFFFFFF
            # Below 2^-6 the steps are 2^-9: adding 2^23 leaves the rounded count of them in the low bits.
            steps = (size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
            rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
            magnitude = tl.where(size < 0x3C800000, steps, rounded - 960)  # 960 = (127 - 7) << 3
            return (sign | magnitude).to(tl.uint8)
