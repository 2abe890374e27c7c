"""A Hugging Face directory as a source of tensors: config.json, generation_config.json and *.safetensors.

The files are opened when asked for their shapes and stay memory-mapped until the source is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from contracts.errors import ConfigError
from engine.spec import ModelSpec, spec_from_hf

_INDEX = "model.safetensors.index.json"


class HfSource:
    """Implements weights.TensorSource. Raises ConfigError for unreadable or incomplete files."""

    def __init__(self, directory: Path) -> None:
        config = _read_json(directory / "config.json")
        self.spec: ModelSpec = spec_from_hf(_with_generation_config(config, directory))
        self._shards = _shards(directory)
        self.files: Sequence[Path] = [directory / "config.json", *self._shards]
        self.tensors: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}
        for shard in self._shards:
            self._open(shard)

    def _open(self, shard: Path) -> None:
        try:
            handle: Any = safe_open(str(shard), framework="pt")
            for name in handle.keys():  # noqa: SIM118 (the handle is not iterable)
                self._handles[name] = handle
                self.tensors[name] = tuple(handle.get_slice(name).get_shape())
        except (OSError, SafetensorError) as exc:
            raise ConfigError(f"expected a safetensors file but could not read {shard}: {exc}") from exc

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy the tensor from the mapped file, converted. Raises ConfigError if it is not floating-point."""
        tensor: Tensor = self._handles[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise ConfigError(f"tensor {name}: expected floating-point weights but got {tensor.dtype}")
        target.copy_(tensor)


def _with_generation_config(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """`config` with every stop token either file names; chat models list their end-of-turn only in the second."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return config
    ids: dict[int, None] = {}
    for value in (config.get("eos_token_id"), _read_json(path).get("eos_token_id")):
        ids.update(dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value]))
    return {**config, "eos_token_id": list(ids)}


def _shards(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        weight_map = _read_json(directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{_INDEX}: expected 'weight_map' to be an object but got {weight_map!r}")
        shards = [directory / name for name in sorted(set(weight_map.values()))]
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"expected JSON in {path} but could not read it: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"expected a JSON object in {path} but got {type(value).__name__}")
    return value
