"""coordinator/instance.py and haproxy.py: one owner per port, and nothing left of an owner that was killed."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from contracts.errors import ConfigError
from coordinator import haproxy, instance
from coordinator.instance import Claim, PortBusyError, claim_port, free_ports, processes_using, stop, sweep
from tests.coordinator.http_tools import error_of

HOLDER = """
import sys, subprocess
from coordinator.instance import claim_port
held = claim_port("127.0.0.1", int(sys.argv[1]))
command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", held.claim.run_dir]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()  # it runs: at the moment of its exec it would have no command line
try:
    print(held.claim.run_dir, child.pid, flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    child.kill()
    child.wait()
    held.close()
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    yield
    assert not list((tmp_path / "run").glob("*")), "a claim was left"


class Holder:
    """Another process that owns a port; `run_dir` and a child which would outlive it."""

    def __init__(self, port: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(instance.__file__).parents[1])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        run_dir, child_pid = self.process.stdout.readline().split()
        self.run_dir, self.child_pid = Path(run_dir), int(child_pid)

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.communicate()


def is_alive(pid: int) -> bool:
    """Running; a zombie that only waits for its parent to look is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_claim_gives_a_private_folder_and_gives_it_back() -> None:
    [port] = free_ports(1)
    held = claim_port("127.0.0.1", port)
    assert held.run_dir.stat().st_mode & 0o777 == 0o700
    assert held.claim.url == f"http://127.0.0.1:{port}"
    assert held.close()
    assert held.close()
    assert not held.run_dir.exists()


def test_ports_for_later_are_those_of_a_range_that_nobody_listens_on() -> None:
    [first] = free_ports(1)
    with socket.create_server(("", first)):
        [second] = free_ports(1, [first, *free_ports(1)])
        assert second != first
        with pytest.raises(ConfigError, match="expected 1 free ports"):
            free_ports(1, [first])


def test_every_address_is_shown_as_loopback() -> None:
    [port] = free_ports(1)
    held = claim_port("0.0.0.0", port)
    held.close()
    assert held.claim.url == f"http://127.0.0.1:{port}"


def test_two_ports_two_owners() -> None:
    first, second = (claim_port("127.0.0.1", port) for port in free_ports(2))
    assert first.run_dir != second.run_dir
    first.close()
    assert second.run_dir.is_dir()
    second.close()


def test_port_of_another_program_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(PortBusyError, match=r"expected port .* to be free"):
            claim_port("127.0.0.1", other.getsockname()[1])


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        claim_port("192.0.2.1", free_ports(1)[0])


def test_port_of_another_instance_is_refused_with_its_pid() -> None:
    [port] = free_ports(1)
    holder = Holder(port)
    with pytest.raises(PortBusyError, match=rf"pid {holder.process.pid}.*make stop PORT={port}"):
        claim_port("127.0.0.1", port)
    holder.end(signal.SIGINT)


def test_killed_owner_is_swept_with_its_processes() -> None:
    [port] = free_ports(1)
    holder = Holder(port)
    assert processes_using(str(holder.run_dir)) == [holder.child_pid]
    holder.process.kill()
    holder.process.wait()
    assert sweep() == [port]
    assert not holder.run_dir.exists()
    assert not is_alive(holder.child_pid)
    holder.process.communicate()


def test_living_owner_is_not_swept() -> None:
    [port] = free_ports(1)
    holder = Holder(port)
    assert sweep() == []
    assert holder.run_dir.is_dir()
    assert is_alive(holder.child_pid)
    holder.end(signal.SIGINT)


def test_stop_without_an_instance_says_so() -> None:
    assert stop(free_ports(1)[0]) is False


def test_stop_finds_an_instance_that_was_started_with_another_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)
    holder = Holder(port)
    with monkeypatch.context() as patched:
        patched.setenv("BATON_CACHE", str(tmp_path / "other"))
        assert stop(port) is True
    assert holder.process.wait() == -signal.SIGTERM
    holder.process.communicate()
    assert sweep() == [port]  # this owner could not do it itself
    assert stop(port) is False


def test_stop_believes_no_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = free_ports(1)
    holder = Holder(port)
    with monkeypatch.context() as patched:
        patched.setenv("BATON_CACHE", str(tmp_path / "other"))
        patched.setattr(os, "geteuid", lambda: 12345)
        assert stop(port) is False
    holder.end(signal.SIGINT)


def test_claim_file_never_names_a_folder_to_remove_elsewhere(tmp_path: Path) -> None:
    precious = tmp_path / "baton-precious"
    precious.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    text = f'{{"pid": 1, "host": "", "port": 1, "run_dir": "{precious}", "url": ""}}'
    (run / "1.json").write_text(text)
    sweep()
    assert precious.is_dir()


def test_what_could_not_be_removed_stays_known(monkeypatch: pytest.MonkeyPatch) -> None:
    held = claim_port("127.0.0.1", free_ports(1)[0])
    with monkeypatch.context() as patched:
        patched.setattr(instance, "_REMOVE_TIMEOUT_S", 0.0)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert not held.close()
    assert held.run_dir.is_dir()
    assert sweep() == [held.claim.port]
    assert not held.run_dir.exists()


def test_a_file_written_while_the_folder_goes_is_removed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    held = claim_port("127.0.0.1", free_ports(1)[0])
    remove, late = shutil.rmtree, held.run_dir / "late"

    def remove_and_lose(path: Path, **options: Any) -> None:
        remove(path, **options)
        if not late.parent.exists() and not monkeypatch.setattr(shutil, "rmtree", remove):
            late.parent.mkdir()
            late.touch()

    monkeypatch.setattr(shutil, "rmtree", remove_and_lose)
    held.close()
    assert not held.run_dir.exists()


def test_instances_share_no_file_and_no_port() -> None:
    [port] = free_ports(1)
    [neighbour] = free_ports(
        1, range(port + 1, port + 100)
    )  # ports 200 apart share a range, and look what is free
    first, second = (claim_port("127.0.0.1", number) for number in (port, neighbour))
    one, two = haproxy.serve_environment(first), haproxy.serve_environment(second)
    for name in one:
        own = name.endswith(("_LOC", "_PATH", "_BASE", "_FILE", "_PORT")) and "IMPORT_PATH" not in name
        if own and "DIRECT_INGRESS" not in name:
            assert one[name] != two[name], name
    first.close()
    second.close()


def test_haproxy_socket_paths_fit_into_a_unix_address() -> None:
    held = claim_port("127.0.0.1", free_ports(1)[0])
    environment = haproxy.serve_environment(held)
    node_id, suffix = "f" * 56, ".4194304.tmp"
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        path = Path(environment[name])
        assert len(str(path.parent / node_id / path.name) + suffix) <= 107
    held.close()


def test_haproxy_has_a_thread_for_every_four_cores_and_at_least_one() -> None:
    assert [haproxy.num_threads(cores) for cores in (1, 2, 7, 8, 16, 96)] == [1, 1, 1, 2, 4, 4]


def claim(host: str = "127.0.0.1") -> Claim:
    return Claim(os.getpid(), host, 8000, "", "")


def rewritten(tmp_path: Path, text: str, host: str = "127.0.0.1") -> str:
    """What the script makes of a configuration."""
    script = haproxy.write_script(tmp_path, claim(host))
    config = tmp_path / "haproxy.cfg"
    config.write_text(text)
    (tmp_path / "haproxy.py").write_text((tmp_path / "haproxy.py").read_text().replace("os.execv(", "print("))
    subprocess.run([script, "-db", "-f", config], check=True, capture_output=True)
    return config.read_text()


@pytest.mark.parametrize(
    ("host", "told"),
    [("0.0.0.0", "0.0.0.0"), ("192.0.2.7", "192.0.2.7"), ("::", "ipv6@::"), ("localhost", "localhost")],
)
def test_haproxy_listens_for_clients_where_told_and_else_on_loopback(
    tmp_path: Path, host: str, told: str
) -> None:
    """The script rewrites the configuration that Serve generated and then becomes the real binary."""
    template = [
        line for line in HAPROXY_CONFIG_TEMPLATE.splitlines() if " bind " in line and "proto h2" not in line
    ]
    text = "\n".join(template)
    for name, value in (
        ("frontend_host", haproxy.SERVE_HOST),
        ("frontend_port", "8000"),
        ("metrics_port", "9101"),
    ):
        text = text.replace(f"{{{{ config.{name} }}}}", value)
    found = rewritten(tmp_path, text.replace("{{ config.stats_port }}", "8404"), host)
    binds = [line.strip() for line in found.splitlines() if "bind" in line]
    assert binds == ["bind 127.0.0.1:9101", f"bind {told}:8000", "bind 127.0.0.1:8404"]


def test_no_plain_text_is_left_where_serves_template_answers_clients(tmp_path: Path) -> None:
    """Serve's own pages (`/-/…`) apart; a new form of the template must not pass unseen."""
    source = "\n".join(line for line in HAPROXY_CONFIG_TEMPLATE.splitlines() if "grpc" not in line)
    assert "errorfile 503" in source
    text = rewritten(tmp_path, source)
    assert "errorfile" not in text
    plain = [line for line in text.splitlines() if "text/plain" in line]
    assert all("Ingress request router failed" in line for line in plain), plain


@contextlib.contextmanager
def proxying(tmp_path: Path, backend: str) -> Iterator[str]:
    """The address of an HAProxy that was started by the script."""
    script = haproxy.write_script(tmp_path, claim())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (tmp_path / "haproxy.cfg").write_text(
            "defaults\n  mode http\n  timeout connect 1s\n  timeout client 9s\n  timeout server 9s\n  retries 0\n"
            f"frontend f\n  bind fd@{listener.fileno()}\n  default_backend b\nbackend b\n  {backend}\n"
        )
        command = [script, "-db", "-f", tmp_path / "haproxy.cfg"]
        proxy = subprocess.Popen(command, pass_fds=[listener.fileno()], stderr=subprocess.DEVNULL)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            proxy.kill()
            proxy.wait()


NO_APPLICATION = 'http-request return status 404 content-type text/plain lf-string "Path"'


def test_what_haproxy_answers_itself_has_openais_form(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:

        def leave() -> None:
            connection, _ = mute.accept()
            with connection:
                connection.recv(1 << 16)

        thread = threading.Thread(target=leave)
        thread.start()
        cases = {
            f"server s 127.0.0.1:{free_ports(1)[0]}": (503, "overloaded"),
            NO_APPLICATION: (503, "overloaded"),
            f"server s 127.0.0.1:{mute.getsockname()[1]}": (502, "worker_lost"),
        }
        for backend, expected in cases.items():
            with proxying(tmp_path, backend) as url:
                response = httpx.post(
                    f"{url}/v1/x", json={}, headers={"x-request-id": "mine-1"}, timeout=30.0
                )
            assert (response.status_code, error_of(response)["code"]) == expected
            assert response.headers["x-request-id"] == "mine-1"
            assert response.headers["retry-after"] == "1"
        thread.join()


def test_what_no_server_behind_haproxy_would_answer_in_openais_form_stays_in_front(tmp_path: Path) -> None:
    expected = [
        ("FOO", "/v1/models", 405), ("PROPFIND", "/", 405), ("OPTIONS", "*", 404), ("GET", "/", 503),
        ("GET", "/-/routes", 404), ("GET", "/-/Routes?x", 404), ("GET", "http://x/-/routes", 404),
    ]  # fmt: skip
    with proxying(tmp_path, NO_APPLICATION) as url:
        for method, target, status in expected:
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30.0) as client:
                client.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(f"HTTP/1.1 {status} ".encode()), (method, head)
            error_of(httpx.Response(status, content=body))


def test_a_request_id_that_is_not_sane_is_replaced_before_serve_repeats_it(tmp_path: Path) -> None:
    with proxying(tmp_path, NO_APPLICATION) as url:
        for given in ([], ["x" * 129], ["two words"], ["caf\xe9"], ["a", "b"]):
            headers = [(b"x-request-id", value.encode("latin-1")) for value in given]
            found = httpx.get(url, headers=headers, timeout=30.0).headers["x-request-id"]
            assert re.fullmatch(r"req_[0-9a-f-]{36}", found)
        kept = httpx.get(url, headers={"x-request-id": "x" * 128}, timeout=30.0)
        assert kept.headers["x-request-id"] == "x" * 128


def test_headers_that_dribble_in_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "HEADER_TIMEOUT_S", 1)
    script = haproxy.write_script(tmp_path, claim())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (tmp_path / "haproxy.cfg").write_text(
            "defaults\n  mode http\n  timeout connect 1s\n  timeout client 60s\n  timeout server 60s\n"
            f"frontend f\n  bind fd@{listener.fileno()}\n"
        )
        command = [script, "-db", "-f", tmp_path / "haproxy.cfg"]
        proxy = subprocess.Popen(command, pass_fds=[listener.fileno()], stderr=subprocess.DEVNULL)
        try:
            with socket.create_connection(listener.getsockname(), timeout=30.0) as client:
                client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x")
                answer = client.recv(100)
        finally:
            proxy.kill()
            proxy.wait()
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_client_that_leaves_before_its_answer_is_seen_at_the_replica(tmp_path: Path) -> None:
    """The body arrives after the headers, as HTTP clients send it: the second part is what HAProxy would splice."""
    script = haproxy.write_script(tmp_path, claim())
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as replica,
    ):
        replica.settimeout(30.0)
        (tmp_path / "haproxy.cfg").write_text(
            "global\n  nbthread 2\n"
            "defaults\n  mode http\n  timeout connect 5s\n  timeout client 3600s\n"
            "  option abortonclose\n  option splice-request\n  option splice-response\n"
            f"frontend f\n  bind fd@{listener.fileno()}\n  default_backend b\n"
            f"backend b\n  http-reuse always\n  server s 127.0.0.1:{replica.getsockname()[1]}\n"
        )
        command = [script, "-db", "-f", tmp_path / "haproxy.cfg"]
        proxy = subprocess.Popen(command, pass_fds=[listener.fileno()], stderr=subprocess.DEVNULL)
        try:
            for _ in range(8):  # without the remedy, one in several is seen all the same
                with socket.create_connection(listener.getsockname(), timeout=30.0) as client:
                    client.sendall(
                        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 200\r\n\r\n"
                    )
                    forwarded, _ = replica.accept()
                    forwarded.settimeout(30.0)
                    received = b""
                    while not received.endswith(b"\r\n\r\n"):
                        received += forwarded.recv(1 << 16)
                    client.sendall(b"x" * 200)
                    while not received.endswith(b"\n" + b"x" * 200):
                        received += forwarded.recv(1 << 16)
                with forwarded:
                    readable, _, _ = select.select([forwarded], [], [], 10.0)
                assert readable, "expected HAProxy to leave the replica as its client did"
        finally:
            proxy.kill()
            proxy.wait()


def test_haproxy_ends_with_its_parent(tmp_path: Path) -> None:
    script = haproxy.write_script(tmp_path, claim())
    (tmp_path / "haproxy.cfg").write_text(
        f"defaults\n  timeout connect 1s\n  timeout client 1s\n  timeout server 1s\n"
        f"frontend f\n  bind 127.0.0.1:{free_ports(1)[0]}\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(script), str(tmp_path / "haproxy.cfg")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    waiter = os.pidfd_open(child_pid)
    parent.kill()
    parent.communicate()
    readable, _, _ = select.select([waiter], [], [], 10.0)
    os.close(waiter)
    assert readable, "expected HAProxy to end with its parent"


_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.argv[1], "-db", "-f", sys.argv[2]], stderr=subprocess.DEVNULL)
while b"bin/haproxy" not in open(f"/proc/{child.pid}/cmdline", "rb").read().split(b"\\0")[0]:
    time.sleep(0.01)
print(child.pid, flush=True)
sys.stdin.read()
"""
