"""Random checkpoints of a few thousand weights, as a Hugging Face directory or a GGUF file, and their oracle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.kv import KvSlab
from engine.model import Model
from engine.runner import Runner, StepItem
from engine.weights import LoadedModel

if TYPE_CHECKING:  # every process that collects tests would wait for it
    from transformers import PreTrainedConfig, PreTrainedModel

BLOCK_SIZE = 4
PROMPT: list[int] = torch.randint(0, 96, (90,), generator=torch.Generator().manual_seed(3)).tolist()
BLOCKS = list(range(40, 17, -1))
"""A table for PROMPT, out of order."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def make_config(**changes: Any) -> dict[str, Any]:
    """A config.json of two layers, six query heads over two kv heads, untied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes


def family_config(family: str, **changes: Any) -> dict[str, Any]:
    """As `make_config`, for one of FAMILIES."""
    return make_config() | FAMILIES[family] | changes


_MOE = {"num_experts_per_tok": 2, "num_hidden_layers": 3, "intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": None},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "tie_word_embeddings": True,
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 5,
        "sliding_window": None,
        **_MOE,
    },
    "qwen3moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "norm_topk_prob": True,
        "moe_intermediate_size": 32,
        **_MOE,
    },
}


def make_oracle(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """transformers' model of `config` with random weights: norms and biases too, so that none can be forgotten."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    given = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    if given.get("head_dim") is None:  # some families compute it only if the field is absent
        given.pop("head_dim", None)
    oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **given)).eval()
    norm_mean = 0.0 if config["model_type"].startswith("gemma") else 1.0  # Gemma stores the distance from one
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            parameter.normal_(norm_mean if "norm" in name else 0.0, 0.2)
    return oracle


def oracle_logits(oracle: PreTrainedModel, token_ids: Sequence[int], **options: Any) -> Tensor:
    """[T, V] after each token."""
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([list(token_ids)]), **options).logits[0]
    return logits


def write_hf(directory: Path, config: dict[str, Any], oracle: PreTrainedModel) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(checkpoint_tensors(oracle), directory / "model.safetensors")
    return directory


def checkpoint_tensors(oracle: PreTrainedModel) -> dict[str, Tensor]:
    """By Hugging Face name; a tied head is not stored."""
    is_tied = oracle.config.tie_word_embeddings
    return {
        name: tensor.contiguous()
        for name, tensor in oracle.state_dict().items()
        if not (is_tied and name == "lm_head.weight")
    }


_GGUF_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}


def write_gguf(path: Path, oracle: PreTrainedModel, quantization: str | Callable[[str], str] = "F32") -> Path:
    """`quantization` applies to matrices, or says by name what does; of a kind that the library cannot write, a matrix
    is random blocks. A llama3-scaled rope is written as GGUF does: one factor per frequency."""
    config = oracle.config
    architecture = _GGUF_ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _add_header(writer, config)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        unscaled = rope["rope_theta"] ** -exponents
        writer.add_tensor("rope_freqs.weight", (unscaled / oracle.model.rotary_emb.inv_freq).numpy())
    for hf_name, tensor in _split_experts(checkpoint_tensors(oracle)):
        name = gguf_name(hf_name, config)
        kind = quantization if isinstance(quantization, str) else quantization(name)
        _add_tensor(writer, name, _as_stored(tensor, name, architecture, config), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(hf_name: str, config: PreTrainedConfig) -> str:
    number = {short: number for number, short in gguf.MODEL_ARCH_NAMES.items()}[
        _GGUF_ARCHITECTURES[config.model_type]
    ]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    name: str | None = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
    assert name is not None, hf_name
    return name


def _add_header(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if (num_experts := getattr(config, "num_local_experts", None)) is not None:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_array("tokenizer.ggml.tokens", [f"piece {i}" for i in range(config.vocab_size)])
    writer.add_array("tokenizer.ggml.scores", [0.5 * i for i in range(config.vocab_size)])


def _split_experts(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """GGUF keeps gate and up of all experts apart."""
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = tensor.chunk(2, dim=1)
            yield f"{stem}gate_proj.weight", gate
            yield f"{stem}up_proj.weight", up
        else:
            yield f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor


def _as_stored(tensor: Tensor, name: str, architecture: str, config: PreTrainedConfig) -> Tensor:
    """As llama.cpp's converter changes values on the way."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    if architecture == "llama" and heads is not None:  # rotation pairs side by side
        halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, quantization: str) -> None:
    if tensor.ndim == 1 or quantization == "F32":
        writer.add_tensor(name, tensor.numpy().copy())
        return
    kind = gguf.GGMLQuantizationType[quantization]
    try:
        blocks = gguf.quants.quantize(tensor.numpy(), kind)
    except NotImplementedError:
        blocks = make_blocks(*tensor.shape, quantization, seed=len(name))
    writer.add_tensor(name, blocks, raw_dtype=kind)


def make_blocks(rows: int, columns: int, kind: str, seed: int) -> np.ndarray:
    """[rows, bytes]: random blocks of any kind. Bytes stay small, so that no half or exponent in them is large."""
    generator = np.random.default_rng(seed)
    number = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16", "BF16"):
        return gguf.quants.quantize(generator.normal(0, 0.05, (rows, columns)).astype(np.float32), number)
    size, num_bytes = gguf.GGML_QUANT_SIZES[number]
    return generator.integers(0, 0x20, (rows, columns // size * num_bytes), dtype=np.uint8)


def make_runner(model: LoadedModel, num_blocks: int = 64, dtype: torch.dtype = torch.float32) -> Runner:
    slab = KvSlab.allocate(model.spec, num_blocks, BLOCK_SIZE, dtype)
    return Runner(Model(model), slab, num_threads=1)


def run_prompt(runner: Runner, token_ids: Sequence[int], chunk: int, block_ids: Sequence[int]) -> Tensor:
    """[V]: logits after the last token, the prompt given `chunk` tokens at a time."""
    logits = torch.empty(0)
    for low in range(0, len(token_ids), chunk):
        logits = runner.execute([StepItem(token_ids[low : low + chunk], low, block_ids, want_logits=True)])
    return logits[0]
