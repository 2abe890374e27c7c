from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from contracts.errors import ConfigError, EngineError
from engine.kv import KvSlab, num_blocks_for
from engine.model import Model
from engine.runner import GPU_CHUNKS, Runner, StepItem
from engine.weights import LoadedModel, load_model
from tests.engine.tiny_models import BLOCK_SIZE, make_config, make_oracle, make_runner, run_prompt, write_hf

LENGTHS = (1, 2, 4, 5, 17, 31, 60, 90)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    config = make_config()
    return load_model(write_hf(tmp_path_factory.mktemp("tiny"), config, make_oracle(config)), torch.float32)


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 96, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def blocks_of(index: int) -> list[int]:
    """Disjoint, unordered blocks for sequence `index` of up to 100 tokens."""
    return [(25 * index + 7 * i % 25) for i in range(25)]


def alone(model: LoadedModel, token_ids: list[int]) -> Tensor:
    return run_prompt(make_runner(model), token_ids, 1000, blocks_of(1))


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 16, 30, 64])
def test_chunked_prefill_equals_whole(model: LoadedModel, chunk: int) -> None:
    prompt = make_prompt(90)
    close(run_prompt(make_runner(model), prompt, chunk, blocks_of(0)), alone(model, prompt))


def test_a_batch_of_prompts_equals_each_alone(model: LoadedModel) -> None:
    prompts = [make_prompt(n, seed=n) for n in LENGTHS]
    runner = make_runner(model, num_blocks=200)
    logits = runner.execute([StepItem(p, 0, blocks_of(i), True) for i, p in enumerate(prompts)])
    for row, prompt in zip(logits, prompts, strict=True):
        close(row, alone(model, prompt))


def test_a_batch_of_decodes_equals_each_alone(model: LoadedModel) -> None:
    prompts = [make_prompt(n, seed=n) for n in LENGTHS]
    runner = make_runner(model, num_blocks=200)
    runner.execute([StepItem(p, 0, blocks_of(i), False) for i, p in enumerate(prompts)])
    for token in (5, 6):
        logits = runner.execute(
            [StepItem([token], len(p), blocks_of(i), True) for i, p in enumerate(prompts)]
        )
        prompts = [[*p, token] for p in prompts]
        for row, prompt in zip(logits, prompts, strict=True):
            close(row, alone(model, prompt))


def test_a_mixed_step_answers_in_item_order(model: LoadedModel) -> None:
    first, second, third, fourth = (make_prompt(n, seed=n) for n in (20, 33, 64, 9))
    runner = make_runner(model, num_blocks=200)
    runner.execute(
        [StepItem(first[:19], 0, blocks_of(0), False), StepItem(third[:16], 0, blocks_of(2), False)]
    )
    runner.execute([StepItem(fourth[:8], 0, blocks_of(3), False)])
    logits = runner.execute(
        [
            StepItem(first[19:], 19, blocks_of(0), True),
            StepItem(third[16:40], 16, blocks_of(2), False),
            StepItem(second, 0, blocks_of(1), True),
            StepItem(fourth[8:], 8, blocks_of(3), True),
        ]
    )
    assert logits.shape == (3, 96)
    assert logits.dtype == torch.float32
    for row, prompt in zip(logits, (first, second, fourth), strict=True):
        close(row, alone(model, prompt))
    last = runner.execute([StepItem(third[40:], 40, blocks_of(2), True)])
    close(last[0], alone(model, third))


def test_blocks_moved_to_another_slab_continue_there(model: LoadedModel) -> None:
    prompt, size = make_prompt(30), BLOCK_SIZE
    here, there = (KvSlab.allocate(model.spec, 60, size, torch.float32) for _ in range(2))
    Runner(Model(model), here).execute([StepItem(prompt[:29], 0, blocks_of(0), False)])
    there.data[blocks_of(1)] = here.data[blocks_of(0)]
    close(
        Runner(Model(model), there).execute([StepItem(prompt[29:], 29, blocks_of(1), True)])[0],
        alone(model, prompt),
    )


def test_a_step_without_wanted_logits_returns_none(model: LoadedModel) -> None:
    logits = make_runner(model).execute([StepItem([1, 2], 0, [0], False)])
    assert logits.shape == (0, 96)


def test_logits_may_be_changed_in_place(model: LoadedModel) -> None:
    logits = make_runner(model).execute([StepItem([1, 2], 0, [0], True)])
    logits[0, 3] = -torch.inf
    assert logits[0].argmax() != 3


def test_warm_up_leaves_the_slab_zeroed(model: LoadedModel) -> None:
    slab = KvSlab.allocate(model.spec, 4, BLOCK_SIZE, torch.float32)
    Runner(Model(model), slab).warm_up()
    assert not slab.data.any()


def test_longer_chunks_of_a_warm_up_leave_nothing_either(model: LoadedModel) -> None:
    """Also one that is longer than slab and context."""
    slab, lengths = KvSlab.allocate(model.spec, 4, BLOCK_SIZE, torch.float32), []
    runner = Runner(
        Model(model), slab, within=lambda items: nullcontext(lengths.append(len(items[0].token_ids)))
    )
    runner.warm_up(chunks=(*GPU_CHUNKS, 10_000))
    assert lengths == [BLOCK_SIZE - 1, *GPU_CHUNKS, model.spec.max_position, 1]
    assert not slab.data.any()


@pytest.mark.parametrize(
    "item",
    [
        StepItem([], 0, [0], True),
        StepItem([1] * 5, 0, [0], True),
        StepItem([1], 8, [0, 1], True),
        StepItem([1], -1, [0], True),
        StepItem([1], 256, list(range(64)) * 2, True),
    ],
)
def test_an_impossible_item_is_an_engine_error(model: LoadedModel, item: StepItem) -> None:
    with pytest.raises(EngineError, match="expected"):
        make_runner(model).execute([item])


def test_a_block_outside_the_slab_is_never_written(model: LoadedModel) -> None:
    runner = make_runner(model, num_blocks=2)
    for block in (2, 3, -1):
        with pytest.raises(EngineError, match="block ids within 0 to 1"):
            runner.execute([StepItem([1], 0, [block], True)])


def test_a_slab_of_another_model_is_refused(model: LoadedModel) -> None:
    slab = KvSlab.allocate(model.spec, 4, BLOCK_SIZE, torch.bfloat16)
    with pytest.raises(ConfigError, match="kv slab"):
        Runner(Model(model), slab)


def test_slab_sizes_follow_from_the_spec(model: LoadedModel) -> None:
    slab = KvSlab.allocate(model.spec, 3, BLOCK_SIZE, torch.bfloat16)
    assert slab.data.shape == (3, 2, 2, 2, BLOCK_SIZE, 16)
    assert slab.bytes_per_block == slab.layout.bytes_per_block == 2 * 2 * 2 * BLOCK_SIZE * 16 * 2
    assert slab.layer(1).shape == (3, 2, 2, BLOCK_SIZE, 16)
    assert num_blocks_for(10 * slab.bytes_per_block + 5, model.spec, BLOCK_SIZE, torch.bfloat16) == 10
    with pytest.raises(ConfigError, match="at least"):
        num_blocks_for(slab.bytes_per_block - 1, model.spec, BLOCK_SIZE, torch.bfloat16)
    with pytest.raises(ConfigError, match="num_blocks"):
        KvSlab.allocate(model.spec, 0, BLOCK_SIZE, torch.float32)
