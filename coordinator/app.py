"""The composition root: the one place where ingress, pools, phases and policy meet.

    serve run serve.yaml
    serve run coordinator.app:build model=PATH config=FILE engine.block_size=32 …

    Coordinator (ingress, HTTP) ──handles──► Prefill × n, Decode × m      Ray: placement, health, drain, discovery
                └───────────────data plane─► every worker                tokens and commands, without Ray

Every worker gets both phases injected, so a role is a label: a decode worker can read a prompt itself, and `prefill`
and `decode` stay strangers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from contracts.config import BatonConfig, load_config
from contracts.messages import Role
from coordinator.addresses import is_loopback_host
from coordinator.cluster import ClusterBackend
from coordinator.drain import Drain
from coordinator.fleet import Fleet
from coordinator.flow import Flow
from coordinator.handles import ServePool, worker_options
from coordinator.http import make_app
from coordinator.metrics import Metrics
from coordinator.phases import make_phases
from coordinator.planning import Planning, make_planning, running
from decode.server import DecodeServer
from engine.embedded import check_model, resolve_model
from engine.text.tokenizer import load_text
from prefill.server import PrefillServer

MAX_HTTP_REQUESTS = 100_000

REPLICA_ENVIRONMENT = {
    # Serve would run the application on a thread and in an event loop of its own, and pass each chunk over to the one
    # with the socket: more time than the chunk itself takes, and no sign of a client that does not read.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Serve's own metrics are read every few seconds; by default they are written ten times a second, asked for or not.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
}


def build(args: Mapping[str, Any] | None = None) -> Any:
    """The Serve application. `args`: `model`, `config` (a YAML file), or any dotted key of the configuration.

    Raises ConfigError naming the key, what was expected and what came.
    """
    config = read_args(args or {})
    secret = secrets.token_bytes(32)
    decode = _node(DecodeServer, worker_options(config.decode, config.planner), config, secret, make_phases)
    prefill = None
    if not config.is_colocated:
        prefill = _node(
            PrefillServer, worker_options(config.prefill, config.planner), config, secret, make_phases
        )
    options = {
        "num_replicas": config.coordinator.num_replicas,
        "ray_actor_options": {
            "num_cpus": config.coordinator.num_cpus,
            "runtime_env": {"env_vars": REPLICA_ENVIRONMENT},
        },
        "graceful_shutdown_timeout_s": config.decode.drain_timeout_s,
    }
    return _node(Coordinator, options, config, secret, decode, prefill)


def _node(deployment: Any, options: Mapping[str, Any], *args: Any) -> Any:
    """One node of the graph. Serve's decorators have no types."""
    return deployment.options(**options).bind(*args)


def read_args(args: Mapping[str, Any]) -> BatonConfig:
    """`model` and `config` are short for `model.path` and the file that the rest is laid over."""
    overrides = {key: value for key, value in args.items() if key not in ("config", "model")}
    if args.get("model"):
        overrides["model.path"] = args["model"]
    return load_config(args.get("config"), overrides)


@serve.deployment(max_ongoing_requests=MAX_HTTP_REQUESTS, health_check_period_s=1.0)
@serve.ingress()
class Coordinator:
    """One ingress replica: HTTP in front, the fleet behind."""

    def __init__(
        self,
        config: BatonConfig,
        secret: bytes,
        decode: DeploymentHandle[Any],
        prefill: DeploymentHandle[Any] | None,
    ) -> None:
        self._config = config
        self._secret = secret
        self._drain = Drain()
        self._handles: dict[Role, DeploymentHandle[Any]] = {"decode": decode}
        if prefill is not None:
            self._handles["prefill"] = prefill

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve in the replica, after the constructor."""
        config = self._config
        model_path = resolve_model(config.model.path)
        if config.model.adapters:
            check_model(model_path, adapters=config.model.adapters)
        text = load_text(model_path)
        metrics = Metrics()
        fleet = Fleet(config, self._secret)
        pools: dict[Role, ServePool] = {
            role: ServePool(
                role, handle, partial(fleet.sync, role), hold_timeout_s=config.coordinator.request_timeout_s
            )
            for role, handle in self._handles.items()
        }

        def hold(role: Role, replica_id: str, request_id: str) -> None:
            pools[role].hold(replica_id, request_id)

        flow = Flow(config, fleet, self._secret, hold, metrics, text.eos_ids)
        planning = make_planning(config, fleet, metrics)
        backend = ClusterBackend(config, fleet, flow, planning)
        app = make_app(config, text, backend, metrics, _sees_clients(), self._drain)
        # Serve adds x-request-id to every answer; a second one would be joined to it.
        app.state.ids_are_told_outside = True
        app.router.lifespan_context = partial(_lifespan, fleet, list(pools.values()), planning, self._drain)
        return app

    async def drain(self, timeout_s: float) -> int:
        """For whoever stops the service (the launcher): see `Drain.drain`."""
        return await self._drain.drain(timeout_s)


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


def _sees_clients() -> bool:
    """Whether a loopback peer really is a client on this machine.

    Behind Serve's HAProxy every client looks like loopback (measured with Ray 2.60), so there only a proxy that
    itself listens on loopback can be believed.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return True
    client = _get_global_client()
    return client is not None and is_loopback_host(str(client.http_config.host))
