"""A GGUF file as a source of tensors: Hugging Face names and row order on the outside, any quantization inside.

The file stays memory-mapped; each `read` dequantizes one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from contracts.errors import ConfigError
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


class GgufSource:
    """Implements weights.TensorSource. Raises ConfigError for unreadable files and unknown quantizations."""

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as exc:
            raise ConfigError(f"expected a GGUF file but could not read {path}: {exc}") from exc
        self.spec: ModelSpec = spec_from_gguf(reader)
        self.files: Sequence[Path] = [path]
        self._tensors = {hf_name(t.name): t for t in reader.tensors if t.name not in _NOT_WEIGHTS}
        # GGUF lists dimensions innermost first.
        self.tensors: dict[str, tuple[int, ...]] = {
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()
        }

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


def _dequantized(tensor: ReaderTensor) -> Tensor:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as exc:
        raise ConfigError(f"tensor {tensor.name}: {exc}") from exc
    # NOTE: float32 tensors come back as a read-only view of the mapped file, which torch warns about and
    # nobody may write to; the cast copies only those.
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _half_split_rows(values: Tensor, num_heads: int) -> Tensor:
    """GGUF orders a head's rows as rotation pairs (0, d/2, 1, d/2+1, ...); Hugging Face as halves (0, 1, ..., d-1)."""
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
