"""Every tensor a checkpoint of a spec holds, by its Hugging Face name, and what it takes in memory.

Experts go by the names of Qwen3-MoE (`mlp.gate`, `mlp.experts.3.up_proj`), one tensor per expert and projection,
however a file stores them.
"""

from __future__ import annotations

import math

from engine.spec import ModelSpec

Shape = tuple[int, ...]
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name -> shape, outermost dimension first, in the order of use."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}"
        shapes |= {f"{prefix}.{name}.weight": (spec.hidden_size,) for name in layer_norms(spec)}
        shapes |= _attention(spec, f"{prefix}.self_attn")
        if spec.layers[index].is_sparse:
            shapes |= _experts(spec, f"{prefix}.mlp")
        else:
            shapes |= mlp(f"{prefix}.mlp", spec.hidden_size, spec.intermediate_size, spec.mlp_bias)
    shapes["model.norm.weight"] = (spec.hidden_size,)
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def layer_norms(spec: ModelSpec) -> tuple[str, ...]:
    """Norms over the width of the model: before attention, before the MLP; with post norms also behind each.

    NOTE: `post_attention_layernorm` is the norm before the MLP in models without post norms, and behind attention in
    models with them.
    """
    if spec.has_post_norms:
        return (
            "input_layernorm",
            "pre_feedforward_layernorm",
            "post_attention_layernorm",
            "post_feedforward_layernorm",
        )
    return ("input_layernorm", "post_attention_layernorm")


def mlp(prefix: str, hidden: int, inner: int, has_bias: bool) -> dict[str, Shape]:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return _matrices(prefix, shapes, has_bias)


def fused_with(name: str) -> list[str]:
    """The matrices that are kept as one with `name`, itself included, in their order."""
    for parts in _FUSED:
        for part in parts:
            if name.endswith(f".{part}.weight"):
                return [name.replace(f".{part}.", f".{other}.") for other in parts]
    return [name]


def weight_bytes(spec: ModelSpec, bytes_per_element: int) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(spec).values()) * bytes_per_element


def largest_matrix(spec: ModelSpec) -> int:
    """Elements of the largest matrix."""
    return max(math.prod(shape) for shape in expected_tensors(spec).values())


def _attention(spec: ModelSpec, prefix: str) -> dict[str, Shape]:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inputs = {
        f"{name}_proj": (rows, spec.hidden_size)
        for name, rows in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)
    }
    shapes = _matrices(prefix, inputs, spec.qkv_bias)
    shapes |= _matrices(prefix, {"o_proj": (spec.hidden_size, q_rows)}, spec.out_bias)
    if spec.has_head_norms:
        shapes |= {f"{prefix}.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
    return shapes


def _experts(spec: ModelSpec, prefix: str) -> dict[str, Shape]:
    experts = spec.experts
    assert experts is not None, "checked by ModelSpec"
    shapes: dict[str, Shape] = {f"{prefix}.gate.weight": (experts.num_experts, spec.hidden_size)}
    for index in range(experts.num_experts):
        shapes |= mlp(
            f"{prefix}.experts.{index}", spec.hidden_size, experts.intermediate_size, has_bias=False
        )
    return shapes


def _matrices(prefix: str, shapes: dict[str, tuple[int, int]], has_bias: bool) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        found[f"{prefix}.{name}.weight"] = shape
        if has_bias:
            found[f"{prefix}.{name}.bias"] = shape[:1]
    return found
