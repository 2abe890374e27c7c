"""Weights that stay in blocks from the file to memory, and weights that are rounded when asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contracts.errors import ConfigError
from engine import quantization, weights
from engine.parallel.shards import Shard
from engine.quantization import GROUP, BlockKind, quantize, resolve_quantization
from engine.weights import Linear, LoadedModel, load_model
from tests.engine.tiny_models import FAMILIES, family_config, make_config, make_oracle, write_gguf, write_hf

CONFIG = make_config(hidden_size=96, intermediate_size=128, num_attention_heads=6, head_dim=16)


def numbers(matrix: Linear) -> torch.Tensor:
    if matrix.quantized is not None:
        return matrix.quantized.expanded()
    assert matrix.weight is not None
    return matrix.weight


def matrices(model: LoadedModel) -> list[Linear]:
    held = model.weights
    return [held.embedding, held.lm_head, *(m for layer in held.layers for m in layer.matrices)]


@pytest.mark.parametrize("kind", [BlockKind.Q4_0, BlockKind.Q4_1, BlockKind.Q8_0])
def test_blocks_of_a_file_are_kept_and_are_its_numbers(tmp_path: Path, kind: BlockKind) -> None:
    path = write_gguf(tmp_path / "x.gguf", make_oracle(CONFIG), kind.name)
    kept = load_model(path, torch.float32, quantization="auto")
    expanded = load_model(path, torch.float32)
    for ours, theirs in zip(matrices(kept), matrices(expanded), strict=True):
        assert ours.quantized is not None
        assert ours.quantized.kind is kind
        assert theirs.quantized is None
        assert torch.equal(numbers(ours), numbers(theirs))


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_what_the_file_quantized_is_not_rounded_again(
    tmp_path: Path, mode: quantization.Quantization
) -> None:
    path = write_gguf(tmp_path / "x.gguf", make_oracle(CONFIG), "Q4_0")
    kinds = {
        m.quantized.kind for m in matrices(load_model(path, torch.float32, quantization=mode)) if m.quantized
    }
    assert kinds == {BlockKind.Q4_0}


@pytest.mark.parametrize(("mode", "kind"), [("int8", BlockKind.Q8_0), ("int4", BlockKind.Q4_1)])
def test_float_weights_are_rounded_when_asked_and_the_vocabulary_to_8_bits(
    tmp_path: Path, mode: quantization.Quantization, kind: BlockKind
) -> None:
    path = write_hf(tmp_path, CONFIG, make_oracle(CONFIG))
    exact, rounded = load_model(path, torch.float32), load_model(path, torch.float32, quantization=mode)
    for index, (ours, theirs) in enumerate(zip(matrices(rounded), matrices(exact), strict=True)):
        assert ours.quantized is not None
        assert ours.quantized.kind is (BlockKind.Q8_0 if index < 2 else kind)
        span = numbers(theirs).amax() - numbers(theirs).amin()
        assert (numbers(ours) - numbers(theirs)).abs().max() < span / (200 if index < 2 else 20)
    assert all(m.quantized is None for m in matrices(load_model(path, torch.float32, quantization="auto")))


def test_int4_is_nearer_than_codes_that_span_from_end_to_end() -> None:
    """By a twentieth of the squared error, of what weights look like."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    groups = weight.view(64, -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    spanned = ((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low
    error = (quantize(weight, BlockKind.Q4_1).expanded() - weight).square().mean()
    assert error < 0.95 * (spanned - groups).square().mean()


def test_what_is_a_line_of_16_steps_is_kept_as_it_is() -> None:
    codes = torch.randint(0, 16, (8, 4, GROUP), generator=torch.Generator().manual_seed(2)).float()
    codes[..., 0], codes[..., 1] = 0, 15
    weight = (codes * 0.25 - 1.5).view(8, -1)
    weight[0, :GROUP], weight[1, :GROUP] = 0.75, 0.0  # no step at all
    assert torch.equal(quantize(weight, BlockKind.Q4_1).expanded(), weight)


