"""Cores of their own for threads that compute: claimed by real processes, on as many cores as a test wants.

What is pinned is pinned for real, to cores that there are: also on a machine with one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from contracts.config import load_config
from coordinator.phases import make_phases
from tests.engine.tiny_models import make_config, make_oracle, write_hf
from tests.local.cluster import SECRET, overrides
from worker import cores
from worker.cores import OwnCores
from worker.worker import Worker

WAIT_S = 60.0
ALLOWED = os.sched_getaffinity(0)


def make_machine(folder: Path, siblings: dict[int, str]) -> Path:
    """What the kernel shows of CPUs. `siblings`: of each, those that share its core, as the kernel writes them."""
    for cpu, text in siblings.items():
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    return folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cores that there are, at least four, and nobody's claims on them."""
    folder = make_machine(tmp_path / "cpus", {cpu: str(cpu) for cpu in ALLOWED | {0, 1, 2, 3}})
    monkeypatch.setattr(cores, "CPUS", folder)
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "no-quota")
    return folder


CLAIM = """
import pathlib, subprocess, sys
from worker import cores
cores.CPUS = pathlib.Path(sys.argv[1])
own = cores.OwnCores("w")
claimed = own.claim(int(sys.argv[2]), {0, 1, 2, 3})
child = "import sys; print(*sys.argv[1:], flush=True); sys.stdin.read()"
subprocess.run([sys.executable, "-c", child, *map(str, claimed)], close_fds=False)
"""


@contextmanager
def claimer(machine: Path, num_cores: int) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """A process that claims cores of four, and what it got. Its child lives until this ends, whatever becomes of it.

    It is the child that says so: until it runs its own program, it has the files of the process that started it.
    """
    command = [sys.executable, "-c", CLAIM, str(machine), str(num_cores)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process, {int(cpu) for cpu in process.stdout.readline().split()}
        process.stdin.close()
        assert process.stdout.read() == ""  # the child's end, too


def on_a_thread(work: Callable[[], object]) -> set[int]:
    """The cores of a thread that did `work`."""
    seen: list[set[int]] = []

    def run() -> None:
        work()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT_S)
    return seen[0]


def test_each_process_claims_cores_of_its_own(machine: Path) -> None:
    with claimer(machine, 1) as (_, first), claimer(machine, 2) as (_, second):
        assert (len(first), len(second)) == (1, 2)
        own = OwnCores("w")
        assert own.claim(1, {0, 1, 2, 3}) == {0, 1, 2, 3} - first - second
        own.release()


def test_the_cores_of_a_killed_process_are_free_at_once_though_its_child_lives(machine: Path) -> None:
    own = OwnCores("w")
    with claimer(machine, 4) as (process, claimed):
        assert claimed == {0, 1, 2, 3}
        assert not own.claim(1, claimed)
        process.kill()
        process.wait(WAIT_S)
        assert own.claim(4, claimed) == claimed
    own.release()


def test_who_cannot_have_all_that_it_wants_holds_none(machine: Path) -> None:
    with claimer(machine, 3) as (_, claimed):
        greedy, modest = OwnCores("greedy"), OwnCores("modest")
        assert not greedy.claim(2, {0, 1, 2, 3})
        assert modest.claim(1, {0, 1, 2, 3}) == {0, 1, 2, 3} - claimed
        modest.release()


def test_two_workers_of_one_process_claim_different_cores_and_give_them_back(machine: Path) -> None:
    first, second, third = OwnCores("1"), OwnCores("2"), OwnCores("3")
    assert first.claim(2, {0, 1, 2, 3}) | second.claim(2, {0, 1, 2, 3}) == {0, 1, 2, 3}
    first.release()
    assert len(third.claim(2, {0, 1, 2, 3})) == 2
    second.release()
    third.release()


