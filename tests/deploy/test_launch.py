"""coordinator/launch.py against real Ray and Serve: two instances beside each other, every way to end one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import JobID

from contracts.errors import ConfigError
from coordinator import ending, launch, local_ray, outside
from coordinator.addresses import is_loopback_host
from coordinator.instance import claim_port, free_ports, processes_using, sweep

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 60.0


class Launcher:
    """`python -m tests.deploy.tiny_app` on a free port; its output up to the summary."""

    def __init__(self, cache: Path, host: str, **variables: str) -> None:
        [self.port] = free_ports(1)
        environment = {**os.environ, "BATON_CACHE": str(cache), "PYTHONPATH": str(ROOT), **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.deploy.tiny_app", "--port", str(self.port), "--host", host],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self.output = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, self.process.kill)
        watchdog.start()
        for line in self.process.stdout:
            self.output += line
            if "stops it" in line:
                watchdog.cancel()
                return
        watchdog.cancel()
        pytest.fail(f"the launcher ended before it was ready:\n{self.output}")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=END_TIMEOUT_S)
        self.output += rest
        return self.process.returncode

    def run_dirs(self) -> list[Path]:
        return list(Path("/tmp").glob(f"baton{self.port}-*"))


@pytest.mark.cluster
@pytest.mark.slow
def test_two_instances_live_and_end_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    # A second is too little for a proxy: Serve kills it, and gives the next one more.
    first = Launcher(tmp_path, "127.0.0.3")
    second = Launcher(tmp_path, "0.0.0.0", RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="1")
    try:
        first.wait_ready()
        second.wait_ready()
        assert re.search(
            rf"ready after \d+\.\d s: http://127\.0\.0\.3:{first.port}$", first.output, re.MULTILINE
        )
        assert outside.get(f"http://127.0.0.1:{first.port}/ready")[0] == 0, "it listens where it was told to"
        assert re.search(r"prefill +prefill-0 \(pid \d+\)", first.output)
        assert re.search(r"decode +decode-0 \(pid \d+\)", first.output)

        given = json.loads(outside.get(f"http://127.0.0.3:{first.port}/given")[1])
        assert given == {"server.host": "127.0.0.3", "server.port": str(first.port)}

        assert launch.main(["--port", str(first.port)]) == 2, "a busy port is refused"

        [run_dir] = first.run_dirs()
        assert first.end(signal.SIGTERM) == 0, first.output
        assert not processes_using(str(run_dir))
        assert not run_dir.exists()

        assert outside.get(f"http://127.0.0.2:{second.port}/ready")[0] == 200, "the other one is not touched"
        [run_dir] = second.run_dirs()
        second.process.kill()
        second.process.communicate(timeout=END_TIMEOUT_S)
        assert sweep() == [second.port]
        assert not processes_using(str(run_dir))
        assert not run_dir.exists()
        assert outside.get(f"http://127.0.0.1:{second.port}/ready")[0] == 0
    finally:
        for launcher in (first, second):
            launcher.process.kill()
            launcher.process.communicate(timeout=END_TIMEOUT_S)
        sweep()


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_a_start_that_is_interrupted_says_so_and_leaves_nothing(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    launcher = Launcher(tmp_path, "127.0.0.1")
    try:
        assert launcher.process.stdout is not None
        line = next(line for line in launcher.process.stdout if "starting Ray" in line)
        [run_dir] = launcher.run_dirs()
        while not processes_using(
            str(run_dir), program="raylet"
        ):  # Ray waits for its node, and does not answer yet
            assert launcher.process.poll() is None, line
        for _ in range(times - 1):
            launcher.process.send_signal(signal.SIGINT)
        assert launcher.end(signal.SIGINT) == 0, launcher.output
        assert re.fullmatch(
            r"\nstopping\nstopped within \d+\.\d s; nothing is left running\n", launcher.output
        )
        assert not processes_using(str(run_dir))
        assert not run_dir.exists()
    finally:
        launcher.process.kill()
        launcher.process.communicate(timeout=END_TIMEOUT_S)
        sweep()


def test_the_end_of_a_start_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Ray may be one that nobody can tell to end: there was no time to connect to it."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(ending._Ender, "run", lambda self: None)
    monkeypatch.setattr(ending, "wait_lost", lambda *_: pytest.fail("it was waited for"))
    monkeypatch.setitem(sys.modules, "ray", object())
    instance = claim_port("127.0.0.1", free_ports(1)[0])
    script = f"import signal; print('{instance.run_dir}', flush=True); signal.pause()"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    monkeypatch.setattr("coordinator.instance._TERM_TIMEOUT_S", END_TIMEOUT_S)
    ending.give_back(instance, (), None)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    assert not instance.run_dir.exists()


def test_an_interrupt_among_the_imports_is_no_traceback() -> None:
    code = """
