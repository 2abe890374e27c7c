"""One Baton instance on this machine: its lock, its folder, its ports, and what it may leave behind.

    <cache>/run/<port>.json   the claim: who serves this port. Locked (flock) for as long as its owner lives, so a
                              claim that can be locked belongs to nobody and what it names can be removed.
    /tmp/baton<port>-xxxx/    the run folder: Ray's session, HAProxy's configuration, sockets and state. Mode 0700.
        claim                 link to the claim, for whoever looks for it with another cache

    claim() ─► run folder ─► Ray, Serve, HAProxy ─► close(): left-over processes ended, folder and claim removed
       └ before: every claim without a living owner is swept (its owner was killed and could not do it itself)

Ray binds its processes to the life of the process that started it, and coordinator/haproxy.py does so for HAProxy. The
sweep is for what neither can see: a machine that froze, a kill in the first milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from contracts.config import cache_dir
from contracts.errors import ConfigError

_TERM_TIMEOUT_S = 3.0
_KILL_TIMEOUT_S = 5.0
_REMOVE_TIMEOUT_S = 5.0
_POLL_S = 0.05

# NOTE: HAProxy appends a suffix to a socket path and Serve a node id of 56 characters; a unix socket path ends at 107.
_RUN_ROOT = Path("/tmp")
_LINK = "claim"


class PortBusyError(ConfigError):
    """Somebody else has the port."""

    code = "port_busy"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim file says."""

    pid: int
    host: str
    port: int
    run_dir: str
    url: str


@dataclass(slots=True)
class Instance:
    """A held claim. `close` gives everything back and may be called twice."""

    claim: Claim
    path: Path
    lock: IO[str]

    @property
    def run_dir(self) -> Path:
        return Path(self.claim.run_dir)

    def close(self, is_idle: bool = False) -> bool:
        """Whether nothing is left; if something is, the claim stays for the next sweep. `is_idle`: no process has
        anything to finish.
        """
        if self.lock.closed:
            return not self.run_dir.exists()
        is_clean = _remove_leftovers(self.claim, 0.0 if is_idle else _TERM_TIMEOUT_S)
        if is_clean:
            self.path.unlink(missing_ok=True)
        self.lock.close()
        return is_clean


def claim_port(host: str, port: int) -> Instance:
    """Make this process the owner of `port` on this machine, after sweeping what dead owners left.

    Raises PortBusyError if another instance or another program has the port.
    """
    sweep()
    folder = _claims_dir()
    path = folder / f"{port}.json"
    lock = path.open("a+")
    if not _try_lock(lock):
        lock.close()
        other = _read_claim(path)
        pid = f" (pid {other.pid})" if other else ""
        raise PortBusyError(
            f"port {port} already serves a Baton instance{pid}: `make stop PORT={port}` ends it; or choose another PORT"
        )
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    run_dir = _RUN_ROOT / f"baton{port}-{secrets.token_hex(4)}"
    claim = Claim(os.getpid(), host, port, str(run_dir), f"http://{shown}:{port}")
    try:
        _check_free(host, port)
        # The claim before the folder: whatever exists is known to the next sweep.
        lock.truncate(0)
        lock.write(json.dumps({name: getattr(claim, name) for name in Claim.__slots__}))
        lock.flush()
        run_dir.mkdir(mode=0o700)
        (run_dir / _LINK).symlink_to(path.absolute())
    except BaseException:
        path.unlink(missing_ok=True)
        lock.close()
        raise
    return Instance(claim, path, lock)


