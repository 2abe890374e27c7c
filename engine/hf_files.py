"""The JSON files of a Hugging Face directory, and the one rule that says which tokens end an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.errors import ConfigError
from engine.spec_fields import Fields
from engine.spec_hf import text_config


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; an empty one if there is no such file. Raises ConfigError if it is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"expected JSON in {path} but could not read it: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"expected a JSON object in {path} but got {type(value).__name__}")
    return value


def end_token_ids(directory: Path, id_of: Callable[[str], int | None] | None = None) -> tuple[int, ...]:
    """The tokens that end an answer: those of config.json, those of generation_config.json, which alone has a chat
    model's end of turn, and `eos_token` of tokenizer_config.json, which some fine-tunes change and no other file.

    `id_of`: the id of a token by its text, for who has a tokenizer; else tokenizer.json is read for it. An id past the
    end of the model's is none. Raises ConfigError for ids that are none.
    """
    config = text_config(read_json(directory / "config.json"))
    generation = read_json(directory / "generation_config.json")
    ids = [
        *Fields(config, "config.json").token_ids("eos_token_id"),
        *Fields(generation, "generation_config.json").token_ids("eos_token_id"),
    ]
    spelt = token_text(read_json(directory / "tokenizer_config.json").get("eos_token"))
    if spelt is not None:
        found = id_of(spelt) if id_of else _id_in(read_json(directory / "tokenizer.json"), spelt)
        ids += [] if found is None else [found]
    limit = num_token_ids(directory)
    return tuple(i for i in dict.fromkeys(ids) if limit is None or i < limit)


def num_token_ids(directory: Path) -> int | None:
    """How many the model has; None where config.json does not say. A tokenizer may have more."""
    config = Fields(text_config(read_json(directory / "config.json")), "config.json")
    return config.integer("vocab_size") if config.has("vocab_size") else None


def token_text(value: Any) -> str | None:
    """The text of a token as tokenizer_config.json writes it: plain, or an object with more about it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _id_in(tokenizer: dict[str, Any], text: str) -> int | None:
    """As `tokenizers.Tokenizer.token_to_id`, without building one, which takes seconds for a large vocabulary."""
    for added in tokenizer.get("added_tokens") or ():
        if added["content"] == text:
            return int(added["id"])
    vocab = tokenizer.get("model", {}).get("vocab")
    found = vocab.get(text) if isinstance(vocab, dict) else None
    return None if found is None else int(found)
