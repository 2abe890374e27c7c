"""Kernels run under Triton's interpreter here; tests/conftest.py has them imported that way."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
