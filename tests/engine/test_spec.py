from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ConfigError
from engine.gguf_file import GgufFile, GgufTensor
from engine.spec import Experts, FactorRope, LayerSpec, LinearRope, Llama3Rope, Rope, YarnRope
from engine.spec_gguf import spec_from_gguf
from engine.spec_hf import spec_from_hf
from tests.engine.tiny_models import LLAMA3_ROPE, family_config, make_config


def make_gguf(**changes: Any) -> GgufFile:
    fields = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.eos_token_id": 2,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    fields = {name: value for name, value in fields.items() if value is not None}
    return GgufFile(
        Path("x.gguf"), fields, {"token_embd.weight": GgufTensor("token_embd.weight", (96, 32), 0, 0)}
    )


FEW_TYPES = family_config("gemma3", num_hidden_layers=2, layer_types=["full_attention"])
MOE = family_config("qwen3moe")


def test_hf_config_gives_every_number() -> None:
    spec = spec_from_hf(make_config())
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
        2,
        48,
        6,
        2,
        16,
    )
    assert (spec.intermediate_size, spec.vocab_size, spec.max_position) == (64, 96, 256)
    assert spec.layers == (LayerSpec(Rope(10000.0)),) * 2
    assert (spec.norm_eps, spec.attention_scale, spec.embedding_scale) == (1e-5, 0.25, 1.0)
    assert (spec.tie_embeddings, spec.qkv_bias, spec.out_bias, spec.mlp_bias) == (False, False, False, False)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))


def test_head_dim_and_kv_heads_have_their_usual_defaults() -> None:
    spec = spec_from_hf(make_config(head_dim=None, num_key_value_heads=None))
    assert (spec.head_dim, spec.num_kv_heads) == (8, 6)


def test_eos_may_be_a_list() -> None:
    assert spec_from_hf(make_config(eos_token_id=[2, 7])).eos_token_ids == (2, 7)


def test_mistral_without_a_sliding_window_is_a_llama() -> None:
    config = make_config(architectures=["MistralForCausalLM"], sliding_window=None)
    assert spec_from_hf(config) == spec_from_hf(make_config())


def test_rope_scaling_is_read_in_both_spellings() -> None:
    llama3 = Llama3Rope(8.0, 1.0, 4.0, 32)
    assert spec_from_hf(make_config(rope_scaling=LLAMA3_ROPE)).layers[0].rope == Rope(1e4, llama3)
    newer = spec_from_hf(make_config(rope_theta=None, rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5}))
    assert newer.layers[0].rope == Rope(5e5, llama3)
    older = spec_from_hf(make_config(rope_scaling={"type": "linear", "factor": 2}))
    assert older.layers[0].rope == Rope(1e4, LinearRope(2.0))


def test_dynamic_rope_is_plain_within_the_context() -> None:
    dynamic = spec_from_hf(make_config(rope_scaling={"type": "dynamic", "factor": 2}))
    assert dynamic == spec_from_hf(make_config())


def test_yarn_reaches_past_the_context_it_was_trained_on() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    spec = spec_from_hf(make_config(rope_scaling=yarn))
    assert spec.layers[0].rope.scaling == YarnRope(4.0, 256, pytest.approx(1.1386294))
    assert spec.max_position == 1024


def test_gemma_alternates_windows_and_ropes_in_both_spellings() -> None:
    newer = spec_from_hf(family_config("gemma3"))
    older = spec_from_hf(
        family_config(
            "gemma3", rope_parameters=None, rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6
        )
    )
    assert newer == older
    local, everything = LayerSpec(Rope(1e4), 24), LayerSpec(Rope(1e6))
    assert newer.layers == (*[local] * 5, everything, local)
    assert newer.embedding_scale == pytest.approx(48**0.5)


def test_layer_types_say_which_layers_slide() -> None:
    kinds = ["full_attention", "sliding_attention"]
    config = family_config("qwen2", use_sliding_window=True, sliding_window=8, layer_types=kinds)
    assert [layer.window for layer in spec_from_hf(config).layers] == [None, 8]
    assert [layer.window for layer in spec_from_hf(config | {"use_sliding_window": False}).layers] == [
        None
    ] * 2


def test_a_window_that_is_left_out_is_that_of_the_library() -> None:
    config = family_config("mistral")
    del config["sliding_window"]
    assert spec_from_hf(config).layers[0].window == 4096


