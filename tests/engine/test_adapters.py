"""Adapters are checked against their base before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from contracts.errors import ConfigError
from engine.adapters import check_adapters
from engine.embedded import check_model
from engine.spec_hf import spec_from_hf
from tests.engine.tiny_models import make_config

SPEC = spec_from_hf(make_config())
Q = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN = "base_model.model.model.layers.1.mlp.down_proj"
GOOD = {
    f"{Q}.lora_A.weight": (4, 48), f"{Q}.lora_B.weight": (96, 4),
    f"{DOWN}.lora_A.weight": (4, 64), f"{DOWN}.lora_B.weight": (48, 4),
}  # fmt: skip


def write_adapter(folder: Path, shapes: dict[str, tuple[int, ...]] | None = None, **config: Any) -> Path:
    folder.mkdir()
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "modules_to_save": None}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    tensors = {name: torch.zeros(shape) for name, shape in (GOOD if shapes is None else shapes).items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def test_an_adapter_of_the_bases_matrices_fits(tmp_path: Path) -> None:
    check_adapters(
        {"a": str(write_adapter(tmp_path / "a")), "b": str(write_adapter(tmp_path / "b", r=4))}, SPEC
    )
    check_adapters({}, SPEC)


@pytest.mark.parametrize(
    ("shapes", "config", "message"),
    [
        (None, {"peft_type": "IA3"}, "expected peft_type='LORA' but got 'IA3'"),
        (None, {"use_dora": True}, "expected use_dora=False but got True"),
        (None, {"bias": "all"}, "expected bias='none'"),
        (None, {"modules_to_save": ["lm_head"]}, "expected modules_to_save"),
        (None, {"r": 0}, "expected r from 1 to 1024 but got 0"),
        (None, {"r": "4"}, "expected .*an integer"),
        ({}, {}, "expected weights but there are none"),
        ({f"{Q}.lora_A.weight": (4, 48)}, {}, r"expected A \[rank, 48\] and B \[96, rank\] but got \[4, 48\] and \[\]"),
        ({f"{Q}.lora_A.weight": (4, 64), f"{Q}.lora_B.weight": (96, 4)}, {}, r"q_proj: expected A \[rank, 48\]"),
        ({f"{Q}.lora_A.weight": (4, 48), f"{Q}.lora_B.weight": (96, 8)}, {}, r"q_proj: expected A \[rank, 48\]"),
        (GOOD | {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": (4, 48)}, {}, "layers.9"),
        (GOOD | {"base_model.model.model.norm.lora_A.weight": (4, 48)}, {}, "expected matrices of the base"),
        (GOOD | {"base_model.model.lm_head.weight": (96, 48)}, {}, "expected matrices of the base"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_name(
    shapes: dict[str, tuple[int, ...]] | None, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", shapes, **config)
    with pytest.raises(ConfigError, match=rf"^model\.adapters\.mine: .*{message}"):
        check_adapters({"mine": str(path)}, SPEC)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", b"{"), ("adapter_config.json", b"[]"), ("adapter_config.json", b"\xff"),
        ("adapter_model.safetensors", b""), ("adapter_model.safetensors", b"\xff" * 20),
        ("adapter_model.safetensors", b"\x02" + bytes(7) + b"[]"), ("adapter_model.safetensors", None),
        ("adapter_model.safetensors", b"\x09" + bytes(7) + b'{"a": {}}'), ("adapter_config.json", None),
    ],
)  # fmt: skip
def test_files_that_are_broken_or_missing_are_refused(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a")
    (path / name).unlink()
    if content is not None:
        (path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^model\.adapters\.mine: "):
        check_adapters({"mine": str(path)}, SPEC)


def test_a_model_is_checked_with_its_adapters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config()))
    path = write_adapter(tmp_path / "a", {f"{Q}.lora_A.weight": (4, 32), f"{Q}.lora_B.weight": (96, 4)})
    with pytest.raises(ConfigError, match=r"model\.adapters\.mine"):
        check_model(tmp_path, adapters={"mine": str(path)})
