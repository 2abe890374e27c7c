"""Invariant 4 on real engines: a stream that loses its workers after any token gets the answer it would have got."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contracts.messages import Role
from contracts.request import Finished, GenerateRequest, Token
from tests.coordinator.streams import Stream
from tests.local.cluster import LocalCluster, greedy, local_cluster
from tests.local.gate import gate_before

PROMPT = [3 + i % 50 for i in range(70)]
NUM_TOKENS = 24
NUM_AHEAD = 2  # drawn already
NUM_MORE = 3  # drawn meanwhile
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


async def cut(cluster: LocalCluster) -> None:
    """Every connection between coordinator and workers."""
    for worker in cluster.workers.values():
        for channel in list(worker._channels):
            channel.abort()


async def events_of(
    cluster: LocalCluster,
    request: GenerateRequest,
    after: Iterable[int] = (),
    do: Callable[[LocalCluster], Awaitable[None]] = cut,
) -> list[Token | Finished]:
    """All events, with `do` after each token of `after`, while the workers draw no more than NUM_AHEAD + NUM_MORE
    tokens behind it.
    """
    events: list[Token | Finished] = []
    limits = [index + 1 + NUM_AHEAD for index in sorted(after)] + [math.inf]
    with gate_before(cluster.workers.values(), limits.pop(0)) as gate:
        async with aclosing(Stream(cluster.flow, request, 60.0)) as stream:
            async for event in stream:
                events.append(event)
                if isinstance(event, Token) and event.index in after:
                    gate.move(event.index + 1 + NUM_AHEAD + NUM_MORE)
                    await do(cluster)
                    gate.move(limits.pop(0))
    return events


def num_attempts(events: list[Token | Finished]) -> int:
    """By what its end says."""
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.timings is not None
    return end.timings.num_attempts


def state_of(events: list[Token | Finished]) -> list[Any]:
    """What a client is told, with every bit of the logprobs."""
    told: list[Any] = []
    for event in events:
        if isinstance(event, Finished):
            told.append((event.reason, event.stop_token_id))
        else:
            told.append((event.index, event.token_id, event.logprob, event.top))
    return told


@pytest.mark.parametrize(
    ("state", "num_prefills", "dtype"),
    [
        *((state, 1, "float32") for state in STATES),
        ("greedy", 0, "float32"),
        ("penalties", 0, "float32"),
        ("logprobs", 1, "bfloat16"),
        ("penalties", 0, "bfloat16"),
    ],
)
async def test_a_stream_that_is_cut_after_any_tokens_is_the_whole_one(
    tiny_model: Path, state: str, num_prefills: int, dtype: str
) -> None:
    cuts: list[set[int]] = [{0}, {7}, {NUM_TOKENS - 1}, {1, 4, 9}]
    async with local_cluster(
        tiny_model, num_prefills, engine__num_blocks=64, engine__batch_invariant=True, model__dtype=dtype
    ) as cluster:
        request = greedy("whole", PROMPT, NUM_TOKENS, **({"ignore_eos": True} | STATES[state]))
        whole = await events_of(cluster, request)
        for number, cut_after in enumerate(cuts):
            broken = await events_of(cluster, replace(request, request_id=f"cut{number}"), cut_after)
            assert state_of(broken) == state_of(whole), cut_after
            # After its last token nothing is left to be asked for again.
            assert num_attempts(broken) == 1 + len(cut_after - {NUM_TOKENS - 1}), cut_after
        await cluster.settled()


async def test_the_cache_hits_of_a_continuation_are_not_the_clients(tiny_model: Path) -> None:
    """The second attempt finds prompt and output in the cache, where the first one left them."""
    async with local_cluster(tiny_model, engine__num_blocks=64) as cluster:
        request = greedy("cold", PROMPT, NUM_TOKENS, ignore_eos=True)
        events = await events_of(cluster, request, [20])
        assert num_attempts(events) == 2
        assert isinstance(events[-1], Finished)
        assert events[-1].num_cached_tokens == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_leaves_for_long_hands_its_streams_on(tiny_model: Path, role: Role) -> None:
    async with local_cluster(
        tiny_model, 2, 2, engine__num_blocks=64, coordinator__max_continuations=0,
        prefill__drain_timeout_s=0.0, decode__drain_timeout_s=0.0,
    ) as cluster:  # fmt: skip
        infos = [worker.info for worker in cluster.workers.values() if worker.info.role == role]

        async def leave(cluster: LocalCluster) -> None:
            busy = {link.info.worker_id for link in cluster.fleet.links() if link.num_requests}
            cluster.fleet.sync(role, [info for info in infos if info.worker_id not in busy])

        request = greedy("whole", PROMPT, NUM_TOKENS, ignore_eos=True)
        whole = await events_of(cluster, request)
        told = await events_of(cluster, replace(request, request_id="moved"), [2], leave)
        assert state_of(told) == state_of(whole)
        if role == "decode":
            assert num_attempts(told) == 2
        cluster.fleet.sync(role, infos)
        await cluster.settled()
