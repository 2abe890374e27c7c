"""What a worker asks memory for before it reads weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from contracts.config import load_config
from contracts.errors import ConfigError
from engine.spec_hf import spec_from_hf
from tests.engine.tiny_models import make_config, make_oracle, write_hf
from worker.loading import CPU_KV_BYTES, Solo, load_engine, planned_kv_bytes

SPEC = spec_from_hf(make_config())
BLOCK_BYTES = SPEC.num_layers * 2 * SPEC.num_kv_heads * 16 * SPEC.head_dim * 2


@pytest.mark.parametrize(
    ("changes", "device", "expected"),
    [
        ({}, "cpu", CPU_KV_BYTES),
        ({}, "cuda", 0),
        ({"engine.kv_cache_bytes": 5000}, "cpu", 5000),
        ({"engine.kv_cache_bytes": 5000}, "cuda", 5000),
        ({"engine.num_blocks": 8}, "cpu", 8 * BLOCK_BYTES),
        ({"engine.num_blocks": 8}, "cuda", 8 * BLOCK_BYTES),
    ],
)
def test_what_is_known_of_the_cache_is_planned_for(
    changes: dict[str, int], device: str, expected: int
) -> None:
    config = load_config(None, {"engine.block_size": 16, **changes})
    assert planned_kv_bytes(config.engine, device, torch.bfloat16, SPEC) == expected


def test_blocks_that_do_not_fit_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    path = write_hf(tmp_path, make_config(), make_oracle(make_config()))
    config = load_config(None, {"engine.num_blocks": 1 << 40, "engine.device": "cpu"})
    read: list[int] = []
    with pytest.raises(ConfigError, match=r"does not fit: .*try a KV cache of .* or engine.num_blocks\)"):
        load_engine(config, path, Solo(), lambda done, _total: read.append(done))
    assert read == []
