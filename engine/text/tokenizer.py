"""Text to token ids and back, for one model: `load_text(path) -> TextModel`.

Ids become text through real bytes: each id has its bytes, and text is those bytes read as UTF-8. So a token
that holds half a character is exact (`token_bytes`), and a stream can be cut anywhere (see detokenizer.py).

Text that spells a special token ("<|im_end|>") is tokenised as that token wherever it stands, in a client's
message too, as most servers do: a template's own markers and a client's cannot be told apart once rendered.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from contracts.errors import ConfigError
from engine.gguf_file import model_stem
from engine.hf_files import end_token_ids, num_token_ids, read_json, token_text
from engine.text.gguf_vocab import read_vocab
from engine.text.template import ChatTemplate

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_QUANT_SUFFIX = re.compile(r"[.-](i?q\d\w*|f16|f32|bf16)$", re.IGNORECASE)
# Only what the edge may use as the default of a request's own field.
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class TextModel:
    """Tokenizer and chat template of one model. Immutable; every method is safe to call from any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        name: str,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        template: ChatTemplate | None = None,
        sampling_defaults: dict[str, float] | None = None,
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.name = name
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.template = template
        self.sampling_defaults = sampling_defaults or {}
        self._bytes, self._strips_space = _byte_table(tokenizer)
        self.special_ids = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self.max_token_bytes = max(map(len, self._bytes), default=1)
        self.whole_texts = _WholeTexts(self._bytes)

    def parts(self) -> list[Any]:
        """As JSON can carry them, for `of_parts`; without the chat template."""
        return [self._tokenizer.to_str(), self.name, sorted(self.eos_ids), self.bos_id]

    @classmethod
    def of_parts(cls, parts: list[Any]) -> Self:
        tokenizer, name, eos_ids, bos_id = parts
        return cls(Tokenizer.from_str(tokenizer), name=name, eos_ids=eos_ids, bos_id=bos_id)

    @cached_property
    def fingerprint(self) -> str:
        """Of all that decides about tokens: 32 hexadecimal digits. The first call takes a tenth of a second."""
        digest = hashlib.sha256(self._tokenizer.to_str().encode())
        digest.update((self.template.source if self.template else "").encode())
        return digest.hexdigest()[:32]

    @property
    def vocab_size(self) -> int:
        """Number of ids that have text; a model's logits may be wider (padding)."""
        return len(self._bytes)

    @property
    def chat_template(self) -> str | None:
        return self.template.source if self.template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises ValueError (UnicodeEncodeError) for lone surrogates."""
        # NOTE: `encode` holds the GIL to the end; the batch form releases it, and so does not stop an event
        # loop.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
            0
        ].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are no UTF-8 become U+FFFD.

        Raises IndexError for an unknown id.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self._bytes[i] for i in ids if i not in hidden).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space else text

    def token_id(self, piece: str) -> int | None:
        """The id of a token that is spelt exactly so, special ones included."""
        found: int | None = self._tokenizer.token_to_id(piece)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The id's own bytes, possibly part of a character; empty for an id without text (padding)."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """The id's bytes as text, U+FFFD for what is only part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat. Raises RequestError(param="messages") for what the template refuses."""
        if self.template is None:
            raise ConfigError(f"expected a chat template but model {self.name} has none")
        return self.template.render(messages, add_generation_prompt, continue_final_message, tools, kwargs)


class _WholeTexts(dict[int, str | None]):
    """Each id's text if its bytes are whole characters, else None; made when first asked for.

    Asked for every token that is shown, and so without a call of ours.
    """

    def __init__(self, table: Sequence[bytes]) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str | None:
        found: str | None = ""
        if 0 <= token_id < len(self._table):
            try:
                found = self._table[token_id].decode()
            except UnicodeDecodeError:
                found = None
            self[token_id] = found
        return found


