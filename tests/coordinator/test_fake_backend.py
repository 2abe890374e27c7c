"""The fake keeps the rules that the real flow has to keep."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.backend import Backend
from tests.coordinator.backend_conformance import BackendConformance
from tests.coordinator.fake_backend import FakeBackend


class TestFakeBackend(BackendConformance):
    timeout_s = 5.0

    @pytest.fixture
    def backend(self) -> FakeBackend:
        return FakeBackend(lambda request: [ord("a") + i % 26 for i in range(1000)])

    async def settled(self, backend: Backend) -> None:
        assert isinstance(backend, FakeBackend)
        if backend.running:
            async with asyncio.timeout(1):
                await backend.idle.wait()
