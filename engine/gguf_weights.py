"""A GGUF file as a source of tensors: Hugging Face names and row order on the outside, any quantization inside.

The file, or each of its parts, stays memory-mapped; each `read_into` dequantizes one tensor, straight into its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.gguf_file import GgufFile, GgufTensor, read_gguf
from engine.gguf_kinds import check_file, is_float, num_blocks_of, num_bytes_of
from engine.parallel.shards import Part
from engine.quantization import GROUP, BlockKind
from engine.reading import give_back
from engine.spec import ModelSpec
from engine.spec_gguf import spec_from_gguf

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_POST_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NO_POST_NORMS = {"ffn_norm": "post_attention_layernorm"}
# Part of the spec, not a weight.
_ROPE_FACTORS = "rope_freqs.weight"
_PIECE_ROWS = 256
_PIECE_ELEMENTS = 1 << 16  # four times as many took twice as long (SmolLM2-135M, Q4_1)


class GgufSource:
    """Implements forms.TensorSource. Raises ConfigError for files that are not whole and unknown quantizations."""

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        check_file(file)
        # NOTE: a plain array over the mapping; slices of a memmap object cost far more than the reads.
        self._bytes = [np.asarray(np.memmap(part, mode="r")) for part in file.paths]
        self.spec: ModelSpec = spec_from_gguf(file, self._rope_factors(file))
        self.files: Sequence[Path] = file.paths
        # llama.cpp rotates neighbours in this architecture and halves, as Hugging Face, in all others.
        self._has_paired_rows = file.fields["general.architecture"] == "llama"
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in file.tensors.values():
            if tensor.name != _ROPE_FACTORS:
                self._tensors.update(_parts(tensor, self.spec.has_post_norms))
        self.tensors: dict[str, tuple[int, ...]] = {name: t.shape for name, t in self._tensors.items()}

    def file_of(self, name: str) -> int:
        return self._tensors[name].part

    def read_into(self, name: str, target: Tensor, part: Part) -> None:
        """Expand into `target`, rows in Hugging Face order."""
        tensor, head_rows = self._tensors[name], self._rows_of_paired_head(name)
        if len(tensor.shape) == 1:
            values = self._expanded(tensor)
            target.copy_((_half_split_rows(values, head_rows) if head_rows else values)[part.rows])
            return
        tensor = _rows(tensor, part.rows)
        if head_rows:
            target.copy_(_half_split_rows(self._expanded(tensor), head_rows))
        elif part.has_all_columns:
            self._expand(tensor, target)
        else:
            for low in range(0, tensor.shape[0], _PIECE_ROWS):
                high = min(low + _PIECE_ROWS, tensor.shape[0])
                target[low:high].copy_(self._expanded(_rows(tensor, slice(low, high)))[:, part.columns])

    def is_quantized(self, name: str) -> bool:
        return not is_float(self._tensors[name])

    def block_kind(self, name: str) -> BlockKind | None:
        """Q4_0, Q4_1, Q8_0 matrices are kept as they are; all else is expanded."""
        tensor = self._tensors[name]
        known = {kind.value for kind in BlockKind}
        return BlockKind(tensor.kind) if tensor.kind in known and len(tensor.shape) == 2 else None

    def read_blocks(self, name: str, target: Tensor, part: Part) -> None:
        """As forms.TensorSource, rows in Hugging Face order."""
        whole, head_rows = self._tensors[name], self._rows_of_paired_head(name)
        tensor = _rows(whole, part.rows)
        stored = self._bytes[tensor.part][tensor.offset : tensor.offset + num_bytes_of(tensor)]
        # NOTE: copied, since torch has no tensors over the read-only mapping.
        low, high, _ = part.columns.indices(whole.shape[1])
        block_bytes = BlockKind(tensor.kind).block_bytes
        columns = slice(low // GROUP * block_bytes, high // GROUP * block_bytes)
        rows = torch.from_numpy(stored.reshape(tensor.shape[0], -1)[:, columns].copy())
        give_back(stored.ctypes.data, stored.nbytes)
        target.copy_(_half_split_rows(rows, head_rows) if head_rows else rows)

    def _rows_of_paired_head(self, name: str) -> int:
        """Rows of a head, where the file holds them as rotation pairs; 0: it does not."""
        is_paired = self._has_paired_rows and name.split(".")[-2] in ("q_proj", "k_proj")
        return self.spec.head_dim if is_paired else 0

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
        flat, kind = target.view(-1), GGMLQuantizationType(tensor.kind)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        num_blocks = num_blocks_of(tensor)
        stored = self._bytes[tensor.part][tensor.offset : tensor.offset + num_blocks * block_bytes]
        # The library does not care where a row of the tensor ends.
        step = max(1, _PIECE_ELEMENTS // block_elements)
        for low in range(0, num_blocks, step):
            piece = stored[low * block_bytes : (low + step) * block_bytes]
            values = dequantize(piece[None], kind).ravel()
            # NOTE: copied first where the values are a view of the read-only file; torch has no such tensors.
            values = values if values.flags.writeable else values.copy()
            begin = low * block_elements
            flat[begin : begin + len(values)].copy_(torch.from_numpy(values))
        give_back(stored.ctypes.data, stored.nbytes)


def hf_name(name: str, has_post_norms: bool = False) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name without a counterpart is kept."""
    in_layer = _IN_LAYER | (_POST_NORMS if has_post_norms else _NO_POST_NORMS)
    match name.split("."):
        case ["blk", index, module, suffix] if module in in_layer:
            return f"model.layers.{index}.{in_layer[module]}.{suffix}"
        case ["blk", index, module, expert, suffix] if (
            module in _EXPERTS
        ):  # files of 2023: a tensor per expert
            return f"model.layers.{index}.mlp.experts.{expert}.{_EXPERTS[module]}.{suffix}"
        case [module, suffix] if module in _TOP:
            return f"{_TOP[module]}.{suffix}"
    return name


def _parts(tensor: GgufTensor, has_post_norms: bool) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors that one of the file holds: itself, or one per expert where it stacks them, [E, out, in]."""
    match tensor.name.split("."):
        case ["blk", index, module, suffix] if (
            module.removesuffix("_exps") in _EXPERTS and len(tensor.shape) == 3
        ):
            short, bytes_each = module.removesuffix("_exps"), num_bytes_of(tensor) // tensor.shape[0]
            for expert in range(tensor.shape[0]):
                name = f"model.layers.{index}.mlp.experts.{expert}.{_EXPERTS[short]}.{suffix}"
                begin = tensor.offset + expert * bytes_each
                yield name, replace(tensor, shape=tensor.shape[1:], offset=begin)
        case _:
            yield hf_name(tensor.name, has_post_norms), tensor


def _rows(tensor: GgufTensor, rows: slice) -> GgufTensor:
    """Some rows of a matrix, which are whole blocks one after the other."""
    low, high, _ = rows.indices(tensor.shape[0])
    row_bytes = num_bytes_of(tensor) // tensor.shape[0]
    return replace(tensor, shape=(high - low, *tensor.shape[1:]), offset=tensor.offset + low * row_bytes)


def _half_split_rows(values: Tensor, head_rows: int) -> Tensor:
    """GGUF orders a head's rows as rotation pairs (0, d/2, 1, d/2+1, ...); Hugging Face as halves (0, 1, ..., d-1)."""
    pairs = values.view(-1, head_rows // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
