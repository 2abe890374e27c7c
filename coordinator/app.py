"""The composition root: the one place where ingress, pools, phases and policy meet.

    serve run serve.yaml
    serve run coordinator.app:build model=PATH config=FILE engine.block_size=32 …

    Coordinator (ingress, HTTP) ──handles──► Prefill × n, Decode × m      Ray: placement, health, drain, discovery
                └───────────────data plane─► every worker                tokens and commands, without Ray

Every worker gets both phases injected, so a role is a label: a decode worker can read a prompt itself, and `prefill`
and `decode` stay strangers.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from click import ClickException
from fastapi import FastAPI
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from contracts.config import BatonConfig, load_config
from contracts.errors import ConfigError
from contracts.heap import loading
from contracts.messages import Role
from coordinator.addresses import is_loopback_host
from coordinator.drain import Drain
from coordinator.handles import worker_options
from coordinator.local_ray import REPLICA_ENVIRONMENT
from coordinator.phases import make_phases
from decode.server import DecodeServer
from prefill.server import PrefillServer

MAX_HTTP_REQUESTS = 100_000
_SHORT = ("config", "model")
_HINT = " (model=PATH, config=FILE, or section.key=value)"


class BuildError(ConfigError, ClickException, RayServeException):  # type: ignore[misc]
    """What is wrong with the configuration, in one line: the `serve` command shows the second kind so, and Serve, in an
    application's status, the third. All others are shown with their traceback.
    """


def _own_environment() -> dict[str, Any]:
    """Options of an actor that needs REPLICA_ENVIRONMENT; none where all of Ray has it.

    NOTE: an environment of its own starts a process through a second interpreter, which imports Ray for nothing.
    """
    missing = {name: value for name, value in REPLICA_ENVIRONMENT.items() if os.environ.get(name) != value}
    return {"runtime_env": {"env_vars": missing}} if missing else {}


def build(args: Mapping[str, Any] | None = None) -> Any:
    """The Serve application. `args`: `model`, `config` (a YAML file), or any dotted key of the configuration.

    Raises BuildError naming the key, what was expected and what came.
    """
    args = args or {}
    try:
        config = read_args(args)
    except ConfigError as error:
        is_short = any(
            "." not in key and key not in _SHORT and key not in BatonConfig.model_fields for key in args
        )
        raise BuildError(error.message + (_HINT if is_short else "")) from None
    secret = secrets.token_bytes(32)
    decode = _node(DecodeServer, worker_options(config.decode, config.planner), config, secret, make_phases)
    prefill = None
    if not config.is_colocated:
        prefill = _node(
            PrefillServer, worker_options(config.prefill, config.planner), config, secret, make_phases
        )
    options = {
        "num_replicas": config.coordinator.num_replicas,
        "ray_actor_options": {"num_cpus": config.coordinator.num_cpus} | _own_environment(),
        "graceful_shutdown_timeout_s": config.decode.drain_timeout_s,
    }
    return _node(Coordinator, options, config, secret, decode, prefill)


def _node(deployment: Any, options: Mapping[str, Any], *args: Any) -> Any:
    """One node of the graph. Serve's decorators have no types."""
    return deployment.options(**options).bind(*args)


def read_args(args: Mapping[str, Any]) -> BatonConfig:
    """`model` and `config` are short for `model.path` and the file that the rest is laid over."""
    overrides = {key: value for key, value in args.items() if key not in _SHORT}
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
        with loading():
            # NOTE: imported here, in the replica: whoever describes the graph needs nothing of it.
            from coordinator.wiring import make_ingress

            sees_clients = _sees_clients(self._config.server.host)
            return make_ingress(self._config, self._secret, self._handles, self._drain, sees_clients)

    async def drain(self, timeout_s: float) -> int:
        """For whoever stops the service (the launcher): see `Drain.drain`."""
        return await self._drain.drain(timeout_s)


def _sees_clients(host: str) -> bool:
    """Whether a loopback peer really is a client on this machine. `host`: where the launcher's HAProxy listens; Serve's
    own listens where Serve says.

    Behind Serve's HAProxy every client looks like loopback (measured with Ray 2.60), so there only a proxy that
    itself listens on loopback can be believed.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return True
    client = _get_global_client()
    return client is not None and is_loopback_host(host) and is_loopback_host(str(client.http_config.host))
