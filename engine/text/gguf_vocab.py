"""The tokenizer that a GGUF file describes, as a `tokenizers.Tokenizer`.

A GGUF holds pieces, merges or scores, token types and the name of a pre-tokenizer; the rules behind that name
are not in the file. The names known here are those of the model families that the engine serves; any other is
refused by name rather than guessed.

Where a file leaves something open, it is read as `transformers` reads it: text is not normalized (Qwen's own
tokenizer.json would compose it first), and SentencePiece's leading space stands before the first piece of text
only, not behind each special token.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from contracts.errors import ConfigError
from engine.gguf_file import end_token_ids, named_token_ids, read_gguf
from engine.spec_fields import Fields

# Token types of the format.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
    """Raises ConfigError for a file that is not GGUF v2/v3, or whose tokenizer is of an unknown kind or damaged."""
    meta = read_gguf(path).fields
    pieces = Fields(meta, str(path), "tokenizer.ggml.").items("tokens")
    if not pieces:
        raise ConfigError(f"expected a vocabulary (tokenizer.ggml.tokens) in {path} but there is none")
    try:
        tokenizer = _tokenizer(meta, pieces)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path}: expected a vocabulary but: {error}") from error
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _named_id(meta, role) for name, role in named.items()}
    return GgufVocab(
        tokenizer=tokenizer,
        name=str(meta.get("general.name") or path.stem),
        chat_template=Fields(meta, str(path)).text("tokenizer.chat_template", "") or None,
        bos_id=ids["bos_token"],
        eos_ids=end_token_ids(meta),
        special_tokens={name: pieces[i] for name, i in ids.items() if i is not None},
    )


def _named_id(meta: dict[str, Any], role: str) -> int | None:
    return next(iter(named_token_ids(meta, role)), None)


def _tokenizer(meta: dict[str, Any], pieces: list[str]) -> Tokenizer:
    kind = meta.get("tokenizer.ggml.model")
    builder = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if builder is None:
        raise ConfigError(f"expected tokenizer model gpt2 or llama but got {kind!r}")
    tokenizer = builder(meta, pieces)
    bos_id = _named_id(meta, "bos")
    _add_tokens(tokenizer, pieces, meta.get("tokenizer.ggml.token_type"), {bos_id, *end_token_ids(meta)})
    begins = kind == "llama" or meta.get("tokenizer.ggml.pre") in _BOS_FIRST
    if meta.get("tokenizer.ggml.add_bos_token", begins) and bos_id is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{pieces[bos_id]} $A", special_tokens=[(pieces[bos_id], bos_id)]
        )
    return tokenizer


def _byte_level(meta: dict[str, Any], pieces: list[str]) -> Tokenizer:
    name = str(meta.get("tokenizer.ggml.pre") or "default")
    rules = _PRE_TOKENIZERS.get(name)
    if rules is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ConfigError(f"tokenizer.ggml.pre: expected one of {known} but got {name!r}")
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges") or ()]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = rules()
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


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "pixtral")
# These take a whole word that is in the vocabulary before they look at merges.
_WHOLE_WORDS_FIRST = (*_LLAMA3_NAMES, "tekken")
# And these begin a prompt with BOS where the header does not say, as in llama.cpp; so do SentencePiece's.
_BOS_FIRST = _WHOLE_WORDS_FIRST
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "smollm": _single_digits,
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
    "tekken": _split(_TEKKEN),
    "smaug-bpe": _split(_LLAMA3),  # finetunes of Llama 3 with a tokenizer of their own
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
    unk_id = _named_id(meta, "unknown") or 0
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores),
            unk_token=pieces[unk_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", not is_gemma))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to build a piece from two others, best score first; of one piece the longest left part first.

    These are the ties of `transformers`, whose tokenizers this has to equal.
    """
    found: list[tuple[float, int, tuple[str, str]]] = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab:
                found.append((-scores[i], -cut, (left, right)))
    found.sort(key=lambda item: item[:2])
    return [item[2] for item in found]


def _add_tokens(
    tokenizer: Tokenizer, pieces: list[str], types: list[int] | None, known: Container[int | None]
) -> None:
    """Pieces that are matched whole in the text: control tokens, and those the model's makers defined. `known`: ids of
    control tokens whatever their type, which early files have wrong, or none of.

    A piece that the vocabulary spells otherwise (Gemma's runs of spaces) is left to the merges: added under this
    spelling it would get an id of its own, past the end of the model's.
    """
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for i, (piece, kind) in enumerate(zip(pieces, types or [_NORMAL] * len(pieces), strict=False)):
        is_special = kind in (_UNKNOWN, _CONTROL) or i in known
        if (is_special or kind == _USER_DEFINED) and tokenizer.token_to_id(piece) == i:
            token = AddedToken(piece, normalized=False, special=is_special)
            (special if is_special else plain).append(token)
    # NOTE: all at once; each call builds the matcher of all added tokens anew, and Gemma has six thousand.
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
