"""How far the GPU kernels are from float64, at small shapes: the part of `benchmarks.gpu_kernels` that is no speed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import reference
from engine.kernels.grouped import GroupedWeight, dequantized
from engine.kernels.triton import gated, norm, rope_write, sampling
from engine.kernels.triton.decode_attention import paged_attention
from engine.kernels.triton.grouped_linear import grouped_linear
from engine.kernels.triton.prefill_attention import prefill_attention
from engine.spec import AttentionRule

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HEAD_DIMS = (64, 80, 128, 256)
# Of the largest number of a result. bfloat16 rounds inputs of a product, weights of attention and the result.
LIMITS = {torch.float32: 2e-5, BF16: 2e-2, FP8: 2e-2}
RULES = {"": AttentionRule(0.1), " window cap": AttentionRule(0.2, window=100, cap=20.0)}


def errors(device: torch.device) -> dict[str, tuple[float, float]]:
    """name -> (largest error over largest number, its limit)."""
    torch.manual_seed(0)
    return dict([*_attention(device), *_fused(device), *_linears(device), _sampling(device)])


def error_of(got: Tensor, exact: Tensor) -> float:
    """NaN where a result is not a number: that is within no limit."""
    return float((got.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def exact_attention(q: Tensor, kv: Tensor, num_context: int, rule: AttentionRule) -> Tensor:
    """q [T, H, D] are the last T of `num_context` positions; kv [C, 2, K, D] float64 -> [T, H, D] float64."""
    keys, values = kv[:num_context].repeat_interleave(q.shape[1] // kv.shape[2], dim=2).unbind(1)
    scores = torch.einsum("thd,chd->htc", q.double(), keys) * rule.scale
    scores = reference.soft_cap(scores, rule.cap)
    at = torch.arange(num_context - len(q), num_context, device=q.device)[:, None]
    of = torch.arange(num_context, device=q.device)
    is_seen = (of <= at) & (of > at - (rule.window or num_context))
    return torch.einsum("htc,chd->thd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), values)


def _attention(device: torch.device) -> Iterator[tuple[str, tuple[float, float]]]:
    num_heads, num_kv_heads, num_blocks = 8, 2, 64
    for head_dim in HEAD_DIMS:
        for dtype, limit in LIMITS.items():
            layer = torch.randn(num_blocks, 2, 2, num_kv_heads, 16, head_dim, device=device).to(dtype)[:, 1]
            scales = torch.rand(2, num_kv_heads, device=device) + 0.5 if dtype == FP8 else None
            ids = torch.randperm(num_blocks, device=device)
            # [C, 2, K, D]
            kv = layer.double() if scales is None else layer.double() * scales[:, :, None, None].double()
            kv = kv[ids].permute(0, 3, 1, 2, 4).flatten(0, 1)
            for name, rule in RULES.items():
                q = torch.randn(200, num_heads, head_dim, device=device).to(BF16 if dtype == FP8 else dtype)
                label = f"{head_dim} {str(dtype).removeprefix('torch.')}{name}"
                got = prefill_attention(q, layer, ids, 500, rule, scales)
                yield f"prefill {label}", (error_of(got, exact_attention(q, kv, 700, rule)), limit)
                lens = torch.tensor([1000, 1, 0, 333], device=device)
                got = paged_attention(q[:4], layer, ids.expand(4, -1), lens, rule, scales)
                exact = torch.zeros(4, num_heads, head_dim, dtype=torch.float64, device=device)
                for row in (0, 1, 3):  # an empty context gives zeros
                    exact[row] = exact_attention(q[row : row + 1], kv, int(lens[row]), rule)[0]
                yield f"decode {label}", (error_of(got, exact), limit)


def _fused(device: torch.device) -> Iterator[tuple[str, tuple[float, float]]]:
    hidden, added = (torch.randn(33, 4096, device=device) for _ in range(2))
    weight = torch.randn(4096, device=device)
    total = hidden.double() + added.double()
    exact = total * (total.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    for dtype in (torch.float32, BF16):
        _, normed = norm.add_rms_norm(hidden, added, weight, 1e-5, dtype)
        yield f"norm {dtype}", (error_of(normed, exact), LIMITS[dtype])
    gate, up = hidden.double().chunk(2, dim=-1)
    yield "swiglu", (error_of(gated.swiglu(hidden), F.silu(gate) * up), LIMITS[torch.float32])
    exact = F.gelu(gate, approximate="tanh") * up
    yield "geglu", (error_of(gated.geglu(hidden), exact), LIMITS[torch.float32])
    heads = torch.randn(33, 12, 128, device=device)
    angles = torch.rand(33, 1, 64, device=device) * 100
    at = (torch.arange(33, device=device) // 16, torch.arange(33, device=device) % 16)
    low, high = heads[:, :10].double().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    for dtype in (torch.float32, FP8):
        layer = torch.zeros(3, 2, 2, 16, 128, device=device).to(dtype)
        scales = torch.full((2, 2), 0.01, device=device) if dtype == FP8 else None
        q = rope_write.rope_write(heads, (cos, sin), layer, at, None, scales)
        yield f"rope q {dtype}", (error_of(q, turned[:, :8]), LIMITS[torch.float32])
        stored = layer.double()[at[0], 0, :, at[1]] * (1.0 if scales is None else 0.01)
        # e4m3 keeps three bits behind the first: half a step is 1 / 16 of a number
        yield f"rope k {dtype}", (error_of(stored, turned[:, 8:]), 2**-4 if dtype == FP8 else 2e-5)


def _linears(device: torch.device) -> Iterator[tuple[str, tuple[float, float]]]:
    for bits, has_minima in ((8, False), (4, False), (4, True)):
        dtype, width = (torch.int8, 512) if bits == 8 else (torch.uint8, 256)
        codes = torch.randint(-100 if bits == 8 else 0, 127, (300, width), dtype=dtype, device=device)
        scales = torch.rand(300, 16, device=device).half()
        weight = GroupedWeight(bits, codes, scales, -scales if has_minima else None)
        exact_weight = dequantized(weight).double()
        for num_tokens, kind in ((1, BF16), (40, BF16), (100, BF16), (5, torch.float32)):
            x = torch.randn(num_tokens, 512, device=device).to(kind)
            got = grouped_linear(x, weight)
            label = (
                f"int{bits}{' minima' if has_minima else ''} {num_tokens} {str(kind).removeprefix('torch.')}"
            )
            yield f"linear {label}", (error_of(got, x.double() @ exact_weight.T), LIMITS[kind])


def _sampling(device: torch.device) -> tuple[str, tuple[float, float]]:
    """The share of rows that draw another token than float64: a number may lie on a border."""
    logits = 3 * torch.randn(256, 32000, device=device)
    rows = torch.arange(256, device=device)
    limits = torch.stack(
        (0.2 + rows % 5 / 3, (rows % 3) * 20.0, 1.0 - (rows % 4) * 0.1, (rows % 2) * 0.05), dim=1
    )
    uniforms = torch.rand(256, dtype=torch.float64, device=device)
    differs = sampling.sample(logits, limits, uniforms) != reference.sample(logits, limits, uniforms)
    return "sample, share of rows", (float(differs.double().mean()), 0.01)
