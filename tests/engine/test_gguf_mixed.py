"""Files of every family as quantizers of llama.cpp mix them, against `transformers` with the numbers they expand to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch

from engine.quantization import Quantization
from engine.weights import load_model
from tests.engine.tiny_models import (
    BLOCKS,
    PROMPT,
    checkpoint_tensors,
    family_config,
    gguf_name,
    make_oracle,
    make_runner,
    oracle_logits,
    run_prompt,
    write_gguf,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = {
    "attn_q": "Q4_K",
    "attn_k": "Q5_0",
    "attn_v": "Q8_0",
    "attn_output": "Q4_K",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q4_K",
    "ffn_down": "Q6_K",
    "token_embd": "Q8_0",
    "output": "Q6_K",
}
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with a tied head": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2 with a tied head": ("qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 with a tied head": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 64}),
}


def mixed(name: str) -> str:
    """The first layer in Q8_0, as where a quantizer spares it."""
    return "Q8_0" if name.startswith("blk.0.") else KINDS.get(name.split(".")[-2], "F32")


def expanded(path: Path, oracle: PreTrainedModel) -> PreTrainedModel:
    """`oracle` with the numbers of the file that was made of it, back in the order of Hugging Face."""
    config, tensors = oracle.config, {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    is_llama = config.model_type in ("llama", "mistral")
    state = {}
    for name, old in checkpoint_tensors(oracle).items():
        stored = tensors[gguf_name(name, config)]
        values = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
        if is_llama and name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = values.view(-1, config.head_dim // 2, 2, old.shape[1])
            values = pairs.transpose(1, 2).reshape(old.shape)
        elif config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            values -= 1
        state[name] = values
    missing, unexpected = oracle.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return oracle


@pytest.mark.parametrize("quantization", ["none", "auto"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mixed_file_gives_the_logits_of_its_numbers(
    tmp_path: Path, variant: str, quantization: Quantization
) -> None:
    family, changes = VARIANTS[variant]
    oracle = make_oracle(family_config(family, **{**SHAPE, **changes}))
    path = write_gguf(tmp_path / "x.gguf", oracle, mixed)
    expected = oracle_logits(expanded(path, oracle), PROMPT)[-1]
    runner = make_runner(load_model(path, torch.float32, quantization=quantization))
    for chunk in (16, len(PROMPT)):
        logits = run_prompt(runner, PROMPT, chunk, BLOCKS)
        assert (logits - expected).norm() < 1e-4 * expected.norm()
