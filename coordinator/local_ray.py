"""Ray on this machine, for one instance: what it is told, how large it says the machine is, and what it leaves out."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from contracts.config import BatonConfig
from contracts.config_pools import PoolConfig

_OBJECT_STORE_BYTES = 128 << 20  # Serve's messages are small and KV does not travel through Ray
_SERVE_CPUS = 1.0  # room for Serve's own actors
_NODE_TIMEOUT_S = 30.0  # as Ray's own
_NODE_INTERVAL_S = 0.05

REPLICA_ENVIRONMENT = {
    # Serve would run the application on a thread and in an event loop of its own, and pass each chunk over to the one
    # with the socket: more time than the chunk itself takes, and no sign of a client that does not read.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Serve's own metrics are read every few seconds; by default they are written ten times a second, asked for or not.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
}
"""What a replica of the coordinator wants of Serve, on a machine or in a cluster."""

# A user's own values win.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Baton has its own /metrics; nobody reads Ray's here.
    "RAY_enable_metrics_collection": "0",
    # A worker that cannot start will not do so at the second try on the same machine: say why at once.
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
    # A worker that does not answer cannot end its requests in good order; it only keeps memory from the next one.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Ray gives its workers the lowest priority but four, so that any other program of the machine would stall streams.
    "RAY_worker_niceness": "0",
    # Held calls are many and idle: with these two, each costs the coordinator less.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # A proxy that is still importing after this time is killed for another one, which is no quicker.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Three looks at a dead proxy until there is another one; by itself Serve looks every ten seconds.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    # Serve's controller looks at everything that often, by itself ten times a second; streams need the core more.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    # For all: a worker does not mind.
    **REPLICA_ENVIRONMENT,
}

# Six processes of Ray's import Ray and Serve, and nothing of that is garbage: to look for some takes a seventh of it.
_SITECUSTOMIZE = "import gc\n\ngc.set_threshold(50_000, 10, 10)\n"


def start_ray(run_dir: Path, config: BatonConfig) -> None:
    """The head node of a Ray instance of this process's own, which ends with it."""
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    _keep_messages(run_dir)
    with _fewer_processes(), _node_seen_at_once(), _patient_python(run_dir / "python"):
        ray.init(
            address="local",
            num_cpus=_logical_cpus(config),
            resources=_custom_resources(config),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            # NOTE: a folder within: Ray opens its temp folder to everybody, and HAProxy's program lies beside it.
            _temp_dir=str(run_dir / "ray"),
        )


def _keep_messages(run_dir: Path) -> None:
    """What Ray's node process tells its driver (that a worker was killed, and what may be the reasons) goes to a
    file beside its other logs; by itself Ray prints it, `log_to_driver` or not.

    NOTE: a Ray that names it otherwise prints it on.
    """
    from ray._private import worker

    path = run_dir / "ray" / "session_latest" / "logs" / "raylet-messages.log"

    def keep(data: dict[str, Any], **_options: Any) -> None:
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in data["lines"])

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = keep


@contextlib.contextmanager
def _patient_python(folder: Path) -> Iterator[None]:
    """Within, what is started and is Python looks for garbage rarely (_SITECUSTOMIZE)."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def _fewer_processes() -> Iterator[None]:
    """Within, ray.init starts neither Ray's node autoscaler nor its log monitor nor the API server: one machine has no
    nodes to add, nobody reads the workers' logs through the driver, and what is left of the API server without its
    dashboard is its usage statistics, for which ray.init waits. Together they take longer to start than a worker's
    libraries.

    NOTE: `ray start` has options for two of them, `ray.init` has none; a Ray that names them otherwise starts them.
    """
    from ray._private import node, parameter

    plain = parameter.RayParams
    known = inspect.signature(plain).parameters
    unwanted = {"no_monitor": True, "include_log_monitor": False}
    start_api_server = getattr(node.Node, "start_api_server", None)
    parameter.RayParams = partial(plain, **{name: value for name, value in unwanted.items() if name in known})
    if start_api_server is not None:
        node.Node.start_api_server = lambda self, **_options: None
    try:
        yield
    finally:
        parameter.RayParams = plain
        if start_api_server is not None:
            node.Node.start_api_server = start_api_server


@contextlib.contextmanager
def _node_seen_at_once() -> Iterator[None]:
    """Within, ray.init sees that its node has come up when it has; by itself it looks once a second."""
    from ray._private import services
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # in a compiled module
    from ray.exceptions import RpcError

    plain = services.get_node

    def get_node(gcs_address: str, node_id: str) -> Any:
        client, deadline_s = GcsClient(address=gcs_address), time.monotonic() + _NODE_TIMEOUT_S
        with contextlib.suppress(RpcError):  # Ray itself looks again, and has more patience
            while time.monotonic() < deadline_s:
                if any(known.hex() == node_id for known in client.get_all_node_info(timeout=_NODE_TIMEOUT_S)):
                    break
                time.sleep(_NODE_INTERVAL_S)
        return plain(gcs_address, node_id)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = plain


def _logical_cpus(config: BatonConfig) -> int:
    """Ray's CPUs are a book-keeping of shares, so a small machine may have more of them than cores."""
    wanted = _SERVE_CPUS + config.coordinator.num_replicas * config.coordinator.num_cpus
    wanted += sum(pool.most_replicas * pool.tensor_parallel_size * pool.num_cpus for pool in _pools(config))
    return max(os.cpu_count() or 1, int(wanted + 0.999))


def _custom_resources(config: BatonConfig) -> dict[str, float]:
    """A cluster's configuration works here too: this one node is of every type it names."""
    total: dict[str, float] = {}
    for pool in _pools(config):
        for name, amount in pool.resources.items():
            total[name] = total.get(name, 0.0) + amount * pool.most_replicas
    return total


def _pools(config: BatonConfig) -> tuple[PoolConfig, PoolConfig]:
    return config.prefill, config.decode
