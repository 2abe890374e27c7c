"""coordinator/outside.py: what a launcher waits for and shows, with a server's answers made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from contracts.config import BatonConfig, load_config
from coordinator import outside
from coordinator.instance import Claim
from coordinator.outside import summary, wait_ready, wanted_workers, workers

URL = "http://here:1"
WANTED = {"prefill": 1, "decode": 2}


def ready(num_decodes: int, status: int = 200) -> tuple[int, str]:
    pools = {
        "prefill": {"num_workers": 1, "num_ready": 1},
        "decode": {"num_workers": 2, "num_ready": num_decodes},
    }
    return status, json.dumps({"reason": "no decode worker is ready", "pools": pools})


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Of /ready, one after the other; the last one again and again. Time passes with each."""
    given: list[tuple[int, str]] = []
    monkeypatch.setattr(outside, "get", lambda _url: given.pop(0) if len(given) > 1 else given[0])
    clock: Iterator[int] = iter(range(1_000_000))
    monkeypatch.setattr(outside.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(outside.time, "sleep", lambda _seconds: None)
    return given


def test_a_start_waits_for_all_workers_and_says_which_are_missing(answers: list[tuple[int, str]]) -> None:
    answers += [(0, "refused"), ready(0, 503), ready(0, 503), ready(1), ready(1), ready(2)]
    said: list[str] = []
    wait_ready(URL, WANTED, said.append, lambda: "", 600.0)
    assert said == ["not ready yet: no decode worker is ready", "not ready yet: 1 of 2 decode workers"]


def test_a_worker_that_cannot_start_keeps_nobody_waiting_where_others_serve(
    answers: list[tuple[int, str]],
) -> None:
    answers += [ready(1)]
    said: list[str] = []
    wait_ready(URL, WANTED, said.append, lambda: "Decode: no memory", 600.0)
    assert said[-1] == "Decode: no memory"
    answers[:] = [ready(0, 503)]
    with pytest.raises(RuntimeError, match="no memory"):
        wait_ready(URL, WANTED, said.append, lambda: "Decode: no memory", 600.0)


def test_when_time_is_over_those_that_are_there_will_do(answers: list[tuple[int, str]]) -> None:
    answers += [ready(1)]
    wait_ready(URL, WANTED, lambda _text: None, lambda: "", 30.0)
    answers[:] = [ready(0, 503)]
    with pytest.raises(TimeoutError, match="within 30 s but got 503"):
        wait_ready(URL, WANTED, lambda _text: None, lambda: "", 30.0)


def test_what_is_no_ready_of_ours_lacks_nobody(answers: list[tuple[int, str]]) -> None:
    answers += [(200, '{"status": "ready"}')]
    wait_ready(URL, WANTED, lambda _text: None, lambda: "", 30.0)


def test_pools_without_replicas_are_not_waited_for() -> None:
    config: BatonConfig = load_config(overrides={"prefill.num_replicas": 0, "decode.num_replicas": 3})
    assert wanted_workers(config) == {"decode": 3}


def test_the_summary_says_how_many_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"role": role, "worker_id": f"{role}-0", "pid": 7} for role in WANTED]
    monkeypatch.setattr(outside, "get", lambda _url: (200, json.dumps({"workers": rows})))
    summary(Claim(1, "127.0.0.1", 1, "/tmp/baton1-0", URL), WANTED, 3.0)
    lines = capsys.readouterr().out.splitlines()
    assert "  prefill  prefill-0 (pid 7)" in lines
    assert "  decode   decode-0 (pid 7); 1 of 2 are ready" in lines


def test_the_pools_are_shown_where_only_metrics_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = "".join(
        f'baton_worker_step_age_seconds{{role="{role}",worker_id="{role}-0"}} 0.1\n'
        for role in ("decode", "prefill")
    )
    monkeypatch.setattr(
        outside, "get", lambda url: (200, f"# TYPE …\n{metrics}") if url.endswith("/metrics") else (403, "{}")
    )
    assert workers("http://here") == {"decode": ["decode-0"], "prefill": ["prefill-0"]}
