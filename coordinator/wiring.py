"""What one ingress replica consists of, put together: fleet, flow, planner, gateway and the HTTP surface.

Apart from app.py, because who only describes the graph (the launcher) needs none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI

from contracts.config import BatonConfig
from contracts.messages import Role
from coordinator.cluster import ClusterBackend
from coordinator.drain import Drain
from coordinator.fleet import Fleet
from coordinator.flow import Flow
from coordinator.handles import ServePool
from coordinator.http import make_app
from coordinator.metrics import Metrics
from coordinator.planning import Planning, make_planning, running
from engine.embedded import check_model, resolve_model
from engine.text.tokenizer import load_text


def make_ingress(
    config: BatonConfig, secret: bytes, handles: Mapping[Role, Any], drain: Drain, sees_clients: bool
) -> FastAPI:
    """The application of a replica; its lifespan follows the pools. `handles`: Serve's, one for each pool.

    Raises ConfigError for a model that is not there or cannot be read.
    """
    model_path = resolve_model(config.model.path)
    if config.model.adapters:
        check_model(model_path, adapters=config.model.adapters)
    text = load_text(model_path)
    _ = text.fingerprint  # now, not while the first answers wait for it
    metrics = Metrics()
    fleet = Fleet(config, secret)
    pools: dict[Role, ServePool] = {
        role: ServePool(
            role, handle, partial(fleet.sync, role), hold_timeout_s=config.coordinator.request_timeout_s
        )
        for role, handle in handles.items()
    }

    def hold(role: Role, replica_id: str, request_id: str) -> None:
        pools[role].hold(replica_id, request_id)

    flow = Flow(config, fleet, secret, hold, metrics, text.eos_ids)
    planning = make_planning(config, fleet, metrics)
    backend = ClusterBackend(config, fleet, flow, planning)
    app = make_app(config, text, backend, metrics, sees_clients, drain)
    # Serve adds x-request-id to every answer; a second one would be joined to it.
    app.state.ids_are_told_outside = True
    app.router.lifespan_context = partial(_lifespan, fleet, list(pools.values()), planning, drain)
    return app


@asynccontextmanager
async def _lifespan(
    fleet: Fleet, pools: list[ServePool], planning: Planning | None, drain: Drain, app: FastAPI
) -> AsyncIterator[None]:
    """Follow the pools for as long as the replica lives."""
    for pool in pools:
        await pool.start()
    async with running(planning), app.state.gateway.running(app):
        yield
        await drain.drain(0.0)
    await asyncio.gather(*(pool.close() for pool in pools))
    await fleet.close()
