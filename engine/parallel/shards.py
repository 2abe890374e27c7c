"""Which part of every tensor a rank holds, and which numbers of ranks a model can be cut into.

    q, k, v            rows, whole heads          a sum over ranks follows o and down
    o                  columns of those heads
    gate, up           rows                       of each expert, too
    down               columns
    embedding, head    rows: a share of the vocabulary
    norms, router      all, on every rank
    biases of o, down  rank 0 alone: they are added once

(Megatron-LM, arXiv:1909.08053.) With more ranks than kv heads, neighbours hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from contracts.blocks import head_ranges
from contracts.errors import ConfigError
from engine.spec import ModelSpec
from engine.tensor_names import Shape, expected_tensors

_BY_COLUMNS = ("o_proj", "down_proj")
_BY_ROWS = ("q_proj", "gate_proj", "up_proj")
_KV = ("k_proj", "v_proj")
_VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns of a tensor; of a vector, rows. `shape` is what they make."""

    shape: Shape
    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))

    def some_rows(self, low: int, high: int) -> Part:
        """Rows [low, high) of these."""
        first = self.rows.start or 0
        return replace(self, shape=(high - low, *self.shape[1:]), rows=slice(first + low, first + high))

    @property
    def has_all_columns(self) -> bool:
        return self.columns == slice(None)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """What this rank computes, as a model of its own; only its vocabulary is still the whole one."""
        experts = whole.experts
        return replace(
            whole,
            num_heads=whole.num_heads // self.size,
            num_kv_heads=len(self.kv_heads(whole.num_kv_heads)),
            intermediate_size=max(1, whole.intermediate_size // self.size),
            experts=experts and replace(experts, intermediate_size=experts.intermediate_size // self.size),
        )

    def kv_heads(self, num_kv_heads: int) -> range:
        return head_ranges(num_kv_heads, self.size)[self.rank]

    def vocabulary(self, vocab_size: int) -> range:
        """Token ids whose rows of embedding and head are here."""
        return range(self.rank * vocab_size // self.size, (self.rank + 1) * vocab_size // self.size)

    def tensors(self, whole: ModelSpec) -> dict[str, Part]:
        """What this rank reads of every tensor of the checkpoint, in the order of use."""
        parts = {name: self._part(name, shape, whole) for name, shape in expected_tensors(whole).items()}
        return {name: part for name, part in parts.items() if part is not None}

    def _part(self, name: str, shape: Shape, whole: ModelSpec) -> Part | None:
        if self.size == 1:
            return Part(shape)
        module, suffix = name.split(".")[-2:]
        if module in _BY_COLUMNS:
            if suffix == "bias":
                return Part(shape) if self.rank == 0 else None
            columns = self._share(shape[1])
            return Part((shape[0], len(columns)), columns=_slice(columns))
        if module in _BY_ROWS:
            rows = self._share(shape[0])
        elif module in _KV:
            heads, size = self.kv_heads(whole.num_kv_heads), whole.head_dim
            rows = range(heads.start * size, heads.stop * size)
        elif module in _VOCABULARY:
            rows = self.vocabulary(shape[0])
        else:
            return Part(shape)
        return Part((len(rows), *shape[1:]), rows=_slice(rows))

    def _share(self, size: int) -> range:
        each = size // self.size
        return range(self.rank * each, (self.rank + 1) * each)


WHOLE = Shard()


def check_degree(spec: ModelSpec, degree: int, field: str = "tensor_parallel_size") -> None:
    """Raises ConfigError, saying which numbers of ranks would do, if `spec` cannot be cut into `degree`."""
    known = degrees(spec)
    if degree not in known:
        inner = " and ".join(map(str, _inner_sizes(spec)))
        raise ConfigError(
            f"{field}: expected one of {', '.join(map(str, known))} for a model of {spec.num_heads} heads, "
            f"{spec.num_kv_heads} kv heads and MLPs of {inner} but got {degree}"
        )


def degrees(spec: ModelSpec) -> list[int]:
    """Into how many ranks `spec` can be cut: whole heads, equal MLPs, and kv heads that are dealt out evenly."""
    sizes = (spec.num_heads, *_inner_sizes(spec))
    return [
        degree
        for degree in range(1, spec.num_heads + 1)
        if all(size % degree == 0 for size in sizes)
        and (spec.num_kv_heads % degree == 0 or degree % spec.num_kv_heads == 0)
    ]


def _inner_sizes(spec: ModelSpec) -> list[int]:
    sizes = {spec.experts.intermediate_size for layer in spec.layers if layer.is_sparse and spec.experts}
    if not all(layer.is_sparse for layer in spec.layers):
        sizes.add(spec.intermediate_size)
    return sorted(sizes)


def _slice(span: range) -> slice:
    return slice(span.start, span.stop)
