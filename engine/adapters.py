"""LoRA adapters as PEFT writes them: whether one fits a base model, from its description and the header of its weights.

    adapter_config.json ─► kind, rank ─► header of adapter_model.safetensors ─► each pair A, B against its matrix

No weight is read here, and none is applied anywhere yet: the coordinator lists adapters and refuses requests for them
(docs/decisions.md, 20). No torch: a server checks them before it starts anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError
from engine.spec import ModelSpec
from engine.spec_fields import Fields
from engine.tensor_names import Shape, expected_tensors

MAX_RANK = 1024
_MAX_HEADER_BYTES = 64 << 20
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
# Field -> values with which an adapter is pairs of matrices and nothing else.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "use_dora": (None, False), "bias": (None, "none"), "modules_to_save": (None, []),
    "fan_in_fan_out": (None, False), "lora_bias": (None, False),
}  # fmt: skip


def check_adapters(adapters: Mapping[str, str], spec: ModelSpec) -> None:
    """`adapters`: folder by name. Raises ConfigError naming the adapter that is not there or does not fit."""
    for name, path in adapters.items():
        try:
            _check(Path(path).expanduser(), spec)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.adapters.{name}: expected a LoRA adapter but: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"model.adapters.{name}: {path}: {error.message}") from error


def _check(folder: Path, spec: ModelSpec) -> None:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ConfigError(f"expected a JSON object in adapter_config.json but got {type(config).__name__}")
    for field, values in _PLAIN.items():
        if config.get(field) not in values:
            raise ConfigError(
                f"adapter_config.json: expected {field}={values[-1]!r} but got {config.get(field)!r}"
            )
    rank = Fields(config, "adapter_config.json").integer("r")
    if not 0 < rank <= MAX_RANK:
        raise ConfigError(f"adapter_config.json: expected r from 1 to {MAX_RANK} but got {rank}")
    _check_pairs(_shapes(folder / "adapter_model.safetensors"), spec)


def _check_pairs(shapes: dict[str, Shape], spec: ModelSpec) -> None:
    """A [rank, in] and B [out, rank] for a matrix [out, in] of the base."""
    base, pairs = expected_tensors(spec), dict[str, dict[str, Shape]]()
    for name, shape in shapes.items():
        found = _NAME.fullmatch(name)
        if found is None or len(base.get(f"{found['module']}.weight", ())) != 2:
            raise ConfigError(f"expected matrices of the base model but got {name!r}")
        pairs.setdefault(found["module"], {})[found["part"]] = shape
    if not pairs:
        raise ConfigError("expected weights but there are none")
    for module, parts in pairs.items():
        rows, columns = base[f"{module}.weight"]
        first, second = parts.get("A", ()), parts.get("B", ())
        if first[1:] != (columns,) or second != (rows, *first[:1]):
            raise ConfigError(
                f"{module}: expected A [rank, {columns}] and B [{rows}, rank] but got {list(first)} and {list(second)}"
            )


def _shapes(path: Path) -> dict[str, Shape]:
    """By the header that a safetensors file begins with: its length in 8 bytes, then JSON."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _MAX_HEADER_BYTES:
            raise ConfigError(f"{path.name}: expected a header but got {size} bytes of it")
        header = json.loads(file.read(size))
    try:
        return {name: tuple(info["shape"]) for name, info in header.items() if name != "__metadata__"}
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path.name}: expected a header of names and shapes") from error