@pytest.mark.parametrize("siblings", [("0-1", "0-1", "2-3", "2-3"), ("0,2", "1,3", "0,2", "1,3")])
def test_threads_of_one_core_are_shared_last(
    siblings: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever each begins to look."""
    monkeypatch.setattr(cores, "CPUS", make_machine(tmp_path, dict(enumerate(siblings))))
    for start in range(4):
        monkeypatch.setattr("random.choice", lambda cpus, start=start: cpus[start])
        first, second = OwnCores("1"), OwnCores("2")
        (one,) = first.claim(1, {0, 1, 2, 3})
        monkeypatch.setattr("random.choice", lambda cpus: cpus[0])
        (other,) = second.claim(1, {0, 1, 2, 3})
        assert siblings[one] != siblings[other]
        first.release()
        second.release()


def test_the_calling_thread_alone_is_pinned(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = OwnCores("decode-0")
    with caplog.at_level(logging.INFO, "baton.worker"):
        (core,) = on_a_thread(lambda: own.pin(1))
    assert core in ALLOWED
    assert os.sched_getaffinity(0) == ALLOWED
    assert [record.message for record in caplog.records] == [
        f"decode-0: its engine thread keeps to core {core}"
    ]
    own.release()


def test_when_all_cores_are_taken_the_next_thread_floats(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others, own = OwnCores("others"), OwnCores("decode-0")
    assert others.claim(len(ALLOWED), ALLOWED) == ALLOWED
    with caplog.at_level(logging.INFO, "baton.worker"):
        assert on_a_thread(lambda: own.pin(1)) == ALLOWED
    (record,) = caplog.records
    assert record.message.startswith("decode-0: its engine thread floats: expected 1 unclaimed of ")
    others.release()


def test_a_thread_that_needs_more_cores_than_there_are_floats(machine: Path) -> None:
    own = OwnCores("decode-0")
    assert on_a_thread(lambda: own.pin(len(ALLOWED) + 1)) == ALLOWED
    assert own.claim(len(ALLOWED), ALLOWED) == ALLOWED
    own.release()


@pytest.mark.parametrize(
    ("quota_cores", "is_pinned"), [(None, True), (len(ALLOWED), True), (len(ALLOWED) - 0.5, False)]
)
def test_where_a_quota_says_that_cores_are_shared_threads_float(
    quota_cores: float | None, is_pinned: bool, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = "max" if quota_cores is None else str(round(quota_cores * 100_000))
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    own, probe = OwnCores("decode-0"), OwnCores("probe")
    on_a_thread(lambda: own.pin(1))
    assert bool(probe.claim(len(ALLOWED), ALLOWED)) is not is_pinned
    own.release()
    probe.release()


def no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "CPUS", tmp_path / "none")


def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(tid: int, cpus: set[int]) -> None:
        raise PermissionError(f"expected no seccomp filter for {tid} on {cpus}")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)


def no_pinning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")


def odd_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("")
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")


@pytest.mark.parametrize("break_it", [no_folder, refused, no_pinning, odd_quota])
def test_whatever_is_wrong_the_thread_floats_and_holds_nothing(
    break_it: Callable[[pytest.MonkeyPatch, Path], None],
    machine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, probe = OwnCores("decode-0"), OwnCores("probe")
    with monkeypatch.context() as broken, caplog.at_level(logging.INFO, "baton.worker"):
        break_it(broken, tmp_path)
        assert on_a_thread(lambda: own.pin(1)) == ALLOWED
    (record,) = caplog.records
    assert record.message.startswith("decode-0: its engine thread floats: ")
    assert probe.claim(len(ALLOWED), ALLOWED) == ALLOWED
    probe.release()


POOL = """
import os, pathlib, sys, threading
import torch
from worker import cores
cores.CPUS, cores.QUOTA = pathlib.Path(sys.argv[1]), pathlib.Path("no-quota")

def tasks():
    return set(os.listdir("/proc/self/task"))

def engine():
    before = tasks()
    cores.OwnCores("w").pin(2)
    torch.set_num_threads(2)
    torch.ones(1 << 20).mul_(2.0)
    pool = tasks() - before
    assert pool
    print(len(os.sched_getaffinity(0)), *{len(os.sched_getaffinity(int(task))) for task in pool})

thread = threading.Thread(target=engine)
thread.start()
thread.join()
"""


def test_threads_that_compute_together_have_their_cores_together(machine: Path) -> None:
    """torch starts the further ones when the engine thread first needs them."""
    done = subprocess.run(
        [sys.executable, "-c", POOL, str(machine)], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    num_cores = min(2, len(ALLOWED))  # a single core is not enough: both float over it
    assert done.stdout.split() == [str(num_cores)] * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config()
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", config, make_oracle(config))


def cores_by_thread() -> dict[int, set[int]]:
    return {int(task): os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}


async def started(model: Path, **sections: object) -> tuple[Worker, int]:
    """A worker, and its engine thread's id."""
    worker = Worker("decode", "d", load_config(overrides=overrides(**sections)), SECRET, make_phases)
    await worker.start(model, "127.0.0.1")
    ready = threading.Event()
    worker._engine.submit(ready.set)
    assert ready.wait(WAIT_S)
    assert worker._engine._thread is not None
    assert worker._engine._thread.native_id is not None
    return worker, worker._engine._thread.native_id


async def test_a_workers_engine_thread_has_a_core_until_it_closes(machine: Path, model: Path) -> None:
    worker, engine = await started(model)
    by_thread = cores_by_thread()
    (core,) = by_thread.pop(engine)
    assert core in ALLOWED
    assert all(allowed == ALLOWED for allowed in by_thread.values())
    probe = OwnCores("probe")
    assert not probe.claim(1, {core})
    await worker.close()
    assert probe.claim(1, {core})
    probe.release()


async def test_an_engine_thread_floats_where_it_shall(machine: Path, model: Path) -> None:
    worker, engine = await started(model, engine__pin_threads=False)
    probe = OwnCores("probe")
    assert probe.claim(len(ALLOWED), ALLOWED) == ALLOWED
    assert cores_by_thread()[engine] == ALLOWED
    probe.release()
    await worker.close()
