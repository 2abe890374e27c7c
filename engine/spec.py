"""What a checkpoint is: the numbers of one decoder, whatever file they come from.

Families differ by what a `ModelSpec` says, not by a class each; `spec_hf` and `spec_gguf` fill it in. Everything here
is pure data; no tensor is touched.

    family             differs from Llama by
    Mistral            a sliding window on every layer, if its config has one
    Qwen2, Qwen2.5     biases on q, k and v
    Qwen3              norms over each head of q and k
    Gemma 3            two kinds of layers (window and rope base), norms behind attention and MLP too, norms over heads,
                       scaled embeddings, a GELU gate, its own attention scale, soft caps where configured
    Mixtral, Qwen3-MoE layers whose MLP is a choice of experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from contracts.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class LinearRope:
    """All frequencies divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (arXiv:2309.00071): frequencies that turn more than `beta_fast` times within the original context are kept,
    those below `beta_slow` divided by `factor`, a ramp between; cosines and sines are multiplied by `magnitude`.

    `truncates`: the ends of the ramp are whole frequencies.
    """

    factor: float
    original_max_position: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True


@dataclass(frozen=True, slots=True)
class FactorRope:
    """One divisor per frequency, head_dim / 2 of them: how GGUF stores what Llama 3.1 scaling works out to."""

    factors: tuple[float, ...]


RopeScaling = LinearRope | Llama3Rope | YarnRope | FactorRope | None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (arXiv:2104.09864): frequencies theta^(-2i/D), then scaled."""

    theta: float
    scaling: RopeScaling = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer. `window`: a query sees itself and the window - 1 positions before it;
    None: all before it. `is_sparse`: its MLP is `ModelSpec.experts`."""

    rope: Rope
    window: int | None = None
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A sparse MLP: each token goes through the `num_chosen` experts of the highest probability. `is_normalized`: the
    probabilities of the chosen ones are divided by their sum."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
    is_normalized: bool


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores become weights: q·k times `scale`, then cap·tanh(score / cap) if there is a cap, then a softmax over
    what the window lets a query see."""

    scale: float
    window: int | None = None
    cap: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and constants of one decoder. Sizes count elements, `max_position` counts tokens."""

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    attention_scale: float
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    has_head_norms: bool = False
    has_post_norms: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    attention_cap: float | None = None
    logit_cap: float | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
        ):
            require_positive(name, getattr(self, name))
        for name in ("vocab_size", "max_position", "norm_eps", "attention_scale", "embedding_scale"):
            require_positive(name, getattr(self, name))
        for name in ("attention_cap", "logit_cap"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"expected num_heads to be a multiple of num_kv_heads={self.num_kv_heads} but got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"expected an even head_dim but got {self.head_dim}")
        for layer in dict.fromkeys(self.layers):
            self._check_layer(layer)
        if self.experts is not None:
            _check_experts(self.experts)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_sparse(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.is_sparse for layer in self.layers)

    def rule(self, layer: LayerSpec) -> AttentionRule:
        """How `layer` weighs what its queries see."""
        return AttentionRule(self.attention_scale, layer.window, self.attention_cap)

    def _check_layer(self, layer: LayerSpec) -> None:
        require_positive("rope_theta", layer.rope.theta)
        if layer.window is not None:
            require_positive("sliding_window", layer.window)
        scaling = layer.rope.scaling
        if isinstance(scaling, LinearRope | Llama3Rope | YarnRope):
            require_positive("rope factor", scaling.factor)
        if isinstance(scaling, FactorRope) and len(scaling.factors) != self.head_dim // 2:
            raise ConfigError(f"expected {self.head_dim // 2} rope factors but got {len(scaling.factors)}")
        assert not layer.is_sparse or self.experts is not None, "a sparse layer without experts"


def require_positive(name: str, value: float) -> None:
    """Raises ConfigError unless `value` > 0; NaN is not."""
    if not value > 0:
        raise ConfigError(f"expected {name} > 0 but got {value}")


def _check_experts(experts: Experts) -> None:
    for name in ("num_experts", "num_chosen", "intermediate_size"):
        require_positive(f"experts: {name}", getattr(experts, name))
    if experts.num_chosen > experts.num_experts:
        raise ConfigError(
            f"expected at most num_experts={experts.num_experts} experts per token but got {experts.num_chosen}"
        )
