"""`make serve`: one Baton instance on this machine, from nothing to ready, and everything given back at the end.

    read config ─► claim the port ─► fetch the model ─► Ray ─────┬─► Serve ─► workers ─► /ready ─► wait for a signal
         │ 2             │ 2              │ 2     └► application ┘ 2                │ 1                  │ 0
         └───────────────┴────────────────┴── exit status ──┴── finally: all given back (coordinator/ending.py)

The application is imported and built on a thread while Ray waits for its own processes to come up.

SIGINT, SIGTERM and SIGHUP take the same way out. `--stop` asks the instance on a port to do so, from another shell.
The Ray instance is this process's own: other Ray clusters on the machine are neither joined nor stopped.
"""

from __future__ import annotations

import os
import signal

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

if __name__ == "__main__":
    # NOTE: before the imports below, which take a second. Nothing is there yet that would have to be given back.
    def _leave(_number: int, _frame: object) -> None:
        os.write(1, b"\nstopping\n")
        os._exit(0)

    for _number in _STOP_SIGNALS:
        signal.signal(_number, _leave)

import argparse
import contextlib
import importlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from contracts.config import BatonConfig, cache_dir, load_config
from contracts.errors import ConfigError
from contracts.heap import loading
from coordinator.ending import Interrupt, give_back, wait_lost
from coordinator.instance import Instance, claim_port, stop
from coordinator.local_ray import RAY_ENVIRONMENT, start_ray
from coordinator.outside import summary, wait_ready, wanted_workers
from coordinator.progress import WorkerLog, reason_of

READY_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 45.0  # beyond the drain
_CONTROLLER_INTERVAL_S = 0.1
_STILL_S = 10.0

# Takes `model` and `config` as given to the launcher, returns a Serve application.
Build = Callable[[dict[str, str]], Any]


class Stages:
    """Prints what happens now, with the time since the start of the process's work.

    A context manager: within, a silence of _STILL_S is broken by saying what is still going on.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._stage = "starting"
        self._news = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._break_silence, name="stages", daemon=True)

    def __enter__(self) -> Stages:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._news.set()
        self._thread.join()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def begin(self, stage: str) -> None:
        self._stage = stage
        self(stage)

    def __call__(self, text: str) -> None:
        print(f"[{self.elapsed_s:5.1f} s] {text}", flush=True)
        self._news.set()

    def _break_silence(self) -> None:
        while not self._is_over:
            if not self._news.wait(_STILL_S):
                print(f"[{self.elapsed_s:5.1f} s] still {self._stage}", flush=True)
            self._news.clear()


def main(argv: Sequence[str] | None = None, build: Build | None = None) -> int:
    """Run the command line; returns the exit status. `build` replaces coordinator.app's (for tests)."""
    args = _parser().parse_args(argv)
    try:
        overrides = {
            name: getattr(args, key) for key, name in _OVERRIDES.items() if getattr(args, key) is not None
        }
        config = load_config(args.config, overrides)
        if args.stop:
            return _stop(config)
        return _serve(args, config, build or _build_app)
    except ConfigError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


_OVERRIDES = {"port": "server.port", "host": "server.host"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator.launch", description="Serve a model on this machine."
    )
    parser.add_argument("--port", type=int, help="port to listen on (default: 8000)")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--model", help="Hugging Face directory, GGUF file or hub id (default: the embedded model)"
    )
    parser.add_argument("--config", help="YAML file, see docs/configuration.md")
    parser.add_argument(
        "--stop", action="store_true", help="stop the instance on --port and wait for its end"
    )
    return parser


def _stop(config: BatonConfig) -> int:
    port = config.server.port
    try:
        found = stop(port, config.decode.drain_timeout_s + _STOP_TIMEOUT_S)
    except TimeoutError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    print(f"stopped the instance on port {port}" if found else f"no instance on port {port}")
    return 0


