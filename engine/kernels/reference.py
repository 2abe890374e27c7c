"""Plain torch: what every other kernel set must equal, on any device. Softmax and norms run in float32.

House letters: T tokens of a step, B sequences, H query heads, K kv heads, G = H / K, D head dim, N blocks, S slots per
block, M blocks per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.grouped import GroupedWeight, dequantized, from_gguf
from engine.spec import Activation, AttentionRule
from engine.weights import Linear

MAX_QUERY_ROWS = 256
"""Queries of one attention product: bounds the score matrix, and lets a causal chunk skip what it must not see."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
NUM_REFINED = 32
"""Logits per row that are recomputed in float32: more than lie within a rounding step of the best."""


def pack(layer: Linear) -> None:
    """Blocks of a quantized matrix become scales and codes apart; plain torch multiplies with numbers as they are.
    Packing twice is packing once."""
    if layer.quantized is not None:
        layer.packed = from_gguf(layer.quantized.blocks, layer.quantized.kind.name)
        layer.quantized = None


def linear(x: Tensor, layer: Linear) -> Tensor:
    """x [T, in] -> [T, out]."""
    if isinstance(layer.packed, GroupedWeight):
        return grouped_linear(x, layer.packed, layer.bias)
    assert layer.weight is not None, "packed by another kernel set"
    return F.linear(x, layer.weight, layer.bias)


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x [T, in] -> [T, out] in `dtype`, else in x's, by 4- or 8-bit weights; computed in float32."""
    product = F.linear(x.float(), dequantized(weight), None if bias is None else bias.float())
    return product.to(dtype or x.dtype)


def embed(token_ids: Tensor, table: Linear) -> Tensor:
    """token_ids [T] -> their rows of `table`, [T, hidden] float32."""
    if isinstance(table.packed, GroupedWeight):
        return dequantized(table.packed.rows(token_ids))
    assert table.weight is not None, "packed by another kernel set"
    return table.weight[token_ids].float()


