"""Weights of 4 or 8 bits: blocks of 32 along a row, each with a scale, as GGUF files hold them.

    GGUF Q4_0, Q4_1, Q8_0   the stored blocks as they are, never rounded again
    float weights           rounded here when asked: int8 with a scale, int4 with a scale and a minimum

Products use float32 (or the activations' type), never the rounded activations that integer products would need.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Literal

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from contracts.errors import ConfigError
from engine.kernels.native.build import library

Quantization = Literal["auto", "none", "int8", "int4"]

GROUP = 32
"""Weights that share a scale."""
_PIECE_ELEMENTS = 1 << 20


class BlockKind(Enum):
    """Layouts of ggml: block_q8_0 (w = d q), block_q4_0 (w = d (q - 8)), block_q4_1 (w = d q + m); d, m half."""

    Q8_0 = 8
    Q4_0 = 2
    Q4_1 = 3

    @property
    def block_bytes(self) -> int:
        block_bytes: int = GGML_QUANT_SIZES[GGMLQuantizationType(self.value)][1]
        return block_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [out, in] as `blocks` [out, in / 32 * block_bytes] uint8."""

    kind: BlockKind
    blocks: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.blocks.shape
        return rows, row_bytes // self.kind.block_bytes * GROUP

    def expanded(self) -> Tensor:
        """[out, in] float32."""
        values = dequantize(self.blocks.numpy(), GGMLQuantizationType(self.kind.value))
        return torch.from_numpy(values).view(self.shape)


def resolve_quantization(name: Quantization, device: torch.device) -> Quantization:
    """What can be done here: `auto` becomes `none` where there is no kernel for it.

    Raises ConfigError if int8 or int4 is asked for by name there.
    """
    is_cpu = device.type == "cpu"
    if name == "none" or (library() is not None if is_cpu else find_spec("triton") is not None):
        return name
    if name == "auto":
        return "none"
    reason = "no C++ compiler that works" if is_cpu else f"device {device.type} without the library triton"
    raise ConfigError(f"engine.quantization: expected auto or none but got {name} ({reason})")


def row_bytes(kind: BlockKind, num_columns: int) -> int:
    return num_columns // GROUP * kind.block_bytes


def quantize(weight: Tensor, kind: BlockKind) -> Quantized:
    """weight [out, in], `in` a multiple of 32 -> the nearest blocks (round to nearest with the scale as stored).

    Some rows at a time: what comes between would be several times the matrix.
    """
    num_rows = max(1, _PIECE_ELEMENTS // weight.shape[1])
    pieces = [_blocks(piece, kind) for piece in torch.split(weight, num_rows)]
    return Quantized(kind, torch.cat(pieces))


def _blocks(weight: Tensor, kind: BlockKind) -> Tensor:
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    match kind:
        case BlockKind.Q8_0:
            scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
            codes = _codes(groups, scale, -127, 127).to(torch.int8).view(torch.uint8)
            parts = [scale.view(torch.uint8), codes]
        case BlockKind.Q4_1:
            low = groups.amin(-1, keepdim=True)
            low, scale = _fitted(groups, low, (groups.amax(-1, keepdim=True) - low) / 15)
            codes = _codes(groups - low.float(), scale, 0, 15).to(torch.uint8)
            packed = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
            parts = [scale.view(torch.uint8), low.view(torch.uint8), packed]
        case BlockKind.Q4_0:
            raise ValueError("expected Q8_0 or Q4_1: Q4_0 is read, never written")
    return torch.cat(parts, dim=-1).view(rows, -1)


def _fitted(groups: Tensor, low: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(minimum, scale) in half of the line that is nearest to the groups with the codes of the one given, which goes
    from end to end: outliers pull at it less."""
    codes = _codes(groups - low, scale, 0, 15)
    mean, center = groups.mean(-1, keepdim=True), codes.mean(-1, keepdim=True)
    offsets = codes - center
    spread = offsets.square().sum(-1, keepdim=True)
    slope = (
        torch.where(spread > 0, (offsets * groups).sum(-1, keepdim=True) / spread, 0.0).clamp(min=0).half()
    )
    return (mean - slope.float() * center).half(), slope


def _codes(values: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    wide = scale.float()
    return torch.where(wide > 0, values / wide, 0.0).round().clamp(low, high)
