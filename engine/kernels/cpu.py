"""Matrix products that are fast on CPUs; all else is `reference`.

bfloat16 with bfloat16 instructions: oneDNN with weights packed once. bfloat16 without them (AVX2): torch's own product is
a scalar loop beyond a few rows, so the weight is widened for the call: products of bfloat16 numbers are exact in float32
and the sum is rounded once, which is what the instructions do. Measured on two AVX2 cores, all linears of
SmolLM2-135M at 8 rows: 211 ms native, 86 ms widened; at 1 row native wins (31 against 51 ms).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.weights import Linear, has_native_bf16

MAX_NATIVE_ROWS = 4


def pack(layer: Linear) -> None:
    """Replace a bfloat16 weight by its packed copy where the CPU has the instructions; else leave it."""
    weight = layer.weight
    if weight is None or weight.dtype != torch.bfloat16 or not has_native_bf16():
        return
    layer.packed = torch.ops.mkldnn._reorder_linear_weight(weight.to_mkldnn())
    if not layer.is_shared:
        layer.weight = None


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [T, in] -> [T, out]."""
    if layer.packed is not None:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.packed, layer.bias, "none", [], "")
        return product
    weight = layer.weight
    assert weight is not None, "neither packed nor plain"
    if x.dtype == torch.bfloat16 and len(x) > MAX_NATIVE_ROWS:
        bias = None if layer.bias is None else layer.bias.float()
        return F.linear(x.float(), weight.float(), bias).to(x.dtype)
    return F.linear(x, weight, layer.bias)
