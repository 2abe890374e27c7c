"""Each model family against transformers: from safetensors and from GGUF, whole, in chunks and token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from contracts.errors import ConfigError
from engine.kernels import reference
from engine.runner import Runner, StepItem
from engine.weights import load_model
from tests.engine.tiny_models import (
    BLOCKS,
    FAMILIES,
    PROMPT,
    checkpoint_tensors,
    family_config,
    make_oracle,
    make_runner,
    oracle_logits,
    run_prompt,
    write_gguf,
    write_hf,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GEMMA_ROPE = FAMILIES["gemma3"]["rope_parameters"]
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1000.0,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mistral with a window past the prompt": ("mistral", {"sliding_window": 128}),
    "qwen2 with tied embeddings": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3 with wide heads": ("qwen3", {"head_dim": 32}),
    "gemma3 with a window past the prompt": ("gemma3", {"sliding_window": 128}),
    "gemma3 with one window per token": ("gemma3", {"sliding_window": 1}),
    "gemma3 with a linear global rope": (
        "gemma3",
        {
            "rope_parameters": {
                **GEMMA_ROPE,
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            }
        },
    ),
    "gemma3 with capped logits": ("gemma3", {"final_logit_softcapping": 5.0}),
    "mixtral with tied embeddings": ("mixtral", {"tie_word_embeddings": True}),
}
HF_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 with windows on late layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3moe with windows": ("qwen3moe", {"use_sliding_window": True, "sliding_window": 10}),
    "qwen3moe without normalized weights": ("qwen3moe", {"norm_topk_prob": False}),
    "qwen3moe with a dense layer": ("qwen3moe", {"mlp_only_layers": [1]}),
    "mixtral with windows": ("mixtral", {"sliding_window": 10}),
    "gemma3 with its own scale": ("gemma3", {"query_pre_attn_scalar": 50}),
    "gemma3 with layer types": (
        "gemma3",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "yarn with its own magnitude": (
        "llama",
        {"rope_parameters": {**YARN, "attention_factor": 0.7, "beta_fast": 8, "truncate": False}},
    ),
    "yarn with mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    "dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
}
Variant = tuple[str, dict[str, Any]]


def make_variant(variant: Variant) -> tuple[dict[str, Any], PreTrainedModel]:
    family, changes = variant
    config = family_config(family, **changes)
    return config, make_oracle(config)


def assert_same(runner: Runner, oracle: PreTrainedModel, chunks: tuple[int, ...], **options: Any) -> None:
    expected = oracle_logits(oracle, PROMPT, **options)
    for chunk in chunks:
        logits = run_prompt(runner, PROMPT, chunk, BLOCKS)
        torch.testing.assert_close(logits, expected[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", [*VARIANTS.values(), *HF_ONLY.values()], ids=[*VARIANTS, *HF_ONLY])
def test_safetensors_give_the_logits_of_transformers(tmp_path: Path, variant: Variant) -> None:
    config, oracle = make_variant(variant)
    runner = make_runner(load_model(write_hf(tmp_path, config, oracle), torch.float32))
    assert_same(runner, oracle, chunks=(1, 16, len(PROMPT)))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_gguf_gives_the_logits_of_transformers(tmp_path: Path, variant: Variant) -> None:
    _, oracle = make_variant(variant)
    runner = make_runner(load_model(write_gguf(tmp_path / "x.gguf", oracle), torch.float32))
    assert_same(runner, oracle, chunks=(16, len(PROMPT)))


@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_of_mixed_lengths_share_a_batch(tmp_path: Path, family: str) -> None:
    config, oracle = make_variant((family, {}))
    runner = make_runner(load_model(write_hf(tmp_path, config, oracle), torch.float32))
    lengths, expected = (3, 25, 26, 60), oracle_logits(oracle, PROMPT)
    tables = [list(range(16 * i, 16 * (i + 1))) for i in range(len(lengths))]
    runner.execute([StepItem(PROMPT[: n - 1], 0, t, False) for n, t in zip(lengths, tables, strict=True)])
    step = [StepItem([PROMPT[n - 1]], n - 1, t, True) for n, t in zip(lengths, tables, strict=True)]
    rows = expected[[n - 1 for n in lengths]]
    torch.testing.assert_close(runner.execute(step), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_near_float32(tmp_path: Path, family: str) -> None:
    config, oracle = make_variant((family, {}))
    path = write_hf(tmp_path, config, oracle)
    logits = run_prompt(
        make_runner(load_model(path, torch.bfloat16), dtype=torch.bfloat16), PROMPT[:20], 16, BLOCKS
    )
    expected = oracle_logits(oracle, PROMPT[:20])[-1]
    # Random experts lie close together: a rounding may choose another one.
    tolerance = 0.3 if "num_experts_per_tok" in config else 0.05
    assert (logits - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("family", ["gemma3", "qwen3moe"])
def test_plain_torch_kernels_give_the_same_logits(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, oracle = make_variant((family, {}))
    monkeypatch.setattr("engine.model.select_kernels", lambda device: reference)
    runner = make_runner(load_model(write_hf(tmp_path, config, oracle), torch.float32))
    assert_same(runner, oracle, chunks=(1, 16, len(PROMPT)))


def test_capped_attention_scores_are_those_of_transformers(tmp_path: Path) -> None:
    """transformers reads the cap of a Gemma 3 config but applies it only where it is asked to."""
    config, oracle = make_variant(("gemma3", {"attn_logit_softcapping": 0.8}))
    oracle.set_attn_implementation("eager")
    runner = make_runner(load_model(write_hf(tmp_path, config, oracle), torch.float32))
    assert_same(runner, oracle, chunks=(1, 16, len(PROMPT)), softcap=0.8)


@pytest.mark.parametrize("family", ["mixtral", "qwen3moe"])
def test_experts_are_found_under_the_names_of_the_hub(tmp_path: Path, family: str) -> None:
    """`save_pretrained` writes one tensor per expert and projection, as the published checkpoints have them."""
    _, oracle = make_variant((family, {}))
    oracle.save_pretrained(tmp_path)
    runner = make_runner(load_model(tmp_path, torch.float32))
    assert_same(runner, oracle, chunks=(len(PROMPT),))


@pytest.mark.parametrize("prefix", [None, "language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_sees_images_is_one(tmp_path: Path, prefix: str | None) -> None:
    """Gemma 3 from 4B on, as `save_pretrained` writes it and by either version's names."""
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    text = {name: value for name, value in family_config("gemma3").items() if value is not None}
    eyes = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**text).to_dict(), vision_config=eyes.to_dict(), mm_tokens_per_image=1
    )
    torch.manual_seed(0)
    oracle = Gemma3ForConditionalGeneration(config).eval()
    oracle.save_pretrained(tmp_path)
    if prefix is not None:
        tensors = {
            name.replace("model.language_model.", prefix): tensor.contiguous()
            for name, tensor in oracle.state_dict().items()
            if name != "lm_head.weight"
        }
        save_file(tensors, tmp_path / "model.safetensors")
    assert_same(make_runner(load_model(tmp_path, torch.float32)), oracle, chunks=(16, len(PROMPT)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_as_transformers_writes_it_is_understood(tmp_path: Path, family: str) -> None:
    config, oracle = make_variant((family, {}))
    oracle.save_pretrained(tmp_path / "whole")
    ours = load_model(write_hf(tmp_path / "ours", config, oracle), torch.float32)
    assert load_model(tmp_path / "whole", torch.float32).spec == ours.spec


@pytest.mark.parametrize("quantization", ["Q8_0", "Q5_0", "Q5_1", "Q4_0", "F16"])
def test_quantized_experts_are_taken_apart_without_loss(tmp_path: Path, quantization: str) -> None:
    """Each expert of the stack is what the library expands it to."""
    from gguf import GGMLQuantizationType, quants

    config = family_config("qwen3moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=64)
    oracle = make_oracle(config)
    loaded = load_model(write_gguf(tmp_path / "x.gguf", oracle, quantization), torch.float32)
    kind = GGMLQuantizationType[quantization]
    stacked = checkpoint_tensors(oracle)["model.layers.1.mlp.experts.down_proj"].numpy()
    expected = torch.from_numpy(quants.dequantize(quants.quantize(stacked, kind), kind))
    mlp = loaded.weights.layers[1].mlp
    for expert, values in zip(mlp.experts, expected, strict=True):  # type: ignore[union-attr]
        assert torch.equal(expert.down.weight, values)


def test_experts_of_early_gguf_files_are_tensors_of_their_own(tmp_path: Path) -> None:
    from engine.gguf_weights import hf_name

    assert hf_name("blk.3.ffn_down.7.weight") == "model.layers.3.mlp.experts.7.down_proj.weight"


def test_an_unsupported_quantization_is_named_with_what_is_supported(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, value in {
        "block_count": 1,
        "context_length": 8,
        "embedding_length": 32,
        "feed_forward_length": 32,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", torch.zeros(4, 32, dtype=torch.int32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ConfigError, match=r"token_embd.weight: unsupported quantization: expected one of .*Q4_K.* I32"
    ):
        load_model(tmp_path / "x.gguf", torch.float32)
