"""Which process grew, from samples made by hand, and from processes that really run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks.growth import (
    JUDGED_S,
    WARM_S,
    Growth,
    Life,
    Sample,
    Watcher,
    growth_checks,
    growth_of,
    growth_table,
    role_of,
)

NUM_S = 300


def life(
    kib: Callable[[int], int], files: Callable[[int], int] = lambda _at_s: 5, num_s: int = NUM_S, pid: int = 7
) -> Life:
    """One sample a second."""
    samples = [Sample(float(second), kib(second), files(second)) for second in range(num_s)]
    return Life(pid, "decode", f"decode-{pid}", 3, samples)


def leaking(pid: int = 7) -> Life:
    return life(lambda at_s: 1000 + 100 * at_s, lambda at_s: 5 + at_s // 10, pid=pid)


def test_growth_is_that_of_the_last_quarter_over_the_first_behind_the_warm_up() -> None:
    growth = growth_of(leaking())
    assert growth is not None
    judged_s = NUM_S - WARM_S
    assert growth.grown_mb == pytest.approx(0.75 * judged_s * 0.1024, rel=0.02)
    assert growth.mb_per_hour == pytest.approx(3600 * 0.1024)
    assert growth.more_files == pytest.approx(0.75 * judged_s / 10, abs=1.0)
    warming = growth_of(life(lambda at_s: 1000 * min(at_s, int(WARM_S))))
    assert warming is not None
    assert (warming.grown_mb, warming.mb_per_hour) == (0.0, 0.0)


def test_a_life_that_was_too_short_tells_nothing() -> None:
    assert growth_of(life(lambda at_s: at_s, num_s=int(WARM_S + JUDGED_S))) is None
    assert growth_of(life(lambda at_s: at_s, num_s=int(WARM_S + JUDGED_S) + 2)) is not None
    assert growth_of(life(lambda at_s: at_s, num_s=0)) is None


def test_the_row_of_a_process_says_who_it_is_and_how_it_grew() -> None:
    growth = growth_of(leaking(18165))
    assert growth is not None
    row = growth.row()
    assert list(row) == list(Growth.HEADER)
    assert (row["process"], row["role"], row["pid"], row["incarnation"]) == (
        "decode-18165",
        "decode",
        18165,
        3,
    )
    assert row["life_s"] == NUM_S - 1
    assert row["last_mb"] - row["first_mb"] == row["grown_mb"] == growth.grown_mb > 0
    assert row["mb_per_hour"] == growth.mb_per_hour
    assert row["more_files"] == growth.more_files


def test_the_table_has_ids_as_they_are() -> None:
    growth = growth_of(leaking(18165))
    assert growth is not None
    head, _, line = growth_table([growth]).splitlines()
    assert head.split() == [name for name in Growth.HEADER if name != "incarnation"]
    assert line.split()[:3] == ["decode-18165", "decode", "18165"]


def test_the_checks_name_the_process_that_grew_most() -> None:
    lives = [life(lambda _at_s: 1000, pid=1), leaking(2), life(lambda at_s: at_s, num_s=9, pid=3)]
    growths = [growth for each in lives if (growth := growth_of(each))]
    memory, files = growth_checks(growths)
    assert (memory.name, memory.of) == ("rss_growth_mb", "decode-2 (pid 2)")
    assert memory.value == max(growth.grown_mb for growth in growths)
    assert (files.name, files.of) == ("more_files", "decode-2 (pid 2)")
    assert "decode-2 (pid 2)" in str(memory)


def test_nobody_measured_is_not_met() -> None:
    assert [(check.value, check.is_ok) for check in growth_checks([])] == [(None, False)] * 2


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::ServeReplica:baton:Decode", "decode"),
        ("ray::ServeReplica:baton:Coordinator", "coordinator"),
        ("ray::ServeController.listen_for_change", "ServeController"),
        ("ray::IDLE", "IDLE"),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp", "gcs_server"),
        ("/x/bin/python -m coordinator.launch --port 1", "launcher"),
        ("/x/bin/python -u /x/ray/dashboard/agent.py", "python"),
        ("", ""),
    ],
)
def test_a_process_is_called_by_what_it_does(command: str, role: str) -> None:
    assert role_of(command) == role


def test_a_worker_leads_to_all_processes_of_its_instance() -> None:
    """As under a launcher: it starts a node process, which starts the workers; a worker may start others."""
    sleeper = "import sys; print('up', flush=True); input()"
    middle = (
        "import subprocess, sys;"
        f"children = [subprocess.Popen([sys.executable, '-c', {sleeper!r}, name]) for name in ('w1', 'w2')];"
        "print(children[0].pid, children[1].pid, flush=True); [child.wait() for child in children]"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {middle!r}, 'node'])"
    process = subprocess.Popen(
        [sys.executable, "-c", outer, "launcher"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        first, second = next(map(int, line.split()) for line in lines if line.strip() != "up")
        watcher = Watcher()
        watcher.know([{"pid": first, "worker_id": "decode-1", "role": "decode", "incarnation": 9}])
        watcher.look(0.0)
        lives = {each.pid: each for each in watcher.lives}
        assert {process.pid, first, second} < lives.keys()
        assert len(lives) == 4
        assert (lives[first].name, lives[first].role, lives[first].incarnation) == ("decode-1", "decode", 9)
        assert all(each.samples[0].kib > 0 and each.samples[0].files >= 3 for each in lives.values())
    finally:
        process.communicate("\n\n")
    watcher.look(1.0)
    assert all(len(each.samples) == 1 for each in watcher.lives)
