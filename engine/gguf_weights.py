"""A GGUF file as a source of tensors: Hugging Face names and row order on the outside, any quantization inside.

The file stays memory-mapped; each `read_into` dequantizes one tensor, straight into its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from contracts.errors import ConfigError
from engine.gguf_file import GgufFile, GgufTensor, read_gguf
from engine.spec import ModelSpec, spec_from_gguf

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Part of the spec, not a weight.
_ROPE_FACTORS = "rope_freqs.weight"
_PIECE_ELEMENTS = 1 << 16  # four times as many took twice as long (SmolLM2-135M, Q4_1)


class GgufSource:
    """Implements weights.TensorSource. Raises ConfigError for unreadable files and unknown quantizations."""

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        # NOTE: a plain array over the mapping; slices of a memmap object cost far more than the reads.
        self._bytes = np.asarray(np.memmap(path, mode="r"))
        self.spec: ModelSpec = spec_from_gguf(file, self._rope_factors(file))
        self.files: Sequence[Path] = [path]
        self._tensors = {hf_name(name): t for name, t in file.tensors.items() if name != _ROPE_FACTORS}
        self.tensors: dict[str, tuple[int, ...]] = {name: t.shape for name, t in self._tensors.items()}

    def read_into(self, name: str, target: Tensor) -> None:
        """Expand into `target`, rows in Hugging Face order. Raises ConfigError for a quantization nobody can expand."""
        tensor = self._tensors[name]
        if ".q_proj." in name:
            target.copy_(_half_split_rows(self._expanded(tensor), self.spec.num_heads))
        elif ".k_proj." in name:
            target.copy_(_half_split_rows(self._expanded(tensor), self.spec.num_kv_heads))
        else:
            self._expand(tensor, target)

    def _rope_factors(self, file: GgufFile) -> tuple[float, ...] | None:
        tensor = file.tensors.get(_ROPE_FACTORS)
        return None if tensor is None else tuple(self._expanded(tensor).tolist())

    def _expanded(self, tensor: GgufTensor) -> Tensor:
        values = torch.empty(tensor.shape)
        self._expand(tensor, values)
        return values

    def _expand(self, tensor: GgufTensor, target: Tensor) -> None:
        """Piece by piece: a small piece's memory is used again for the next, while fresh pages for a whole tensor's
        intermediate values take longer than the arithmetic."""
        flat = target.view(-1)
        try:
            kind = GGMLQuantizationType(tensor.kind)
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
            num_blocks = math.prod(tensor.shape) // block_elements
            stored = self._bytes[tensor.offset : tensor.offset + num_blocks * block_bytes]
            if len(stored) != num_blocks * block_bytes:
                raise ValueError(f"the file ends {num_blocks * block_bytes - len(stored)} bytes too early")
            # The library does not care where a row of the tensor ends.
            step = max(1, _PIECE_ELEMENTS // block_elements)
            for low in range(0, num_blocks, step):
                piece = stored[low * block_bytes : (low + step) * block_bytes]
                values = dequantize(piece[None], kind).ravel()
                # NOTE: copied first where the values are a view of the read-only file; torch has no such tensors.
                values = values if values.flags.writeable else values.copy()
                begin = low * block_elements
                flat[begin : begin + len(values)].copy_(torch.from_numpy(values))
        except (NotImplementedError, ValueError) as exc:
            raise ConfigError(
                f"tensor {tensor.name}: expected a known, whole quantization but {exc}"
            ) from exc


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name without a counterpart is kept."""
    match name.split("."):
        case ["blk", index, module, suffix] if module in _IN_LAYER:
            return f"model.layers.{index}.{_IN_LAYER[module]}.{suffix}"
        case [module, suffix] if module in _TOP:
            return f"{_TOP[module]}.{suffix}"
    return name


def _half_split_rows(values: Tensor, num_heads: int) -> Tensor:
    """GGUF orders a head's rows as rotation pairs (0, d/2, 1, d/2+1, ...); Hugging Face as halves (0, 1, ..., d-1)."""
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
