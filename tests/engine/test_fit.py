"""engine/fit.py: a model that does not fit is refused before its weights are read, with something to try."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contracts.errors import ConfigError
from engine import fit
from engine.spec_hf import spec_from_hf
from engine.tensor_names import expected_tensors, weight_bytes
from engine.weights import load_model
from tests.engine.tiny_models import FAMILIES, family_config, make_config, make_oracle, write_gguf, write_hf

CPU = torch.device("cpu")
SPARSE = spec_from_hf(family_config("mixtral"))
GIB = 1 << 30
LARGE = spec_from_hf(
    make_config(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256, head_dim=128,
        num_attention_heads=32, num_key_value_heads=8,
    )
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_bytes_are_those_of_the_checkpoint(family: str) -> None:
    config = family_config(family)
    elements = sum(parameter.numel() for parameter in make_oracle(config).parameters())
    assert weight_bytes(spec_from_hf(config), 2) == 2 * elements


def test_eight_billion_parameters_need_what_they_are_known_for() -> None:
    assert round(weight_bytes(LARGE, 2) / 1e9, 1) == 16.1
    need = fit.need_of(LARGE, torch.bfloat16, kv_bytes=4 * GIB)
    assert need.total > need.weights + need.kv_cache
    assert need.total < 1.2 * (need.weights + need.kv_cache)
    assert len(expected_tensors(LARGE)) == 32 * 9 + 3


def test_what_does_not_fit_says_what_is_needed_and_what_to_try() -> None:
    with pytest.raises(ConfigError) as caught:
        fit.check_fit(LARGE, torch.float32, CPU, 4 * GIB, lambda device: 20 * GIB)
    message = caught.value.message
    assert "does not fit: needs 36." in message
    assert "weights 29.9" in message
    assert "KV cache 4.00 GiB" in message
    assert "cpu has 20.00 GiB" in message
    assert "model.dtype bfloat16 (needs 21." in message
    assert "a smaller model" in message


def test_a_smaller_kv_cache_is_proposed_where_it_would_do() -> None:
    with pytest.raises(
        ConfigError, match=r"try a KV cache of [12]\.\d\d GiB or less \(engine.kv_cache_bytes or"
    ):
        fit.check_fit(LARGE, torch.bfloat16, CPU, 8 * GIB, lambda device: 20 * GIB)


def test_recorded_steps_are_counted_and_can_be_given_up() -> None:
    """Each keeps its logits: 128,256 float32 of 16 + 64 rows, and of the largest some more at work."""
    graphs = fit.need_of(LARGE, torch.bfloat16, graph_buckets=(16, 64)).graphs
    assert graphs == fit.graph_bytes(LARGE, (16, 64)) > (16 + 64) * 128256 * 4
    assert fit.graph_bytes(LARGE, ()) == 0
    assert fit.graph_bytes(replace(LARGE, layers=SPARSE.layers, experts=SPARSE.experts), (16, 64)) == 0
    free = fit.need_of(LARGE, torch.bfloat16).total
    with pytest.raises(ConfigError, match=r"try engine.cuda_graphs false, a smaller model"):
        fit.check_fit(LARGE, torch.bfloat16, CPU, 0, lambda device: free, graph_buckets=(16, 64))


def test_a_gpu_widens_no_matrix() -> None:
    free = fit.need_of(LARGE, torch.bfloat16).total - 2 * LARGE.vocab_size * LARGE.hidden_size
    fit.check_fit(LARGE, torch.bfloat16, torch.device("cuda"), 0, lambda device: free)
    with pytest.raises(ConfigError, match="cpu has"):
        fit.check_fit(LARGE, torch.bfloat16, CPU, 0, lambda device: free)


def test_rounding_is_proposed_with_what_it_needs(tmp_path: Path) -> None:
    """Of what is in blocks already, nothing is to be had."""
    config = make_config(hidden_size=96)
    for path, expected in (
        (write_hf(tmp_path / "hf", config, make_oracle(config)), True),
        (write_gguf(tmp_path / "x.gguf", make_oracle(config), "Q4_0"), False),
    ):
        with pytest.raises(ConfigError) as caught:
            load_model(path, torch.float32, available=lambda device: 1000, quantization="auto")
        found = re.findall(r"engine.quantization (int\d) \(needs \d+ MiB\)", caught.value.message)
        assert found == (["int8", "int4"] if expected else [])


@pytest.mark.parametrize("free", [None, 64 * GIB])
def test_enough_or_unknown_memory_is_no_reason_to_refuse(free: int | None) -> None:
    fit.check_fit(LARGE, torch.bfloat16, CPU, 8 * GIB, lambda device: free)


def test_no_weight_is_read_of_a_model_that_does_not_fit(tmp_path: Path) -> None:
    config = make_config()
    path = write_hf(tmp_path, config, make_oracle(config))
    read: list[int] = []
    with pytest.raises(ConfigError, match="does not fit"):
        load_model(path, torch.float32, lambda done, total: read.append(done), available=lambda device: 1000)
    assert read == []


def test_free_memory_is_what_the_kernel_can_give_within_the_limit_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    monkeypatch.setattr(fit, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(fit, "_CGROUP", tmp_path)
    assert fit.available_bytes(CPU) == 5000 * 1024
    (tmp_path / "memory.max").write_text("6000000\n")
    assert fit.available_bytes(CPU) == 3_000_000
    monkeypatch.setattr(fit, "_MEMINFO", tmp_path / "absent")
    monkeypatch.setattr(fit, "_CGROUP", tmp_path / "absent")
    assert fit.available_bytes(CPU) is None
