"""Weights on their way from a checkpoint into memory.

    path ──► TensorSource (HF directory | GGUF file) ──► every name and shape checked
                                                          ──► one tensor at a time, converted straight into its place

Projections that read the same input are stored fused (q|k|v and gate|up, rows in this order), so a layer does four
matrix products. Files are memory-mapped: at no time does a second full copy exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from contracts.errors import ConfigError
from engine.gguf_weights import GgufSource
from engine.hf_weights import HfSource
from engine.spec import ModelSpec

Progress = Callable[[int, int], None]
_SAMPLE_BYTES = 1 << 20


class TensorSource(Protocol):
    """A checkpoint under Hugging Face tensor names."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def files(self) -> Sequence[Path]: ...

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]: ...

    def read_into(self, name: str, target: Tensor) -> None: ...


@dataclass(slots=True)
class Linear:
    """Weight [out, in] and bias [out] of one matrix product.

    `packed` is a device-specific copy that a kernel set may make instead of `weight`; whoever packs drops `weight`
    (so that memory holds one copy) unless `is_shared` says that somebody else reads it too.
    """

    weight: Tensor | None
    bias: Tensor | None = None
    packed: Tensor | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`embedding` [V, hidden]; tied models share its storage with `lm_head`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`fingerprint` identifies the files; two workers whose fingerprints differ must not exchange KV."""

    spec: ModelSpec
    weights: ModelWeights
    fingerprint: str


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
    path: Path, dtype: torch.dtype, progress: Progress | None = None, device: torch.device | str = "cpu"
) -> LoadedModel:
    """Read a Hugging Face directory or a GGUF file. `progress` gets (bytes done, bytes in all), as held in memory.

    Raises ConfigError for a path that is neither, an unsupported model, and missing, extra or misshaped tensors.
    """
    source = open_source(path)
    _check_tensors(source)
    fingerprint = fingerprint_files(source.files)
    weights = _Filler(source, dtype, torch.device(device), progress or (lambda done, total: None)).fill()
    return LoadedModel(source.spec, weights, fingerprint)


def open_source(path: Path) -> TensorSource:
    """The checkpoint at `path`, header read, no tensor read yet. Raises ConfigError if there is none."""
    if path.is_file() and path.suffix == ".gguf":
        return GgufSource(path)
    if path.is_dir() and (path / "config.json").is_file():
        return HfSource(path)
    raise ConfigError(f"expected a .gguf file or a directory with a config.json but got {path}")


def fingerprint_files(files: Sequence[Path]) -> str:
    """sha256 over each file's name, size, first and last MiB: cheap, and different for any two real checkpoints."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this spec holds, by Hugging Face name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = {"q_proj": (q_rows, hidden), "k_proj": (kv_rows, hidden), "v_proj": (kv_rows, hidden)}
    attention["o_proj"] = (hidden, q_rows)
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for block, has_bias, matrices in (
            ("self_attn", spec.attention_bias, attention),
            ("mlp", spec.mlp_bias, mlp),
        ):
            for name, shape in matrices.items():
                shapes[f"{prefix}.{block}.{name}.weight"] = shape
                if has_bias:
                    shapes[f"{prefix}.{block}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


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
    """Reads tensors one by one into their final, possibly fused, place."""

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._shapes = expected_tensors(source.spec)
        self._done = 0
        self._total = sum(self._num_bytes(shape) for shape in self._shapes.values())

    def fill(self) -> ModelWeights:
        spec = self._source.spec
        embedding = self._fuse(["model.embed_tokens.weight"])
        layers = tuple(self._layers(spec))
        final_norm = self._norm("model.norm.weight")
        if spec.tie_embeddings:
            lm_head = Linear(embedding, is_shared=True)
        else:
            lm_head = Linear(self._fuse(["lm_head.weight"]))
        return ModelWeights(embedding, layers, final_norm, lm_head)

    def _layers(self, spec: ModelSpec) -> Iterator[LayerWeights]:
        for index in range(spec.num_layers):
            prefix = f"model.layers.{index}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            qkv = [f"{attention}.{name}_proj" for name in "qkv"]
            yield LayerWeights(
                attention_norm=self._norm(f"{prefix}.input_layernorm.weight"),
                qkv=self._linear(qkv, spec.attention_bias),
                out=self._linear([f"{attention}.o_proj"], spec.attention_bias),
                mlp_norm=self._norm(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=self._linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], spec.mlp_bias),
                down=self._linear([f"{mlp}.down_proj"], spec.mlp_bias),
            )

    def _linear(self, names: list[str], has_bias: bool) -> Linear:
        weight = self._fuse([f"{name}.weight" for name in names])
        bias = self._fuse([f"{name}.bias" for name in names]) if has_bias else None
        return Linear(weight, bias)

    def _norm(self, name: str) -> Tensor:
        # Norms run in float32 whatever the model's dtype, so their weights are kept so.
        return self._fuse([name], torch.float32)

    def _fuse(self, names: list[str], dtype: torch.dtype | None = None) -> Tensor:
        rows = [self._shapes[name][0] for name in names]
        shape = (sum(rows), *self._shapes[names[0]][1:])
        fused = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        low = 0
        for name, num_rows in zip(names, rows, strict=True):
            self._source.read_into(name, fused[low : low + num_rows])
            low += num_rows
            self._done += self._num_bytes(self._shapes[name])
            self._progress(self._done, self._total)
        return fused

    def _num_bytes(self, shape: tuple[int, ...]) -> int:
        return torch.Size(shape).numel() * self._dtype.itemsize
