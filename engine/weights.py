"""Weights on their way from a checkpoint into memory.

    path ──► TensorSource (HF directory | GGUF file) ──► every name and shape checked, and that it all fits
                                                          ──► tensor by tensor, converted straight into its place

The files of a model that is cut into several are read side by side (engine/reading.py). Projections that read the same
input are stored fused (q|k|v and gate|up, rows in this order), so a layer does four matrix products. Files are
memory-mapped: at no time does a second full copy exist.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from contracts.errors import ConfigError
from engine.fit import AvailableBytes, available_bytes, check_fit
from engine.forms import ROUNDING, Forms, TensorSource
from engine.gguf_weights import GgufSource
from engine.hf_weights import HfSource
from engine.parallel.shards import WHOLE, Shard, check_degree
from engine.quantization import BlockKind, Quantization, Quantized, quantize, row_bytes
from engine.reading import Reads
from engine.spec import ModelSpec
from engine.tensor_names import Shape, expected_tensors, layer_norms

logger = logging.getLogger("baton.engine")

Progress = Callable[[int, int], None]
_SAMPLE_BYTES = 1 << 20
_LARGE_BYTES = 64 << 20  # more than any tokenizer
_PIECE_ELEMENTS = 1 << 20  # what is rounded at a time; the allocator keeps several times as much


@dataclass(slots=True)
class Linear:
    """Weight [out, in] and bias [out] of one matrix product; the weight as numbers, or as `quantized` blocks.

    `packed` is a device-specific copy that a kernel set may make instead of either; whoever packs drops what it packed
    (so that memory holds one copy) unless `is_shared` says that its rounded products are refined from `weight`.
    """

    weight: Tensor | None
    bias: Tensor | None = None
    packed: object = None
    is_shared: bool = False
    quantized: Quantized | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """`router` [E, hidden] says which of the E experts a token goes through."""

    router: Linear
    experts: tuple[Mlp, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """`head_norms` [H + K, D]: the weight of each query and key head's norm; `*_post_norm`: norms of what attention
    and MLP add to the residual stream. None in models without."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    mlp: Mlp | SparseMlp
    head_norms: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None

    @property
    def matrices(self) -> Iterator[Linear]:
        """Every matrix of the layer."""
        yield from (self.qkv, self.out)
        if isinstance(self.mlp, SparseMlp):
            yield self.mlp.router
        for mlp in self.mlp.experts if isinstance(self.mlp, SparseMlp) else (self.mlp,):
            yield from (mlp.gate_up, mlp.down)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`embedding` [V, hidden]; in tied models it is `lm_head`."""

    embedding: Linear
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`fingerprint` identifies the files; two workers whose fingerprints differ must not exchange KV. `dtype`: of the
    activations, and of weights that are not quantized. Of a `shard`, `spec` and weights are what this rank has, and
    `whole` is the spec of the model."""

    spec: ModelSpec
    weights: ModelWeights
    fingerprint: str
    dtype: torch.dtype
    whole: ModelSpec
    shard: Shard = WHOLE