def load_text(model_path: str | Path) -> TextModel:
    """The text side of a Hugging Face directory or a GGUF file.

    Raises ConfigError for a missing or unreadable tokenizer, or a kind that is not supported.
    """
    path = Path(model_path)
    if path.is_dir():
        return _from_directory(path)
    if not path.is_file():
        raise ConfigError(f"expected a model directory or a GGUF file but {path} does not exist")
    vocab = read_vocab(path)
    template = ChatTemplate(vocab.chat_template, vocab.special_tokens) if vocab.chat_template else None
    return TextModel(
        vocab.tokenizer, name=_model_name(path), eos_ids=vocab.eos_ids, bos_id=vocab.bos_id, template=template
    )


def _model_name(path: Path) -> str:
    return _QUANT_SUFFIX.sub("", model_stem(path)).lower()


def _from_directory(path: Path) -> TextModel:
    tokenizer = _read_tokenizer(path / "tokenizer.json", num_token_ids(path))
    config, generation = (
        read_json(path / "tokenizer_config.json"),
        read_json(path / "generation_config.json"),
    )
    special = {
        name: token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    tokens = {name: text for name, text in special.items() if text is not None}
    template = _template_source(path, config)
    return TextModel(
        tokenizer,
        name=path.resolve().name,
        eos_ids=end_token_ids(path, tokenizer.token_to_id),
        bos_id=tokenizer.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None,
        template=ChatTemplate(template, tokens) if template else None,
        sampling_defaults={
            key: float(generation[key])
            for key in _SAMPLING_DEFAULTS
            if generation.get("do_sample", True) and isinstance(generation.get(key), int | float)
        },
    )


def _read_tokenizer(source: Path, num_ids: int | None) -> Tokenizer:
    """`num_ids`: of the model. Tokens that are added past its end (Gemma 3 1B has one for images, which it does not
    see) are not known then: their spelling is text."""
    if not source.is_file():
        raise ConfigError(f"expected {source} (a `tokenizers` file) but it does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(source))
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if num_ids is not None and largest >= num_ids:
            content = read_json(source)
            content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] < num_ids]
            tokenizer = Tokenizer.from_str(json.dumps(content))
            largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"expected a tokenizer in {source} but got: {error}") from error
    if num_ids is not None and largest >= num_ids:
        raise ConfigError(
            f"{source}: expected token ids below {num_ids}, which the model has, but got {largest}"
        )
    return tokenizer


def _template_source(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template", read_json(path / "chat_template.json").get("chat_template"))
    if isinstance(source, list):  # several named ones
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default", next(iter(named.values()), None))
    if not isinstance(source, str | None):
        raise ConfigError(f"{path}: expected a chat template as text, or named ones, but got {source!r}")
    return source


def _byte_table(tokenizer: Tokenizer) -> tuple[list[bytes], bool]:
    """(bytes of each id, whether decoding drops one leading space), by the kind of the decoder."""
    # NOTE: the decoder's own state; the whole tokenizer's is tens of megabytes of JSON, seconds to read.
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder]) if "type" in step}
    kinds = steps.keys()
    if "ByteLevel" in kinds:
        convert, strips = _byte_level_bytes, False
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        is_prefixed = "Metaspace" in kinds and steps["Metaspace"].get("prepend_scheme") != "never"
        convert, strips = _sentencepiece_bytes, "Strip" in kinds or is_prefixed
    else:
        raise ConfigError(
            f"tokenizer decoder: expected ByteLevel, ByteFallback or Metaspace but got {sorted(kinds)}"
        )
    added = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(max(vocab.values(), default=-1), *added, -1) + 1)
    for piece, i in vocab.items():
        if i not in added:
            table[i] = convert(piece)
    for i, token in added.items():
        # The decoder's steps hold for added tokens too: Gemma adds its runs of spaces, spelt with SentencePiece's mark.
        table[i] = convert(token.content) if convert is _sentencepiece_bytes else token.content.encode()
    return table, strips


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_LATIN_OF).encode("latin-1")
    except UnicodeEncodeError:  # it has a character that stands for no byte
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins, to the Latin-1 character of their byte: a visible Latin-1 character stands for
    itself, the other bytes follow U+0100. What is below and stands for none becomes a character outside Latin-1.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    stand_ins = {0x100 + i: chr(byte) for i, byte in enumerate(hidden)}
    return dict.fromkeys(hidden, "\ufffd") | {byte: chr(byte) for byte in visible} | stand_ins


_LATIN_OF = _byte_alphabet()
