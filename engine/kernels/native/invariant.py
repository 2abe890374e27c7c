"""The kernel set of `engine.batch_invariant`: a token has the same bits whatever shares its step, and however its
prompt was cut into chunks.

    products     compiled, numbers and blocks alike, for any number of rows: every sum runs over the input in order
    attention    that of prompts for all, a decode being a chunk of one token: keys are taken in blocks that begin at
                 fixed positions, and what a query does not see adds exact zeros
    all between  as in the native set: rows do not meet

What it costs stands in docs/engine.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.cpu import NO_FLOAT8
from engine.kernels.native import kernels, ops
from engine.spec import AttentionRule
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


def attend_decodes(
    q: Tensor,
    kv: Tensor,
    group: tuple[Tensor, Tensor, Tensor],
    rule: AttentionRule,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """As reference.attend_decodes."""
    assert scales is None, NO_FLOAT8
    for row, table, length in zip(*group, strict=True):
        part = slice(int(row), int(row) + 1)
        out[part] = prefill_attention(q[part], kv, table, int(length) - 1, rule)


def prefill_attention(
    q: Tensor, kv: Tensor, block_ids: Tensor, start: int, rule: AttentionRule, scales: Tensor | None = None
) -> Tensor:
    """As reference.prefill_attention. `invariant_kernels` has made sure that the compiled one knows the shape."""
    assert scales is None, NO_FLOAT8
    out = torch.empty(q.shape, dtype=kv.dtype)
    ops.prefill_attention(q.float().contiguous(), kv, block_ids, start, rule, out)
    return out
