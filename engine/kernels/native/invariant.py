"""The kernel set of `engine.batch_invariant`: the native one, whose rows have the same bits whatever shares their step
and however a prompt was cut into chunks, without oneDNN, of whose products that does not hold.

Where the native set leaves nothing to oneDNN (`kernels.is_onednn_faster`), the two are the same.
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.native import kernels, ops
from engine.weights import Linear

pack = kernels.pack_panels


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [T, in] -> [T, out] float32."""
    assert isinstance(layer.packed, ops.Panels), "packed by another kernel set"
    return ops.linear(x, layer.packed, layer.bias)


logits = linear
embed = kernels.embed
add_norm = kernels.add_norm
split_heads = kernels.split_heads
gated = kernels.gated
attend_decodes = kernels.attend_decodes
prefill_attention = kernels.prefill_attention
