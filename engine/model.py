"""The decoder: one forward pass over the tokens of a step, from ids to logits.

One description covers the Llama family by `ModelSpec`: grouped-query attention, rope variants, biases, tied embeddings.
A step mixes single-token decodes and prompt chunks; all products run over all tokens at once, attention per kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels import cpu, reference
from engine.kv import KvSlab
from engine.spec import FactorRope, LinearRope, Llama3Rope, ModelSpec
from engine.weights import LayerWeights, Linear, LoadedModel


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-token sequences of similar length: rows [B] of the step, block_table [B, M], context_lens [B]."""

    rows: Tensor
    block_table: Tensor
    context_lens: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [low, high) of the step are a prompt chunk that starts at position `start`; block_ids [M]."""

    low: int
    high: int
    start: int
    block_ids: Tensor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything about a step that all layers share. T tokens: token_ids, positions, block_ids, slots [T];
    `wanted` [R]: rows whose logits are asked for."""

    token_ids: Tensor
    positions: Tensor
    block_ids: Tensor
    slots: Tensor
    wanted: Tensor
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


class Kernels(Protocol):
    """What a device may do better than plain torch; `kernels.reference` says what each function returns."""

    def pack(self, layer: Linear) -> None: ...

    def linear(self, x: Tensor, layer: Linear) -> Tensor: ...

    def logits(self, x: Tensor, head: Linear) -> Tensor: ...

    def write_kv(self, kv: Tensor, k: Tensor, v: Tensor, block_ids: Tensor, slots: Tensor) -> None: ...

    def paged_attention(self, q: Tensor, kv: Tensor, block_table: Tensor, context_lens: Tensor) -> Tensor: ...

    def prefill_attention(self, q: Tensor, kv: Tensor, block_ids: Tensor, start: int) -> Tensor: ...


def select_kernels(device: torch.device) -> Kernels:
    """The fastest kernel set for a device."""
    return cpu if device.type == "cpu" else reference


class Model:
    """Weights and their arithmetic; stateless between steps. `dtype` is that of the activations."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.spec = loaded.spec
        self._weights = loaded.weights
        self.dtype = loaded.weights.embedding.dtype
        self.device = loaded.weights.embedding.device
        self._kernels = select_kernels(self.device)
        self._inv_freq = inverse_frequencies(self.spec).to(self.device)
        # Packed or not, the head keeps its plain weight: the best logits are refined from it.
        loaded.weights.lm_head.is_shared = True
        for layer in loaded.weights.layers:
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
                self._kernels.pack(matrix)
        self._kernels.pack(loaded.weights.lm_head)

    def forward(self, plan: StepPlan, slab: KvSlab) -> Tensor:
        """Logits [R, V] float32 of the wanted rows. Writes KV of all T tokens into `slab`."""
        # The residual stream stays float32: in bfloat16 it loses what late layers add to it.
        hidden = self._weights.embedding[plan.token_ids].float()
        cos, sin = reference.rope_table(plan.positions, self._inv_freq)
        for index, layer in enumerate(self._weights.layers):
            hidden = self._layer(hidden, layer, plan, slab.layer(index), (cos, sin))
        if not len(plan.wanted):
            return torch.empty(0, self.spec.vocab_size, device=self.device)
        final = self._norm(hidden[plan.wanted], self._weights.final_norm)
        return self._kernels.logits(final, self._weights.lm_head)

    def _layer(
        self, hidden: Tensor, layer: LayerWeights, plan: StepPlan, kv: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        spec = self.spec
        normed = self._norm(hidden, layer.attention_norm)
        heads = self._kernels.linear(normed, layer.qkv).view(len(hidden), -1, spec.head_dim)
        num_rotated = spec.num_heads + spec.num_kv_heads
        rotated = reference.rope(heads[:, :num_rotated], *rotation)
        q, k = torch.split(rotated, [spec.num_heads, spec.num_kv_heads], dim=1)
        self._kernels.write_kv(kv, k, heads[:, num_rotated:], plan.block_ids, plan.slots)
        attended = self._attend(q, kv, plan).view(len(hidden), -1)
        hidden = hidden + self._kernels.linear(attended, layer.out)
        normed = self._norm(hidden, layer.mlp_norm)
        inner = reference.swiglu(self._kernels.linear(normed, layer.gate_up)).to(self.dtype)
        return hidden + self._kernels.linear(inner, layer.down)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return reference.rms_norm(hidden, weight, self.spec.norm_eps).to(self.dtype)

    def _attend(self, q: Tensor, kv: Tensor, plan: StepPlan) -> Tensor:
        out = torch.empty(q.shape, dtype=self.dtype, device=q.device)
        for group in plan.decodes:
            out[group.rows] = self._kernels.paged_attention(
                q[group.rows], kv, group.block_table, group.context_lens
            )
        for chunk in plan.chunks:
            rows = slice(chunk.low, chunk.high)
            out[rows] = self._kernels.prefill_attention(q[rows], kv, chunk.block_ids, chunk.start)
        return out


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """[D / 2] float32: theta^(-2i/D), scaled as the spec says (Su et al., arXiv:2104.09864; Llama 3.1 scaling)."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    match spec.rope_scaling:
        case None:
            return frequencies
        case LinearRope(factor):
            return frequencies / factor
        case FactorRope(factors):
            return frequencies / torch.tensor(factors)
        case Llama3Rope():
            return _llama3(frequencies, spec.rope_scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    old_len = scaling.original_max_position
    is_long = wavelengths > old_len / scaling.low_freq_factor
    is_short = wavelengths < old_len / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = (old_len / wavelengths - scaling.low_freq_factor) / span
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(is_long, frequencies / scaling.factor, frequencies)
    return torch.where(~is_long & ~is_short, between, scaled)
