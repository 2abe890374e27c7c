"""A Hugging Face directory as a source of tensors: config.json, generation_config.json and *.safetensors.

The files are opened when asked for their shapes and stay memory-mapped until the source is dropped. Experts are found
in any of three spellings: one tensor per expert and projection, by Qwen's or by Mixtral's names, or all experts of a
layer in one (`experts.gate_up_proj` [E, 2 * inner, hidden], `experts.down_proj` [E, hidden, inner]).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from contracts.errors import ConfigError
from engine.hf_files import end_token_ids, read_json
from engine.parallel.shards import Part
from engine.quantization import BlockKind
from engine.reading import give_back
from engine.spec import ModelSpec
from engine.spec_hf import has_offset_norms, spec_from_hf, text_config

_INDEX = "model.safetensors.index.json"
WORD_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Beside weights and their description, what decides which tokens a text is, and which one ends it."""
_WHOLE = "model.safetensors"
_MIXTRAL_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# Of a model that sees images too, by its writer's version.
_TEXT_PART = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_IMAGE_PART = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies: all of `name`, or the rows [low, high) of its expert number `expert`. `file`: which of the
    directory's."""

    handle: Any
    name: str
    shape: tuple[int, ...]
    file: int
    expert: int | None = None
    low: int = 0

    def read(self, part: Part) -> Tensor:
        """A view of the mapped file, of which only what is looked at is read."""
        found: Tensor = self.handle.get_tensor(self.name)
        if self.expert is not None:
            found = found[self.expert]
        low, high, _ = part.rows.indices(self.shape[0])
        rows = found[self.low + low : self.low + high]
        return rows if rows.dim() == 1 else rows[:, part.columns]


class HfSource:
    """Implements forms.TensorSource. Raises ConfigError for unreadable or incomplete files."""

    def __init__(self, directory: Path) -> None:
        config = read_json(directory / "config.json")
        self.spec: ModelSpec = spec_from_hf(config | {"eos_token_id": list(end_token_ids(directory))})
        self._has_offset_norms = has_offset_norms(config)
        self._sees_images = text_config(config) is not config
        self._shards = _shards(directory)
        words = [path for name in WORD_FILES if (path := directory / name).is_file()]
        self.files: Sequence[Path] = [directory / "config.json", *words, *self._shards]
        self._stored: dict[str, _Stored] = {}
        for file, shard in enumerate(self._shards):
            self._open(shard, file)
        self.tensors: dict[str, tuple[int, ...]] = {name: part.shape for name, part in self._stored.items()}

    def _open(self, shard: Path, file: int) -> None:
        try:
            handle: Any = safe_open(str(shard), framework="pt")
            for name in handle.keys():  # noqa: SIM118 (the handle is not iterable)
                if self._sees_images and _IMAGE_PART.match(name):
                    continue
                stored = _Stored(handle, name, tuple(handle.get_slice(name).get_shape()), file)
                self._stored.update(_parts(_text_name(name) if self._sees_images else name, stored))
        except (OSError, SafetensorError) as exc:
            raise ConfigError(f"expected a safetensors file but could not read {shard}: {exc}") from exc

    def file_of(self, name: str) -> int:
        return self._stored[name].file

    def read_into(self, name: str, target: Tensor, part: Part) -> None:
        """Copy the part from the mapped file, converted. Raises ConfigError if it is not floating-point."""
        tensor = self._stored[name].read(part)
        if not tensor.is_floating_point():
            raise ConfigError(f"tensor {name}: expected floating-point weights but got {tensor.dtype}")
        target.copy_(tensor)
        give_back(tensor.data_ptr(), _span_bytes(tensor))
        if self._has_offset_norms and name.endswith("norm.weight"):
            target.add_(1.0)

    def is_quantized(self, name: str) -> bool:
        """Never: what is no floating-point weight is refused."""
        return False

    def block_kind(self, name: str) -> BlockKind | None:
        """None: such a directory holds numbers."""
        return None

    def read_blocks(self, name: str, target: Tensor, part: Part) -> None:
        raise AssertionError(f"{name}: asked for blocks of a tensor that has none")


def _text_name(name: str) -> str:
    for prefix, text in _TEXT_PART.items():
        if name.startswith(prefix):
            return text + name.removeprefix(prefix)
    return name


def _parts(name: str, stored: _Stored) -> Iterator[tuple[str, _Stored]]:
    """The tensors that one of the file, `name`, holds, by the names of `tensor_names`."""
    fused = _FUSED.fullmatch(name)
    if fused is None or len(stored.shape) != 3:
        yield _expert_name(name), stored
        return
    num_experts, rows, columns = stored.shape
    modules = ["gate_proj", "up_proj"] if fused[2] == "gate_up_proj" else ["down_proj"]
    shape = (rows // len(modules), columns)
    for expert in range(num_experts):
        for index, module in enumerate(modules):
            part = replace(stored, shape=shape, expert=expert, low=index * shape[0])
            yield f"{fused[1]}.{expert}.{module}.weight", part


def _span_bytes(view: Tensor) -> int:
    """From its first number to its last."""
    steps = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return (steps + 1) * view.itemsize


def _expert_name(name: str) -> str:
    """`….block_sparse_moe.experts.3.w2.weight` -> `….mlp.experts.3.down_proj.weight`; other names are kept."""
    head, mixtral, tail = name.partition(".block_sparse_moe.")
    if not mixtral:
        return name
    for short, module in _MIXTRAL_EXPERT.items():
        tail = tail.replace(f".{short}.", f".{module}.")
    return f"{head}.mlp.{tail}"


def _shards(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        weight_map = read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{_INDEX}: expected 'weight_map' to be an object but got {weight_map!r}")
        shards = [directory / name for name in sorted(set(weight_map.values()))]
    elif (
        directory / _WHOLE
    ).is_file():  # beside it, Mistral's directories have the same weights by other names
        shards = [directory / _WHOLE]
    else:
        shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"expected *.safetensors in {directory} but found none")
    for shard in shards:
        if shard.parent != directory:
            raise ConfigError(f"{_INDEX}: expected file names in {directory} but got {shard}")
        if not shard.is_file():
            raise ConfigError(f"{_INDEX}: expected the file {shard} but it is missing")
    return shards
