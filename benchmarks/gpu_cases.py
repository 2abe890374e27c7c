"""What `benchmarks.gpu_kernels` times: kernels at the shapes of an 8B model, and one whole decode step of it.

A case is what a kernel must move or multiply at least, and a function that sets it up; one case's tensors are in memory
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import reference
from engine.kernels.grouped import GroupedWeight
from engine.kernels.triton.decode_attention import paged_attention
from engine.kernels.triton.gated import swiglu
from engine.kernels.triton.grouped_linear import grouped_linear
from engine.kernels.triton.norm import add_rms_norm
from engine.kernels.triton.prefill_attention import prefill_attention
from engine.kernels.triton.rope_write import rope_write
from engine.kernels.triton.sampling import sample
from engine.spec import AttentionRule

BLOCK_SIZE = 16
BF16 = torch.bfloat16
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a decoder."""

    hidden: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336
    vocab: int = 128256
    dtype: torch.dtype = BF16

    @property
    def rule(self) -> AttentionRule:
        return AttentionRule(self.head_dim**-0.5)

    @property
    def qkv(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def kv_bytes(self, num_tokens: int, dtype: torch.dtype | None = None) -> int:
        """Of one layer."""
        return 2 * num_tokens * self.num_kv_heads * self.head_dim * (dtype or self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prepare: Callable[[], Work]
    num_bytes: int
    flops: int = 0


def cases(device: torch.device, num_layers: int, shape: Shape | None = None) -> Iterator[Case]:
    """In the order they are measured."""
    of = shape or Shape()
    for num_seqs, context in ((64, 8192), (16, 2048), (1, 32768)):
        for dtype in (BF16, torch.float8_e4m3fn):
            name = f"decode attention {num_seqs} x {context:,}{' float8' if dtype != BF16 else ''}"
            prepare = _decode_attention(of, device, num_seqs, context, dtype)
            yield Case(name, prepare, of.kv_bytes(num_seqs * context, dtype))
    for num_tokens in (2048, 8192):
        flops = 2 * num_tokens**2 * of.num_heads * of.head_dim  # two products, half of each is hidden
        num_bytes = of.kv_bytes(num_tokens) + 4 * num_tokens * of.num_heads * of.head_dim
        yield Case(
            f"prefill attention {num_tokens:,}", _prefill_attention(of, device, num_tokens), num_bytes, flops
        )
    yield from _small_cases(of, device)
    num_bytes = Step.num_bytes(of, num_layers, 16, 4096)
    yield Case("decode step 8B", lambda: Step(of, device, num_layers, 16, 4096).run, num_bytes)


def make_table(num_seqs: int, context: int, device: torch.device) -> Tensor:
    """[B, M] of scattered blocks, each in one table."""
    num_blocks = num_seqs * -(-context // BLOCK_SIZE)
    return torch.randperm(num_blocks, device=device).view(num_seqs, -1)


def make_slab(
    of: Shape, num_blocks: int, device: torch.device, num_layers: int, dtype: torch.dtype = BF16
) -> Tensor:
    """[N, L, 2, K, S, D]; random, so that no product is by zeros."""
    shape = (num_blocks, num_layers, 2, of.num_kv_heads, BLOCK_SIZE, of.head_dim)
    if dtype == torch.float8_e4m3fn:
        return torch.randint(0, 0x70, shape, dtype=torch.uint8, device=device).view(dtype)
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def _decode_attention(
    of: Shape, device: torch.device, num_seqs: int, context: int, dtype: torch.dtype
) -> Callable[[], Work]:
    def prepare() -> Work:
        table = make_table(num_seqs, context, device)
        layer = make_slab(of, table.numel(), device, 1, dtype)[:, 0]
        q = torch.randn(num_seqs, of.num_heads, of.head_dim, dtype=BF16, device=device)
        lens = torch.full((num_seqs,), context, device=device)
        scales = None if dtype == BF16 else torch.full((2, of.num_kv_heads), 0.01, device=device)
        return lambda: paged_attention(q, layer, table, lens, of.rule, scales)

    return prepare


def _prefill_attention(of: Shape, device: torch.device, num_tokens: int) -> Callable[[], Work]:
    def prepare() -> Work:
        block_ids = make_table(1, num_tokens, device)[0]
        layer = make_slab(of, len(block_ids), device, 1)[:, 0]
        q = torch.randn(num_tokens, of.num_heads, of.head_dim, dtype=BF16, device=device)
        return lambda: prefill_attention(q, layer, block_ids, 0, of.rule)

    return prepare


def _small_cases(of: Shape, device: torch.device) -> Iterator[Case]:
    num_tokens = 8192

    def norm() -> Work:
        hidden = torch.randn(num_tokens, of.hidden, device=device)
        added, weight = hidden.to(BF16), torch.ones(of.hidden, device=device)
        return lambda: add_rms_norm(hidden, added, weight, 1e-5, BF16)

    def gate() -> Work:
        gate_up = torch.randn(num_tokens, 2 * of.inner, dtype=BF16, device=device)
        return lambda: swiglu(gate_up, BF16)

    def rope() -> Work:
        heads = torch.randn(num_tokens, of.qkv // of.head_dim, of.head_dim, dtype=BF16, device=device)
        layer = make_slab(of, num_tokens // BLOCK_SIZE, device, 1)[:, 0]
        positions = torch.arange(num_tokens, device=device)
        rotation = reference.rope_table(positions, torch.ones(of.head_dim // 2, device=device))
        at = (positions // BLOCK_SIZE, positions % BLOCK_SIZE)
        return lambda: rope_write(heads, rotation, layer, at)

    def draw() -> Work:
        logits = 3 * torch.randn(64, of.vocab, device=device)
        limits = torch.tensor([[0.8, 50, 0.95, 0.0]], device=device).expand(64, 4).contiguous()
        uniforms = torch.rand(64, dtype=torch.float64, device=device)
        return lambda: sample(logits, limits, uniforms)

    yield Case("add and RMSNorm 8,192", norm, num_tokens * of.hidden * (4 + 2 + 4 + 2))
    yield Case("SwiGLU 8,192", gate, num_tokens * of.inner * 6)
    yield Case("rope and KV write 8,192", rope, num_tokens * (4 * of.qkv + 4 * of.head_dim))
    yield Case("sample 64", draw, 64 * of.vocab * 4)
    for bits in (8, 4):
        for batch in (1, 16):
            num_bytes = 2 * of.inner * of.hidden // 32 * (4 * bits + 2)
            yield Case(f"int{bits} linear {batch}", _linear(of, device, bits, batch), num_bytes)


def _linear(of: Shape, device: torch.device, bits: int, batch: int) -> Callable[[], Work]:
    def prepare() -> Work:
        dtype, per_byte = (torch.int8, 1) if bits == 8 else (torch.uint8, 2)
        codes = torch.randint(0, 100, (2 * of.inner, of.hidden // per_byte), dtype=dtype, device=device)
        scales = torch.full((2 * of.inner, of.hidden // 32), 0.01, dtype=torch.float16, device=device)
        weight = GroupedWeight(bits, codes, scales)
        x = torch.randn(batch, of.hidden, dtype=BF16, device=device)
        return lambda: grouped_linear(x, weight)

    return prepare


class Step:
    """One decode step with random weights: every kernel of a dense model, from hidden states to token ids."""

    def __init__(self, of: Shape, device: torch.device, num_layers: int, num_seqs: int, context: int) -> None:
        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=of.dtype, device=device).normal_(std=columns**-0.5)

        self._of = of
        self._layers = [
            (
                matrix(of.qkv, of.hidden),
                matrix(of.hidden, of.num_heads * of.head_dim),
                matrix(2 * of.inner, of.hidden),
                matrix(of.hidden, of.inner),
            )
            for _ in range(num_layers)
        ]
        self._head = matrix(of.vocab, of.hidden)
        self._norm = torch.ones(of.hidden, device=device)
        self._hidden = torch.randn(num_seqs, of.hidden, device=device)
        self._table = make_table(num_seqs, context, device)
        self._slab = make_slab(of, self._table.numel(), device, num_layers, of.dtype)
        self._lens = torch.full((num_seqs,), context, device=device)
        last = self._lens - 1
        self._rotation = reference.rope_table(last, torch.ones(of.head_dim // 2, device=device))
        self._at = (
            self._table.gather(1, (last // BLOCK_SIZE)[:, None])[:, 0].contiguous(),
            last % BLOCK_SIZE,
        )
        self._limits = torch.tensor([[0.8, 50, 0.95, 0.0]], device=device).expand(num_seqs, 4).contiguous()
        self._uniforms = torch.rand(num_seqs, dtype=torch.float64, device=device)

    @staticmethod
    def num_bytes(of: Shape, num_layers: int, num_seqs: int, context: int) -> int:
        """Weights and KV, read once."""
        per_layer = of.hidden * (of.qkv + of.num_heads * of.head_dim + 3 * of.inner)
        weights = of.dtype.itemsize * (num_layers * per_layer + of.vocab * of.hidden)
        return weights + num_layers * of.kv_bytes(num_seqs * context)

    def run(self) -> Tensor:
        """Token ids [B]."""
        hidden, added = self._hidden, torch.zeros_like(self._hidden)
        for index, (qkv, out, gate_up, down) in enumerate(self._layers):
            kv = self._slab[:, index]
            hidden, normed = add_rms_norm(hidden, added, self._norm, 1e-5, self._of.dtype)
            heads = F.linear(normed, qkv).view(len(hidden), -1, self._of.head_dim)
            q = rope_write(heads, self._rotation, kv, self._at)
            mixed = paged_attention(q, kv, self._table, self._lens, self._of.rule)
            added = F.linear(mixed.view(len(hidden), -1), out)
            hidden, normed = add_rms_norm(hidden, added, self._norm, 1e-5, self._of.dtype)
            added = F.linear(swiglu(F.linear(normed, gate_up), self._of.dtype), down)
        _, normed = add_rms_norm(hidden, added, self._norm, 1e-5, self._of.dtype)
        return sample(F.linear(normed, self._head).float(), self._limits, self._uniforms)
