"""Plain torch: what every other kernel set must equal, on any device. Softmax and norms run in float32.

House letters: T tokens of a step, B sequences, H query heads, K kv heads, G = H / K, D head dim, N blocks, S slots per
block, M blocks per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.weights import Linear

MAX_QUERY_ROWS = 256
"""Queries of one attention product: bounds the score matrix, and lets a causal chunk skip what it must not see."""
NUM_REFINED = 32
"""Logits per row that are recomputed in float32: more than lie within a rounding step of the best."""


def pack(layer: Linear) -> None:
    """Nothing: plain torch multiplies with the weight as it is."""


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [T, in] -> [T, out]."""
    assert layer.weight is not None, "packed by another kernel set"
    return F.linear(x, layer.weight, layer.bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, hidden], weight [hidden] float32 -> [T, hidden] in x's dtype (Zhang & Sennrich, arXiv:1910.07467)."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D], cos and sin [T, 1, D / 2] float32 -> [T, heads, D] float32; halves as in Hugging Face Llama."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 * inner] -> silu(first half) * second half, [T, inner] float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return F.silu(gate) * up


def write_kv(kv: Tensor, k: Tensor, v: Tensor, block_ids: Tensor, slots: Tensor) -> None:
    """k, v [T, K, D] into kv [N, 2, K, S, D] at (block_ids [T], slots [T])."""
    kv[block_ids, 0, :, slots] = k.to(kv.dtype)
    kv[block_ids, 1, :, slots] = v.to(kv.dtype)


def paged_attention(q: Tensor, kv: Tensor, block_table: Tensor, context_lens: Tensor) -> Tensor:
    """Decode attention: q [B, H, D], kv [N, 2, K, S, D], block_table [B, M], context_lens [B] -> [B, H, D]
    in kv's dtype.

    Entries of `block_table` past a sequence's context may be any valid block.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, num_slots = kv.shape[2], kv.shape[3]
    group = num_heads // num_kv_heads
    keys = kv[:, 0][block_table].float()  # [B, M, K, S, D]
    values = kv[:, 1][block_table].float()
    queries = q.float().view(num_seqs, 1, num_kv_heads, group, head_dim) * head_dim**-0.5
    scores = (queries @ keys.transpose(-1, -2)).permute(0, 2, 3, 1, 4)  # [B, K, G, M, S]
    scores = scores.reshape(num_seqs, num_kv_heads, group, -1)
    positions = torch.arange(scores.shape[-1], device=q.device)
    is_outside = positions >= context_lens.view(-1, 1, 1, 1)
    probs = scores.masked_fill(is_outside, -torch.inf).softmax(dim=-1)
    probs = probs.view(num_seqs, num_kv_heads, group, -1, num_slots).permute(0, 3, 1, 2, 4)
    mixed: Tensor = (probs @ values).sum(dim=1)  # [B, K, G, D]
    return mixed.reshape(num_seqs, num_heads, head_dim).to(kv.dtype)


def logits(x: Tensor, head: Linear) -> Tensor:
    """x [R, hidden] -> [R, V] float32; the head keeps its plain weight."""
    assert head.weight is not None, "packed by another kernel set"
    return refined_logits(linear(x, head), x, head.weight)


def refined_logits(rounded: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """rounded [R, V] = x [R, hidden] @ weight [V, hidden] -> [R, V] float32, the best NUM_REFINED of each row exact.

    NOTE: a bfloat16 product rounds logits near 20 to steps of 0.125, which ties the best tokens and lets the lowest id
    win. The best few are computed again in float32 from the same weights; a float32 product is returned as it is.
    """
    if rounded.dtype == torch.float32:
        return rounded
    best = rounded.topk(min(NUM_REFINED, rounded.shape[-1]), dim=-1).indices
    exact = torch.bmm(weight[best].float(), x.float().unsqueeze(-1)).squeeze(-1)
    return rounded.float().scatter_(1, best, exact)


def prefill_attention(q: Tensor, kv: Tensor, block_ids: Tensor, start: int) -> Tensor:
    """Causal attention of a chunk: q [T, H, D] at positions start … start + T - 1, kv [N, 2, K, S, D] that already
    holds their keys, block_ids [M] of the one sequence -> [T, H, D] in kv's dtype."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    group = num_heads // num_kv_heads
    # [K, M * S, D]
    keys = kv[:, 0][block_ids].transpose(0, 1).reshape(num_kv_heads, -1, head_dim).float()
    values = kv[:, 1][block_ids].transpose(0, 1).reshape(num_kv_heads, -1, head_dim).float()
    queries = q.float().view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3) * head_dim**-0.5
    parts = [
        causal(queries[:, :, low : low + MAX_QUERY_ROWS], keys, values, start + low)
        for low in range(0, num_tokens, MAX_QUERY_ROWS)
    ]
    mixed = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]  # [K, G, T, D]
    return mixed.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim).to(kv.dtype)


def causal(queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """queries [K, G, R, D] from position `start` on, keys and values [K, C, D] -> [K, G, R, D]."""
    num_kv_heads, group, rows, head_dim = queries.shape
    end = start + rows
    scores = queries.reshape(num_kv_heads, group * rows, head_dim) @ keys[:, :end].transpose(1, 2)
    scores = scores.view(num_kv_heads, group, rows, end)
    is_future = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu(1)
    scores[..., start:].masked_fill_(is_future, -torch.inf)
    probs = scores.softmax(dim=-1).view(num_kv_heads, group * rows, end)
    return (probs @ values[:, :end]).view(num_kv_heads, group, rows, head_dim)


def rope_table(positions: Sequence[int] | Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D / 2] float32 for positions [T] and inv_freq [D / 2]."""
    angles = torch.as_tensor(positions, dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq
    return angles.cos()[:, None], angles.sin()[:, None]