def test_some_layers_of_a_mixture_may_be_dense() -> None:
    spec = spec_from_hf(family_config("qwen3moe", mlp_only_layers=[1], decoder_sparse_step=1))
    assert [layer.is_sparse for layer in spec.layers] == [True, False, True]
    assert spec.experts == Experts(6, 2, 32, True)
    every_other = spec_from_hf(family_config("qwen3moe", decoder_sparse_step=2))
    assert [layer.is_sparse for layer in every_other.layers] == [False, True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "LlamaForCausalLM.*MistralForCausalLM.*GPT2LMHeadModel"),
        ({"architectures": None}, "unsupported architecture"),
        ({"hidden_size": None}, "'hidden_size' but it is missing"),
        ({"vocab_size": "many"}, "'vocab_size' to be an integer but got 'many'"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' to be an integer but got True"),
        ({"num_attention_heads": 0}, "num_attention_heads > 0"),
        ({"num_key_value_heads": 4}, "multiple of num_kv_heads=4"),
        ({"head_dim": 15}, "even head_dim"),
        ({"rms_norm_eps": float("nan")}, "norm_eps > 0"),
        ({"hidden_act": "gelu"}, "'hidden_act' to be 'silu' or 'gelu_pytorch_tanh' but got 'gelu'"),
        ({"sliding_window": 4096}, "no sliding_window"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' to be 1 but got 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "default, linear, llama3, yarn, dynamic but got 'longrope'",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope factor > 0"),
        (FEW_TYPES, "'layer_types' to be 2 times .* but got"),
        ({**MOE, "num_experts_per_tok": 9}, "at most num_experts=6 experts per token but got 9"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' but it is missing"),
        ({"rope_scaling": [1]}, "to be an object"),
        ({"eos_token_id": "</s>"}, "token ids"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from_hf(make_config(**changes))


def test_a_model_that_sees_images_is_its_text_part() -> None:
    """The config of Gemma 3 4B, which leaves out what is as usual."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": text,
    }
    spec = spec_from_hf(config)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
        34,
        2560,
        8,
        4,
        256,
    )
    assert (spec.vocab_size, spec.max_position, spec.eos_token_ids) == (262_208, 131_072, (1, 106))
    assert spec.layers[5] == LayerSpec(Rope(1e6, LinearRope(8.0)))
    assert spec.layers[4] == LayerSpec(Rope(1e4), window=1024)
    with pytest.raises(ConfigError, match="'text_config' to be an object but got None"):
        spec_from_hf(config | {"text_config": None})


def test_gguf_header_gives_every_number() -> None:
    spec = spec_from_gguf(make_gguf(tokenizer__ggml__eot_token_id=9, tokenizer__ggml__bos_token_id=1))
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
        2,
        32,
        4,
        2,
        8,
    )
    assert (spec.intermediate_size, spec.vocab_size, spec.max_position) == (64, 96, 128)
    assert (spec.layers[0].rope, spec.tie_embeddings) == (Rope(10000.0), True)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 9))


def test_numbers_of_layers_may_be_a_list_of_equals() -> None:
    """As newer converters write them; layers that differ are another family."""
    spec = spec_from_gguf(
        make_gguf(
            llama__attention__head_count=[4, 4],
            llama__attention__head_count_kv=[2, 2],
            llama__feed_forward_length=[64, 64],
        )
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.intermediate_size) == (4, 2, 64)
    for value in ([2, 4], [], [2.0, 2.0], "2"):
        with pytest.raises(ConfigError, match=r"'llama.attention.head_count_kv' to be"):
            spec_from_gguf(make_gguf(llama__attention__head_count_kv=value))


def test_a_cap_of_zero_is_none() -> None:
    spec = spec_from_gguf(make_gguf(llama__attn_logit_softcapping=0.0, llama__final_logit_softcapping=0.0))
    assert (spec.attention_cap, spec.logit_cap) == (None, None)


def test_how_a_turn_ends_is_told_by_the_spelling_where_the_header_does_not_say() -> None:
    """Gemma's files name <eos>, base models' the end of a document."""
    pieces = ["<pad>", "<eos>", "<|endoftext|>", "<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|im_start|>"]
    spec = spec_from_gguf(make_gguf(tokenizer__ggml__tokens=pieces, tokenizer__ggml__eos_token_id=1))
    assert spec.eos_token_ids == (1, 2, 3, 4, 5)


def test_gguf_rope_factors_win_over_the_header() -> None:
    factors = (1.0, 1.0, 2.0, 8.0)
    assert spec_from_gguf(make_gguf(), factors).layers[0].rope.scaling == FactorRope(factors)
    with pytest.raises(ConfigError, match="expected 4 rope factors but got 1"):
        spec_from_gguf(make_gguf(), (1.0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "'llama'.*got 'mamba'"),
        ({"llama__expert_count": 8}, "'llama.expert_used_count' but it is missing"),
        ({"llama__rope__dimension_count": 4}, "'llama.rope.dimension_count' to be 8 but got 4"),
        ({"llama__rope__scaling__type": "longrope"}, "none, linear, yarn but got 'longrope'"),
        ({"llama__block_count": None}, "'llama.block_count' but it is missing"),
        ({"tokenizer__ggml__tokens": ["x"] * 97}, "at most 96 tokens, .* but got 97"),
    ],
)
def test_gguf_that_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from_gguf(make_gguf(**changes))
