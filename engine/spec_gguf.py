"""The spec of a GGUF file's header, which keeps a model's numbers under keys that begin with its architecture.

What the header leaves out is what llama.cpp takes for granted; each such default says so.
"""

from __future__ import annotations

import math

from contracts.errors import ConfigError
from engine.gguf_file import GgufFile, end_token_ids, named_token_ids
from engine.spec import (
    Experts,
    FactorRope,
    LayerSpec,
    LinearRope,
    ModelSpec,
    Rope,
    RopeScaling,
    YarnRope,
    require_positive,
)
from engine.spec_fields import Fields
from engine.spec_hf import yarn_magnitude

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3")
GGUF_ROPE_TYPES = ("none", "linear", "yarn")
_HEAD_NORMS = ("qwen3", "qwen3moe", "gemma3")
# Not in the header: llama.cpp knows these of Gemma 3.
_GEMMA_PATTERN = 6
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_27B_LAYERS = 62


def spec_from_gguf(file: GgufFile, rope_factors: tuple[float, ...] | None = None) -> ModelSpec:
    """The spec of a GGUF file's header. `rope_factors`: the content of its tensor rope_freqs.weight, if it has one.

    Raises ConfigError for an unsupported architecture or rope type, partial rotary and missing or mistyped fields.
    """
    tokenizer = Fields(file.fields, "GGUF header", "tokenizer.ggml.")
    name = Fields(file.fields, "GGUF header").text("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        raise ConfigError(f"unsupported architecture: expected one of {GGUF_ARCHITECTURES} but got {name!r}")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError("GGUF: expected the tensor token_embd.weight but it is missing")
    fields = Fields(file.fields, "GGUF header", f"{name}.")
    is_gemma = name == "gemma3"
    hidden_size, num_heads = (
        fields.integer("embedding_length"),
        _of_each_layer(fields, "attention.head_count"),
    )
    require_positive(f"{name}.attention.head_count", num_heads)
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise fields.refuse("rope.dimension_count", str(head_dim))
    layers = _layers(name, fields, file, rope_factors)
    vocab_size, num_pieces = file.tensors["token_embd.weight"].shape[0], len(tokenizer.items("tokens"))
    if num_pieces > vocab_size:
        raise ConfigError(
            f"GGUF header: expected at most {vocab_size} tokens, as the embedding has rows, but got {num_pieces}"
        )
    return ModelSpec(
        layers=layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_of_each_layer(fields, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=_of_each_layer(fields, "feed_forward_length"),
        vocab_size=vocab_size,
        max_position=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        attention_scale=_attention_scale(fields, is_gemma, head_dim, hidden_size // num_heads, len(layers)),
        tie_embeddings="output.weight" not in file.tensors,
        bos_token_id=next(iter(named_token_ids(file.fields, "bos")), None),
        eos_token_ids=end_token_ids(file.fields),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        has_head_norms=name in _HEAD_NORMS,
        has_post_norms=is_gemma,
        activation="gelu_tanh" if is_gemma else "silu",
        embedding_scale=math.sqrt(hidden_size) if is_gemma and hidden_size > 0 else 1.0,
        # Zero is how a header says that there is none.
        attention_cap=fields.number("attn_logit_softcapping", 0.0) or None,
        logit_cap=fields.number("final_logit_softcapping", 0.0) or None,
        experts=_experts(fields),
    )


def _of_each_layer(fields: Fields, name: str, default: int | None = None) -> int:
    """One number, or a list that repeats it for each layer."""
    try:
        return fields.integer(name, default)
    except ConfigError:
        different = set(fields.items(name))
        if len(different) != 1 or not isinstance(number := different.pop(), int):
            raise
        return number


def _attention_scale(fields: Fields, is_gemma: bool, head_dim: int, even_dim: int, num_layers: int) -> float:
    """The header's, if it has one. Gemma 3 27B alone scales by hidden / heads, and is known by its number of layers."""
    scalar = even_dim if is_gemma and num_layers == _GEMMA_27B_LAYERS else head_dim
    require_positive("head_dim", scalar)
    return fields.number("attention.scale", float(scalar) ** -0.5)


def _experts(fields: Fields) -> Experts | None:
    num_experts = fields.integer("expert_count", 0)
    if num_experts == 0:
        return None
    # llama.cpp divides by the sum of the chosen unless the header says otherwise.
    return Experts(
        num_experts,
        fields.integer("expert_used_count"),
        fields.integer("expert_feed_forward_length", _of_each_layer(fields, "feed_forward_length")),
        fields.flag("expert_weights_norm", True),
    )


def _layers(
    name: str, fields: Fields, file: GgufFile, rope_factors: tuple[float, ...] | None
) -> tuple[LayerSpec, ...]:
    num_layers = fields.integer("block_count")
    rope = Rope(fields.number("rope.freq_base", 10_000.0), _scaling(fields, rope_factors))
    local = Rope(fields.number("rope.freq_base_swa", _GEMMA_LOCAL_THETA)) if name == "gemma3" else rope
    return tuple(
        LayerSpec(rope if window is None else local, window, f"blk.{i}.ffn_gate_inp.weight" in file.tensors)
        for i, window in enumerate(_windows(name, fields, num_layers))
    )


def _windows(name: str, fields: Fields, num_layers: int) -> list[int | None]:
    window = fields.integer("attention.sliding_window", 0)
    if window == 0:
        return [None] * num_layers
    if name == "llama":  # Mistral: every layer
        return [window] * num_layers
    if name == "gemma3":
        return [window if local else None for local in _is_local(fields, num_layers)]
    if window < fields.integer("context_length"):  # Qwen: the header cannot say on which layers
        raise fields.refuse("attention.sliding_window", "absent or at least the context length")
    return [None] * num_layers


def _is_local(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers slide: all but each `sliding_window_pattern`-th, or a flag per layer."""
    try:
        period = fields.integer("attention.sliding_window_pattern", _GEMMA_PATTERN)
    except ConfigError:
        flags = fields.items("attention.sliding_window_pattern")
        if len(flags) != num_layers:
            raise fields.refuse("attention.sliding_window_pattern", f"{num_layers} flags") from None
        return [bool(flag) for flag in flags]
    require_positive("attention.sliding_window_pattern", period)
    return [(i + 1) % period != 0 for i in range(num_layers)]


def _scaling(fields: Fields, factors: tuple[float, ...] | None) -> RopeScaling:
    if factors is not None:
        return FactorRope(factors)
    # As llama.cpp: a factor without a type, or by its name of 2023, is linear.
    untyped = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    kind = fields.text("rope.scaling.type", "none" if untyped in (0.0, 1.0) else "linear")
    match kind:
        case "none":
            return None
        case "linear":
            factor = fields.number("rope.scaling.factor", untyped)
            return LinearRope(factor) if factor else None
        case "yarn":
            factor = fields.number("rope.scaling.factor")
            require_positive("rope.scaling.factor", factor)
            original = fields.integer(
                "rope.scaling.original_context_length", fields.integer("context_length")
            )
            # The header's factor multiplies what YaRN itself prescribes.
            extra = fields.number("rope.scaling.attn_factor", 1.0)
            return YarnRope(
                factor,
                original,
                yarn_magnitude(factor) * extra,
                fields.number("rope.scaling.yarn_beta_fast", 32.0),
                fields.number("rope.scaling.yarn_beta_slow", 1.0),
            )
    raise ConfigError(
        f"GGUF header: expected rope.scaling.type {', '.join(GGUF_ROPE_TYPES)} but got {kind!r}"
    )
