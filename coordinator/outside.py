"""An instance as its launcher sees it: over HTTP, like anybody. Until it is ready, and who is there then."""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from contracts.config import BatonConfig
from coordinator.addresses import is_loopback_host
from coordinator.instance import Claim

_READY_INTERVAL_S = 0.1
_FAILURES_INTERVAL_S = 1.0
_HTTP_TIMEOUT_S = 5.0
_STEP_AGE = re.compile(r'^baton_worker_step_age_seconds{role="(\w+)",worker_id="([^"]+)"}', re.MULTILINE)


def wanted_workers(config: BatonConfig) -> dict[str, int]:
    """role -> how many a start begins with."""
    sizes = {"prefill": config.prefill.num_replicas, "decode": config.decode.num_replicas}
    return {role: size for role, size in sizes.items() if size}


def wait_ready(
    url: str,
    wanted: Mapping[str, int],
    say: Callable[[str], None],
    failures: Callable[[], str],
    timeout_s: float,
) -> None:
    """Return when /ready answers 200 and all `wanted` workers are there, or as many as will be.

    Raises RuntimeError for what `failures` tells, TimeoutError with the last answer, unless it can serve all the same.
    """
    begun_s = asked_s = time.monotonic()
    shown = ""
    while True:
        status, body = get(f"{url}/ready")
        can_serve = status == 200
        lacking = _lacking(body, wanted) if can_serve else ""
        if can_serve and not lacking:
            return
        now_s = time.monotonic()
        if now_s - begun_s > timeout_s:
            if can_serve:
                return
            raise TimeoutError(
                f"expected /ready to answer 200 within {timeout_s:.0f} s but got {status}: {body}"
            )
        if now_s - asked_s > _FAILURES_INTERVAL_S:
            if (told := failures()) and can_serve:
                say(told)
                return
            if told:
                raise RuntimeError(told)
            asked_s = now_s
        reason = lacking or (_reason_in(body) if status == 503 else shown)
        if reason != shown:
            say(f"not ready yet: {reason}")
            shown = reason
        time.sleep(_READY_INTERVAL_S)


def summary(claim: Claim, wanted: Mapping[str, int], elapsed_s: float) -> None:
    """What a person needs who has just started it."""
    url = claim.url
    model, needs_key = _first_model(url)
    print(f"\nBaton is ready after {elapsed_s:.1f} s: {url}", flush=True)
    print(f"  model    {'/v1/models tells, with a key' if needs_key else model}")
    for role, names in sorted(workers(url).items()):
        few = f"; {len(names)} of {wanted[role]} are ready" if len(names) < wanted.get(role, 0) else ""
        print(f"  {role:<8} {', '.join(names)}{few}")
    named = {} if needs_key else {"model": model}  # without a name, the one model there is
    body = json.dumps({**named, "messages": [{"role": "user", "content": "Say hello."}], "stream": True})
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    print(f"\n  curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")
    if not is_loopback_host(claim.host) and not needs_key:
        print(
            f"\nWhoever reaches {claim.host} can use it: there are no API keys (gateway.keys_file). "
            "/debug/* is closed to them."
        )
    print(f"\nCtrl-C or `make stop PORT={url.rsplit(':', 1)[1]}` stops it.", flush=True)


def workers(url: str) -> dict[str, list[str]]:
    """`role -> [worker_id (pid n)]`; without pids where /debug/kv wants a key, empty where /metrics does, too."""
    found: dict[str, list[str]] = {}
    status, body = get(f"{url}/debug/kv")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if status == 200:
            for worker in json.loads(body)["workers"]:
                found.setdefault(worker["role"], []).append(f"{worker['worker_id']} (pid {worker['pid']})")
    for role, worker_id in () if found else _STEP_AGE.findall(get(f"{url}/metrics")[1]):
        found.setdefault(role, []).append(worker_id)
    return found


def get(url: str) -> tuple[int, str]:
    """Status (0: no connection) and text. Never follows the environment's HTTP proxy: the server is this machine."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_HTTP_TIMEOUT_S) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


def _lacking(body: str, wanted: Mapping[str, int]) -> str:
    """Of a /ready that says yes: the pools that are not whole yet."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        pools = json.loads(body)["pools"]
        ready = {role: int(pools[role]["num_ready"]) for role in wanted}
        return ", ".join(
            f"{ready[role]} of {size} {role} workers" for role, size in wanted.items() if ready[role] < size
        )
    return ""


def _reason_in(body: str) -> str:
    """Of /ready's own 503; "" for another's: until there is an ingress, the proxy answers."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["reason"])
    return ""


def _first_model(url: str) -> tuple[str, bool]:
    """(its name, whether a key is needed to learn it)."""
    status, body = get(f"{url}/v1/models")
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        if status == 200:
            return str(json.loads(body)["data"][0]["id"]), False
    return "unknown", status == 401
