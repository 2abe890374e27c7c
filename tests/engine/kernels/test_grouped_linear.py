"""Weight-only products, under Triton's interpreter, against `reference`; the layout against the `gguf` library."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from contracts.errors import EngineError
from engine.kernels import reference
from engine.kernels.grouped import GroupedWeight, dequantized, from_gguf
from engine.kernels.triton.grouped_linear import grouped_linear

KINDS = ["Q4_0", "Q4_1", "Q8_0"]


def make_blocks(num_outputs: int, num_inputs: int, kind: str) -> Tensor:
    torch.manual_seed(num_inputs)
    weight = torch.randn(num_outputs, num_inputs).numpy() / num_inputs**0.5
    return torch.from_numpy(gguf.quants.quantize(weight, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_blocks_are_cut_without_a_second_rounding(kind: str) -> None:
    blocks = make_blocks(6, 96, kind)
    weight = from_gguf(blocks, kind)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind]))
    torch.testing.assert_close(dequantized(weight), expected, rtol=0, atol=0)
    assert weight.num_bytes == blocks.numel()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "num_inputs", "dtype"),
    [
        (0, 40, 64, torch.float32),
        (3, 40, 32, torch.float32),
        (1, 40, 96, torch.float32),
        (5, 70, 160, torch.float32),
        (1, 40, 160, torch.bfloat16),
        (33, 70, 64, torch.bfloat16),
        (70, 130, 96, torch.bfloat16),
    ],
)
def test_product(kind: str, num_tokens: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight = from_gguf(make_blocks(num_outputs, num_inputs, kind), kind)
    x = torch.randn(num_tokens, 2 * num_inputs).to(dtype)[:, :num_inputs]
    for bias in (None, torch.randn(num_outputs)):
        got, expected = grouped_linear(x, weight, bias), reference.grouped_linear(x, weight, bias)
        torch.testing.assert_close(got, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    weight = from_gguf(make_blocks(4, 64, "Q4_0"), "Q4_0")
    with pytest.raises(EngineError, match=r"expected \[T, 64\] but got \[1, 32\]"):
        grouped_linear(torch.zeros(1, 32), weight)
    with pytest.raises(EngineError, match="expected Q4_0, Q4_1 or Q8_0 but got Q5_0"):
        from_gguf(torch.zeros(4, 22, dtype=torch.uint8), "Q5_0")
    with pytest.raises(EngineError, match="codes of 8 bits"):
        GroupedWeight(8, weight.codes, weight.scales)
    with pytest.raises(EngineError, match="one for each scale of 4-bit codes"):
        GroupedWeight(4, weight.codes, weight.scales, weight.scales[:, :1])
