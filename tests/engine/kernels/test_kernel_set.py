"""The GPU kernel set inside the model, under Triton's interpreter: prompts in chunks and a batch of decodes through the
runner, against transformers and against plain torch, in every form of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.grouped import GroupedWeight
from engine.kernels.triton import kernel_set
from engine.kv import FP8, SlabPlan
from engine.kv_scales import scales_of
from engine.model import Model
from engine.quantization import Quantization
from engine.runner import Runner, StepItem
from engine.weights import load_model
from tests.engine.recorder import Rerun, make_runners
from tests.engine.tiny_models import (
    BLOCK_SIZE,
    BLOCKS,
    PROMPT,
    family_config,
    make_oracle,
    make_runner,
    oracle_logits,
    run_prompt,
    write_gguf,
    write_hf,
)

TABLES = [list(range(8 * i, 8 * (i + 1))) for i in range(3)]
LENGTHS = (20, 2, 9)


def use(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.select_kernels", lambda device: kernels)


def answers(runner: Runner) -> Tensor:
    """Logits of two chunks of one prompt, whole prompts of two others, then a step of all three as a batch."""
    first, second, third = ([*PROMPT[i : i + n]] for i, n in enumerate(LENGTHS))
    found = [runner.execute([StepItem(first[:13], 0, TABLES[0], True)])]
    found.append(
        runner.execute(
            [
                StepItem(first[13:], 13, TABLES[0], True),
                StepItem(second, 0, TABLES[1], True),
                StepItem(third, 0, TABLES[2], True),
            ]
        )
    )
    batch = zip(LENGTHS, TABLES, strict=True)
    found.append(runner.execute([StepItem([7], length, table, True) for length, table in batch]))
    return torch.cat(found)


@pytest.mark.parametrize(("family", "dtype"), [("gemma3", torch.float32), ("llama", torch.bfloat16)])
def test_a_prompt_and_a_decode_give_the_logits_of_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = family_config(family)
    oracle = make_oracle(config)
    use(kernel_set, monkeypatch)
    runner = make_runner(load_model(write_hf(tmp_path, config, oracle), dtype), dtype=dtype)
    expected = oracle_logits(oracle, PROMPT[:40])[-1]
    logits = run_prompt(runner, PROMPT[:40], 39, BLOCKS)  # a chunk of 39, then one token
    if dtype == torch.float32:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    else:
        assert (logits - expected).norm() < 0.03 * expected.norm()


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
"""One layer, since the interpreter takes its time."""


def write(path: Path, stored: str, **changes: Any) -> Path:
    """A llama with rows of whole groups of 32: a Hugging Face directory, or a GGUF file of `stored`."""
    config = family_config("llama", **SMALL, **changes)
    oracle = make_oracle(config)
    return write_hf(path, config, oracle) if stored == "hf" else write_gguf(path / "x.gguf", oracle, stored)


@pytest.mark.parametrize(
    ("stored", "quantization"),
    [("hf", "none"), ("hf", "int8"), ("hf", "int4"), ("Q4_0", "auto")],
)
def test_every_form_of_weights_gives_the_logits_of_plain_torch(
    stored: str,
    quantization: Quantization,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write(tmp_path, stored, attention_bias=True)
    found = []
    for kernels in (kernel_set, reference):
        use(kernels, monkeypatch)
        loaded = load_model(path, torch.float32, quantization=quantization)
        found.append(answers(make_runner(loaded)))
        layers = loaded.weights.layers
        is_packed = {
            isinstance(matrix.packed, GroupedWeight) for layer in layers for matrix in layer.matrices
        }
        assert is_packed == {quantization != "none"}
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_a_file_are_multiplied_as_the_file_expands(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second rounding: the kept blocks give what the expanded numbers give; tied, so that the head is blocks too."""
    path = write(tmp_path, kind, tie_word_embeddings=True)
    use(kernel_set, monkeypatch)
    kept = answers(make_runner(load_model(path, torch.float32, quantization="auto")))
    use(reference, monkeypatch)
    expanded = answers(make_runner(load_model(path, torch.float32, quantization="none")))
    torch.testing.assert_close(kept, expanded, rtol=1e-4, atol=1e-4)


def test_bfloat16_with_blocks_stays_near_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "Q4_0")
    use(kernel_set, monkeypatch)
    loaded = load_model(path, torch.bfloat16, quantization="auto")
    rounded = answers(make_runner(loaded, dtype=torch.bfloat16))
    use(reference, monkeypatch)
    exact = answers(make_runner(load_model(path, torch.float32, quantization="auto")))
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("family", "factor"), [("llama", 1.0), ("qwen2", 2000.0), ("qwen3", 2000.0)])
def test_float8_kv_gives_the_logits_of_plain_torch(
    family: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As numbers are, and with keys so large, by biases or head norms, that the scales are not all one."""
    config = family_config(family, **SMALL)
    oracle = make_oracle(config)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "k_norm" in name or "k_proj.bias" in name:
                parameter.mul_(factor)
            if "q_norm" in name or "q_proj" in name:
                parameter.div_(factor)
    path = write_hf(tmp_path, config, oracle)
    found = []
    for kernels in (kernel_set, reference):
        use(kernels, monkeypatch)
        loaded = load_model(path, torch.float32)
        scales = scales_of(loaded)
        assert (scales > 1).any() == (factor > 1)
        slab = SlabPlan(loaded.spec, 24, BLOCK_SIZE, FP8, scales=scales).allocate()
        found.append(answers(Runner(Model(loaded), slab)))
    # A number between two of the format may fall to either.
    assert (found[0] - found[1]).norm() < 5e-3 * found[1].norm()
    exact = answers(make_runner(load_model(path, torch.float32)))
    assert 1e-4 * exact.norm() < (found[1] - exact).norm()
    if factor == 1:
        assert (found[1] - exact).norm() < 0.1 * exact.norm()


def test_a_recorded_step_runs_on_static_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows too, which no kernel may take for somebody's."""
    use(kernel_set, monkeypatch)
    config = family_config("llama", num_hidden_layers=1)
    path = write_hf(tmp_path, config, make_oracle(config))
    recorder, loaded = Rerun(), load_model(path, torch.float32)
    (ours, our_slab), (plain, plain_slab) = make_runners(loaded, (3,), recorder)
    lengths, tables = (5, 2), ([3, 1, 0], [7, 6])
    for runner in (ours, plain):
        pairs = zip(lengths, tables, strict=True)
        runner.execute([StepItem(PROMPT[:length], 0, table, False) for length, table in pairs])
    step = [StepItem([9], length, table, True) for length, table in zip(lengths, tables, strict=True)]
    torch.testing.assert_close(ours.execute(step), plain.execute(step), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(our_slab.data, plain_slab.data, rtol=1e-4, atol=1e-4)
    assert recorder.num_replays == 1


def test_experts_in_blocks_give_the_logits_of_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = family_config("qwen3moe", **SMALL | {"num_experts": 3})
    path = write_hf(tmp_path, config, make_oracle(config))
    found = []
    for kernels in (kernel_set, reference):
        use(kernels, monkeypatch)
        found.append(answers(make_runner(load_model(path, torch.float32, quantization="int8"))))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_packing_twice_is_packing_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(kernel_set, monkeypatch)
    loaded = load_model(write(tmp_path, "Q4_0"), torch.float32, quantization="auto")
    Model(loaded)
    packed = loaded.weights.layers[0].qkv.packed
    Model(loaded)
    assert loaded.weights.layers[0].qkv.packed is packed
