"""Vocabularies of a few hundred pieces, trained on the spot and written as the GGUF of each kind of tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, don't you think? We've seen it; they'll see it too.",
    "def main():\n    for i in range(10):\n        print(i ** 2)  # squares\n\treturn None\n\n\n",
    "日本語で自己紹介してください。 中文的句子。 한국어 문장입니다. naïve café résumé",
    "1234567890 2024-01-01 3.14159 ½ ¾ ٣٤",
] * 20
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEFINED = ["<think>", "</think>"]


def write_byte_level(
    path: Path, architecture: str, pre: str, bos: str | None = None, add_bos: bool | None = None
) -> Path:
    """Merges as BPE files have them, learnt within words of GPT-2's rule; SmolLM's never join digits. `bos`: one of
    CONTROL."""
    trained = Tokenizer(models.BPE())
    rules = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if pre == "smollm":
        rules.insert(0, pre_tokenizers.Digits(individual_digits=True))
    trained.pre_tokenizer = pre_tokenizers.Sequence(rules)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer = _begin(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*pieces, *CONTROL, *DEFINED])
    writer.add_token_types([1] * len(pieces) + [3] * len(CONTROL) + [4] * len(DEFINED))
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(len(pieces))
    if bos is not None:
        writer.add_bos_token_id(len(pieces) + CONTROL.index(bos))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    return _end(writer, path)


def write_sentencepiece(path: Path, architecture: str, has_prefix: bool | None) -> Path:
    """Scores as SentencePiece gives them: the earlier a merge, the higher; single characters last. Gemma's file is
    in the order of its merges, spells runs of spaces as spaces, and its scores say nothing."""
    is_gemma = architecture.startswith("gemma")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(split=not is_gemma)
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    merged = ["".join(merge) for merge in model["merges"]]
    if is_gemma:
        merged = ["▁▁", "▁▁▁▁", *merged]
    learnt = list(dict.fromkeys([*merged, *(piece for piece in model["vocab"] if len(piece) == 1)]))
    pieces = ["<unk>", "<s>", "</s>", *CONTROL, *DEFINED, *(f"<0x{i:02X}>" for i in range(256)), *learnt]
    types = [2, 3, 3, *[3] * len(CONTROL), *[4] * len(DEFINED), *[6] * 256, *[1] * len(learnt)]
    scores = [0.0] * (len(pieces) - len(learnt)) + [
        -1.0 if is_gemma else float(-i) for i in range(len(learnt))
    ]
    if is_gemma:
        pieces = [" " * len(piece) if set(piece) == {"▁"} and len(piece) > 1 else piece for piece in pieces]
        types = [4 if set(piece) == {" "} else kind for piece, kind in zip(pieces, types, strict=True)]
    writer = _begin(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if has_prefix is not None:
        writer.add_add_space_prefix(has_prefix)
    return _end(writer, path)


def _begin(path: Path, architecture: str) -> gguf.GGUFWriter:
    """A header with what a reader of configs asks for; there are no weights."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def _end(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