def _serve(args: argparse.Namespace, config: BatonConfig, build: Build) -> int:
    stages = Stages()
    for number in _STOP_SIGNALS:
        signal.signal(number, _interrupt)
    instance = claim_port(config.server.host, config.server.port)
    drain_s = None
    try:
        with stages, loading():
            _start(instance, args, config, build, stages)
        drain_s = config.decode.drain_timeout_s
        summary(instance.claim, wanted_workers(config), stages.elapsed_s)
        wait_lost(instance)
        print("baton: Ray ended unexpectedly", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopping" + _grace(drain_s), flush=True)
        return 0
    except ConfigError:
        raise
    except Exception as error:
        # The outer edge of Ray's and Serve's start, which raise whatever they like (Ray: a bare Exception).
        print(f"baton: start failed: {str(error) or type(error).__name__}", file=sys.stderr)
        _keep_logs(instance)
        return 1
    finally:
        give_back(instance, _STOP_SIGNALS, drain_s)


def _grace(drain_s: float | None) -> str:
    return "" if drain_s is None else f": open requests have {drain_s:g} s; once more ends them now"


_interrupt = Interrupt()


def _start(
    instance: Instance, args: argparse.Namespace, config: BatonConfig, build: Build, stages: Stages
) -> None:
    given = {key: value for key in ("model", "config") if (value := getattr(args, key))}
    given |= {"server.host": instance.claim.host, "server.port": str(instance.claim.port)}
    if build is _build_app:
        # The workers would fetch the model themselves; here its progress can be seen.
        from engine.embedded import check_model, resolve_model

        num_ranks = {
            f"{role}.tensor_parallel_size": pool.tensor_parallel_size
            for role, pool in (("prefill", config.prefill), ("decode", config.decode))
        }
        path = resolve_model(args.model or config.model.path, stages)
        check_model(path, num_ranks, config.model.adapters)
    from coordinator.haproxy import SERVE_HOST, serve_environment

    stages.begin("starting Ray")
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(serve_environment(instance))
    application = _in_background(lambda: build(given))
    start_ray(instance.run_dir, config)
    # NOTE: ray.init installs a SIGTERM handler of its own, which would end the process without our way out.
    signal.signal(signal.SIGTERM, _interrupt)
    stages.begin("starting Serve")
    from ray import serve
    from ray.exceptions import RayActorError

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    http_options = {"host": SERVE_HOST, "port": instance.claim.port}
    # NOTE: serve.start waits for the proxies too, but the workers can begin when there is a controller.
    proxies = _in_background(
        partial(serve.start, http_options=http_options, logging_config={"log_level": "WARNING"})
    )
    _wait_controller(proxies)
    stages.begin("starting the workers: loading and warming up")
    with WorkerLog(instance.run_dir, stages):
        # NOTE: not serve.run, which looks once a second whether all is up.
        serve.run_many(
            [serve.RunTarget(application.result(), name="baton", logging_config={"log_level": "WARNING"})],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        with contextlib.suppress(RayActorError):  # a proxy has died; Serve starts another one
            proxies.result()
        left_s = READY_TIMEOUT_S - stages.elapsed_s
        wait_ready(instance.claim.url, wanted_workers(config), stages, _failures, left_s)


def _wait_controller(starting: Future[Any]) -> None:
    """Return when Serve's controller can be asked. Raises what `starting` Serve raised, TimeoutError."""
    from ray.serve.context import _get_global_client

    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not starting.done():
        if _get_global_client(raise_if_no_controller_running=False) is not None:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"expected Serve's controller within {READY_TIMEOUT_S:.0f} s")
        time.sleep(_CONTROLLER_INTERVAL_S)
    starting.result()


def _failures() -> str:
    """What Serve knows of deployments that could not start: `name: the replica's own message`; "" while it tries."""
    from ray import serve

    found = []
    for application in serve.status().applications.values():
        if application.status.name != "DEPLOY_FAILED":
            continue
        for name, deployment in application.deployments.items():
            if "FAILED" in deployment.status.name or "UNHEALTHY" in deployment.status.name:
                found.append(f"{name}: {reason_of(deployment.message)}")
        found = found or [application.message]
    return "; ".join(found)


def _in_background(work: Callable[[], Any]) -> Future[Any]:
    """Start `work` on a thread of its own. Daemonic: an abandoned start must not keep the process."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # the thread's outer edge; raised again by whoever asks for the result
            done.set_exception(error)

    threading.Thread(target=run, name="build", daemon=True).start()
    return done


def _keep_logs(instance: Instance) -> None:
    """Ray's logs would go with the run folder; after a failed start they are all there is to look at."""
    target = cache_dir() / "logs" / f"failed-{instance.claim.port}"
    shutil.rmtree(target, ignore_errors=True)
    for logs in instance.run_dir.glob("**/session_2*/logs"):
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(logs, target)
            target.chmod(0o700)
            print(f"baton: logs of this start are in {target}", file=sys.stderr)


def _build_app(given: dict[str, str]) -> Any:
    """One machine: workers need not be reachable from outside, unless the configuration says where."""
    app = importlib.import_module("coordinator.app")
    is_placed = load_config(given.get("config")).transfer.host is not None
    return app.build(given if is_placed else {**given, "transfer.host": "127.0.0.1"})


if __name__ == "__main__":
    status = main()
    # NOTE: not sys.exit. Ray's exit handlers wait for a cluster which is gone if ending it took too long.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
