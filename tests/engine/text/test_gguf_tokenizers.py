"""The tokenizer of every kind of GGUF vocabulary against the one that `transformers` reads from the same file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.gguf_file import end_token_ids, read_gguf
from engine.text.tokenizer import TextModel, load_text
from tests.engine.text.gguf_vocabs import CONTROL, DEFINED, write_byte_level, write_sentencepiece

TORTURE = [
    "",
    " ",
    "Hello, world! don't I'LL we've 'tis",
    "👩‍🚀 and 🇫🇷 and 😀😀 🏳️‍🌈",
    "日本語で自己紹介してください。中文，한국어 ไทย עברית العربية",
    "e\u0301 a\u0308 n\u0303o \u0e01\u0e33 Z\u0351\u036b\u0343 \u200d\u200b\ufeff",
    "   three   runs\t\ttabs\n\n\n  newline  \r\n\r\n end  ",
    "def f(x):\n    return x ** 2  # comment\n\tif x != 1_000:\n        pass\n",
    "12345 3.14159 2024-01-01 1e10",
    f"a{CONTROL[2]}b{CONTROL[1]}user {CONTROL[0]} c",
    f"{CONTROL[1]} {DEFINED[0]}\nso {DEFINED[1]}\n\n  {CONTROL[2]}\n",
    "<s>hi</s> <unk> <0x0A> ▁x ▁▁ y",
    "naïve Ünïcode ﬁ Ǆ İ ß ẞ",
    "\u0000\u0001\x7f\ufffd\U0010ffff",
    "{}[]()<>!@#$%^&*~`|\\/",
    "\u00a0\u2003\u3000wide\u2028spaces\u0085",
    "CamelCaseHTTPServer snake_case_name kebab-case",
]
KINDS = {
    "llama-bpe": ("llama", True),
    "qwen2": ("qwen2", True),
    "qwen3": ("qwen3", True),
    "smollm": ("llama", True),
    "tekken": ("llama", True),
    "smaug-bpe": ("llama", True),
    "pixtral": ("llama", True),
    "llama-2": ("llama", False),
    "gemma": ("gemma3", False),
    "gemma without the flag": ("gemma3", False),
}


@cache
def both(kind: str) -> tuple[TextModel, Any]:
    """(ours, the library's) from one file."""
    from transformers import AutoTokenizer  # every process that collects tests would wait for it

    architecture, is_byte_level = KINDS[kind]
    path = Path(mkdtemp(prefix="baton-vocab-")) / "x.gguf"
    if is_byte_level:
        write_byte_level(path, architecture, "qwen2" if kind == "qwen3" else kind)
    else:
        # Gemma's family has no prefix, whether its file says so or not.
        has_prefix = {"llama-2": True, "gemma": False, "gemma without the flag": None}[kind]
        write_sentencepiece(path, architecture, has_prefix)
    pair = load_text(path), AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    path.unlink()
    path.parent.rmdir()
    return pair


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", TORTURE)
def test_text_encodes_and_decodes_like_the_library(kind: str, line: str) -> None:
    ours, library = both(kind)
    ids = ours.encode(line, add_special_tokens=False)
    assert ids == library.encode(line, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False)
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=True)
    assert all(i < ours.vocab_size for i in ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(line=st.text(st.characters(codec="utf-8", exclude_categories=["N"]), max_size=60))
def test_any_text_encodes_like_the_library(kind: str, line: str) -> None:
    # Numerals apart: the library splits SmolLM's by GPT-2's rule, the model's own takes each alone.
    ours, library = both(kind)
    assert ours.encode(line, add_special_tokens=False) == library.encode(line, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["llama-2", "gemma"])
def test_a_sentencepiece_vocabulary_begins_with_bos(kind: str) -> None:
    ours, library = both(kind)
    assert ours.encode("hi") == library.encode("hi")
    assert ours.encode("hi")[0] == ours.bos_id


@pytest.mark.parametrize(
    ("pre", "flag", "begins"),
    [
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("qwen2", None, False),
        ("smollm", None, False),
        ("llama-bpe", False, False),
        ("qwen2", True, True),
    ],
)
def test_a_prompt_begins_with_bos_where_the_header_or_the_family_says(
    pre: str, flag: bool | None, begins: bool, tmp_path: Path
) -> None:
    """Many files of Llama 3 and Mistral leave the flag out; llama.cpp knows these families by their pre-tokenizer."""
    text = load_text(write_byte_level(tmp_path / "x.gguf", "llama", pre, bos=CONTROL[1], add_bos=flag))
    ids = text.encode("hi")
    assert (ids[0] == text.bos_id) is begins
    assert text.bos_id not in text.encode("hi", add_special_tokens=False)


def test_engine_and_tokenizer_end_an_output_with_the_same_tokens(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path / "x.gguf", "qwen2", "qwen2")
    text = load_text(path)
    assert {text.token_text(i) for i in text.eos_ids} == {"<|endoftext|>", "<|im_end|>"}
    assert end_token_ids(read_gguf(path).fields) == (text.token_id(CONTROL[0]), text.token_id(CONTROL[2]))


def test_runs_of_spaces_keep_the_ids_of_the_model() -> None:
    """Gemma's file spells them as spaces; taken by that spelling they got ids past the end of the model's."""
    ours, _ = both("gemma")
    four = ours.encode("    ", add_special_tokens=False)
    assert [ours.token_text(i) for i in four] == ["    "]
    assert four[0] < ours.vocab_size


def test_an_added_run_of_spaces_is_spaces() -> None:
    """As Gemma's tokenizer.json has them."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(["▁▁"])
    assert TextModel(tokenizer, name="spaces").decode([0, 1, 0]) == tokenizer.decode([0, 1, 0]) == "a  a"
