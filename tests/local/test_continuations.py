"""Invariant 4 on real engines: a stream that loses its workers after any token gets the answer it would have got."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.request import Finished, GenerateRequest, Token
from tests.coordinator.streams import Stream
from tests.local.cluster import LocalCluster, greedy, local_cluster

PROMPT = [3 + i % 50 for i in range(70)]
NUM_TOKENS = 24
STATES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"num_logprobs": 3},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 11},
    "penalties": {
        "temperature": 0.8,
        "seed": 5,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
        "num_logprobs": 1,
    },
    "min_tokens": {"min_tokens": 12, "logit_bias": ((2, 30.0),), "ignore_eos": False},
}


def cut(cluster: LocalCluster) -> None:
    """Every connection between coordinator and workers."""
    for worker in cluster.workers.values():
        for channel in list(worker._channels):
            channel.abort()


async def events_of(
    cluster: LocalCluster,
    request: GenerateRequest,
    after: frozenset[int] = frozenset(),
    do: Callable[[LocalCluster], None] = cut,
) -> list[Token | Finished]:
    """All events, with `do` after each token of `after`."""
    events: list[Token | Finished] = []
    async with aclosing(Stream(cluster.flow, request, 60.0)) as stream:
        async for event in stream:
            events.append(event)
            if isinstance(event, Token) and event.index in after:
                do(cluster)
    return events


def state_of(events: list[Token | Finished]) -> list[Any]:
    """What a client is told, with logprobs to the rounding of another order of sums."""
    told: list[Any] = []
    for event in events:
        if isinstance(event, Finished):
            told.append((event.reason, event.stop_token_id))
        else:
            logprob = None if event.logprob is None else pytest.approx(event.logprob, abs=1e-4)
            top = [(token_id, pytest.approx(value, abs=1e-4)) for token_id, value in event.top]
            told.append((event.index, event.token_id, logprob, top))
    return told


@pytest.mark.parametrize(
    ("state", "num_prefills"), [*((state, 1) for state in STATES), ("greedy", 0), ("penalties", 0)]
)
async def test_a_stream_that_is_cut_after_any_tokens_is_the_whole_one(
    tiny_model: Path, state: str, num_prefills: int
) -> None:
    cuts = [frozenset({0}), frozenset({7}), frozenset({NUM_TOKENS - 1}), frozenset({1, 4, 9})]
    async with local_cluster(tiny_model, num_prefills, engine__num_blocks=64) as cluster:
        request = greedy("whole", PROMPT, NUM_TOKENS, **({"ignore_eos": True} | STATES[state]))
        whole = await events_of(cluster, request)
        for number, cut_after in enumerate(cuts):
            broken = await events_of(cluster, replace(request, request_id=f"cut{number}"), cut_after)
            assert state_of(broken) == state_of(whole), cut_after
        await cluster.settled()


async def test_the_cache_hits_of_a_continuation_are_not_the_clients(tiny_model: Path) -> None:
    """The second attempt finds prompt and output in the cache, where the first one left them."""
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster:
        request = greedy("cold", PROMPT, NUM_TOKENS, ignore_eos=True)
        *_, end = await events_of(cluster, request, frozenset({20}))
        assert isinstance(end, Finished)
        assert end.num_cached_tokens == 0
        assert end.timings is not None
        assert end.timings.num_attempts == 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_leaves_for_long_hands_its_streams_on(tiny_model: Path, role: str) -> None:
    async with local_cluster(
        tiny_model, 2, 2, engine__num_blocks=64, coordinator__max_continuations=0,
        prefill__drain_timeout_s=0.0, decode__drain_timeout_s=0.0,
    ) as cluster:  # fmt: skip
        request = greedy("whole", PROMPT, NUM_TOKENS, ignore_eos=True)
        whole = await events_of(cluster, request)
        told: list[Token | Finished] = []
        infos = [worker.info for worker in cluster.workers.values() if worker.info.role == role]
        async with aclosing(Stream(cluster.flow, replace(request, request_id="moved"), 60.0)) as stream:
            async for event in stream:
                told.append(event)
                if len(told) == 3:
                    busy = {link.info.worker_id for link in cluster.fleet.links() if link.num_requests}
                    cluster.fleet.sync(role, [info for info in infos if info.worker_id not in busy])
        assert state_of(told) == state_of(whole)
        cluster.fleet.sync(role, infos)
        await cluster.settled()