def add_norm(
    hidden: Tensor, added: Tensor | None, post: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """hidden [T, width] float32 plus `added`, which is normed by `post` first if there is one; and the norm of the sum
    by `weight`, in `dtype`. The given `hidden` may be overwritten."""
    if added is None:
        return hidden, rms_norm(hidden, weight, eps).to(dtype)
    return add_rms_norm(
        hidden, added if post is None else rms_norm(added.float(), post, eps), weight, eps, dtype
    )


def split_heads(
    qkv: Tensor,
    norms: tuple[Tensor | None, float],
    rotation: tuple[Tensor, Tensor],
    kv: Tensor,
    place: tuple[Tensor, Tensor],
    scales: Tensor | None = None,
) -> Tensor:
    """qkv [T, (H + 2 K) * D] -> q [T, H, D] float32, rotated; keys, rotated, and values go into kv [N, 2, K, S, D].

    norms: the weight [H + K, D] of a norm over each query and key head, or None, and its epsilon; rotation: cos and
    sin of `rope_table`; place: block_ids and slots [T]; scales [2, K]: of a float8 slab.
    """
    q, k, v = turned_heads(qkv, norms, rotation, kv)
    write_kv(kv, k, v, *place, scales)
    return q


def turned_heads(
    qkv: Tensor, norms: tuple[Tensor | None, float], rotation: tuple[Tensor, Tensor], kv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D] and k [T, K, D] float32, normed and rotated, and v [T, K, D]."""
    weight, eps = norms
    heads = qkv.view(len(qkv), -1, kv.shape[4])
    return _turned(heads, rotation, kv.shape[2], None if weight is None else (weight, eps))


def _turned(
    heads: Tensor, rotation: tuple[Tensor, Tensor], num_kv_heads: int, norm: tuple[Tensor, float] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `turned_heads`, of heads [T, H + 2 * K, D]."""
    turning, v = torch.split(heads, [heads.shape[1] - num_kv_heads, num_kv_heads], dim=1)
    rotated = rope(turning if norm is None else head_norm(turning, *norm), *rotation)
    q, k = torch.split(rotated, [rotated.shape[1] - num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def attend_decodes(
    q: Tensor,
    kv: Tensor,
    group: tuple[Tensor, Tensor, Tensor],
    rule: AttentionRule,
    out: Tensor,
    scales: Tensor | None = None,
) -> None:
    """`paged_attention` of some rows of q [T, H, D] into the same rows of `out`; group: rows [B], block_table [B, M],
    context_lens [B]."""
    rows, block_table, context_lens = group
    out[rows] = paged_attention(q[rows], kv, block_table, context_lens, rule, scales).to(out.dtype)


def gated(gate_up: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    """gate_up [T, 2 * inner] -> activation(first half) * second half, [T, inner]."""
    return geglu(gate_up, dtype) if activation == "gelu_tanh" else swiglu(gate_up, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, hidden], weight [hidden] float32 -> [T, hidden] in x's dtype (Zhang & Sennrich, arXiv:1910.07467)."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm(
    hidden: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """hidden [T, hidden] float32 + added [T, hidden] -> the sum, float32, and its rms_norm as `dtype`."""
    total = hidden + added
    return total, rms_norm(total, weight, eps).to(dtype)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head: x [T, heads, D], weight [heads, D] float32 -> [T, heads, D] float32."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D], cos and sin [T, 1, D / 2] float32 -> [T, heads, D] float32; halves as in Hugging Face Llama."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def swiglu(gate_up: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, 2 * inner] -> silu(first half) * second half, [T, inner]; computed in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(dtype)


def geglu(gate_up: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, 2 * inner] -> gelu(first half) * second half, [T, inner]; computed in float32, GELU by its tanh form."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(dtype)


def soft_cap(scores: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(scores / cap), which stays within the cap; `scores` as they are without one."""
    return scores if cap is None else torch.tanh(scores / cap) * cap


def route(router_logits: Tensor, num_chosen: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """[T, E] -> probabilities float32 and numbers of each token's experts, [T, num_chosen] both, best first."""
    probs, chosen = router_logits.float().softmax(dim=-1).topk(num_chosen, dim=-1)
    return (probs / probs.sum(dim=-1, keepdim=True) if is_normalized else probs), chosen


def write_kv(
    kv: Tensor, k: Tensor, v: Tensor, block_ids: Tensor, slots: Tensor, scales: Tensor | None = None
) -> None:
    """k, v [T, K, D] into kv [N, 2, K, S, D] at (block_ids [T], slots [T]).

    A float8 slab holds them divided by `scales` [2, K] float32, K's and V's of each head, and cut at +-448.
    """
    for side, rows in enumerate((k, v)):
        if kv.dtype == FP8:
            assert scales is not None, "a float8 slab has scales"
            stored = (rows.float() / scales[side, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            kv.view(torch.uint8)[block_ids, side, :, slots] = stored.view(torch.uint8)
        else:
            kv[block_ids, side, :, slots] = rows.to(kv.dtype)


def rope_write(
    heads: Tensor,
    rotation: tuple[Tensor, Tensor],
    kv: Tensor,
    at: tuple[Tensor, Tensor],
    norm: tuple[Tensor, float] | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """heads [T, H + 2 * K, D] (q, k, v), cos and sin as for `rope` -> q [T, H, D], rotated, in heads' dtype.
    Rotated keys, and values, go to kv at (block_ids [T], slots [T]).

    `norm`: weight [H + K, D] float32 and eps of `head_norm`, for models that norm q and k.
    """
    q, k, v = _turned(heads, rotation, kv.shape[2], norm)
    write_kv(kv, k, v, *at, scales)
    return q.to(heads.dtype)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    rule: AttentionRule,
    scales: Tensor | None = None,
) -> Tensor:
    """Decode attention: q [B, H, D], kv [N, 2, K, S, D], block_table [B, M], context_lens [B] -> [B, H, D]
    in kv's dtype, or in q's if kv is float8 with `scales` [2, K]. An empty context gives zeros.

    Entries of `block_table` past a sequence's context may be any valid block.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, num_slots = kv.shape[2], kv.shape[3]
    group = num_heads // num_kv_heads
    block_table, is_hidden = within_window(block_table, context_lens, rule.window, num_slots)
    keys, values = _sides(kv, block_table, scales)  # [B, M, K, S, D]
    queries = q.float().view(num_seqs, 1, num_kv_heads, group, head_dim) * rule.scale
    scores = soft_cap(queries @ keys.transpose(-1, -2), rule.cap).permute(0, 2, 3, 1, 4)  # [B, K, G, M, S]
    scores = scores.reshape(num_seqs, num_kv_heads, group, -1)
    is_hidden = is_hidden.view(num_seqs, 1, 1, -1)
    probs = scores.masked_fill(is_hidden, -torch.inf).softmax(dim=-1).masked_fill(is_hidden, 0.0)
    probs = probs.view(num_seqs, num_kv_heads, group, -1, num_slots).permute(0, 3, 1, 2, 4)
    mixed: Tensor = (probs @ values).sum(dim=1)  # [B, K, G, D]
    return mixed.reshape(num_seqs, num_heads, head_dim).to(q.dtype if kv.dtype == FP8 else kv.dtype)


def _sides(kv: Tensor, block_ids: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values [*block_ids, K, S, D] float32."""
    taken = kv.view(torch.uint8)[block_ids].view(FP8) if kv.dtype == FP8 else kv[block_ids]
    both = taken.float() if scales is None else taken.float() * scales[:, :, None, None]
    keys, values = both.unbind(dim=-4)
    return keys, values


def within_window(
    block_table: Tensor, context_lens: Tensor, window: int | None, num_slots: int
) -> tuple[Tensor, Tensor]:
    """The part [B, W] of block_table [B, M] that the window of each sequence's last position touches, and which of its
    slots [B, W * S] that position does not see."""
    num_blocks = block_table.shape[1]
    lens = context_lens[:, None]
    if window is None or window >= num_blocks * num_slots:
        return block_table, torch.arange(num_blocks * num_slots, device=lens.device) >= lens
    first = (lens - window).clamp(min=0) // num_slots
    width = min(num_blocks, (window + num_slots - 2) // num_slots + 1)
    columns = first + torch.arange(width, device=lens.device)
    positions = first * num_slots + torch.arange(width * num_slots, device=lens.device)
    # Columns past the table repeat its last one; their positions lie past the context.
    part = block_table.gather(1, columns.clamp(max=num_blocks - 1))
    return part, (positions >= lens) | (positions < lens - window)


def logits(x: Tensor, head: Linear) -> Tensor:
    """x [R, hidden] -> [R, V] float32; a head of numbers keeps its plain weight."""
    if isinstance(head.packed, GroupedWeight):
        return grouped_linear(x, head.packed, head.bias, torch.float32)
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


def sample(logits: Tensor, limits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from logits [R, V] float32 by `limits` [R, 4] float32: temperature, top_k (0: all), top_p, min_p; with
    uniforms [R] float64 in [0, 1) -> token ids [R].

    As engine.sampler.choose: temperature 0 takes the highest; top_k, then top_p of what is left, then min_p; ties at
    a border fall to lower ids; the inverse CDF runs in the order of ids.
    """
    num_vocab = logits.shape[-1]
    temperature, top_k, top_p, min_p = (column[:, None] for column in limits.double().unbind(1))
    ranked, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(num_vocab, device=logits.device)
    weights = ((ranked - ranked[:, :1]) / temperature.where(temperature > 0, 1.0)).exp()
    weights = weights.masked_fill((top_k > 0) & (rank >= top_k), 0.0)
    before = weights.cumsum(-1) - weights
    weights = weights.masked_fill((top_p < 1) & (before >= top_p * weights.sum(-1, keepdim=True)), 0.0)
    weights = weights.masked_fill(weights < min_p, 0.0)
    by_id = torch.zeros_like(weights).scatter_(1, ids, weights)
    cdf = by_id.cumsum(-1)
    last = (by_id > 0).mul(rank).amax(-1, keepdim=True)
    drawn = torch.searchsorted(cdf, uniforms.double()[:, None] * cdf[:, -1:], right=True).minimum(last)
    return torch.where(temperature > 0, drawn, ids[:, :1])[:, 0]


def prefill_attention(
    q: Tensor, kv: Tensor, block_ids: Tensor, start: int, rule: AttentionRule, scales: Tensor | None = None
) -> Tensor:
    """Causal attention of a chunk: q [T, H, D] at positions start … start + T - 1, kv [N, 2, K, S, D] that already
    holds their keys, block_ids [M] of the one sequence -> [T, H, D] in the dtype that `paged_attention` answers in."""
    num_tokens, num_heads, head_dim = q.shape
    dtype = q.dtype if kv.dtype == FP8 else kv.dtype
    if num_tokens == 0:
        return q.to(dtype)
    num_kv_heads = kv.shape[2]
    group = num_heads // num_kv_heads
    block_ids, start = from_window(block_ids, start, rule.window, kv.shape[3])
    keys, values = (
        side.transpose(0, 1).reshape(num_kv_heads, -1, head_dim) for side in _sides(kv, block_ids, scales)
    )  # [K, M * S, D]
    queries = q.float().view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3) * rule.scale
    parts = [
        causal(queries[:, :, low : low + MAX_QUERY_ROWS], keys, values, start + low, rule)
        for low in range(0, num_tokens, MAX_QUERY_ROWS)
    ]
    mixed = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]  # [K, G, T, D]
    return mixed.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim).to(dtype)


def from_window(block_ids: Tensor, start: int, window: int | None, num_slots: int) -> tuple[Tensor, int]:
    """block_ids [M] without the blocks that no query from `start` on sees, and `start` counted from the first kept."""
    num_hidden = 0 if window is None else max(0, start - window + 1) // num_slots
    return block_ids[num_hidden:], start - num_hidden * num_slots


def causal(queries: Tensor, keys: Tensor, values: Tensor, start: int, rule: AttentionRule) -> Tensor:
    """queries [K, G, R, D], scaled, from position `start` on, keys and values [K, C, D] -> [K, G, R, D]."""
    num_kv_heads, group, rows, head_dim = queries.shape
    begin, end = 0 if rule.window is None else max(0, start - rule.window + 1), start + rows
    scores = queries.reshape(num_kv_heads, group * rows, head_dim) @ keys[:, begin:end].transpose(1, 2)
    scores = soft_cap(scores, rule.cap).view(num_kv_heads, group, rows, end - begin)
    is_future = torch.ones(rows, rows, dtype=torch.bool, device=queries.device).triu(1)
    scores[..., start - begin :].masked_fill_(is_future, -torch.inf)
    if rule.window is not None and end - begin > rule.window:
        is_past = torch.ones(rows, end - begin, dtype=torch.bool, device=queries.device)
        scores.masked_fill_(is_past.tril(start - begin - rule.window), -torch.inf)
    probs = scores.softmax(dim=-1).view(num_kv_heads, group * rows, end - begin)
    return (probs @ values[:, begin:end]).view(num_kv_heads, group, rows, head_dim)


def rope_table(
    positions: Sequence[int] | Tensor, inv_freq: Tensor, magnitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D / 2] float32, times `magnitude`, for positions [T] and inv_freq [D / 2]."""
    angles = torch.as_tensor(positions, dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq
    return angles.cos()[:, None] * magnitude, angles.sin()[:, None] * magnitude
