"""Random Llama checkpoints of a few thousand weights, as a Hugging Face directory or a GGUF file, and their oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.kv import KvSlab
from engine.model import Model
from engine.runner import Runner, StepItem
from engine.weights import LoadedModel

BLOCK_SIZE = 4
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


def make_oracle(config: dict[str, Any], seed: int = 0) -> LlamaForCausalLM:
    """transformers' model of `config` with random weights: norms and biases too, so that none can be forgotten."""
    torch.manual_seed(seed)
    oracle = LlamaForCausalLM(LlamaConfig(**config)).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return oracle


def oracle_logits(oracle: LlamaForCausalLM, token_ids: Sequence[int]) -> Tensor:
    """[T, V] after each token."""
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([list(token_ids)])).logits[0]
    return logits


def write_hf(directory: Path, config: dict[str, Any], oracle: LlamaForCausalLM) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(checkpoint_tensors(oracle), directory / "model.safetensors")
    return directory


def checkpoint_tensors(oracle: LlamaForCausalLM) -> dict[str, Tensor]:
    """By Hugging Face name; a tied head is not stored."""
    is_tied = oracle.config.tie_word_embeddings
    return {
        name: tensor.contiguous()
        for name, tensor in oracle.state_dict().items()
        if not (is_tied and name == "lm_head.weight")
    }


def write_gguf(path: Path, oracle: LlamaForCausalLM, quantization: str = "F32") -> Path:
    """`quantization` applies to matrices. A llama3-scaled rope is written as GGUF does: one factor per frequency."""
    config = oracle.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_array("tokenizer.ggml.tokens", [f"piece {i}" for i in range(config.vocab_size)])
    writer.add_array("tokenizer.ggml.scores", [0.5 * i for i in range(config.vocab_size)])
    if config.rope_parameters["rope_type"] == "llama3":
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        unscaled = config.rope_parameters["rope_theta"] ** -exponents
        writer.add_tensor("rope_freqs.weight", (unscaled / oracle.model.rotary_emb.inv_freq).numpy())
    for name, tensor in checkpoint_tensors(oracle).items():
        _add_tensor(writer, name, tensor, config, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: Tensor, config: LlamaConfig, quantization: str
) -> None:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for module, num_heads in heads.items():
        if module in name:  # as llama.cpp's converter writes them: rotation pairs side by side
            halves = tensor.view(num_heads, 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
    for hf, short in _GGUF_NAMES.items():
        name = name.replace(hf, short)
    if tensor.ndim == 1 or quantization == "F32":
        writer.add_tensor(name, tensor.numpy().copy())
        return
    kind = gguf.GGMLQuantizationType[quantization]
    writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)


def make_runner(model: LoadedModel, num_blocks: int = 64, dtype: torch.dtype = torch.float32) -> Runner:
    slab = KvSlab.allocate(model.spec, num_blocks, BLOCK_SIZE, dtype)
    return Runner(Model(model), slab, num_threads=1)


def run_prompt(runner: Runner, token_ids: Sequence[int], chunk: int, block_ids: Sequence[int]) -> Tensor:
    """[V]: logits after the last token, the prompt given `chunk` tokens at a time."""
    logits = torch.empty(0)
    for low in range(0, len(token_ids), chunk):
        logits = runner.execute([StepItem(token_ids[low : low + chunk], low, block_ids, want_logits=True)])
    return logits[0]
