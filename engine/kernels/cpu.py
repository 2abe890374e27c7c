"""What runs faster on CPUs than plain torch, without a compiler: matrix products and attention. Equal to `reference`
up to rounding.

Products, by what the CPU can do:
    float32                        oneDNN, weights packed once: 1.3 to 1.6 times as fast as torch's own, 4 to 64 rows
    bfloat16 with instructions     oneDNN, weights packed once
    bfloat16 without (AVX2)        torch's own product is a scalar loop beyond a few rows, so the weight is widened for
                                   the call. Products of bfloat16 numbers are exact in float32; the sum stays float32,
                                   for one and for many rows alike, so that a batch of another size changes nothing

Attention reads the slab as rows, one row per (block, K or V, head): such a plane is contiguous, so gathering a table is
a sequence of plain copies that land in the order the products want. Gathering whole blocks and transposing, as
`reference` does, takes about 3.5 times as long.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import reference
from engine.spec import AttentionRule
from engine.weights import Linear, has_native_bf16

MAX_NATIVE_HEAD_ROWS = 4
"""Rows up to which the head multiplies in bfloat16 without instructions: widening a vocabulary costs more than that."""
MAX_QUERY_ROWS = 64
"""Queries of one prefill product: larger tiles leave the cache, smaller ones pay more calls."""

NO_FLOAT8 = "float8 KV is refused on CPUs (engine.kv.resolve_kv_dtype)"


def pack(layer: Linear) -> None:
    """Replace a weight by its packed copy where that is faster; else leave it. Packing twice is packing once."""
    weight = layer.weight
    if weight is None or layer.packed is not None:
        return
    if weight.dtype == torch.bfloat16:
        is_worth_it = has_native_bf16()
    else:  # a shared weight stays in memory anyway, so its float32 copy would cost too much of it
        is_worth_it = weight.dtype == torch.float32 and not layer.is_shared
    if is_worth_it:
        layer.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        if not layer.is_shared:
            layer.weight = None


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [T, in] -> [T, out] in x's dtype, or in float32 where that costs nothing."""
    if layer.packed is not None:
        assert isinstance(layer.packed, Tensor), "packed by another kernel set"
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.packed, layer.bias, "none", [], "")
        return product
    assert layer.weight is not None, "neither packed nor plain"
    bias = None if layer.bias is None else layer.bias.float()
    return F.linear(x.float(), layer.weight.float(), bias)


def logits(x: Tensor, head: Linear) -> Tensor:
    """x [R, hidden] -> [R, V] float32; the head keeps its plain weight."""
    assert head.weight is not None, "the head keeps its plain weight"
    if head.packed is None and x.dtype == torch.bfloat16 and len(x) <= MAX_NATIVE_HEAD_ROWS:
        return reference.refined_logits(F.linear(x, head.weight), x, head.weight)
    return reference.refined_logits(linear(x, head), x, head.weight)


embed = reference.embed
add_norm = reference.add_norm
gated = reference.gated


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
    q, k, v = reference.turned_heads(qkv, norms, rotation, kv)
    write_kv(kv, k, v, *place)
    return q


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
    rows, block_table, context_lens = group
    out[rows] = paged_attention(q[rows], kv, block_table, context_lens, rule)


def write_kv(kv: Tensor, k: Tensor, v: Tensor, block_ids: Tensor, slots: Tensor) -> None:
    """k, v [T, K, D] into kv [N, 2, K, S, D] at (block_ids [T], slots [T])."""
    _, _, num_heads, num_slots, head_dim = kv.shape
    planes_per_block = kv.stride(0) // kv.stride(2)
    heads = torch.arange(num_heads, device=kv.device)
    key_rows = (block_ids[:, None] * planes_per_block + heads) * num_slots + slots[:, None]
    rows = _planes(kv).view(-1, head_dim)
    rows.index_copy_(0, key_rows.view(-1), k.reshape(-1, head_dim).to(kv.dtype))
    rows.index_copy_(0, (key_rows + num_heads * num_slots).view(-1), v.reshape(-1, head_dim).to(kv.dtype))


def paged_attention(
    q: Tensor, kv: Tensor, block_table: Tensor, context_lens: Tensor, rule: AttentionRule
) -> Tensor:
    """As reference.paged_attention."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    block_table, is_hidden = reference.within_window(block_table, context_lens, rule.window, kv.shape[3])
    keys, values = _gather(kv, block_table)
    queries = (q.float() * rule.scale).view(num_seqs * num_kv_heads, -1, head_dim)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(num_seqs, num_heads, -1)
    scores = reference.soft_cap(scores, rule.cap)
    probs = scores.masked_fill_(is_hidden[:, None], -torch.inf).softmax(dim=-1)
    mixed = torch.bmm(probs.view(num_seqs * num_kv_heads, -1, scores.shape[-1]), values)
    return mixed.view(num_seqs, num_heads, head_dim).to(kv.dtype)


def prefill_attention(
    q: Tensor, kv: Tensor, block_ids: Tensor, start: int, rule: AttentionRule, scales: Tensor | None = None
) -> Tensor:
    """As reference.prefill_attention."""
    assert scales is None, NO_FLOAT8
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    block_ids, start = reference.from_window(block_ids, start, rule.window, kv.shape[3])
    keys, values = _gather(kv, block_ids[None])
    queries = (q.float() * rule.scale).view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=kv.dtype)
    for low in range(0, num_tokens, MAX_QUERY_ROWS):
        high = min(low + MAX_QUERY_ROWS, num_tokens)
        mixed = reference.causal(queries[:, :, low:high], keys, values, start + low, rule)
        out[low:high].view(high - low, num_kv_heads, -1, head_dim).copy_(mixed.permute(2, 0, 1, 3))
    return out


def _planes(kv: Tensor) -> Tensor:
    """One layer kv [N, 2, K, S, D] of the slab as rows [planes, S * D]; block n, side c, head k is row
    n * (stride between blocks, in planes) + c * K + k. Planes of other layers lie between."""
    num_blocks, _, num_heads, num_slots, head_dim = kv.shape
    plane = num_slots * head_dim
    assert kv.stride()[1:] == (num_heads * plane, plane, head_dim, 1), "expected a layer of a KvSlab"
    num_planes = (num_blocks - 1) * (kv.stride(0) // plane) + 2 * num_heads
    return kv.as_strided((num_planes, plane), (plane, 1))


def _gather(kv: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B * K, M * S, D] float32 of block_table [B, M]."""
    num_seqs, num_blocks = block_table.shape
    num_heads, head_dim = kv.shape[2], kv.shape[4]
    heads = torch.arange(2 * num_heads).view(2, 1, num_heads, 1)
    rows = block_table[:, None, :] * (kv.stride(0) // kv.stride(2)) + heads  # [2, B, K, M]
    both = _planes(kv).index_select(0, rows.view(-1)).float()
    keys, values = both.view(2, num_seqs * num_heads, num_blocks * kv.shape[3], head_dim)
    return keys, values
