from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.config import load_config
from contracts.config_pools import PoolConfig
from contracts.errors import EngineError
from coordinator.phases import make_phases
from tests.engine.tiny_models import make_config, make_oracle, write_hf
from tests.local.cluster import SECRET, overrides
from worker.serving import EXIT_STUCK
from worker.watchdog import LOOK_PERIOD_S, MAX_TICK_S, AwakeClock, Watchdog
from worker.worker import Worker

WAIT_S = 20.0


class Time:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make_watchdog(
    time: Time, loop_timeout_s: float = 10.0, trouble: Callable[[], str | None] = lambda: None
) -> tuple[AwakeClock, Watchdog]:
    clock = AwakeClock(time)
    return clock, Watchdog(clock, trouble, loop_timeout_s, on_stuck=lambda _reason: None)


def look_for(time: Time, watchdog: Watchdog, seconds: float) -> str | None:
    """Looks for so long; the first thing that was wrong."""
    for _ in range(round(seconds / LOOK_PERIOD_S)):
        time.now_s += LOOK_PERIOD_S
        if (reason := watchdog.look()) is not None:
            return reason
    return None


def test_time_awake_is_time_while_somebody_looks() -> None:
    time = Time()
    clock, watchdog = make_watchdog(time, loop_timeout_s=100.0)
    look_for(time, watchdog, 30.0)
    assert clock() == 30.0
    time.now_s += 0.25
    assert clock() == 30.25


def test_a_stop_of_the_process_counts_as_one_tick() -> None:
    """Whether the clock is read before the first look after it, or later."""
    time = Time()
    clock, watchdog = make_watchdog(time)
    time.now_s += 3600.0
    assert clock() == MAX_TICK_S
    watchdog.look()
    assert clock() == MAX_TICK_S
    time.now_s += 1.0
    assert clock() == MAX_TICK_S + 1.0


def test_a_silent_event_loop_is_trouble_and_one_that_was_stopped_is_not() -> None:
    time = Time()
    _, watchdog = make_watchdog(time, loop_timeout_s=10.0)
    time.now_s += 3600.0
    assert look_for(time, watchdog, 7.5) is None
    watchdog._heard()
    assert look_for(time, watchdog, 10.0) is None
    assert "event loop" in (look_for(time, watchdog, 1.0) or "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config()
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", config, make_oracle(config))


async def started(model: Path, on_stuck: Callable[[str], None], **sections: object) -> Worker:
    worker = Worker(
        "decode", "d", load_config(overrides=overrides(**sections)), SECRET, make_phases, on_stuck
    )
    await worker.start(model, "127.0.0.1")
    return worker


async def test_a_hung_step_is_told_and_the_worker_is_not_well(model: Path) -> None:
    reasons: list[str] = []
    told, end = threading.Event(), threading.Event()

    def on_stuck(reason: str) -> None:
        reasons.append(reason)
        told.set()

    worker = await started(model, on_stuck, engine__stall_timeout_s=0.2)
    worker._engine.submit(lambda: end.wait() and None)
    assert await asyncio.to_thread(told.wait, WAIT_S)
    with pytest.raises(EngineError, match="no sign of life from the engine"):
        worker.check_health()
    assert not worker._status().is_ready
    end.set()
    await worker.close()
    assert len(reasons) == 1
    assert "engine" in reasons[0]


async def test_a_broken_engine_thread_is_told(model: Path) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    worker = await started(model, lambda reason: loop.call_soon_threadsafe(told.put_nowait, reason) and None)
    worker._engine.submit(lambda: 1 // 0 and None)
    async with asyncio.timeout(WAIT_S):
        assert "ZeroDivisionError" in await told.get()
    await worker.close()


async def test_a_hung_event_loop_is_told(model: Path) -> None:
    told = threading.Event()
    worker = await started(model, lambda _reason: told.set(), decode__health_check_timeout_s=0.9)
    assert told.wait(WAIT_S)  # on the event loop: nothing else runs here meanwhile
    await worker.close()


async def test_a_worker_at_rest_is_well(model: Path) -> None:
    reasons: list[str] = []
    worker = await started(model, reasons.append, engine__stall_timeout_s=5.0)
    looked = threading.Event()
    worker._watchdog._trouble = lambda: looked.set() or worker._trouble()  # type: ignore[func-returns-value]
    assert await asyncio.to_thread(looked.wait, WAIT_S)
    worker.check_health()
    await worker.close()
    assert not reasons


def test_a_stuck_process_ends_at_once_and_says_where() -> None:
    code = "from worker.serving import end_process; end_process('no sign of life')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == EXIT_STUCK
    assert "ends itself: no sign of life" in done.stderr
    assert "end_process" in done.stderr


def test_serve_misses_as_many_checks_as_fit_the_time_that_was_configured() -> None:
    from ray.serve._private.constants import REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD

    from coordinator.handles import MISSED_CHECKS, worker_options

    assert MISSED_CHECKS == REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD
    options = worker_options(PoolConfig(health_check_timeout_s=12.0))
    assert options["health_check_timeout_s"] == 4.0
