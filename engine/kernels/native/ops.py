"""The compiled functions, called with tensors. Shapes are checked here: behind the call nothing is.

What holds of their numbers: a product's row has the same bits whatever shares its batch, for any number of rows, and so
has a row of each fused operation. A query's attention has the same bits in a prompt, however that is cut, and in a
decode.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.native.build import Library, library
from engine.quantization import GROUP, BlockKind, Quantized
from engine.spec import AttentionRule

LANES = 16
"""Head dimensions must be a multiple of it."""

_MAX_SHORT_ROWS = 16
_KINDS = {BlockKind.Q8_0: 0, BlockKind.Q4_0: 1, BlockKind.Q4_1: 2}
_NUMBERS = {torch.float32: 3, torch.bfloat16: 4}
_SIGNATURES = {  # p: pointer, n: int64, i: int, f: float
    "baton_panel_bytes": "inn",
    "baton_pack": "ipnnp",
    "baton_pack_numbers": "ipnnnp",
    "baton_linear": "ippppnnni",
    "baton_linear_dot": "ippppnnni",
    "baton_has_dot": "",
    "baton_has_tiles": "",
    "baton_rows": "ippnnp",
    "baton_expand": "ipnnp",
    "baton_decode_attention": "ippnnnnpppnnnffnpi",
    "baton_prefill_attention": "ippnnnnpnnnffnpi",
    "baton_add_norm": "ppippfnnppi",
    "baton_split_heads": "pippinnpppppfnnnnp",
    "baton_gated": "piinnpi",
}
_RESULTS = {
    "baton_panel_bytes": ctypes.c_int64,
    "baton_has_dot": ctypes.c_int,
    "baton_has_tiles": ctypes.c_int,
}
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
}


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A matrix [num_rows, num_columns] in the order the kernels read it, its columns filled up to `padded`."""

    kind: int
    data: Tensor
    num_rows: int
    num_columns: int
    padded: int


@cache
def _lib() -> Library:
    found = library()
    assert found is not None, "asked for native kernels that are not there"
    for half in (found.long, found.short):
        for name, signature in _SIGNATURES.items():
            function = getattr(half, name)
            function.argtypes = [_TYPES[letter] for letter in signature]
            function.restype = _RESULTS.get(name)
    return found


def _lib_for(num_rows: int) -> Any:
    """Few rows take less time than handing the interpreter over."""
    return _lib().short if num_rows <= _MAX_SHORT_ROWS else _lib().long


def pack(matrix: Quantized) -> Panels:
    lib, kind = _lib(), _KINDS[matrix.kind]
    num_rows, num_columns = matrix.shape
    assert matrix.blocks.is_contiguous()
    num_bytes = lib.short.baton_panel_bytes(kind, num_rows, num_columns)
    data = torch.empty(num_bytes, dtype=torch.uint8)
    lib.long.baton_pack(kind, matrix.blocks.data_ptr(), num_rows, num_columns, data.data_ptr())
    return Panels(kind, data, num_rows, num_columns, num_columns)


