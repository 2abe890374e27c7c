"""The configuration tree: bad input names the field, what was expected and what came; the docs are in step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from contracts.config import BatonConfig, load_config
from contracts.errors import ConfigError


def test_no_input_gives_the_defaults() -> None:
    assert load_config() == BatonConfig()


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("engine: {block_size: 32, max_num_seqs: 8}\n")
    config = load_config(file, {"engine.block_size": 64})
    assert (config.engine.block_size, config.engine.max_num_seqs) == (64, 8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"engine.block_size": 0}, r"engine\.block_size: .*greater than or equal to 1 but got '0'"),
        ({"engine.blocksize": 16}, r"engine\.blocksize: unknown key"),
        ({"model.dtype": "fp8"}, r"model\.dtype: .*'float32'.* but got 'fp8'"),
        ({"decode.num_replicas": 0}, r"decode\.num_replicas: expected at least 1 but got 0"),
        ({"engine": 3, "engine.block_size": 16}, r"expected engine to be a section"),
    ],
)
def test_bad_values_name_the_field(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=overrides)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "3"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="CONFIG: expected"):
        load_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CONFIG: expected a readable YAML file but .*none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_the_reference_in_the_docs_is_generated_from_the_model() -> None:
    # To mend: python -m contracts.config > docs/configuration.md
    printed = subprocess.run(
        [sys.executable, "-m", "contracts.config"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert Path("docs/configuration.md").read_text() == printed, (
        "run: python -m contracts.config > docs/configuration.md"
    )
