"""A whole instance while it is renewed: decode workers that end in order, and an ingress replica that just dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.processes import children, command_of, parent
from tests.cluster.instance import Running, running, wait_until

pytestmark = pytest.mark.cluster

NUM_TOKENS = 320
PROMPT = "Tell a long story about a lighthouse."


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = {
        "model": {"dtype": "float32"},
        "engine": {"num_blocks": 400},
        "decode": {"num_replicas": 2},
        "coordinator": {"num_replicas": 2},
    }
    with running(tmp_path_factory.mktemp("rolling"), config) as instance:
        yield instance


@pytest.fixture
async def http(baton: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=baton.url, timeout=180.0) as client:
        yield client


class Stream:
    """One greedy answer as a client reads it."""

    def __init__(self, number: int) -> None:
        self.body = {
            "model": "smollm2-135m-instruct", "prompt": f"{PROMPT} Number {number}.", "max_tokens": NUM_TOKENS,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        self.text = ""
        self.num_chunks = 0
        self.ends: list[str] = []
        self.error: Exception | None = None

    async def read(self, http: httpx.AsyncClient) -> None:
        try:
            async with http.stream("POST", "/v1/completions", json=self.body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.error = error

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.ends.append(chunk["error"]["code"])
            return
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.num_chunks += 1
            if choice["finish_reason"]:
                self.ends.append(choice["finish_reason"])


async def texts(http: httpx.AsyncClient, count: int) -> list[str]:
    """The undisturbed answers."""
    streams = [Stream(number) for number in range(count)]
    await asyncio.gather(*(stream.read(http) for stream in streams))
    assert [stream.ends for stream in streams] == [["length"]] * count
    return [stream.text for stream in streams]


async def begun(streams: list[Stream]) -> None:
    async with asyncio.timeout(120.0):
        while not all(stream.num_chunks > 8 or stream.ends for stream in streams):
            await asyncio.sleep(0.02)


async def busy_decode(baton: Running) -> dict[str, Any]:
    """A decode worker that runs something, as soon as the ingress replica that answers has heard of it."""
    async with asyncio.timeout(60.0):
        while True:
            for worker in await asyncio.to_thread(baton.workers):
                if worker["role"] == "decode" and worker["running"]:
                    return worker
            await asyncio.sleep(0.02)


def total(baton: Running, name: str) -> float:
    """Of the ingress replica that happens to answer."""
    text = baton.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def coordinators(baton: Running) -> list[int]:
    raylet = parent(baton.workers()[0]["pid"])
    return [pid for pid in children(raylet) if "Coordinator" in command_of(pid)]


def is_whole(baton: Running) -> bool:
    """All workers are there and ready, and decode workers can reach each other."""
    roles = sorted(worker["role"] for worker in baton.workers())
    peers = baton.get("/debug/peers").json()["workers"]
    ready = [
        sum(peer["is_ready"] for peer in worker["peers"]) for worker in peers if worker["role"] == "decode"
    ]
    return roles == ["decode", "decode", "prefill"] and ready == [1, 1] and baton.is_ready()


async def test_a_decode_worker_told_to_end_hands_its_streams_on_with_their_kv(
    baton: Running, http: httpx.AsyncClient
) -> None:
    expected = await texts(http, 4)
    await asyncio.to_thread(wait_until, lambda: is_whole(baton), 60.0, "all workers to be connected")
    streams = [Stream(number) for number in range(4)]
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.read(http))
        await begun(streams)
        victim = await busy_decode(baton)
        os.kill(victim["pid"], signal.SIGTERM)
    assert [stream.ends for stream in streams] == [["length"]] * 4
    assert [stream.text for stream in streams] == expected
    moved = [value for _ in range(20) if (value := total(baton, "baton_migrations_total"))]
    assert moved, "no ingress replica has moved a stream"
    assert not any(total(baton, "baton_continuations_total") for _ in range(20))
    await asyncio.to_thread(wait_until, lambda: is_whole(baton), 90.0, "a new decode worker")
    assert victim["pid"] not in {worker["pid"] for worker in baton.workers()}
    await asyncio.to_thread(wait_until, baton.is_idle, 10.0, "no block to be held")


async def test_an_ingress_replica_that_dies_takes_its_own_streams_alone(
    baton: Running, http: httpx.AsyncClient
) -> None:
    """Its orphans are forgotten by the workers; the other replica's streams never hear of it."""
    await asyncio.to_thread(wait_until, lambda: is_whole(baton), 90.0, "all workers to be connected")
    expected = await texts(http, 6)
    pids = coordinators(baton)
    assert len(pids) == 2
    streams = [Stream(number) for number in range(6)]
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            # A connection each: the proxy deals them out.
            tasks.create_task(own_connection(baton, stream))
        await begun(streams)
        os.kill(pids[0], signal.SIGKILL)
    whole = [stream for stream in streams if stream.ends == ["length"]]
    cut = [stream for stream in streams if stream.ends != ["length"]]
    assert whole, "expected streams on both replicas"
    assert cut, "expected streams on both replicas"
    for number, stream in enumerate(streams):
        assert (
            stream.text == expected[number] if stream in whole else expected[number].startswith(stream.text)
        )
    assert all(stream.ends == [] for stream in cut)
    await asyncio.to_thread(wait_until, baton.is_idle, 10.0, "the orphans' blocks to be free")
    await asyncio.to_thread(wait_until, lambda: len(coordinators(baton)) == 2, 60.0, "a new ingress replica")
    assert (await texts(http, 2)) == expected[:2]


async def own_connection(baton: Running, stream: Stream) -> None:
    async with httpx.AsyncClient(base_url=baton.url, timeout=180.0) as http:
        await stream.read(http)
