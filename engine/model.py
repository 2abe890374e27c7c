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

from contracts.errors import ConfigError
from engine.kernels import cpu, reference
from engine.kernels.native import invariant
from engine.kernels.native import kernels as native
from engine.kernels.native.build import library
from engine.kernels.native.ops import LANES
from engine.kv import KvSlab
from engine.parallel.group import ALONE, Ranks
from engine.rope import inverse_frequencies, magnitude
from engine.sampler import Draw
from engine.spec import Activation, AttentionRule, Experts
from engine.weights import Linear, LoadedModel, Mlp, SparseMlp


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

    def embed(self, token_ids: Tensor, table: Linear) -> Tensor: ...

    def add_norm(
        self,
        hidden: Tensor,
        added: Tensor | None,
        post: Tensor | None,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]: ...

    def split_heads(
        self,
        qkv: Tensor,
        norms: tuple[Tensor | None, float],
        rotation: tuple[Tensor, Tensor],
        kv: Tensor,
        place: tuple[Tensor, Tensor],
        scales: Tensor | None = None,
    ) -> Tensor: ...

    def gated(self, gate_up: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor: ...

    def attend_decodes(
        self,
        q: Tensor,
        kv: Tensor,
        group: tuple[Tensor, Tensor, Tensor],
        rule: AttentionRule,
        out: Tensor,
        scales: Tensor | None = None,
    ) -> None: ...

    def prefill_attention(
        self,
        q: Tensor,
        kv: Tensor,
        block_ids: Tensor,
        start: int,
        rule: AttentionRule,
        scales: Tensor | None = None,
    ) -> Tensor: ...


def select_kernels(device: torch.device) -> Kernels:
    """The fastest kernel set for a device. The first call may compile (see kernels.native.build)."""
    if device.type == "cpu":
        return cpu if library() is None else native
    if device.type != "cuda" or find_spec("triton") is None:
        return reference
    from engine.kernels.triton import kernel_set  # costs a second that only GPUs should pay

    return kernel_set


def select_draw(device: torch.device) -> Draw | None:
    """What draws many tokens at once on a device; None: nothing that the host does not do as well."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from engine.kernels.triton.sampling import sample  # as in select_kernels

    return sample


def invariant_kernels(device: torch.device, head_dim: int) -> Kernels:
    """The kernel set of `engine.batch_invariant`. Raises ConfigError where there is none."""
    if device.type != "cpu" or library() is None:
        reason = f"device {device.type}" if device.type != "cpu" else "no C++ compiler that works"
        raise ConfigError(f"engine.batch_invariant: expected false but got true ({reason})")
    if head_dim % LANES:
        raise ConfigError(
            f"engine.batch_invariant: expected heads of a multiple of {LANES} but the model has {head_dim}"
        )
    return invariant


class Model:
    """Weights and their arithmetic; stateless between steps. `dtype` is that of the activations.

    One of several ranks has a shard, and `ranks` to add up what each of them computed. The residual stream has the same
    bits on all.
    """

    def __init__(self, loaded: LoadedModel, ranks: Ranks = ALONE, batch_invariant: bool = False) -> None:
        self.spec = loaded.spec
        self._ranks = ranks
        self._vocabulary = loaded.shard.vocabulary(loaded.spec.vocab_size)
        self._weights = loaded.weights
        self.dtype = loaded.dtype
        self.device = loaded.weights.final_norm.device
        if batch_invariant:
            self._kernels = invariant_kernels(self.device, self.spec.head_dim)
        else:
            self._kernels = select_kernels(self.device)
        # Layers share a few ropes: one table of each per step.
        ropes = list(dict.fromkeys(layer.rope for layer in self.spec.layers))
        self._ropes = [
            (inverse_frequencies(rope, self.spec.head_dim).to(self.device), magnitude(rope)) for rope in ropes
        ]
        self._rope_of_layer = [ropes.index(layer.rope) for layer in self.spec.layers]
        self._rules = [self.spec.rule(layer) for layer in self.spec.layers]
        # A head whose products are rounded keeps its plain weight: the best logits are refined from it.
        loaded.weights.lm_head.is_shared = True
        for layer in loaded.weights.layers:
            for matrix in layer.matrices:
                self._kernels.pack(matrix)
        self._kernels.pack(loaded.weights.lm_head)
        if loaded.weights.embedding is not loaded.weights.lm_head and loaded.weights.embedding.quantized:
            self._kernels.pack(loaded.weights.embedding)

    def forward(self, plan: StepPlan, slab: KvSlab) -> Tensor:
        """Logits [R, V] float32 of the wanted rows; beyond rank 0 empty. Writes KV of all T tokens into `slab`."""
        # The residual stream stays float32: in bfloat16 it loses what late layers add to it.
        kernels, ranks, eps = self._kernels, self._ranks, self.spec.norm_eps
        hidden = self._embed(plan.token_ids) * self.spec.embedding_scale
        tables = [reference.rope_table(plan.positions, *rope) for rope in self._ropes]
        # What the last product adds to the stream, not added yet, and the norm behind it.
        added: Tensor | None = None
        post: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            hidden, normed = kernels.add_norm(hidden, added, post, layer.attention_norm, eps, self.dtype)
            rotation, kv = tables[self._rope_of_layer[index]], (slab.layer(index), slab.layer_scales(index))
            norms, place = (layer.head_norms, eps), (plan.block_ids, plan.slots)
            # Keys and values go to the slab first, so that a chunk sees itself there.
            q = kernels.split_heads(kernels.linear(normed, layer.qkv), norms, rotation, kv[0], place, kv[1])
            attended = self._attend(q, kv, plan, self._rules[index])
            added = ranks.total(kernels.linear(attended.view(len(hidden), -1), layer.out))
            post = layer.attention_post_norm
            hidden, normed = kernels.add_norm(hidden, added, post, layer.mlp_norm, eps, self.dtype)
            added, post = ranks.total(self._mlp(normed, layer.mlp)), layer.mlp_post_norm
        if not len(plan.wanted):
            return torch.empty(0, self.spec.vocab_size, device=self.device)
        assert added is not None, "a model without layers"
        wanted = hidden[plan.wanted], added[plan.wanted]
        _, final = kernels.add_norm(*wanted, post, self._weights.final_norm, eps, self.dtype)
        logits = ranks.joined(kernels.logits(final, self._weights.lm_head), self.spec.vocab_size)
        return reference.soft_cap(logits, self.spec.logit_cap)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T, hidden] float32. A rank that does not have a token's row adds zeros."""
        table, low, high = self._weights.embedding, self._vocabulary.start, self._vocabulary.stop
        if high - low == self.spec.vocab_size:
            return self._kernels.embed(token_ids, table)
        is_elsewhere = (token_ids < low) | (token_ids >= high)
        rows = self._kernels.embed((token_ids - low).masked_fill(is_elsewhere, 0), table)
        return self._ranks.total(rows.masked_fill(is_elsewhere[:, None], 0.0))

    def _attend(
        self, q: Tensor, held: tuple[Tensor, Tensor | None], plan: StepPlan, rule: AttentionRule
    ) -> Tensor:
        """q [T, H, D] -> [T, H, D] in the model's dtype; held: a layer of the slab, and its scales if it is float8."""
        kv, scales = held
        out = torch.empty(q.shape, dtype=self.dtype, device=q.device)
        for group in plan.decodes:
            of = (group.rows, group.block_table, group.context_lens)
            self._kernels.attend_decodes(q, kv, of, rule, out, scales)
        for chunk in plan.chunks:
            rows = slice(chunk.low, chunk.high)
            of_chunk = (chunk.block_ids, chunk.start)
            out[rows] = self._kernels.prefill_attention(q[rows], kv, *of_chunk, rule, scales)
        return out

    def _mlp(self, x: Tensor, mlp: Mlp | SparseMlp) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        if isinstance(mlp, SparseMlp):
            return self._sparse_mlp(x, mlp)
        inner = self._kernels.gated(self._kernels.linear(x, mlp.gate_up), self.spec.activation, self.dtype)
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
