"""Weights as 4- or 8-bit codes with a scale per group of 32 along the input: the layout of all weight-only products.

    bits  codes                     weight of input i in group g        from GGUF
    8     int8  [out, in]           code * scale[g]                     Q8_0
    4     uint8 [out, in / 2]       (code - 8) * scale[g]               Q4_0
    4     uint8 [out, in / 2]       code * scale[g] + minimum[g]        Q4_1

Scales and minima are float16 [out, in / 32]. Byte j (of 16) of a 4-bit group holds input j in its low and input j + 16
in its high half. A GGUF block is scale, minimum if any, then codes in this very order, so nothing is rounded a second
time: the blocks are cut, not converted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.errors import EngineError
from engine.quantization import GROUP, BlockKind

_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """The matrix [out, in] of a product; `bits` is 4 or 8."""

    bits: int
    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def __post_init__(self) -> None:
        rows, groups = self.scales.shape
        expected = (torch.int8, (rows, groups * 32)) if self.bits == 8 else (torch.uint8, (rows, groups * 16))
        if self.bits not in (4, 8) or (self.codes.dtype, tuple(self.codes.shape)) != expected:
            raise EngineError(
                f"codes of {self.bits} bits: expected {expected} but got {self.codes.dtype} {list(self.codes.shape)}"
            )
        if self.minima is not None and (self.bits == 8 or self.minima.shape != self.scales.shape):
            raise EngineError("minima: expected one for each scale of 4-bit codes")

    @property
    def num_inputs(self) -> int:
        return self.scales.shape[1] * GROUP

    def rows(self, row_ids: Tensor) -> GroupedWeight:
        """Those of the outputs row_ids [T]."""
        minima = None if self.minima is None else self.minima[row_ids]
        return GroupedWeight(self.bits, self.codes[row_ids], self.scales[row_ids], minima)

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, *(() if self.minima is None else (self.minima,)))
        return sum(part.numel() * part.element_size() for part in parts)


def from_gguf(blocks: Tensor, kind: str) -> GroupedWeight:
    """blocks uint8 [out, bytes] as in the file; kind Q4_0, Q4_1 or Q8_0. Raises EngineError for any other."""
    if kind not in BlockKind.__members__:
        raise EngineError(f"expected Q4_0, Q4_1 or Q8_0 but got {kind}")
    num_scales = 2 if kind == "Q4_1" else 1
    parts = blocks.reshape(len(blocks), -1, BlockKind[kind].block_bytes)
    halves = parts[..., : num_scales * _SCALE_BYTES].contiguous().view(torch.float16)
    # NOTE: of one group, flattening is a view with the scale's bytes between rows.
    codes = parts[..., num_scales * _SCALE_BYTES :].flatten(1).contiguous()
    if kind == "Q8_0":
        return GroupedWeight(8, codes.view(torch.int8), halves[..., 0].contiguous())
    minima = halves[..., 1].contiguous() if kind == "Q4_1" else None
    return GroupedWeight(4, codes, halves[..., 0].contiguous(), minima)


def dequantized(weight: GroupedWeight) -> Tensor:
    """[out, in] float32."""
    if weight.bits == 8:
        codes = weight.codes.view(len(weight.codes), -1, GROUP).float()
    else:
        packed = weight.codes.view(len(weight.codes), -1, GROUP // 2)
        codes = torch.cat((packed & 0xF, packed >> 4), dim=-1).float()
        if weight.minima is None:
            codes -= 8
    groups = codes * weight.scales.float()[..., None]
    if weight.minima is not None:
        groups += weight.minima.float()[..., None]
    return groups.flatten(1)
