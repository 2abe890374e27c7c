"""The embedded model's text side, against the golden prompts and against `transformers` as an oracle."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from contracts.errors import ConfigError
from engine.embedded import ensure_embedded_model
from engine.text.gguf_vocab import read_vocab
from engine.text.tokenizer import TextModel, load_text

GOLDEN = Path(__file__).parents[2] / "data" / "smollm2_greedy.json"

TORTURE = [
    "",
    " ",
    "Hello, world!",
    "👩‍🚀 and 🇫🇷 and 😀😀",
    "日本語で自己紹介してください。中文，한국어",
    "e\u0301 a\u0308 \u0e01\u0e33 \u200d\u200b",
    "   three   runs\t\ttabs\n\n\n  newline  ",
    "def f(x):\n    return x ** 2  # comment\n\tif x != 1_000:\n",
    "12345 3.14159 2024-01-01",
    "a<|im_end|>b<|im_start|>user <|endoftext|>",
    "don't I'LL we've 'tis",
    "naïve Ünïcode ﬁ Ǆ İ",
    "\u0000\u0001\x7f\ufffd\U0010ffff",
    "{}[]()<>!@#$%^&*~`|\\/",
]


@cache
def embedded() -> TextModel:
    return load_text(ensure_embedded_model())


@cache
def oracle() -> Any:
    """NOTE: it splits with GPT-2's rule, not with the model's own (each digit alone): equal but for rare
    numerals.
    """
    from transformers import AutoTokenizer

    path = ensure_embedded_model()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def golden_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
    return cases


def test_chats_become_the_golden_prompt_ids() -> None:
    text = embedded()
    for case in golden_cases():
        prompt = text.render(case["request"])
        assert text.encode(prompt, add_special_tokens=False) == case["prompt_ids"]


def test_golden_output_ids_decode_to_the_golden_text() -> None:
    text = embedded()
    for case in golden_cases():
        assert text.decode(case["output_ids"]) == case["text"]


@pytest.mark.parametrize("line", TORTURE)
def test_encoding_equals_the_oracle(line: str) -> None:
    assert embedded().encode(line) == oracle().encode(line, add_special_tokens=False)


def test_each_numeral_stands_alone() -> None:
    text = embedded()
    assert [text.decode(text.encode(part)) for part in ("¾", "٣٤")] == ["¾", "٣٤"]
    assert text.encode(" ¾") == [*text.encode(" "), *text.encode("¾")]


@settings(max_examples=200)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["N"]), max_size=80))
def test_any_text_encodes_like_the_oracle(line: str) -> None:
    assert embedded().encode(line) == oracle().encode(line, add_special_tokens=False)


@cache
def single_bytes() -> frozenset[bytes]:
    text = embedded()
    return frozenset(piece for i in range(text.vocab_size) if len(piece := text.token_bytes(i)) == 1)


@settings(max_examples=100)
@given(st.text(st.characters(codec="utf-8", max_codepoint=0xFFFF), max_size=80))
def test_decode_undoes_encode(line: str) -> None:
    text = embedded()
    # The vocabulary lacks the bytes that begin characters of unused planes; those cannot come back.
    assume(all(bytes([byte]) in single_bytes() for byte in line.encode()))
    assert text.decode(text.encode(line), skip_special_tokens=False) == line


@settings(max_examples=100)
@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
def test_any_ids_decode_like_the_library(ids: list[int], skip: bool) -> None:
    reference: str = read_library_tokenizer().decode(ids, skip_special_tokens=skip)
    assert embedded().decode(ids, skip_special_tokens=skip) == reference


@cache
def read_library_tokenizer() -> Tokenizer:
    return read_vocab(ensure_embedded_model()).tokenizer


def test_the_embedded_model_knows_its_facts() -> None:
    text = embedded()
    assert (text.name, text.vocab_size, text.bos_id) == ("smollm2-135m-instruct", 49152, 1)
    assert 2 in text.eos_ids
    assert text.token_text(2) == "<|im_end|>"
    assert text.fingerprint == load_text(ensure_embedded_model()).fingerprint


def test_half_a_character_keeps_its_own_bytes() -> None:
    text = embedded()
    ids = text.encode("🦕")
    assert b"".join(map(text.token_bytes, ids)) == "🦕".encode()
    assert len(ids) > 1
    assert b"\xef\xbf\xbd" not in [text.token_bytes(i) for i in ids]


def write_gguf(path: Path, **pairs: Any) -> Path:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def value(item: Any) -> bytes:
        if isinstance(item, str):
            return struct.pack("<I", 8) + text(item)
        if isinstance(item, bool):
            return struct.pack("<I?", 7, item)
        if isinstance(item, int):
            return struct.pack("<II", 4, item)
        kind, code = {str: (8, ""), int: (5, "i"), float: (6, "f")}[type(item[0])]
        body = b"".join(map(text, item)) if kind == 8 else struct.pack(f"<{len(item)}{code}", *item)
        return struct.pack("<IIQ", 9, kind, len(item)) + body

    body = b"".join(text(key.replace("__", ".")) + value(item) for key, item in pairs.items())
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)) + body)
    return path


def sentencepiece_gguf(path: Path) -> Path:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "i", "hi", "▁hi"]
    return write_gguf(
        path,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=pieces,
        tokenizer__ggml__scores=[0.0] * 259 + [-5.0, -4.0, -3.0, -1.0, -2.0],
        tokenizer__ggml__token_type=[2, 3, 3, *([6] * 256), 1, 1, 1, 1, 1],
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
    )


def test_sentencepiece_merges_come_from_scores_and_bytes_fill_the_rest(tmp_path: Path) -> None:
    text = load_text(sentencepiece_gguf(tmp_path / "Tiny.Q4_K_M.gguf"))
    assert [text.token_text(i) for i in text.encode("hi hi")] == ["<s>", " hi", " hi"]
    assert text.name == "tiny"
    ids = text.encode("é", add_special_tokens=False)
    assert b"".join(map(text.token_bytes, ids)) == " é".encode()
    assert text.decode(text.encode("hi é")) == "hi é"


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "x.gguf",
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__pre="strange",
        tokenizer__ggml__tokens=["a"],
    )
    with pytest.raises(ConfigError, match="strange"):
        load_text(path)


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"PK\x03\x04" + bytes(40), b"GGUF" + struct.pack("<IQQ", 3, 0, 5)]
)
def test_a_file_that_is_no_gguf_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_text(path)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "default", "smollm"])
def test_every_known_pre_tokenizer_keeps_the_text(tmp_path: Path, pre: str) -> None:
    alphabet = [chr(c) for c in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)]]
    path = write_gguf(
        tmp_path / "x.gguf",
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__pre=pre,
        tokenizer__ggml__tokens=alphabet,
    )
    text = load_text(path)
    for line in ("abc 123\n\n  x", "日本 12345", "I'll don't\t"):
        assert text.decode(text.encode(line)) == line


def test_a_hugging_face_directory_equals_the_gguf_it_came_from(tmp_path: Path) -> None:
    read_library_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"})
    )
    (tmp_path / "chat_template.jinja").write_text(embedded().chat_template or "")
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, 2], "temperature": 0.6, "do_sample": True, "max_length": 9})
    )
    text = load_text(tmp_path)
    assert text.eos_ids == {0, 2}
    assert text.bos_id == 1
    assert text.sampling_defaults == {"temperature": 0.6}
    for case in golden_cases()[:3]:
        assert text.encode(text.render(case["request"]), add_special_tokens=False) == case["prompt_ids"]