import builtins, os, runpy, signal, sys
plain = builtins.__import__
def watched(name, *rest, **more):
    if name == "contracts.config":
        os.kill(os.getpid(), signal.SIGINT)
    return plain(name, *rest, **more)
builtins.__import__ = watched
runpy.run_module("coordinator.launch", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\nstopping\n", "")


def test_a_second_interrupt_does_not_break_the_way_out_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(ending.time, "monotonic", lambda: now_s)
    interrupt = ending.Interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT, None)
    interrupt(signal.SIGINT, None)
    now_s += ending._UNHEARD_S + 0.1  # it was lost: whoever was interrupted has swallowed it
    with pytest.raises(KeyboardInterrupt):
        interrupt(signal.SIGINT, None)


def test_stop_without_an_instance_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    [port] = free_ports(1)
    assert launch.main(["--stop", "--port", str(port)]) == 0
    assert capsys.readouterr().out == f"no instance on port {port}\n"


def test_bad_configuration_ends_with_2_and_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("decode: {replicas: 2}\n")
    assert launch.main(["--config", str(config)]) == 2
    assert "decode.replicas: unknown key" in capsys.readouterr().err


def test_ray_gets_room_for_all_workers_and_their_resources() -> None:
    from contracts.config import load_config

    config = load_config(
        None, {"decode.num_replicas": 40, "decode.num_cpus": 1.0, "decode.resources": {"decode": 1.0}}
    )
    assert local_ray._logical_cpus(config) >= 41
    assert local_ray._custom_resources(config) == {"decode": 40.0}


def test_pythons_of_a_start_look_for_garbage_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    code = "import gc, sys; print(gc.get_threshold()[0], '/of/the/user' in sys.path)"
    with local_ray._patient_python(tmp_path / "python"):
        told = subprocess.run(
            [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
        )
    assert told.stdout.split() == ["50000", "True"]
    assert os.environ["PYTHONPATH"] == "/of/the/user"


def test_what_ray_says_of_a_killed_worker_goes_to_a_log_and_not_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from ray._private import worker

    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # to have it back
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    local_ray._keep_messages(tmp_path)
    is_over = threading.Event()

    class Subscriber:
        def subscribe(self) -> None: ...

        def poll(self) -> tuple[None, dict[str, Any]]:
            is_over.set()
            return None, {"job_id": None, "error_message": "A worker died"}

    driver = SimpleNamespace(gcs_error_subscriber=Subscriber(), current_job_id=JobID.nil())
    worker.listen_error_messages(driver, is_over)
    assert capfd.readouterr() == ("", "")
    assert [path.read_text() for path in logs.iterdir()] == ["A worker died\n"]


def test_a_coordinator_has_its_environment_from_ray_or_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from coordinator import app

    for name in local_ray.REPLICA_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert app._own_environment() == {"runtime_env": {"env_vars": local_ray.REPLICA_ENVIRONMENT}}
    for name, value in local_ray.RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert app._own_environment() == {}


def test_starting_does_not_load_torch() -> None:
    code = "import sys, coordinator.launch, coordinator.haproxy, engine.embedded; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_coordinator_loads_no_database_until_one_is_asked_for() -> None:
    code = "import sys, coordinator.wiring; sys.exit('sqlalchemy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_a_model_that_is_not_there_ends_with_2_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    command = ["-m", "coordinator.launch", "--port", str(free_ports(1)[0]), "--model", str(tmp_path / "none")]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, check=False, timeout=60)
    printed = capfd.readouterr()
    assert done.returncode == 2
    assert re.fullmatch(r"baton: expected a Hugging Face directory.*does not exist\n", printed.err)
    assert "starting Ray" not in printed.out


def test_a_long_silence_is_broken_by_what_still_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_STILL_S", 0.01)
    printed = threading.Event()

    class Heard(launch.Stages):
        @property
        def elapsed_s(self) -> float:
            if threading.current_thread().name == "stages":
                printed.set()
            return 12.0

    with Heard() as stages:
        stages.begin("starting Ray")
        assert printed.wait(10.0)
    assert capsys.readouterr().out.startswith("[ 12.0 s] starting Ray\n[ 12.0 s] still starting Ray\n")


def test_hosts_that_others_reach_are_told_apart() -> None:
    assert [is_loopback_host(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_an_error_on_the_building_thread_is_raised_to_who_asks() -> None:
    def build() -> None:
        raise ConfigError("expected this but got that")

    with pytest.raises(ConfigError, match="expected this"):
        launch._in_background(build).result(timeout=10.0)
