"""The logits of a request have the same bits, whatever shares its steps, however it is cut: with engine.batch_invariant
on every CPU, and without it where oneDNN multiplies nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contracts.errors import ConfigError
from engine.kernels import reference
from engine.kernels.native import invariant, ops
from engine.kernels.native import kernels as native
from engine.kv import KvSlab
from engine.model import Model, invariant_kernels
from engine.quantization import Quantization
from engine.runner import Runner, StepItem
from engine.weights import Linear, load_model
from tests.engine.tiny_models import family_config, make_oracle, write_gguf, write_hf

NUM_PROMPT, NUM_TOKENS = 300, 330
"""More than one block of keys of the attention kernel."""
BLOCK_SIZE, BLOCKS_EACH = 16, 21
MAX_BATCH = 16


def make_runner(
    path: Path, dtype: torch.dtype, quantization: Quantization = "none", batch_invariant: bool = True
) -> Runner:
    model = load_model(path, dtype, quantization=quantization)
    slab = KvSlab.allocate(model.spec, BLOCKS_EACH * MAX_BATCH, BLOCK_SIZE, dtype)
    return Runner(Model(model, batch_invariant=batch_invariant), slab)


@dataclass
class Stream:
    token_ids: list[int]
    blocks: list[int]
    position: int = 0

    def item(self, rng: random.Random, want_all: bool) -> StepItem:
        """A random piece of the prompt, or the next token."""
        low = self.position
        size = min(rng.choice([1, 7, 64, 150]), NUM_PROMPT - low) if low < NUM_PROMPT else 1
        self.position += size
        return StepItem(self.token_ids[low : low + size], low, self.blocks, True, want_all)

    @property
    def is_over(self) -> bool:
        return self.position == NUM_TOKENS


def streams(rng: random.Random, target: list[int], batch: int) -> list[Stream]:
    """The target among others, all with blocks of their own, in any order."""
    blocks = rng.sample(range(BLOCKS_EACH * MAX_BATCH), BLOCKS_EACH * MAX_BATCH)
    tokens = [target, *([rng.randrange(90) for _ in target] for _ in range(batch - 1))]
    return [
        Stream(
            ids,
            blocks[BLOCKS_EACH * i : BLOCKS_EACH * (i + 1)],
            0 if i == 0 else rng.randrange(NUM_TOKENS - 1),
        )
        for i, ids in enumerate(tokens)
    ]


def logits_of_target(runner: Runner, target: list[int], batch: int, seed: int) -> Tensor:
    """[NUM_TOKENS, V], its tokens computed beside `batch` - 1 others."""
    rng = random.Random(seed)
    running = streams(rng, target, batch)
    mine, found = running[0], []
    while not mine.is_over:
        running = [mine, *(other for other in running[1:] if not other.is_over)]
        order = rng.sample(running, len(running))
        items = [stream.item(rng, want_all=stream is mine) for stream in order]
        logits = runner.execute(items)
        low = sum(item.num_logits for item in items[: order.index(mine)])
        found.append(logits[low : low + items[order.index(mine)].num_logits].clone())
    return torch.cat(found)


CASES = [
    ("llama", "F32", "none", torch.float32),
    ("llama", "F32", "none", torch.bfloat16),
    ("llama", "Q4_1", "auto", torch.float32),
    ("llama", "Q8_0", "auto", torch.bfloat16),
    ("qwen2", "F32", "none", torch.float32),
    ("gemma3", "F32", "none", torch.float32),
    ("qwen3moe", "F32", "none", torch.float32),
]


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize(("family", "stored", "quantization", "dtype"), CASES)
def test_a_request_has_the_same_bits_in_batches_of_1_to_16(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    stored: str,
    quantization: Quantization,
    dtype: torch.dtype,
    batch_invariant: bool,
) -> None:
    if not batch_invariant:
        monkeypatch.setattr(native, "has_native_bf16", lambda: False)  # so nothing is left to oneDNN
    config = family_config(family, max_position_embeddings=512, num_hidden_layers=2)
    if family == "qwen2":  # its heads are hidden_size / 6
        config |= {"hidden_size": 96}
    if stored != "F32":
        config |= {"hidden_size": 96, "intermediate_size": 64}
    oracle = make_oracle(config)
    path = (
        write_hf(tmp_path, config, oracle)
        if stored == "F32"
        else write_gguf(tmp_path / "x.gguf", oracle, stored)
    )
    runner = make_runner(path, dtype, quantization, batch_invariant)
    rng = random.Random(7)
    target = [rng.randrange(90) for _ in range(NUM_TOKENS)]
    table = list(range(BLOCKS_EACH))
    alone = runner.execute([StepItem(target, 0, table, True, True)]).clone()
    assert not alone.isnan().any()
    for batch in range(1, MAX_BATCH + 1):
        assert torch.equal(logits_of_target(runner, target, batch, seed=batch), alone), batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 32), (50, 53), (70, 576)])
def test_products_of_numbers_are_exact_and_a_row_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(5)
    weight, x, bias = torch.randn(shape).to(dtype), torch.randn(40, shape[1]), torch.randn(shape[0])
    layer = Linear(weight.clone(), bias.to(dtype), is_shared=True)
    invariant.pack(layer)
    assert layer.weight is None
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.to(dtype).double())
    alone = torch.cat([invariant.linear(row[None], layer) for row in x])
    torch.testing.assert_close(alone.double(), exact, rtol=1e-5, atol=1e-4)
    for num_rows in (2, 5, 10, 11, 17, 40):
        assert torch.equal(invariant.linear(x[:num_rows], layer), alone[:num_rows])
    assert isinstance(layer.packed, ops.Panels)
    assert torch.equal(ops.rows(layer.packed, torch.arange(shape[0])), weight.float())
    assert torch.equal(ops.expand(layer.packed), weight.bfloat16())


def test_it_answers_as_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = family_config("llama", max_position_embeddings=512)
    path = write_hf(tmp_path, config, make_oracle(config))
    tokens = [i * 7 % 90 for i in range(100)]
    items = [StepItem(tokens, 0, list(range(7)), True, True)]
    found = make_runner(path, torch.float32).execute(items)
    monkeypatch.setattr("engine.model.select_kernels", lambda device: reference)
    loaded = load_model(path, torch.float32)
    plain = Runner(Model(loaded), KvSlab.allocate(loaded.spec, 7, BLOCK_SIZE, torch.float32)).execute(items)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


def test_where_it_cannot_be_had_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"engine.batch_invariant: expected false but got true \(device cuda\)"
    ):
        invariant_kernels(torch.device("cuda"), 64)
    with pytest.raises(ConfigError, match="multiple of 16 but the model has 24"):
        invariant_kernels(torch.device("cpu"), 24)
    monkeypatch.setattr("engine.model.library", lambda: None)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        invariant_kernels(torch.device("cpu"), 64)
