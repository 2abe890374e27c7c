"""What a checkpoint is: the numbers of one Llama-family decoder, read from a config.json or from a GGUF header.

Everything here is pure data; no tensor is touched. A field that is missing, mistyped or that asks for something this
engine does not compute raises `ConfigError` before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from contracts.errors import ConfigError

if TYPE_CHECKING:
    from engine.gguf_file import GgufFile

HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
GGUF_ARCHITECTURES = ("llama",)


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
class FactorRope:
    """One divisor per frequency, head_dim / 2 of them: how GGUF stores what Llama 3.1 scaling works out to."""

    factors: tuple[float, ...]


RopeScaling = LinearRope | Llama3Rope | FactorRope | None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and constants of one decoder. Sizes count elements, `max_position` counts tokens."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rope_theta: float
    rope_scaling: RopeScaling
    norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
        ):
            _require_positive(name, getattr(self, name))
        for name in ("vocab_size", "max_position", "rope_theta", "norm_eps"):
            _require_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"expected num_heads to be a multiple of num_kv_heads={self.num_kv_heads} but got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"expected an even head_dim but got {self.head_dim}")
        if isinstance(self.rope_scaling, FactorRope) and len(self.rope_scaling.factors) != self.head_dim // 2:
            raise ConfigError(
                f"expected {self.head_dim // 2} rope factors but got {len(self.rope_scaling.factors)}"
            )


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"expected {name} > 0 but got {value}")


class _Fields:
    """Typed access to the fields of a config; every complaint names the source and the field."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._mistyped(name, "an integer", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._mistyped(name, "a number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._mistyped(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._mistyped(name, "a string", value)
        return value

    def section(self, name: str) -> _Fields:
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self._mistyped(name, "an object", value)
        return _Fields(value, f"{self._source} {name}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id field, which checkpoints write as nothing, one id or a list of ids."""
        value = self._values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise self._mistyped(name, "token ids", value)
        return tuple(ids)

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self._source}: expected the field {name!r} but it is missing")
        return default

    def _mistyped(self, name: str, expected: str, value: object) -> ConfigError:
        return ConfigError(f"{self._source}: expected {name!r} to be {expected} but got {value!r}")


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Hugging Face config.json.

    `eos_token_id` may be a list; merge a generation_config.json's into it before calling.
    Raises ConfigError for an unsupported architecture or feature and for missing or mistyped fields.
    """
    fields = _Fields(config, "config.json")
    _check_hf_features(config, fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    _require_positive("num_attention_heads", num_heads)
    theta, scaling = _hf_rope(fields)
    return ModelSpec(
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position=fields.integer("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=fields.number("rms_norm_eps"),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _check_hf_features(config: Mapping[str, Any], fields: _Fields) -> None:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not any(name in HF_ARCHITECTURES for name in architectures):
        raise ConfigError(
            f"unsupported architecture: expected one of {HF_ARCHITECTURES} but got {architectures!r}"
        )
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise ConfigError(f"config.json: expected hidden_act='silu' but got {activation!r}")
    if fields.has("sliding_window"):
        raise ConfigError(f"config.json: expected no sliding_window but got {config['sliding_window']!r}")
    if (rotary := fields.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"config.json: expected partial_rotary_factor=1 but got {rotary}")
    if fields.has("quantization_config"):
        raise ConfigError("config.json: expected float weights but the checkpoint has a quantization_config")


def _hf_rope(fields: _Fields) -> tuple[float, RopeScaling]:
    # transformers 5 writes one `rope_parameters` object; older configs write `rope_theta` and `rope_scaling`.
    rope = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearRope(rope.number("factor"))
        case "llama3":
            scaling = Llama3Rope(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position=rope.integer("original_max_position_embeddings"),
            )
            return theta, scaling
    raise ConfigError(f"config.json: expected rope type default, linear or llama3 but got {kind!r}")


def spec_from_gguf(file: GgufFile, rope_factors: tuple[float, ...] | None = None) -> ModelSpec:
    """The spec of a GGUF file's header. `rope_factors`: the content of its tensor rope_freqs.weight, if it has one.

    Raises ConfigError for an architecture other than `llama`, experts, partial rotary or missing fields.
    """
    fields = _Fields(file.fields, "GGUF header")
    architecture = fields.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"unsupported architecture: expected one of {GGUF_ARCHITECTURES} but got {architecture!r}"
        )
    if (experts := fields.integer(f"{architecture}.expert_count", 0)) != 0:
        raise ConfigError(f"GGUF header: expected a dense model but got {experts} experts")
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise ConfigError("GGUF: expected the tensor token_embd.weight but it is missing")
    hidden_size = fields.integer("llama.embedding_length")
    num_heads = fields.integer("llama.attention.head_count")
    _require_positive("llama.attention.head_count", num_heads)
    head_dim = fields.integer("llama.attention.key_length", hidden_size // num_heads)
    if (rotary := fields.integer("llama.rope.dimension_count", head_dim)) != head_dim:
        raise ConfigError(f"GGUF header: expected rope.dimension_count={head_dim} but got {rotary}")
    # NOTE: end-of-turn is a stop token of its own; models whose eos is end-of-text never stop a chat without it.
    eos = (*fields.token_ids("tokenizer.ggml.eos_token_id"), *fields.token_ids("tokenizer.ggml.eot_token_id"))
    return ModelSpec(
        num_layers=fields.integer("llama.block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("llama.feed_forward_length"),
        vocab_size=tensors["token_embd.weight"].shape[0],
        max_position=fields.integer("llama.context_length"),
        rope_theta=fields.number("llama.rope.freq_base", 10_000.0),
        rope_scaling=_gguf_rope(fields, rope_factors),
        norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def _gguf_rope(fields: _Fields, factors: tuple[float, ...] | None) -> RopeScaling:
    if factors is not None:
        return FactorRope(factors)
    kind = fields.text("llama.rope.scaling.type", "none")
    match kind:
        case "none":
            return None
        case "linear":
            return LinearRope(fields.number("llama.rope.scaling.factor"))
    raise ConfigError(f"GGUF header: expected rope.scaling.type none or linear but got {kind!r}")
