"""What the tests of GPU kernels put in: layers of a slab, tables over scattered blocks, rules."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.spec import AttentionRule

BLOCK_SIZE = 16
NUM_BLOCKS = 24
FP8 = torch.float8_e4m3fn

# (head dim, query heads, kv heads, dtype of the slab): head dims of real models, groups of 1 to 8
SHAPES = [
    (64, 6, 2, torch.float32),
    (64, 8, 1, torch.bfloat16),
    (80, 4, 4, torch.float32),
    (96, 5, 1, torch.bfloat16),
    (128, 7, 1, torch.float32),
    (128, 8, 2, FP8),
    (256, 4, 2, torch.float32),
]
IDS = [f"{d}-{h}x{k}-{str(dtype).removeprefix('torch.')}" for d, h, k, dtype in SHAPES]


def make_layer(num_kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The middle layer [N, 2, K, S, D] of a random slab of three."""
    torch.manual_seed(seed)
    slab = torch.randn(NUM_BLOCKS, 3, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    return slab.to(dtype)[:, 1]


def make_scales(num_kv_heads: int, dtype: torch.dtype) -> Tensor | None:
    """[2, K], each another, for a float8 slab."""
    return torch.linspace(0.5, 1.5, 2 * num_kv_heads).view(2, -1) if dtype == FP8 else None


def make_rule(head_dim: int, window: int | None = None, cap: float | None = None) -> AttentionRule:
    return AttentionRule(head_dim**-0.5, window, cap)


def assert_equal(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal up to the rounding of a slab of `dtype`; the interpreter cuts bfloat16 where a GPU rounds it."""
    assert got.dtype == expected.dtype
    rtol, atol = (2**-7, 1e-5) if dtype == torch.bfloat16 else (1e-5, 5e-6)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