class LargestResult(TorchDispatchMode):
    """Bytes of the largest tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("kind", [BlockKind.Q4_1, BlockKind.Q8_0])
def test_rounding_a_matrix_needs_little_memory_beyond_its_blocks(
    kind: BlockKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "_PIECE_ELEMENTS", 1 << 14)
    weight = torch.randn(4096, 64)
    with LargestResult() as seen:
        blocks = quantize(weight, kind).blocks
    assert seen.num_bytes == blocks.nbytes < weight.nbytes / 3
    rows = [quantize(weight[low : low + 1000], kind).blocks for low in range(0, 4096, 1000)]
    assert torch.equal(blocks, torch.cat(rows))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_rounding_a_file_never_holds_a_whole_matrix_of_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, size: int
) -> None:
    """Also where a file has the rows of heads in pairs, and of a rank, which reads some rows or columns."""
    monkeypatch.setattr(weights, "_PIECE_ELEMENTS", 1 << 10)
    oracle = make_oracle(CONFIG)
    path = write_gguf(tmp_path / "x.gguf", oracle) if form == "gguf" else write_hf(tmp_path, CONFIG, oracle)
    shard = Shard(size - 1, size)
    exact = load_model(path, torch.float32, shard=shard)
    with LargestResult() as seen:
        model = load_model(path, torch.float32, quantization="int4", shard=shard)
    assert seen.num_bytes < max(numbers(matrix).nbytes for matrix in matrices(exact)) / 2
    for index, (ours, theirs) in enumerate(zip(matrices(model), matrices(exact), strict=True)):
        assert (ours.quantized is None) == (numbers(theirs).shape[1] % GROUP > 0)
        if ours.quantized is not None:
            kind = BlockKind.Q8_0 if index < 2 else BlockKind.Q4_1
            assert torch.equal(numbers(ours), quantize(numbers(theirs), kind).expanded())


def test_rows_that_are_no_whole_blocks_stay_numbers(tmp_path: Path) -> None:
    config = make_config(hidden_size=48, intermediate_size=64)
    model = load_model(write_hf(tmp_path, config, make_oracle(config)), torch.float32, quantization="int8")
    forms = {
        m.quantized is not None for layer in model.weights.layers for m in (layer.qkv, layer.mlp.gate_up)
    }
    assert forms == {False}
    assert model.weights.layers[0].mlp.down.quantized is not None


@pytest.mark.parametrize("family", [family for family in FAMILIES if "moe" in family or family == "mixtral"])
def test_a_router_is_never_rounded(tmp_path: Path, family: str) -> None:
    config = {**family_config(family), "hidden_size": 96}
    model = load_model(write_hf(tmp_path, config, make_oracle(config)), torch.float32, quantization="int4")
    sparse = [layer.mlp for layer in model.weights.layers if hasattr(layer.mlp, "router")]
    assert sparse
    assert all(mlp.router.quantized is None for mlp in sparse)
    assert all(expert.gate_up.quantized is not None for mlp in sparse for expert in mlp.experts)


def test_progress_counts_blocks_as_they_are(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", make_oracle(CONFIG), "Q4_0")
    seen: list[tuple[int, int]] = []
    model = load_model(path, torch.float32, lambda *done: seen.append(done), quantization="auto")
    held = sum(m.quantized.blocks.numel() for m in matrices(model) if m.quantized is not None)
    assert seen[-1][0] == seen[-1][1] >= held
    assert seen[-1][1] - held == 5 * 96 * 4  # the norms


def test_the_check_of_memory_counts_blocks_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "x.gguf", make_oracle(CONFIG), "Q4_0")
    asked: list[int] = []
    monkeypatch.setattr(weights, "check_fit", lambda *arguments: asked.append(arguments[5]))
    kept = load_model(path, torch.float32, quantization="auto")
    load_model(path, torch.float32)
    blocks = sum(m.quantized.blocks.numel() for m in matrices(kept) if m.quantized is not None)
    norms = 5 * 96 * 4
    assert asked[0] == blocks + norms
    assert asked[1] == blocks // 18 * 32 * 4 + norms


def test_without_kernels_auto_is_none_and_a_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_quantization("auto", cuda) == "auto"
    assert resolve_quantization("int8", cuda) == "int8"
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    assert resolve_quantization("auto", cuda) == "none"
    with pytest.raises(ConfigError, match=r"expected auto or none but got int8 \(device cuda without"):
        resolve_quantization("int8", cuda)
    monkeypatch.setattr(quantization, "library", lambda: None)
    assert resolve_quantization("auto", cpu) == "none"
    with pytest.raises(ConfigError, match=r"got int4 \(no C\+\+ compiler that works"):
        resolve_quantization("int4", cpu)
    monkeypatch.setattr(quantization, "library", object)
    assert resolve_quantization("auto", cpu) == "auto"
    assert resolve_quantization("int4", cpu) == "int4"
