"""The decoder: one forward pass over the tokens of a step, from ids to logits.

One description covers all families by `ModelSpec`; nothing here asks for a family's name.
A step mixes single-token decodes and prompt chunks; all products run over all tokens at once, attention per kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels import cpu, reference
from engine.kv import KvSlab
from engine.rope import inverse_frequencies, magnitude
from engine.spec import AttentionRule, Experts
from engine.weights import LayerWeights, Linear, LoadedModel, Mlp, SparseMlp


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

    def paged_attention(
        self, q: Tensor, kv: Tensor, block_table: Tensor, context_lens: Tensor, rule: AttentionRule
    ) -> Tensor: ...

    def prefill_attention(
        self, q: Tensor, kv: Tensor, block_ids: Tensor, start: int, rule: AttentionRule
    ) -> Tensor: ...


def select_kernels(device: torch.device) -> Kernels:
    """The fastest kernel set for a device."""
    if device.type == "cpu":
        return cpu
    if device.type != "cuda" or find_spec("triton") is None:
        return reference
    from engine.kernels.triton import kernel_set  # costs a second that only GPUs should pay

    return kernel_set


class Model:
    """Weights and their arithmetic; stateless between steps. `dtype` is that of the activations."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.spec = loaded.spec
        self._weights = loaded.weights
        self.dtype = loaded.weights.embedding.dtype
        self.device = loaded.weights.embedding.device
        self._kernels = select_kernels(self.device)
        self._gated = reference.geglu if self.spec.activation == "gelu_tanh" else reference.swiglu
        # Layers share a few ropes: one table of each per step.
        ropes = list(dict.fromkeys(layer.rope for layer in self.spec.layers))
        self._ropes = [
            (inverse_frequencies(rope, self.spec.head_dim).to(self.device), magnitude(rope)) for rope in ropes
        ]
        self._rope_of_layer = [ropes.index(layer.rope) for layer in self.spec.layers]
        self._rules = [self.spec.rule(layer) for layer in self.spec.layers]
        # Packed or not, the head keeps its plain weight: the best logits are refined from it.
        loaded.weights.lm_head.is_shared = True
        for layer in loaded.weights.layers:
            for matrix in layer.matrices:
                self._kernels.pack(matrix)
        self._kernels.pack(loaded.weights.lm_head)

    def forward(self, plan: StepPlan, slab: KvSlab) -> Tensor:
        """Logits [R, V] float32 of the wanted rows. Writes KV of all T tokens into `slab`."""
        # The residual stream stays float32: in bfloat16 it loses what late layers add to it.
        hidden = self._weights.embedding[plan.token_ids].float() * self.spec.embedding_scale
        tables = [reference.rope_table(plan.positions, *rope) for rope in self._ropes]
        for index, layer in enumerate(self._weights.layers):
            heads = self._heads(hidden, layer, tables[self._rope_of_layer[index]])
            attended = self._attend(heads, slab.layer(index), plan, self._rules[index])
            added = self._kernels.linear(attended.view(len(hidden), -1), layer.out)
            hidden = hidden + self._post_norm(added, layer.attention_post_norm)
            added = self._mlp(self._norm(hidden, layer.mlp_norm), layer.mlp)
            hidden = hidden + self._post_norm(added, layer.mlp_post_norm)
        if not len(plan.wanted):
            return torch.empty(0, self.spec.vocab_size, device=self.device)
        final = self._norm(hidden[plan.wanted], self._weights.final_norm)
        return reference.soft_cap(self._kernels.logits(final, self._weights.lm_head), self.spec.logit_cap)

    def _heads(
        self, hidden: Tensor, layer: LayerWeights, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, K, D] of the layer's input; q and k normed and rotated."""
        spec = self.spec
        normed = self._norm(hidden, layer.attention_norm)
        heads = self._kernels.linear(normed, layer.qkv).view(len(hidden), -1, spec.head_dim)
        num_rotated = spec.num_heads + spec.num_kv_heads
        turning = heads[:, :num_rotated]
        if layer.head_norms is not None:
            turning = reference.head_norm(turning, layer.head_norms, spec.norm_eps)
        rotated = reference.rope(turning, *rotation)
        q, k = torch.split(rotated, [spec.num_heads, spec.num_kv_heads], dim=1)
        return q, k, heads[:, num_rotated:]

    def _attend(
        self, heads: tuple[Tensor, Tensor, Tensor], kv: Tensor, plan: StepPlan, rule: AttentionRule
    ) -> Tensor:
        """[T, H, D]; keys and values go to the slab first, so that a chunk sees itself there."""
        q, k, v = heads
        self._kernels.write_kv(kv, k, v, plan.block_ids, plan.slots)
        out = torch.empty(q.shape, dtype=self.dtype, device=q.device)
        for group in plan.decodes:
            out[group.rows] = self._kernels.paged_attention(
                q[group.rows], kv, group.block_table, group.context_lens, rule
            )
        for chunk in plan.chunks:
            rows = slice(chunk.low, chunk.high)
            out[rows] = self._kernels.prefill_attention(q[rows], kv, chunk.block_ids, chunk.start, rule)
        return out

    def _mlp(self, x: Tensor, mlp: Mlp | SparseMlp) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        if isinstance(mlp, SparseMlp):
            return self._sparse_mlp(x, mlp)
        inner = self._gated(self._kernels.linear(x, mlp.gate_up)).to(self.dtype)
        return self._kernels.linear(inner, mlp.down)

    def _sparse_mlp(self, x: Tensor, mlp: SparseMlp) -> Tensor:
        """Each token through its experts; those that nobody chose cost nothing."""
        experts = self.spec.experts
        assert isinstance(experts, Experts), "a sparse layer without experts"
        router_logits = self._kernels.linear(x, mlp.router)
        probs, chosen = reference.route(router_logits, experts.num_chosen, experts.is_normalized)
        out = torch.zeros(x.shape, device=x.device)
        for number in torch.bincount(chosen.view(-1)).nonzero()[:, 0].tolist():
            rows, rank = (chosen == number).nonzero(as_tuple=True)
            answered = self._mlp(x[rows], mlp.experts[number]).float()
            out.index_add_(0, rows, answered * probs[rows, rank, None])
        return out

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return reference.rms_norm(hidden, weight, self.spec.norm_eps).to(self.dtype)

    def _post_norm(self, added: Tensor, weight: Tensor | None) -> Tensor:
        """float32, as the residual stream that it is added to."""
        return added if weight is None else reference.rms_norm(added.float(), weight, self.spec.norm_eps)
