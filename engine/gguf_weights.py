"""A GGUF file as a source of tensors: Hugging Face names and row order on the outside, any quantization inside.

The file stays memory-mapped; each `read` dequantizes one tensor.
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
from engine.gguf_file import GgufTensor, read_gguf
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
# The rope factors are part of the spec.
_NOT_WEIGHTS = ("rope_freqs.weight",)
_ROW_BLOCKS = 1 << 10


class GgufSource:
    """Implements weights.TensorSource. Raises ConfigError for unreadable files and unknown quantizations."""

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self.spec: ModelSpec = spec_from_gguf(file)
        self.files: Sequence[Path] = [path]
        self._tensors = {hf_name(name): t for name, t in file.tensors.items() if name not in _NOT_WEIGHTS}
        self.tensors: dict[str, tuple[int, ...]] = {name: t.shape for name, t in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """float32, rows in Hugging Face order. Raises ConfigError for a quantization nobody can expand."""
        values = _dequantized(self._tensors[name])
        if ".q_proj." in name:
            return _half_split_rows(values, self.spec.num_heads)
        if ".k_proj." in name:
            return _half_split_rows(values, self.spec.num_kv_heads)
        return values


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name without a counterpart is kept."""
    match name.split("."):
        case ["blk", index, module, suffix] if module in _IN_LAYER:
            return f"model.layers.{index}.{_IN_LAYER[module]}.{suffix}"
        case [module, suffix] if module in _TOP:
            return f"{_TOP[module]}.{suffix}"
    return name


def _dequantized(tensor: GgufTensor) -> Tensor:
    kind = tensor.quantization
    if kind == GGMLQuantizationType.F32:
        # NOTE: copied, because a view of the mapped file is read-only and torch has no such thing.
        return torch.from_numpy(tensor.data.view(np.float32).copy()).view(tensor.shape)
    # The library works on 16 rows at a time and knows nothing of where a row ends: long rows are several times faster.
    _, block_bytes = GGML_QUANT_SIZES[kind]
    row_blocks = math.gcd(tensor.data.size // block_bytes, _ROW_BLOCKS)
    try:
        values = dequantize(tensor.data.reshape(-1, row_blocks * block_bytes), kind)
    except NotImplementedError as exc:
        raise ConfigError(f"tensor {tensor.name}: {exc}") from exc
    return torch.from_numpy(values).view(tensor.shape)


def _half_split_rows(values: Tensor, num_heads: int) -> Tensor:
    """GGUF orders a head's rows as rotation pairs (0, d/2, 1, d/2+1, ...); Hugging Face as halves (0, 1, ..., d-1)."""
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
