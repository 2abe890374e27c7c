"""A decode worker of three ranks under Ray: it answers like the reference, and a rank that dies costs a pause."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from coordinator.instance import processes_using
from tests.cluster.instance import Running, running, wait_until

pytestmark = pytest.mark.cluster

CASE = next(
    case
    for case in json.loads((Path(__file__).parent.parent / "data" / "smollm2_greedy.json").read_text())[
        "cases"
    ]
    if case["kind"] == "chat" and min(case["margins"][:8]) > 0.02
)
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = {
        "model": {"dtype": "float32"},
        "decode": {"tensor_parallel_size": 3, "num_cpus": 0.2},
    }
    with running(tmp_path_factory.mktemp("baton"), config) as instance:
        yield instance


def ranks(baton: Running) -> set[int]:
    """The processes that compute for rank 0."""
    (run_dir,) = Path("/tmp").glob(f"baton{baton.url.rsplit(':', 1)[1]}-*")
    found = set()
    for pid in processes_using(str(run_dir)):
        try:
            if psutil.Process(pid).cmdline()[:1] == ["ray::RankActor.run"]:
                found.add(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def answer(baton: Running) -> str:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": CASE["request"],
        "max_tokens": 8,
        "temperature": 0,
    }
    told = httpx.post(f"{baton.url}/v1/chat/completions", json=body, timeout=120.0)
    assert told.status_code == 200, told.text
    text: str = told.json()["choices"][0]["message"]["content"]
    return text


def test_three_ranks_take_over_a_prompt_that_one_read(baton: Running) -> None:
    assert len(ranks(baton)) == 2
    text = answer(baton)
    assert text
    assert CASE["text"].startswith(text)
    handed = [line for line in baton.get("/metrics").text.splitlines() if "handoffs_total{" in line]
    assert any(line.endswith(" 1.0") for line in handed), handed


def test_a_killed_rank_costs_a_pause_and_leaves_no_orphan(baton: Running) -> None:
    before, pid = ranks(baton), baton.pid_of("decode")
    os.kill(min(before), signal.SIGKILL)
    wait_until(lambda: baton.pid_of("decode") != pid and baton.is_ready(), 90.0, "a new decode worker")
    after = ranks(baton)
    assert len(after) == 2
    assert not after & before
    assert CASE["text"].startswith(answer(baton))
    assert not any(psutil.pid_exists(pid) for pid in before)


def test_a_killed_worker_takes_its_ranks_with_it(baton: Running) -> None:
    before, pid = ranks(baton), baton.pid_of("decode")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(psutil.pid_exists(rank) for rank in before), 20.0, "its ranks to end")
    wait_until(lambda: baton.pid_of("decode") != pid and baton.is_ready(), 90.0, "a new decode worker")
    assert CASE["text"].startswith(answer(baton))
