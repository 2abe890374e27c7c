"""Fused kernels, under Triton's interpreter, against `reference`."""

from __future__ import annotations

import pytest
import torch

from contracts.errors import EngineError
from engine.kernels import reference
from engine.kernels.triton import gated, norm, rope_write
from tests.engine.kernels.layers import FP8, IDS, NUM_BLOCKS, SHAPES, assert_equal, make_layer, make_scales

AT = (torch.tensor([3, 3, 1, 23, 0]), torch.tensor([15, 0, 3, 4, 4]))


def raw(layer: torch.Tensor) -> torch.Tensor:
    """The bits of a slab, so that NaN equals NaN."""
    return layer.view(torch.uint8) if layer.dtype == FP8 else layer


@pytest.mark.parametrize("num_hidden", [64, 576, 5376])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_and_norm(num_hidden: int, num_tokens: int, dtype: torch.dtype) -> None:
    hidden, added = torch.randn(num_tokens, num_hidden), torch.randn(num_tokens, num_hidden).to(dtype)
    weight = torch.randn(num_hidden)
    total, normed = norm.add_rms_norm(hidden, added, weight, 1e-5, dtype)
    expected_total, expected = reference.add_rms_norm(hidden, added, weight, 1e-5, dtype)
    assert torch.equal(total, expected_total)
    assert_equal(normed, expected, dtype)


def test_a_row_that_one_program_cannot_hold_is_refused() -> None:
    x = torch.zeros(1, norm.MAX_HIDDEN + 1)
    with pytest.raises(EngineError, match="n <= 16384"):
        norm.add_rms_norm(x, x, x[0], 1e-5, torch.float32)


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
@pytest.mark.parametrize(("num_tokens", "inner"), [(0, 64), (1, 1536), (3, 100)])
def test_gates(name: str, num_tokens: int, inner: int) -> None:
    gate_up = 20 * torch.randn(num_tokens, 2 * inner)
    expected = getattr(reference, name)(gate_up)
    torch.testing.assert_close(getattr(gated, name)(gate_up), expected, rtol=1e-5, atol=1e-5)
    half = getattr(gated, name)(gate_up.bfloat16(), torch.bfloat16)
    assert_equal(half, getattr(reference, name)(gate_up.bfloat16(), torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads", "dtype"), SHAPES, ids=IDS)
def test_rotation_and_write(
    head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype, has_norm: bool
) -> None:
    first, second = (make_layer(num_kv_heads, head_dim, dtype) for _ in range(2))
    untouched, scales = first.clone(), make_scales(num_kv_heads, dtype)
    heads = 3 * torch.randn(5, num_heads + 2 * num_kv_heads, head_dim)
    angles = torch.randn(5, 1, head_dim // 2)
    weight = (torch.randn(num_heads + num_kv_heads, head_dim), 1e-6) if has_norm else None
    q = rope_write.rope_write(heads, (angles.cos(), angles.sin()), first, AT, weight, scales)
    expected = reference.rope_write(heads, (angles.cos(), angles.sin()), second, AT, weight, scales)
    torch.testing.assert_close(q, expected, rtol=1e-5, atol=5e-6)
    if dtype == FP8:  # a key that lies between two numbers may fall to either
        assert (raw(first).int() - raw(second).int()).abs().max() <= 1
        assert (raw(first) != raw(second)).float().mean() < 1e-3
    else:
        assert_equal(first, second, dtype)
    is_written = torch.zeros(NUM_BLOCKS, 2, num_kv_heads, first.shape[3], dtype=torch.bool)
    is_written[AT[0], :, :, AT[1]] = True
    assert torch.equal(raw(first)[~is_written], raw(untouched)[~is_written])


@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads", "dtype"), SHAPES, ids=IDS)
def test_write(head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    first, second = (make_layer(num_kv_heads, head_dim, dtype) for _ in range(2))
    heads, scales = 3 * torch.randn(5, 2 * num_kv_heads, head_dim), make_scales(num_kv_heads, dtype)
    k, v = heads.bfloat16().split(num_kv_heads, dim=1)
    rope_write.write_kv(first, k.float(), v, *AT, scales)
    reference.write_kv(second, k.float(), v, *AT, scales)
    assert torch.equal(raw(first), raw(second))


def test_every_float8_number_and_what_lies_between() -> None:
    """What is stored is what torch rounds to. By bits: the interpreter cuts where hardware rounds."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()  # all that are finite and not negative
    between = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([between, between * (1 + 2**-20), between * (1 - 2**-20)])
    values = torch.cat([numbers, near, torch.tensor([1e-9, 460.0, 1e30])])
    values = torch.cat([values, -values, torch.zeros(1040 - 2 * len(values))])
    k = values.view(-1, 1, 16)
    layer = torch.zeros(5, 2, 1, 16, 16, dtype=torch.uint8).view(FP8)
    at = torch.arange(len(k)) // 16, torch.arange(len(k)) % 16
    rope_write.write_kv(layer, k, k, *at, torch.ones(2, 1))
    stored = layer.view(torch.uint8)[at[0], 0, 0, at[1]].view(FP8).float()
    torch.testing.assert_close(stored, k[:, 0].clamp(-448, 448).to(FP8).float(), rtol=0, atol=0)
