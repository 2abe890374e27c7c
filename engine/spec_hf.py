"""The spec of a Hugging Face config.json.

The file may be as transformers 5 writes it (`rope_parameters`, `layer_types`) or older (`rope_theta`, `rope_scaling`,
`sliding_window_pattern`). A field that is missing, mistyped or that asks for something this engine does not compute
raises `ConfigError` before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from contracts.errors import ConfigError
from engine.spec import (
    Activation,
    Experts,
    LayerSpec,
    LinearRope,
    Llama3Rope,
    ModelSpec,
    Rope,
    RopeScaling,
    YarnRope,
    require_positive,
)
from engine.spec_fields import Fields

HF_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
)
HF_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_HEAD_DIMS = {"Qwen3ForCausalLM": 128, "Gemma3ForCausalLM": 256}
_HEAD_NORMS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM")
# transformers' own default, where a config.json leaves the field out.
_MISTRAL_WINDOW = 4096
_GEMMA_WINDOW = 4096
_GEMMA_PATTERN = 6
_GEMMA_SCALAR = 256.0
_GEMMA_GLOBAL_THETA, _GEMMA_LOCAL_THETA = 1_000_000.0, 10_000.0
_MIXTRAL_THETA, _THETA = 1_000_000.0, 10_000.0
_QWEN_FIRST_WINDOW_LAYER = 28
# Of Gemma 3's models that see images; their files give only what differs.
_GEMMA_TEXT: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config.json.

    `eos_token_id` may be a list; merge what other files say into it before calling (`hf_files.end_token_ids`).
    Raises ConfigError for an unsupported architecture or feature and for missing or mistyped fields.
    """
    config = text_config(config)
    fields = Fields(config, "config.json")
    name = architecture_of(config)
    is_gemma = name == "Gemma3ForCausalLM"
    _check_features(fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    require_positive("num_attention_heads", num_heads)
    head_dim = fields.integer("head_dim", _HEAD_DIMS.get(name, hidden_size // num_heads))
    require_positive("head_dim", head_dim)
    scalar = fields.number("query_pre_attn_scalar", _GEMMA_SCALAR) if is_gemma else float(head_dim)
    require_positive("query_pre_attn_scalar", scalar)
    has_bias = fields.flag("attention_bias", False)
    layers = _layers(name, config, fields)
    return ModelSpec(
        layers=layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position=_max_position(fields, layers),
        norm_eps=fields.number("rms_norm_eps"),
        attention_scale=scalar**-0.5,
        tie_embeddings=fields.flag("tie_word_embeddings", is_gemma),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=fields.token_ids("eos_token_id"),
        qkv_bias=has_bias or name == "Qwen2ForCausalLM",
        out_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        has_head_norms=name in _HEAD_NORMS,
        has_post_norms=is_gemma,
        activation=_activation(name, fields),
        embedding_scale=math.sqrt(hidden_size) if is_gemma and hidden_size > 0 else 1.0,
        attention_cap=fields.optional_number("attn_logit_softcapping"),
        logit_cap=fields.optional_number("final_logit_softcapping"),
        experts=_experts(name, fields),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config itself; of a model that sees images too, that of its part for text."""
    if "Gemma3ForConditionalGeneration" not in (config.get("architectures") or ()):
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"config.json: expected 'text_config' to be an object but got {text!r}")
    tokens = {name: ids for name in ("bos_token_id", "eos_token_id") if (ids := config.get(name)) is not None}
    return _GEMMA_TEXT | dict(text) | tokens | {"architectures": ["Gemma3ForCausalLM"]}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of the config's architectures that is supported. Raises ConfigError if there is none."""
    architectures = config.get("architectures") or []
    if isinstance(architectures, list):
        for name in architectures:
            if name in HF_ARCHITECTURES:
                return str(name)
    raise ConfigError(
        f"unsupported architecture: expected one of {HF_ARCHITECTURES} but got {architectures!r}"
    )


def has_offset_norms(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint stores norm weights as their distance from one, as Gemma does."""
    return architecture_of(text_config(config)) == "Gemma3ForCausalLM"


def _check_features(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refuse("partial_rotary_factor", "1")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.refuse("use_bidirectional_attention", "false")
    if fields.has("quantization_config"):
        raise ConfigError("config.json: expected float weights but the checkpoint has a quantization_config")


def _activation(name: str, fields: Fields) -> Activation:
    is_gemma = name == "Gemma3ForCausalLM"
    field, default = ("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")
    found = _ACTIVATIONS.get(fields.text(field, default))
    if found is None:
        raise fields.refuse(field, " or ".join(map(repr, _ACTIVATIONS)))
    return found


def _experts(name: str, fields: Fields) -> Experts | None:
    match name:
        case "MixtralForCausalLM":
            return Experts(
                fields.integer("num_local_experts"),
                fields.integer("num_experts_per_tok"),
                fields.integer("intermediate_size"),
                is_normalized=True,
            )
        case "Qwen3MoeForCausalLM":
            # Both spellings of the number of experts are written, by different versions of transformers.
            spelling = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
            return Experts(
                fields.integer(spelling),
                fields.integer("num_experts_per_tok"),
                fields.integer("moe_intermediate_size"),
                fields.flag("norm_topk_prob", False),
            )
    return None


# --- layers ---------------------------------------------------------------------------------------------------------


def _layers(name: str, config: Mapping[str, Any], fields: Fields) -> tuple[LayerSpec, ...]:
    num_layers = fields.integer("num_hidden_layers")
    windows = _windows(name, config, fields, num_layers)
    sparse = _sparse(name, fields, num_layers)
    global_rope, local_rope = _ropes(name, fields)
    return tuple(
        LayerSpec(global_rope if window is None else local_rope, window, is_sparse)
        for window, is_sparse in zip(windows, sparse, strict=True)
    )


def _windows(name: str, config: Mapping[str, Any], fields: Fields, num_layers: int) -> list[int | None]:
    """The sliding window of each layer, None where it sees everything."""
    match name:
        case "MistralForCausalLM" | "MixtralForCausalLM":
            default = _MISTRAL_WINDOW if name == "MistralForCausalLM" else None
            window = config.get("sliding_window", default)
            return [None if window is None else fields.integer("sliding_window", default)] * num_layers
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM" | "Qwen3MoeForCausalLM":
            if not (fields.flag("use_sliding_window", False) and fields.has("sliding_window")):
                return [None] * num_layers
            is_moe = name == "Qwen3MoeForCausalLM"
            first = 0 if is_moe else fields.integer("max_window_layers", _QWEN_FIRST_WINDOW_LAYER)
            return _by_layer_types(
                fields, fields.integer("sliding_window"), [i >= first for i in range(num_layers)]
            )
        case "Gemma3ForCausalLM":
            pattern = fields.integer("sliding_window_pattern", _GEMMA_PATTERN)
            require_positive("sliding_window_pattern", pattern)
            is_local = [(i + 1) % pattern != 0 for i in range(num_layers)]
            return _by_layer_types(fields, fields.integer("sliding_window", _GEMMA_WINDOW), is_local)
    if fields.has("sliding_window"):
        raise ConfigError(f"config.json: expected no sliding_window but got {config['sliding_window']!r}")
    return [None] * num_layers


def _by_layer_types(fields: Fields, window: int, is_local: list[bool]) -> list[int | None]:
    """`window` for the sliding layers: those that `layer_types` names, else those that `is_local` says."""
    if fields.has("layer_types"):
        kinds = fields.items("layer_types")
        if len(kinds) != len(is_local) or not set(kinds) <= {"sliding_attention", "full_attention"}:
            raise fields.refuse(
                "layer_types", f"{len(is_local)} times 'sliding_attention' or 'full_attention'"
            )
        is_local = [kind == "sliding_attention" for kind in kinds]
    return [window if local else None for local in is_local]


def _sparse(name: str, fields: Fields, num_layers: int) -> list[bool]:
    match name:
        case "MixtralForCausalLM":
            return [True] * num_layers
        case "Qwen3MoeForCausalLM":
            dense, step = fields.items("mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
            require_positive("decoder_sparse_step", step)
            return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
    return [False] * num_layers


# --- rope -----------------------------------------------------------------------------------------------------------


def _ropes(name: str, fields: Fields) -> tuple[Rope, Rope]:
    """(of layers that see everything, of sliding layers); they differ for Gemma only."""
    if name != "Gemma3ForCausalLM":
        theta = fields.number("rope_theta", _MIXTRAL_THETA if name == "MixtralForCausalLM" else _THETA)
        rope = _rope(fields, _rope_section(fields), theta)
        return rope, rope
    theta = fields.number("rope_theta", _GEMMA_GLOBAL_THETA)
    local_theta = fields.number("rope_local_base_freq", _GEMMA_LOCAL_THETA)
    if not fields.has("rope_parameters"):
        return _rope(fields, fields.section("rope_scaling"), theta), Rope(local_theta)
    both = fields.section("rope_parameters")
    return (
        _rope(fields, both.section("full_attention"), theta),
        _rope(fields, both.section("sliding_attention"), local_theta),
    )


def _rope_section(fields: Fields) -> Fields:
    # transformers 5 writes one `rope_parameters` object; older configs write `rope_theta` and `rope_scaling`.
    return fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def _rope(fields: Fields, rope: Fields, theta: float) -> Rope:
    return Rope(rope.number("rope_theta", theta), _scaling(fields, rope))


def _scaling(fields: Fields, rope: Fields) -> RopeScaling:
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.refuse("partial_rotary_factor", "1")
    kind = rope.text("rope_type", rope.text("type", "default"))
    match kind:
        # Dynamic scaling begins where `max_position_embeddings` ends, and no request goes past that.
        case "default" | "dynamic":
            return None
        case "linear":
            return LinearRope(rope.number("factor"))
        case "llama3":
            return Llama3Rope(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position=rope.integer("original_max_position_embeddings"),
            )
        case "yarn":
            return _yarn(fields, rope)
    raise ConfigError(f"config.json: expected rope type {', '.join(HF_ROPE_TYPES)} but got {kind!r}")


def _yarn(fields: Fields, rope: Fields) -> YarnRope:
    trained = fields.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", trained)
    require_positive("original_max_position_embeddings", original)
    factor = rope.number("factor", trained / original)
    require_positive("rope factor", factor)
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    else:
        magnitude = yarn_magnitude(factor)
    return YarnRope(
        factor,
        original,
        rope.number("attention_factor", magnitude),
        # transformers reads zero as "not given".
        rope.number("beta_fast", 0.0) or 32.0,
        rope.number("beta_slow", 0.0) or 1.0,
        rope.flag("truncate", True),
    )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's multiplier of cosines and sines: 0.1·weight·ln(factor) + 1 (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _max_position(fields: Fields, layers: tuple[LayerSpec, ...]) -> int:
    """What the config says; YaRN's `factor` goes beyond it, as its model cards tell users to configure it."""
    trained = fields.integer("max_position_embeddings")
    reached = [
        int(layer.rope.scaling.factor * layer.rope.scaling.original_max_position)
        for layer in layers
        if isinstance(layer.rope.scaling, YarnRope)
    ]
    return max(trained, min(reached, default=0))
