"""Work on disk has an owner: what a cancelled request leaves behind ends before its folder is let go."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from coordinator.gateway import jobs
from coordinator.gateway.store import JobStore
from coordinator.gateway.threads import Threads
from tests.coordinator.fake_backend import reply
from tests.coordinator.gateway.gateway_tools import gateway_service


async def test_closing_waits_for_work_that_nobody_waits_for_any_more() -> None:
    threads, begun, go, done = Threads("test"), asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(30.0)
        done.append(1)

    waiting = asyncio.create_task(threads.run(work))
    await asyncio.wait_for(begun.wait(), 30.0)
    waiting.cancel()
    closing = asyncio.create_task(threads.close())
    await asyncio.wait({waiting})
    assert (waiting.cancelled(), closing.done(), done) == (True, False, [])
    go.set()
    await asyncio.wait_for(closing, 30.0)
    assert done == [1]
    with pytest.raises(RuntimeError):
        await threads.run(work)


async def test_a_store_is_opened_once_and_closed_though_its_first_request_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    opened: list[JobStore] = []
    closed: list[JobStore] = []
    open_store, close = jobs._open_store, JobStore.close

    def slow(folder: Path) -> JobStore:
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(30.0)
        opened.append(open_store(folder))
        return opened[-1]

    def noted(store: JobStore) -> None:
        closed.append(store)
        close(store)

    monkeypatch.setattr(jobs, "_open_store", slow)
    monkeypatch.setattr(JobStore, "close", noted)
    async with gateway_service(reply("ok"), folder=tmp_path / "state") as s:
        first = asyncio.create_task(s.client.get("/v1/files"))
        await asyncio.wait_for(begun.wait(), 30.0)
        first.cancel()
        await asyncio.wait({first})
        second = asyncio.create_task(s.client.get("/v1/batches"))
        third = asyncio.create_task(s.client.get("/v1/files"))
        await asyncio.sleep(0)
        third.cancel()
        go.set()
        assert (await second).status_code == 200
    assert len(opened) == 1
    assert closed == opened
