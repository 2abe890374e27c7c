"""A tiny random model for tests that need many workers and no golden answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny_models import make_config, make_oracle, write_hf


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config()
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", config, make_oracle(config))