def resolve_dtype(name: str, device: torch.device | str = "cpu") -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies it natively, else float32.

    Raises ConfigError for a name other than auto, float32, bfloat16.
    """
    match name:
        case "float32":
            return torch.float32
        case "bfloat16":
            return torch.bfloat16
        case "auto":
            is_native = torch.device(device).type == "cuda" or has_native_bf16()
            return torch.bfloat16 if is_native else torch.float32
    raise ConfigError(f"dtype: expected auto, float32 or bfloat16 but got {name!r}")


def has_native_bf16() -> bool:
    """Whether this CPU has bfloat16 instructions that oneDNN uses."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def load_model(
    path: Path,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    kv_bytes: Callable[[ModelSpec], int] = lambda _spec: 0,
    available: AvailableBytes = available_bytes,
    quantization: Quantization = "none",
    shard: Shard = WHOLE,
    graph_buckets: Sequence[int] = (),
) -> LoadedModel:
    """Read a Hugging Face directory or a GGUF file. `progress` gets (bytes done, bytes in all), as held in memory.

    `kv_bytes(spec)`: what the caller will allocate for KV of this rank. `quantization`: from `resolve_quantization`;
    auto keeps what the file holds in blocks that the kernels know, int8 and int4 round float matrices too. `shard`:
    what of the model this rank holds; nothing else is read. `graph_buckets`: of decode steps that will be recorded.
    Raises ConfigError for a path that is neither, an unsupported model, missing, extra or misshaped tensors, a model
    that cannot be cut so, and one that does not fit into what is `available`.
    """
    source, place = open_source(path), torch.device(device)
    _check_tensors(source)
    check_degree(source.spec, shard.size)
    spec, forms = shard.spec(source.spec), Forms(source, quantization, shard)
    num_bytes = forms.total(dtype)
    check_fit(
        spec,
        dtype,
        place,
        kv_bytes(spec),
        available,
        num_bytes,
        shard.size,
        graph_buckets,
        lambda: {mode: Forms(source, mode, shard).total(dtype) for mode in ROUNDING},
    )
    if again := forms.rounded_again():
        logger.warning(
            "engine.quantization %s rounds %d matrices a second time, which the file holds quantized (%s and others); "
            "auto rounds none", quantization, len(again), again[0],
        )  # fmt: skip
    fingerprint = fingerprint_files(source.files)
    filler = _Filler(source, spec, forms, (dtype, place), num_bytes, progress or (lambda done, total: None))
    return LoadedModel(spec, filler.fill(), fingerprint, dtype, source.spec, shard)


def open_source(path: Path) -> TensorSource:
    """The checkpoint at `path`, header read, no tensor read yet. Raises ConfigError if there is none."""
    if path.is_file() and path.suffix == ".gguf":
        return GgufSource(path)
    if path.is_dir() and (path / "config.json").is_file():
        return HfSource(path)
    raise ConfigError(f"expected a .gguf file or a directory with a config.json but got {path}")


def fingerprint_files(files: Sequence[Path]) -> str:
    """sha256 over each file's name, size, and content: of a large one the first and last MiB, which is cheap and
    differs for any two real checkpoints.
    """
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size > _LARGE_BYTES:
                digest.update(stream.read(_SAMPLE_BYTES))
                stream.seek(size - _SAMPLE_BYTES)
            digest.update(stream.read())
    return digest.hexdigest()


def _check_tensors(source: TensorSource) -> None:
    expected, found = expected_tensors(source.spec), source.tensors
    for name, shape in expected.items():
        if name not in found:
            raise ConfigError(f"tensor {name}: expected shape {shape} but it is missing")
        if found[name] != shape:
            raise ConfigError(f"tensor {name}: expected shape {shape} but got {found[name]}")
    # Some writers store a tied head or the rope table too; both repeat what the spec already says.
    is_redundant = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if source.spec.tie_embeddings:
        is_redundant.add("lm_head.weight")
    for name in found.keys() - expected.keys() - is_redundant:
        raise ConfigError(f"tensor {name}: expected no such tensor but got one of shape {found[name]}")


