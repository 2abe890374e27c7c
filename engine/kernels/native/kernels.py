"""The kernel set of CPUs that have the compiled functions. Equal to `reference` up to rounding.

    products             compiled, of quantized weights and of numbers: in float32, or where the CPU has them by dot
                         products of bfloat16 pairs (docs/engine.md: against oneDNN)
    on CPUs that have    bfloat16 numbers through `cpu`: oneDNN with packed weights; quantized weights beyond a few rows
    tiles (AMX)          through oneDNN, too, expanded for the call: tiles take many rows several times as fast
    all between          compiled, one pass each: norm with addition, heads with rotation and KV, gate, attention

`cpu` is asked wherever the compiled functions do not know a shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import cpu
from engine.kernels.cpu import NO_FLOAT8
from engine.kernels.native import ops
from engine.spec import Activation, AttentionRule
from engine.weights import Linear, has_native_bf16

MIN_EXPANDED_ROWS = 32
"""Rows from which a bfloat16 product is worth expanding the weights."""


def is_onednn_faster() -> bool:
    """Whether many rows of bfloat16 are multiplied faster by oneDNN than by the compiled functions."""
    return has_native_bf16() and (ops.has_tiles() or not ops.has_dot())


def pack(layer: Linear) -> None:
    """A matrix is brought into the order of its kernel, and what it was is dropped: a head needs no plain weight, since
    its logits are exact. Packing twice is packing once."""
    is_wide = layer.weight is not None and layer.weight.dtype == torch.float32
    if layer.quantized is not None or is_wide or not is_onednn_faster():
        pack_panels(layer)
    elif layer.packed is None:
        cpu.pack(layer)


def pack_panels(layer: Linear) -> None:
    """As `pack`, for the compiled products whatever the CPU."""
    if layer.quantized is not None:
        layer.packed = ops.pack(layer.quantized)
        layer.quantized = None
    elif layer.weight is not None:
        layer.packed = ops.pack_numbers(layer.weight)
        layer.weight = None
    layer.bias = None if layer.bias is None else layer.bias.float()


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [T, in] -> [T, out], float32 unless both x and weights are bfloat16."""
    panels = layer.packed
    if not isinstance(panels, ops.Panels):
        return cpu.linear(x, layer)
    if x.dtype == torch.bfloat16 and len(x) >= MIN_EXPANDED_ROWS and is_onednn_faster():
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, ops.expand(panels), bias)
    return ops.linear(x, panels, layer.bias)


def logits(x: Tensor, head: Linear) -> Tensor:
    """As reference.logits; of compiled products all are exact up to float32."""
    if isinstance(head.packed, ops.Panels):
        return ops.linear(x, head.packed, head.bias)
    return cpu.logits(x, head)


def embed(token_ids: Tensor, table: Linear) -> Tensor:
    """As reference.embed."""
    if isinstance(table.packed, ops.Panels):
        return ops.rows(table.packed, token_ids)
    return cpu.embed(token_ids, table)


def add_norm(
    hidden: Tensor, added: Tensor | None, post: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As reference.add_norm, in place."""
    return hidden, ops.add_norm(hidden, added, post, weight, eps, dtype)


def split_heads(
    qkv: Tensor,
    norms: tuple[Tensor | None, float],
    rotation: tuple[Tensor, Tensor],
    kv: Tensor,
    place: tuple[Tensor, Tensor],
    scales: Tensor | None = None,
) -> Tensor:
    """As reference.split_heads."""
    assert scales is None, NO_FLOAT8
    return ops.split_heads(qkv, norms, rotation, kv, place)


def gated(gate_up: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    """As reference.gated."""
    return ops.gated(gate_up, activation == "gelu_tanh", dtype)


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
    if ops.can_attend(kv):
        ops.decode_attention(q, kv, group, rule, out)
    else:
        cpu.attend_decodes(q, kv, group, rule, out)


def prefill_attention(
    q: Tensor, kv: Tensor, block_ids: Tensor, start: int, rule: AttentionRule, scales: Tensor | None = None
) -> Tensor:
    """As reference.prefill_attention."""
    assert scales is None, NO_FLOAT8
    if not ops.can_attend(kv):
        return cpu.prefill_attention(q, kv, block_ids, start, rule)
    out = torch.empty(q.shape, dtype=kv.dtype)
    ops.prefill_attention(q.float().contiguous(), kv, block_ids, start, rule, out)
    return out
