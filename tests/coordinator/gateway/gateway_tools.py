"""An application with its gateway running, and keys to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from coordinator.drain import Drain
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.keys import KeyFile, _write_file, make_key
from coordinator.http import make_app
from coordinator.ingress import PlainErrors
from tests.coordinator.fake_backend import FakeBackend, Script
from tests.coordinator.http_tools import TEXT, Service, make_config


@dataclass
class GatewayService(Service):
    """A service whose gateway a test may look into."""

    gateway: Gateway
    drain: Drain


@asynccontextmanager
async def gateway_service(
    script: Script | None = None,
    *,
    folder: Path,
    server: dict[str, Any] | None = None,
    root_path: str = "",
    slo: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[GatewayService]:
    """`settings`: the gateway's. Leaves only when no request runs and no task of the gateway is left."""
    settings = {"state_dir": str(folder), **settings}
    backend, drain = FakeBackend(script), Drain()
    config = make_config(gateway=settings, server=server or {}, slo=slo or {})
    app = make_app(config, TEXT, backend, drain=drain)
    transport = httpx.ASGITransport(PlainErrors(app), root_path=root_path)  # as Serve puts it around
    async with app.state.gateway.running(app):
        async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
            yield GatewayService(client, backend, app, app.state.gateway, drain)
    assert not backend.running


def write_keys(path: Path, *tenants: str, scopes: tuple[str, ...] = ("inference", "batch")) -> list[str]:
    """A key file with one key for each tenant; the keys."""
    file, keys = KeyFile(pepper="p" * 32), []
    for tenant in tenants:
        key, file = make_key(file, tenant, scopes, None)
        keys.append(key)
    _write_file(path, file)
    return keys


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
