"""The instance that test_conformance.py and, after it, test_serve.py ask: starting one takes most of a test's time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.instance import Running, running

DRAIN_S = 5.0


@pytest.fixture(scope="session")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One worker of each role. The last test of test_serve.py ends it; modules after it have instances of their own."""
    config = {
        "model": {"dtype": "float32"},
        "engine": {"max_num_seqs": 16},
        "decode": {"drain_timeout_s": DRAIN_S},
    }
    with running(tmp_path_factory.mktemp("baton"), config) as instance:
        yield instance