class _Filler:
    """Reads tensors into their final, possibly fused, place: norms at once, the rest when all places are made."""

    def __init__(
        self,
        source: TensorSource,
        spec: ModelSpec,
        forms: Forms,
        place: tuple[torch.dtype, torch.device],
        num_bytes: int,
        progress: Progress,
    ) -> None:
        self._source = source
        self._spec = spec
        self._forms = forms
        self._dtype, self._device = place
        self._progress = progress
        self._parts = forms.parts
        self._done = 0
        self._total = num_bytes
        self._reads = Reads()
        self._counting = Lock()

    def fill(self) -> ModelWeights:
        spec = self._spec
        embedding = self._linear(["model.embed_tokens"], has_bias=False)
        layers = tuple(self._layers(spec))
        final_norm = self._norm("model.norm.weight")
        lm_head = embedding if spec.tie_embeddings else self._linear(["lm_head"], has_bias=False)
        self._reads.run()
        return ModelWeights(embedding, layers, final_norm, lm_head)

    def _layers(self, spec: ModelSpec) -> Iterator[LayerWeights]:
        for index, layer in enumerate(spec.layers):
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            norms = [self._norm(f"{prefix}.{name}.weight") for name in layer_norms(spec)]
            yield LayerWeights(
                attention_norm=norms[0],
                qkv=self._linear([f"{attention}.{name}_proj" for name in "qkv"], spec.qkv_bias),
                out=self._linear([f"{attention}.o_proj"], spec.out_bias),
                mlp_norm=norms[1],
                mlp=self._sparse_mlp(f"{prefix}.mlp")
                if layer.is_sparse
                else self._mlp(f"{prefix}.mlp", spec.mlp_bias),
                head_norms=self._head_norms(attention) if spec.has_head_norms else None,
                attention_post_norm=norms[2] if spec.has_post_norms else None,
                mlp_post_norm=norms[3] if spec.has_post_norms else None,
            )

    def _mlp(self, prefix: str, has_bias: bool) -> Mlp:
        gate_up = self._linear([f"{prefix}.gate_proj", f"{prefix}.up_proj"], has_bias)
        return Mlp(gate_up, self._linear([f"{prefix}.down_proj"], has_bias))

    def _sparse_mlp(self, prefix: str) -> SparseMlp:
        experts = self._spec.experts
        assert experts is not None, "checked by ModelSpec"
        router = self._linear([f"{prefix}.gate"], has_bias=False)
        chosen_from = range(experts.num_experts)
        return SparseMlp(
            router, tuple(self._mlp(f"{prefix}.experts.{i}", has_bias=False) for i in chosen_from)
        )

    def _head_norms(self, prefix: str) -> Tensor:
        """One row per head, so that queries and keys are normed together."""
        spec = self._spec
        q, k = self._norm(f"{prefix}.q_norm.weight"), self._norm(f"{prefix}.k_norm.weight")
        return torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))

    def _linear(self, names: list[str], has_bias: bool) -> Linear:
        weights, biases = [f"{name}.weight" for name in names], [f"{name}.bias" for name in names]
        # A bias that follows a sum over ranks belongs to one of them.
        bias = self._fuse(biases) if has_bias and biases[0] in self._parts else None
        kind = self._forms.of(weights)
        if kind is None:
            return Linear(self._fuse(weights), bias)
        return Linear(None, bias, quantized=Quantized(kind, self._fuse_blocks(weights, kind)))

    def _norm(self, name: str) -> Tensor:
        # Norms run in float32 whatever the model's dtype, so their weights are kept so.
        norm = torch.empty(self._parts[name].shape, device=self._device)
        self._read(name, norm)
        return norm

    def _fuse(self, names: list[str]) -> Tensor:
        fused, places = self._stack(names, self._parts[names[0]].shape[1:], self._dtype)
        for name, place in zip(names, places, strict=True):
            self._reads.add(self._source.file_of(name), partial(self._read, name, place))
        return fused

    def _fuse_blocks(self, names: list[str], kind: BlockKind) -> Tensor:
        columns = row_bytes(kind, self._parts[names[0]].shape[1])
        fused, places = self._stack(names, (columns,), torch.uint8)
        for name, place in zip(names, places, strict=True):
            if self._source.block_kind(name) is kind:
                self._reads.add(self._source.file_of(name), partial(self._read_blocks, name, place))
            else:
                self._reads.add(self._source.file_of(name), partial(self._round, name, place, kind))
        return fused

    def _stack(self, names: list[str], columns: Shape, dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
        """A place for the rows of all, and that of each."""
        rows = [self._parts[name].shape[0] for name in names]
        stacked = torch.empty((sum(rows), *columns), dtype=dtype, device=self._device)
        return stacked, torch.split(stacked, rows)

    def _read(self, name: str, place: Tensor) -> None:
        self._source.read_into(name, place, self._parts[name])
        self._report(name)

    def _read_blocks(self, name: str, place: Tensor) -> None:
        self._source.read_blocks(name, place, self._parts[name])
        self._report(name)

    def _round(self, name: str, place: Tensor, kind: BlockKind) -> None:
        part, head_dim = self._parts[name], self._spec.head_dim
        # NOTE: whole heads at a time; a file may hold the rows of one in another order.
        step = max(1, _PIECE_ELEMENTS // part.shape[1] // head_dim) * head_dim
        for low in range(0, part.shape[0], step):
            some = part.some_rows(low, min(low + step, part.shape[0]))
            numbers = torch.empty(some.shape)
            self._source.read_into(name, numbers, some)
            place[low : low + step].copy_(quantize(numbers, kind).blocks)
        self._report(name)

    def _report(self, name: str) -> None:
        with self._counting:
            self._done += self._forms.num_bytes(name, self._dtype)
            self._progress(self._done, self._total)
