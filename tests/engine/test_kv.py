"""The slab: its plan, float8 with its scales, scratch blocks."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contracts.blocks import KvLayout
from contracts.errors import ConfigError
from engine.kv import FP8, KvSlab, SlabPlan, num_blocks_for, resolve_kv_dtype, whole_layout
from engine.kv_scales import scales_of
from engine.model import Model
from engine.parallel.shards import Shard
from engine.runner import Runner
from engine.weights import LoadedModel, load_model
from kvtransfer.pages import Pages
from kvtransfer.reshard import Reshard, check_layouts
from tests.engine.tiny_models import BLOCK_SIZE, family_config, make_oracle, write_hf

CPU = torch.device("cpu")


def load(tmp_path: Path, family: str, bias: float = 0.0, **changes: int) -> LoadedModel:
    config = family_config(family, **changes)
    oracle = make_oracle(config)
    with torch.no_grad():
        for layer in oracle.model.layers:
            if bias:
                layer.self_attn.k_proj.bias[3], layer.self_attn.v_proj.bias[12] = bias, -bias
    return load_model(write_hf(tmp_path / family, config, oracle), torch.float32)


def make_float8(model: LoadedModel, scale: float = 2.0, block_size: int = BLOCK_SIZE) -> KvSlab:
    scales = torch.full((model.spec.num_layers, 2, model.spec.num_kv_heads), scale)
    return SlabPlan(model.spec, 6, block_size, FP8, scales=scales).allocate()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def large_plan(tmp_path: Path) -> tuple[SlabPlan, int]:
    plan = SlabPlan(load(tmp_path, "llama").spec, 1, BLOCK_SIZE, torch.float32)
    plan = replace(plan, num_blocks=(64 << 20) // plan.allocate().bytes_per_block)
    return plan, math.prod(plan.shape) * plan.dtype.itemsize


def test_a_new_slab_has_all_its_pages(tmp_path: Path) -> None:
    plan, num_bytes = large_plan(tmp_path)
    before = resident_bytes()
    slab = plan.allocate()
    assert resident_bytes() - before >= 0.95 * num_bytes
    assert not slab.storage.any()


def test_the_file_of_a_rank_has_all_its_pages(tmp_path: Path) -> None:
    plan, num_bytes = large_plan(tmp_path)
    with os.fdopen(plan.shared_file()) as file:
        status = os.fstat(file.fileno())
    assert status.st_size == num_bytes
    assert status.st_blocks * 512 >= num_bytes


def test_scales_are_one_unless_the_weights_say_more(tmp_path: Path) -> None:
    assert scales_of(load(tmp_path, "llama")).eq(1).all()
    assert scales_of(load(tmp_path, "qwen2")).eq(1).all()


def test_large_biases_are_kept_from_being_cut(tmp_path: Path) -> None:
    """Twice the bias, over 448, up to the next power of two; of the head that has it."""
    scales = scales_of(load(tmp_path, "qwen2", bias=500.0))
    assert scales.shape == (2, 2, 2)
    assert scales[0].tolist() == [[4.0, 1.0], [1.0, 4.0]]


def test_normed_keys_have_a_bound(tmp_path: Path) -> None:
    model = load(tmp_path, "qwen3")
    norms = model.weights.layers[1].head_norms
    assert norms is not None
    norms[model.spec.num_heads :] = 200.0  # times sqrt(16), over 448
    assert scales_of(model)[1].tolist() == [[2.0, 2.0], [1.0, 1.0]]


@pytest.mark.parametrize("degree", [1, 2, 6])
def test_ranks_together_name_the_scales_of_one(tmp_path: Path, degree: int) -> None:
    """So that workers of different numbers of ranks find each other's KV to be the same."""
    whole = load(tmp_path, "qwen2", bias=500.0, intermediate_size=96)
    parts = [load_model(tmp_path / "qwen2", torch.float32, shard=Shard(r, degree)) for r in range(degree)]
    one, *slabs = (SlabPlan(m.spec, 6, 4, FP8, scales=scales_of(m)).allocate() for m in (whole, *parts))
    together = whole_layout(slabs[0], [slab.scales for slab in slabs], whole.spec.num_kv_heads)
    assert together == one.layout
    assert together.scales


def test_layouts_name_dtype_and_scales(tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    first, second, other = (make_float8(model, scale).layout for scale in (2.0, 2.0, 4.0))
    assert first == second != other
    assert first.dtype == "float8_e4m3fn"
    assert (
        first.bytes_per_block * 4 == KvSlab.allocate(model.spec, 1, BLOCK_SIZE, torch.float32).bytes_per_block
    )
    assert num_blocks_for(10 * first.bytes_per_block, model.spec, BLOCK_SIZE, FP8) == 10
    check_layouts(first, second)
    with pytest.raises(ConfigError, match=r"scales='\w{16}' but peer has '\w{16}'"):
        check_layouts(first, other)
    with pytest.raises(ConfigError, match=r"dtype=float8_e4m3fn .* but peer has bfloat16"):
        check_layouts(first, KvLayout(2, 2, 16, BLOCK_SIZE, "bfloat16"))


@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 2 * BLOCK_SIZE])
def test_float8_blocks_are_handed_over_bit_for_bit(tmp_path: Path, block_size: int) -> None:
    """Also into blocks of another size, and with bytes that are no number of the format's."""
    model = load(tmp_path, "llama")
    source, target = make_float8(model), make_float8(model, block_size=block_size)
    raw = source.data.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    ours, theirs = Pages(source.data, source.layout), Pages(target.data, target.layout)
    sender = ours if block_size == BLOCK_SIZE else Reshard(ours, target.layout)
    wire = torch.empty(sender.num_bytes(0, 11), dtype=torch.uint8)
    sender.gather([4, 1, 3], 0, 11, wire)
    theirs.scatter([2, 0, 5], 0, 11, wire)

    def tokens(slab: KvSlab, block_ids: list[int]) -> torch.Tensor:
        blocks = slab.data.view(torch.uint8)[block_ids]
        return blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :11]

    assert torch.equal(tokens(target, [2, 0, 5]), tokens(source, [4, 1, 3]))


def test_scratch_blocks_lie_behind_those_that_are_handed_out(tmp_path: Path) -> None:
    spec = load(tmp_path, "llama").spec
    slab = SlabPlan(spec, 5, BLOCK_SIZE, torch.float32, num_scratch=1).allocate()
    assert slab.num_blocks == len(slab.data) == 5
    assert slab.data.is_contiguous()
    assert slab.layer(0).shape[0] == 6
    slab.layer(1)[5] = 1.0
    assert not slab.data.any()
    slab.clear(5)
    assert not slab.storage.any()


def test_a_slab_is_float8_with_scales_or_of_the_models_dtype(tmp_path: Path) -> None:
    model = load(tmp_path, "llama")
    Runner(Model(model), make_float8(model))
    with pytest.raises(ConfigError, match="kv slab"):
        Runner(Model(model), KvSlab(make_float8(model).storage))


def test_float8_is_for_gpus() -> None:
    assert resolve_kv_dtype("auto", torch.bfloat16, CPU) == torch.bfloat16
    assert resolve_kv_dtype("fp8", torch.bfloat16, torch.device("cuda")) == FP8
    with pytest.raises(ConfigError, match=r"engine.kv_dtype: expected auto on a CPU but got fp8"):
        resolve_kv_dtype("fp8", torch.float32, CPU)
