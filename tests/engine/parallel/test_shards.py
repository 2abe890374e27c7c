"""engine/parallel/shards.py and the readers: the parts of all ranks are the model, and nothing is read twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from contracts.errors import ConfigError
from engine.parallel.shards import Shard, check_degree, degrees
from engine.quantization import Quantization
from engine.spec_hf import spec_from_hf
from engine.weights import Linear, LoadedModel, Mlp, SparseMlp, load_model
from tests.engine.tiny_models import FAMILIES, family_config, make_config, make_oracle, write_gguf, write_hf


def matrix(linear: Linear) -> Tensor:
    if linear.quantized is not None:
        return linear.quantized.expanded()
    assert linear.weight is not None
    return linear.weight


def mlps(mlp: Mlp | SparseMlp) -> tuple[Mlp, ...]:
    return mlp.experts if isinstance(mlp, SparseMlp) else (mlp,)


def check_parts(whole: LoadedModel, parts: list[LoadedModel]) -> None:
    """Put together, `parts` are `whole`."""
    spec, size = whole.spec, len(parts)

    def joined(name: str) -> Tensor:
        return torch.cat([matrix(getattr(part.weights, name)) for part in parts])

    assert torch.equal(joined("embedding"), matrix(whole.weights.embedding))
    assert torch.equal(joined("lm_head"), matrix(whole.weights.lm_head))
    for index, layer in enumerate(whole.weights.layers):
        layers = [part.weights.layers[index] for part in parts]
        heads = [part.spec.num_heads * spec.head_dim for part in parts]
        kv = [part.spec.num_kv_heads * spec.head_dim for part in parts]
        split = [matrix(mine.qkv).split([q, k, k]) for mine, q, k in zip(layers, heads, kv, strict=True)]
        assert torch.equal(
            torch.cat([torch.cat(column) for column in zip(*split, strict=True)]), matrix(layer.qkv)
        )
        assert torch.equal(torch.cat([matrix(mine.out) for mine in layers], dim=1), matrix(layer.out))
        assert all(torch.equal(mine.attention_norm, layer.attention_norm) for mine in layers)
        for number, mlp in enumerate(mlps(layer.mlp)):
            mine = [mlps(part.mlp)[number] for part in layers]
            halves = zip(*(matrix(part.gate_up).chunk(2) for part in mine), strict=True)
            assert torch.equal(torch.cat([torch.cat(half) for half in halves]), matrix(mlp.gate_up))
            assert torch.equal(torch.cat([matrix(part.down) for part in mine], dim=1), matrix(mlp.down))
        assert [part.shard for part in parts] == [Shard(rank, size) for rank in range(size)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_the_parts_of_all_ranks_are_the_model(tmp_path: Path, family: str, kind: str) -> None:
    config = family_config(family)
    oracle = make_oracle(config)
    if kind == "hf":
        path = write_hf(tmp_path, config, oracle)
    else:
        path = write_gguf(tmp_path / "x.gguf", oracle)
    whole = load_model(path, torch.float32)
    check_parts(whole, [load_model(path, torch.float32, shard=Shard(rank, 2)) for rank in range(2)])


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("mode", ["auto", "none"])
def test_parts_of_a_quantized_file_keep_its_blocks(
    tmp_path: Path, quantization: str, mode: Quantization
) -> None:
    config = make_config(hidden_size=128, num_attention_heads=4, head_dim=32, intermediate_size=192)
    path = write_gguf(tmp_path / "x.gguf", make_oracle(config), quantization)
    whole = load_model(path, torch.float32, quantization=mode)
    parts = [load_model(path, torch.float32, quantization=mode, shard=Shard(rank, 2)) for rank in range(2)]
    check_parts(whole, parts)
    kept = [matrix.quantized is not None for part in parts for matrix in part.weights.layers[0].matrices]
    assert kept == [mode == "auto"] * len(kept)


def test_columns_that_cut_a_block_are_expanded(tmp_path: Path) -> None:
    config = make_config(hidden_size=96, num_attention_heads=4, head_dim=32, intermediate_size=96)
    path = write_gguf(tmp_path / "x.gguf", make_oracle(config), "Q8_0")
    parts = [load_model(path, torch.float32, quantization="auto", shard=Shard(rank, 2)) for rank in range(2)]
    check_parts(load_model(path, torch.float32, quantization="auto"), parts)
    (layer, *_) = parts[1].weights.layers
    assert isinstance(layer.mlp, Mlp)
    assert layer.mlp.down.quantized is None
    assert layer.mlp.gate_up.quantized is not None
    assert layer.out.quantized is not None


def test_biases_behind_a_sum_are_added_once(tmp_path: Path) -> None:
    config = make_config(attention_bias=True, mlp_bias=True)
    path = write_hf(tmp_path, config, make_oracle(config))
    first, second = (
        load_model(path, torch.float32, shard=Shard(rank, 2)).weights.layers[0] for rank in (0, 1)
    )
    assert isinstance(first.mlp, Mlp)
    assert isinstance(second.mlp, Mlp)
    assert first.out.bias is not None
    assert first.mlp.down.bias is not None
    assert second.out.bias is None
    assert second.mlp.down.bias is None
    assert second.qkv.bias is not None
    assert len(second.qkv.bias) == (3 + 2 * 1) * 16


def test_ranks_beyond_the_kv_heads_share_them(tmp_path: Path) -> None:
    config = make_config(num_attention_heads=8, hidden_size=128)
    path = write_hf(tmp_path, config, make_oracle(config))
    whole = load_model(path, torch.float32).weights.layers[0]
    for rank in range(4):
        part = load_model(path, torch.float32, shard=Shard(rank, 4))
        assert (part.spec.num_heads, part.spec.num_kv_heads) == (2, 1)
        q, k, v = matrix(part.weights.layers[0].qkv).split([32, 16, 16])
        queries, keys, values = matrix(whole.qkv).split([128, 32, 32])
        assert torch.equal(q, queries.view(4, 32, -1)[rank])
        assert torch.equal(k, keys.view(2, 16, -1)[rank // 2])
        assert torch.equal(v, values.view(2, 16, -1)[rank // 2])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}, [1, 3]),
        ({"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}, [1, 2, 4, 8, 16, 32]),
        ({"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864}, [1, 2]),
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 2048}, [1, 2, 4]),
    ],
)  # fmt: skip
def test_which_numbers_of_ranks_work_is_told(changes: dict[str, int], expected: list[int]) -> None:
    spec = spec_from_hf(make_config(**changes))
    assert degrees(spec) == expected
    with pytest.raises(
        ConfigError, match=f"decode.tensor_parallel_size: expected one of {', '.join(map(str, expected))} for"
    ):
        check_degree(spec, 5, "decode.tensor_parallel_size")


def test_memory_is_counted_by_rank(tmp_path: Path) -> None:
    """Each of two ranks asks for half of the weights, and may have half of a CPU's memory."""
    config = make_config(vocab_size=1 << 14, hidden_size=96)
    path = write_hf(tmp_path, config, make_oracle(config))
    totals: list[int] = []
    load_model(
        path, torch.float32, lambda _done, total: totals.append(total), available=lambda _device: 300 << 20
    )
    with pytest.raises(ConfigError, match=r"for each of 2 ranks, cpu has 50 MiB"):
        load_model(path, torch.float32, available=lambda _device: 100 << 20, shard=Shard(1, 2))
    load_model(path, torch.float32, lambda _done, total: totals.append(total), shard=Shard(1, 2))
    assert totals[-1] < 0.55 * totals[0]
