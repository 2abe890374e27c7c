"""The tokenizer that a GGUF file describes, as a `tokenizers.Tokenizer`.

A GGUF holds pieces, merges or scores, token types and the name of a pre-tokenizer; the rules behind that name
are not in the file. The names known here are those of the Llama family; any other is refused by name rather
than guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from contracts.errors import ConfigError
from engine.gguf_file import read_gguf

# Token types of the format.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """What `read_vocab` found: the tokenizer and the facts that `tokenizer_config.json` holds elsewhere."""

    tokenizer: Tokenizer
    name: str
    chat_template: str | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: dict[str, str]


def read_vocab(path: Path) -> GgufVocab:
    """Raises ConfigError for a file that is not GGUF v2/v3, or whose tokenizer is of an unknown kind."""
    meta = read_gguf(path).fields
    pieces = meta.get("tokenizer.ggml.tokens")
    if not pieces:
        raise ConfigError(f"expected a vocabulary (tokenizer.ggml.tokens) in {path} but there is none")
    kind = meta.get("tokenizer.ggml.model")
    builder = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if builder is None:
        raise ConfigError(f"{path}: expected tokenizer model gpt2 or llama but got {kind!r}")
    tokenizer = builder(meta, pieces)
    _add_tokens(tokenizer, pieces, meta.get("tokenizer.ggml.token_type"))
    bos_id, eos_id = meta.get("tokenizer.ggml.bos_token_id"), meta.get("tokenizer.ggml.eos_token_id")
    if meta.get("tokenizer.ggml.add_bos_token", kind == "llama") and bos_id is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{pieces[bos_id]} $A", special_tokens=[(pieces[bos_id], bos_id)]
        )
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    ends = (eos_id, meta.get("tokenizer.ggml.eot_token_id"), meta.get("tokenizer.ggml.eom_token_id"))
    return GgufVocab(
        tokenizer=tokenizer,
        name=str(meta.get("general.name") or path.stem),
        chat_template=meta.get("tokenizer.chat_template"),
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        special_tokens={name: pieces[i] for name, i in ids.items() if i is not None and i < len(pieces)},
    )


def _byte_level(meta: dict[str, Any], pieces: list[str]) -> Tokenizer:
    name = str(meta.get("tokenizer.ggml.pre") or "default")
    rules = _PRE_TOKENIZERS.get(name)
    if rules is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ConfigError(f"tokenizer.ggml.pre: expected one of {known} but got {name!r}")
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges") or ()]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    # Llama 3 takes a whole word that is in the vocabulary before it looks at merges.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _LLAMA3_NAMES))
    tokenizer.pre_tokenizer = rules()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], Any]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "smollm": _single_digits,
    "qwen2": _split(_QWEN2),
    **dict.fromkeys(_LLAMA3_NAMES, _split(_LLAMA3)),
}


def _sentencepiece(meta: dict[str, Any], pieces: list[str]) -> Tokenizer:
    """SentencePiece BPE with byte fallback, its merges recovered from the scores of the pieces."""
    is_gemma = str(meta.get("general.architecture", "")).startswith("gemma")
    if is_gemma:  # stores runs of spaces as spaces, and orders merges by token id, not by score
        pieces = ["▁" * len(piece) if piece and not piece.strip(" ") else piece for piece in pieces]
    scores = meta.get("tokenizer.ggml.scores")
    if is_gemma or not scores:
        scores = [float(-i) for i in range(len(pieces))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    unk_id = meta.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores),
            unk_token=pieces[unk_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend("▁")] if meta.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to build a piece from two others, best score first; ties keep the order of the vocabulary."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[i], vocab[left], vocab[right], (left, right)))
    found.sort(key=lambda item: item[:3])
    return [item[3] for item in found]


def _add_tokens(tokenizer: Tokenizer, pieces: list[str], types: list[int] | None) -> None:
    for i, kind in enumerate(types or ()):
        if kind in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(pieces[i], normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(pieces[i], normalized=False, special=False)])
