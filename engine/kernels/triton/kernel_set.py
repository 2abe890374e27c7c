"""The kernel set of GPUs (`engine.model.Kernels`): Triton where it moves fewer bytes, torch's own matrix products.

The sampler asks for the kernel of `sampling` itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.grouped import GroupedWeight
from engine.kernels.reference import embed, pack
from engine.kernels.triton.decode_attention import paged_attention
from engine.kernels.triton.gated import geglu, swiglu
from engine.kernels.triton.grouped_linear import grouped_linear
from engine.kernels.triton.norm import MAX_HIDDEN, add_rms_norm
from engine.kernels.triton.prefill_attention import prefill_attention
from engine.kernels.triton.rope_write import rope_write
from engine.spec import Activation, AttentionRule
from engine.weights import Linear

__all__ = [
    "add_norm", "attend_decodes", "embed", "gated", "linear", "logits", "pack", "paged_attention", "prefill_attention",
    "split_heads",
]  # fmt: skip


def linear(x: Tensor, layer: Linear) -> Tensor:
    """As reference.linear."""
    if isinstance(layer.packed, GroupedWeight):
        return grouped_linear(x, layer.packed, layer.bias)
    return reference.linear(x, layer)


def logits(x: Tensor, head: Linear) -> Tensor:
    """As reference.logits."""
    if isinstance(head.packed, GroupedWeight):
        return grouped_linear(x, head.packed, head.bias, torch.float32)
    return reference.logits(x, head)


def add_norm(
    hidden: Tensor, added: Tensor | None, post: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As reference.add_norm; one pass where there is something to add and it has no norm of its own."""
    if added is None or post is not None or hidden.shape[1] > MAX_HIDDEN:
        return reference.add_norm(hidden, added, post, weight, eps, dtype)
    return add_rms_norm(hidden, added, weight, eps, dtype)


def split_heads(
    qkv: Tensor,
    norms: tuple[Tensor | None, float],
    rotation: tuple[Tensor, Tensor],
    kv: Tensor,
    place: tuple[Tensor, Tensor],
    scales: Tensor | None = None,
) -> Tensor:
    """As reference.split_heads, but q in qkv's dtype."""
    weight, eps = norms
    heads = qkv.view(len(qkv), -1, kv.shape[4])
    return rope_write(heads, rotation, kv, place, None if weight is None else (weight, eps), scales)


def gated(gate_up: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    """As reference.gated."""
    return geglu(gate_up, dtype) if activation == "gelu_tanh" else swiglu(gate_up, dtype)


def attend_decodes(
    q: Tensor,
    kv: Tensor,
    group: tuple[Tensor, Tensor, Tensor],
    rule: AttentionRule,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """As reference.attend_decodes."""
    rows, block_table, context_lens = group
    out[rows] = paged_attention(q[rows], kv, block_table, context_lens, rule, scales)