def pack_numbers(weight: Tensor) -> Panels:
    """weight [out, in], float32 or bfloat16, as it is: a product's row has the same bits in every batch."""
    kind, weight, (num_rows, num_columns) = _NUMBERS[weight.dtype], weight.contiguous(), weight.shape
    padded = -(-num_columns // GROUP) * GROUP
    lib = _lib()
    data = torch.empty(lib.short.baton_panel_bytes(kind, num_rows, padded), dtype=torch.uint8)
    lib.long.baton_pack_numbers(kind, weight.data_ptr(), num_rows, num_columns, padded, data.data_ptr())
    return Panels(kind, data, num_rows, num_columns, padded)


@cache
def has_dot() -> bool:
    """Whether the compiled functions multiply bfloat16 rows in bfloat16, by this CPU's dot products of pairs."""
    return bool(_lib().short.baton_has_dot())


@cache
def has_tiles() -> bool:
    """Whether this CPU multiplies whole tiles of bfloat16 (AMX), which the compiled functions do not use."""
    return bool(_lib().short.baton_has_tiles())


def linear(x: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
    """x [T, in] -> [T, out] float32; bias [out] float32. Only sums are rounded: bfloat16 rows are multiplied
    as they are."""
    assert x.ndim == 2, x.shape
    assert x.shape[1] == panels.num_columns, (x.shape, panels.num_columns)
    assert bias is None or (bias.shape == (panels.num_rows,) and bias.dtype == torch.float32)
    is_dot = x.dtype == torch.bfloat16 and panels.kind != _NUMBERS[torch.float32] and has_dot()
    x = (x if is_dot else x.float()).contiguous()
    if panels.padded != panels.num_columns:
        x = F.pad(x, (0, panels.padded - panels.num_columns))
    out = torch.empty(len(x), panels.num_rows)
    multiply = _lib().long.baton_linear_dot if is_dot else _lib().long.baton_linear
    multiply(
        panels.kind,
        panels.data.data_ptr(),
        None if bias is None else bias.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
        len(x),
        panels.padded,
        panels.num_rows,
        torch.get_num_threads(),
    )
    return out


def rows(panels: Panels, row_ids: Tensor) -> Tensor:
    """row_ids [T] int64 -> [T, in] float32, as expanding the file gives them."""
    assert row_ids.dtype == torch.int64
    if len(row_ids) and not 0 <= int(row_ids.min()) <= int(row_ids.max()) < panels.num_rows:
        raise IndexError(f"expected rows below {panels.num_rows} but got {row_ids.tolist()}")
    out = torch.empty(len(row_ids), panels.padded)
    _lib_for(len(row_ids)).baton_rows(
        panels.kind,
        panels.data.data_ptr(),
        row_ids.contiguous().data_ptr(),
        len(row_ids),
        panels.padded,
        out.data_ptr(),
    )
    return out[:, : panels.num_columns]


def expand(panels: Panels) -> Tensor:
    """[out, in] bfloat16, rounded to nearest."""
    out = torch.empty(panels.num_rows, panels.padded, dtype=torch.bfloat16)
    _lib().long.baton_expand(
        panels.kind, panels.data.data_ptr(), panels.num_rows, panels.padded, out.data_ptr()
    )
    return out[:, : panels.num_columns]


def can_attend(kv: Tensor) -> bool:
    """Whether the compiled attention knows this layer [N, 2, K, S, D]."""
    return kv.dtype in _NUMBERS and kv.shape[4] % LANES == 0


def decode_attention(
    q: Tensor,
    kv: Tensor,
    group: tuple[Tensor, Tensor, Tensor],
    rule: AttentionRule,
    out: Tensor,
) -> None:
    """Rows of q [T, H, D] float32 into the same rows of out [T, H, D]; group: rows [B], block_table [B, M] and
    context_lens [B], all int64."""
    row_ids, table, lens = group
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert q.dtype == torch.float32
    assert out.dtype == kv.dtype
    assert table.is_contiguous()
    _lib().long.baton_decode_attention(
        kv.dtype == torch.bfloat16,
        q.data_ptr(),
        *_layer(kv),
        row_ids.data_ptr(),
        table.data_ptr(),
        lens.data_ptr(),
        len(lens),
        table.shape[1],
        q.shape[1],
        *_rule(rule),
        out.data_ptr(),
        torch.get_num_threads(),
    )


def prefill_attention(
    q: Tensor, kv: Tensor, block_ids: Tensor, start: int, rule: AttentionRule, out: Tensor
) -> None:
    """q and out [T, H, D]: the rows of one chunk."""
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert q.dtype == torch.float32
    assert out.dtype == kv.dtype
    assert block_ids.is_contiguous()
    assert len(block_ids) * kv.shape[3] >= start + len(q)
    _lib().long.baton_prefill_attention(
        kv.dtype == torch.bfloat16,
        q.data_ptr(),
        *_layer(kv),
        block_ids.data_ptr(),
        len(q),
        q.shape[1],
        start,
        *_rule(rule),
        out.data_ptr(),
        torch.get_num_threads(),
    )


def _layer(kv: Tensor) -> tuple[int, int, int, int, int]:
    _, _, num_kv_heads, num_slots, head_dim = kv.shape
    plane = num_slots * head_dim
    assert kv.stride()[1:] == (num_kv_heads * plane, plane, head_dim, 1), "expected a layer of a KvSlab"
    return kv.data_ptr(), kv.stride(0), num_kv_heads, num_slots, head_dim


def _rule(rule: AttentionRule) -> tuple[float, float, int]:
    return rule.scale, rule.cap or 0.0, rule.window or 0


def add_norm(
    hidden: Tensor, added: Tensor | None, post: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """As reference.add_norm, but hidden [T, width] is changed in place."""
    num_rows, width = hidden.shape
    assert hidden.is_contiguous()
    assert hidden.dtype == torch.float32
    if added is not None:
        assert added.shape == hidden.shape
        added = added.contiguous()
    out = torch.empty(num_rows, width, dtype=dtype)
    scratch = torch.empty(width)
    _lib_for(num_rows).baton_add_norm(
        hidden.data_ptr(),
        None if added is None else added.data_ptr(),
        added is not None and added.dtype == torch.bfloat16,
        None if post is None else post.data_ptr(),
        weight.data_ptr(),
        eps,
        num_rows,
        width,
        scratch.data_ptr(),
        out.data_ptr(),
        dtype == torch.bfloat16,
    )
    return out


def split_heads(
    qkv: Tensor,
    norms: tuple[Tensor | None, float],
    rotation: tuple[Tensor, Tensor],
    kv: Tensor,
    place: tuple[Tensor, Tensor],
) -> Tensor:
    """As reference.split_heads."""
    layer, block_stride, num_kv_heads, num_slots, head_dim = _layer(kv)
    (cos, sin), (block_ids, slots), (weight, eps) = rotation, place, norms
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = torch.empty(len(qkv), num_heads, head_dim)
    scratch = torch.empty(head_dim)
    assert qkv.is_contiguous()
    assert cos.shape == sin.shape == (len(qkv), 1, head_dim // 2)
    _lib_for(len(qkv)).baton_split_heads(
        qkv.data_ptr(),
        qkv.dtype == torch.bfloat16,
        q.data_ptr(),
        layer,
        kv.dtype == torch.bfloat16,
        block_stride,
        num_slots,
        block_ids.data_ptr(),
        slots.data_ptr(),
        None if weight is None else weight.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        eps,
        len(qkv),
        num_heads,
        num_kv_heads,
        head_dim,
        scratch.data_ptr(),
    )
    return q


def gated(gate_up: Tensor, is_gelu: bool, dtype: torch.dtype) -> Tensor:
    """gate_up [T, 2 * inner] -> [T, inner]."""
    inner = gate_up.shape[1] // 2
    out = torch.empty(len(gate_up), inner, dtype=dtype)
    assert gate_up.is_contiguous()
    _lib_for(len(gate_up)).baton_gated(
        gate_up.data_ptr(),
        gate_up.dtype == torch.bfloat16,
        is_gelu,
        len(gate_up),
        inner,
        out.data_ptr(),
        dtype == torch.bfloat16,
    )
    return out
