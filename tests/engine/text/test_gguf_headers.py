"""What the headers of GGUF vocabularies leave out or get wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ConfigError
from engine.gguf_file import end_token_ids, read_gguf
from engine.text.tokenizer import TextModel, load_text
from tests.engine.text.gguf_vocabs import CONTROL, DEFINED, write_byte_level, write_sentencepiece

NO_ID = 0xFFFFFFFF
"""How some writers say that there is none: -1, unsigned."""


@pytest.fixture(params=["byte level", "sentencepiece"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "byte level":
        return write_byte_level(tmp_path / "x.gguf", "llama", "llama-bpe", bos=CONTROL[1])
    return write_sentencepiece(tmp_path / "x.gguf", "llama", has_prefix=True)


def load(path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> TextModel:
    """`changes` of fields under tokenizer.ggml; None: it is not there."""
    file = read_gguf(path)
    fields = file.fields | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    changed = replace(file, fields={name: value for name, value in fields.items() if value is not None})
    monkeypatch.setattr("engine.text.gguf_vocab.read_gguf", lambda _path: changed)
    text = load_text(path)
    assert text.eos_ids == set(end_token_ids(changed.fields))
    return text


def test_an_id_that_no_piece_has_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = load_text(path)
    found = load(
        path, monkeypatch, bos_token_id=NO_ID, eos_token_id=NO_ID, eot_token_id=NO_ID, unknown_token_id=NO_ID
    )
    assert NO_ID not in found.eos_ids
    assert found.bos_id is None
    assert found.encode("hi") == known.encode("hi", add_special_tokens=False)


def test_sentencepiece_without_ids_has_those_of_the_usual_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sentencepiece(tmp_path / "x.gguf", "llama", has_prefix=True)
    known = load_text(path)
    found = load(path, monkeypatch, bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    assert (found.bos_id, found.eos_ids) == (known.bos_id, known.eos_ids) == (1, found.eos_ids | {2})
    assert found.encode("hi \U0010ffff") == known.encode("hi \U0010ffff")


@pytest.mark.parametrize("has_types", [True, False])
def test_what_ends_an_output_is_matched_whole_and_hidden_whatever_its_type(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_types: bool
) -> None:
    """Early files have the end of a turn as a plain or defined piece."""
    tokens, types = (read_gguf(path).fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    end = tokens.index(CONTROL[2])
    for kind in (1, 4):
        types[end] = kind
        text = load(path, monkeypatch, token_type=types if has_types else None)
        assert end in text.encode(f"a{CONTROL[2]}")
        assert text.decode([end]) == ""
        assert end in text.eos_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": ["zzq qqz"]}, "out of vocabulary"),
        ({"merges": ["zzq"]}, "expected a vocabulary"),
        ({"tokens": "abc"}, "'tokenizer.ggml.tokens' to be a list"),
        ({"bos_token_id": "first"}, "'tokenizer.ggml.bos_token_id' to be token ids"),
        ({"model": "bert"}, "expected tokenizer model gpt2 or llama but got 'bert'"),
        ({"pre": "poro-chat"}, "expected one of .*llama-bpe.* but got 'poro-chat'"),
    ],
)
def test_what_cannot_be_a_vocabulary_is_refused_as_such(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_byte_level(tmp_path / "x.gguf", "llama", "llama-bpe")
    with pytest.raises(ConfigError, match=message):
        load(path, monkeypatch, **changes)


def test_more_types_than_pieces_are_no_harm(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = read_gguf(path).fields["tokenizer.ggml.token_type"]
    found = load(path, monkeypatch, token_type=[*types, 3, 3])
    assert found.encode(f"{DEFINED[0]}hi") == load_text(path).encode(f"{DEFINED[0]}hi")


def test_a_template_that_is_no_text_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = read_gguf(path)
    file.fields["tokenizer.chat_template"] = ["a", "b"]
    monkeypatch.setattr("engine.text.gguf_vocab.read_gguf", lambda _path: file)
    with pytest.raises(ConfigError, match=r"'tokenizer\.chat_template' to be a string"):
        load_text(path)
