from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ConfigError
from engine.gguf_file import GgufFile, GgufTensor
from engine.spec import FactorRope, LinearRope, Llama3Rope, spec_from_gguf, spec_from_hf
from tests.engine.tiny_models import LLAMA3_ROPE, make_config


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
    assert (spec.rope_theta, spec.rope_scaling, spec.norm_eps) == (10000.0, None, 1e-5)
    assert (spec.tie_embeddings, spec.attention_bias, spec.mlp_bias) == (False, False, False)
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
    assert spec_from_hf(make_config(rope_scaling=LLAMA3_ROPE)).rope_scaling == llama3
    newer = spec_from_hf(make_config(rope_theta=None, rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5}))
    assert (newer.rope_theta, newer.rope_scaling) == (5e5, llama3)
    assert spec_from_hf(make_config(rope_scaling={"type": "linear", "factor": 2})).rope_scaling == LinearRope(
        2.0
    )


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
        ({"hidden_act": "gelu"}, "hidden_act='silu'"),
        ({"sliding_window": 4096}, "no sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "default, linear or llama3 but got 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' but it is missing"),
        ({"rope_scaling": [1]}, "to be an object"),
        ({"eos_token_id": "</s>"}, "token ids"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from_hf(make_config(**changes))


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
    assert (spec.rope_theta, spec.rope_scaling, spec.tie_embeddings) == (10000.0, None, True)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 9))


def test_gguf_rope_factors_win_over_the_header() -> None:
    factors = (1.0, 1.0, 2.0, 8.0)
    assert spec_from_gguf(make_gguf(), factors).rope_scaling == FactorRope(factors)
    with pytest.raises(ConfigError, match="expected 4 rope factors but got 1"):
        spec_from_gguf(make_gguf(), (1.0,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "mamba"}, "'llama'.*got 'mamba'"),
        ({"llama__expert_count": 8}, "dense model but got 8 experts"),
        ({"llama__rope__dimension_count": 4}, "rope.dimension_count=8 but got 4"),
        ({"llama__rope__scaling__type": "yarn"}, "none or linear but got 'yarn'"),
        ({"llama__block_count": None}, "'llama.block_count' but it is missing"),
    ],
)
def test_gguf_that_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from_gguf(make_gguf(**changes))