def stop(port: int, timeout_s: float = 60.0) -> bool:
    """End the instance that owns `port` and wait until it has given everything back; False if there was none.

    Raises TimeoutError if it is still there after `timeout_s`; nothing is killed by force then.
    """
    path = _owned_claim(port)
    claim = _read_claim(path) if path is not None else None
    if path is None or claim is None:
        sweep()
        return False
    os.kill(claim.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    # The owner is not our child, so there is no event to wait on but its lock.
    while _is_owned(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"instance on port {port} (pid {claim.pid}) did not end in {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    sweep()
    return True


def _owned_claim(port: int) -> Path | None:
    """In our cache, or in the one that the owner of a run folder was started with."""
    claims = [_claims_dir() / f"{port}.json"]
    for folder in _RUN_ROOT.glob(f"baton{port}-*"):
        with contextlib.suppress(OSError):  # it goes while we look, or is from before there were links
            if folder.stat().st_uid == os.geteuid():  # everybody may write to _RUN_ROOT
                claims.append((folder / _LINK).readlink())
    return next((claim for claim in claims if _is_owned(claim)), None)


def sweep() -> list[int]:
    """Remove what instances without a living owner left; the ports of those found."""
    swept = []
    for path in sorted(_claims_dir().glob("*.json")):
        with contextlib.suppress(FileNotFoundError), path.open("r+") as lock:
            if not _try_lock(lock):
                continue
            claim = _read_claim(path)
            if claim is not None:
                if not _remove_leftovers(claim):
                    continue
                swept.append(claim.port)
            path.unlink(missing_ok=True)
    return swept


def free_ports(count: int, among: Iterable[int] | None = None) -> list[int]:
    """Ports nobody listens on now. They are not held: use them soon, or name some (`among`) that the system gives to
    nobody by itself. Raises ConfigError if too few of those are free.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in itertools.repeat(0) if among is None else among:
            if len(found) == count:
                break
            holder = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                holder.bind(("", port))
                found.append(holder.getsockname()[1])
        if len(found) < count:
            raise ConfigError(f"expected {count} free ports of {among} but got {len(found)}")
        return found


def _claims_dir() -> Path:
    folder = cache_dir() / "run"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"expected a writable cache but {folder}: {error.strerror}") from error
    return folder


def _read_claim(path: Path) -> Claim | None:
    try:
        fields = json.loads(path.read_text())
        return Claim(**{name: fields[name] for name in Claim.__slots__})
    except (OSError, ValueError, KeyError, TypeError):
        # Absent, or its owner was killed while it wrote: then there is no run folder to know of either.
        return None


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_owned(path: Path) -> bool:
    try:
        with path.open("r+") as file:
            return not _try_lock(file)
    except FileNotFoundError:
        return False


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise ConfigError(
                f"HOST: expected an address of this machine but got {host!r}: {error.strerror}"
            ) from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"HOST: expected an address of this machine but got {host!r}") from error
            raise PortBusyError(
                f"expected port {port} on {host} to be free but: {error.strerror}; choose another PORT"
            ) from error


def _remove_leftovers(claim: Claim, patience_s: float = _TERM_TIMEOUT_S) -> bool:
    """Whether nothing is left. If not, the claim has to stay, so that the next sweep tries again."""
    run_dir = Path(claim.run_dir)
    if not run_dir.name.startswith("baton") or run_dir.parent != _RUN_ROOT:
        return True
    # Processes of Ray end by themselves when their raylet is gone; give them the time to.
    _wait_gone(claim.run_dir, patience_s, lambda pid: None)
    _wait_gone(claim.run_dir, _KILL_TIMEOUT_S, lambda pid: os.kill(pid, signal.SIGKILL))
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    shutil.rmtree(run_dir, ignore_errors=True)
    while (is_left := run_dir.exists()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        # Again: a process in its last moments may have written a file meanwhile.
        shutil.rmtree(run_dir, ignore_errors=True)
    return not is_left


def _wait_gone(run_dir: str, timeout_s: float, act: Callable[[int], None]) -> None:
    deadline = time.monotonic() + timeout_s
    while (pids := processes_using(run_dir)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                act(pid)
        time.sleep(_POLL_S)


def processes_using(run_dir: str, program: str = "") -> list[int]:
    """Processes that name the run folder in their command line or write their output into it; never this one.

    Ray's workers overwrite their command line, but their standard output goes to the session's logs. With `program`,
    only those whose executable has this name.
    """
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _uses(entry, run_dir, program)
    ]


def _uses(process: Path, run_dir: str, program: str) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
        if program and not command.split(b"\0")[0].endswith(f"/{program}".encode()):
            return False
        if run_dir.encode() in command:
            return True
        return any(os.readlink(process / "fd" / number).startswith(run_dir + "/") for number in ("1", "2"))
    except OSError:
        # It ended meanwhile, or it is not ours to look at.
        return False
