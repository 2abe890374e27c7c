"""Which tokens end an answer of a Hugging Face directory: one rule for those who draw and those who make text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from contracts.errors import ConfigError
from engine.hf_weights import HfSource
from engine.text.tokenizer import load_text
from tests.engine.tiny_models import make_config, make_oracle, write_hf

TURN, PIECE = 95, 5
"""Ids of "<turn>", an added token, and "</s>", a piece of the vocabulary."""


def write_model(tmp_path: Path, *added: str, **files: dict[str, Any]) -> Path:
    """A checkpoint of 96 tokens. `files`: content of config.json and others by their stems, in addition; `added`:
    tokens past the end of the model's."""
    config = make_config() | files.pop("config", {})
    write_hf(tmp_path, make_config(), make_oracle(make_config()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    vocab = {"</s>" if i == PIECE else f"piece{i}": i for i in range(TURN)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<turn>", *added)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for stem, content in files.items():
        (tmp_path / f"{stem}.json").write_text(json.dumps(content))
    return tmp_path


IN_PARTS = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": make_config(model_type="gemma3_text", query_pre_attn_scalar=16, eos_token_id=8),
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, [2]),
        ({"tokenizer_config": {"eos_token": "<turn>"}}, [2, TURN]),
        ({"tokenizer_config": {"eos_token": {"content": "</s>", "special": True}}}, [2, PIECE]),
        ({"tokenizer_config": {"eos_token": "<nobody>"}}, [2]),
        ({"tokenizer_config": {"eos_token": None}}, [2]),
        ({"generation_config": {"eos_token_id": [7, 2]}}, [2, 7]),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": 7}}, [7]),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "<turn>"}}, [TURN]),
        ({"config": IN_PARTS}, [8]),
        ({"config": IN_PARTS, "generation_config": {"eos_token_id": 7}}, [8, 7]),
    ],
)
def test_both_sides_know_the_same_ends(
    tmp_path: Path, files: dict[str, dict[str, Any]], expected: list[int]
) -> None:
    path = write_model(tmp_path, **files)
    assert HfSource(path).spec.eos_token_ids == tuple(expected)
    assert load_text(path).eos_ids == set(expected)


@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_an_end_that_is_no_id_is_refused_with_its_file(tmp_path: Path, file: str) -> None:
    path = write_model(tmp_path, **{file: {"eos_token_id": "<turn>"}})
    for load in (HfSource, load_text):
        with pytest.raises(ConfigError, match=rf"{file}\.json: expected 'eos_token_id' to be token ids"):
            load(path)


def test_without_a_tokenizer_the_numbers_alone_count(tmp_path: Path) -> None:
    path = write_model(tmp_path, tokenizer_config={"eos_token": "<turn>"})
    (path / "tokenizer.json").unlink()
    assert HfSource(path).spec.eos_token_ids == (2,)


def test_a_token_past_the_end_of_the_model_is_text_and_no_end(tmp_path: Path) -> None:
    """Gemma 3 1B has such a one, for images that only the larger ones see: in a client's message it was a row of the
    embedding that is not there."""
    path = write_model(
        tmp_path,
        "<image>",
        tokenizer_config={"eos_token": "<image>"},
        generation_config={"eos_token_id": [96, 7]},
    )
    text = load_text(path)
    assert HfSource(path).spec.eos_token_ids == (2, 7)
    assert text.eos_ids == {2, 7}
    assert text.vocab_size == 96
    assert all(i < 96 for i in text.encode("<turn><image>"))
    assert TURN in text.encode("<turn><image>")


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    vocab = {f"piece{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: expected token ids below 96, .* but got 96"):
        load_text(path)
