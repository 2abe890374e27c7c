"""Workers whose decode steps are recorded, by a recorder that needs no GPU: they answer as others do."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.engine.recorder import Rerun
from tests.engine.tiny_models import PROMPT, family_config, make_config, make_oracle, write_hf
from tests.local.cluster import greedy, local_cluster

REQUESTS = [greedy(f"r{i}", PROMPT[i : 40 + 7 * i], 12, ignore_eos=True, seed=i) for i in range(5)]


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Rerun]:
    """One for each worker that records."""
    made: list[Rerun] = []

    def make(device: object) -> Rerun:
        made.append(Rerun())
        return made[-1]

    monkeypatch.setattr("worker.loading.recorder_on", make)
    return made


async def answers(model: Path, **sections: Any) -> list[list[int]]:
    async with local_cluster(model, engine__num_blocks=64, engine__max_num_seqs=4, **sections) as cluster:
        return [tokens for tokens, _ in await asyncio.gather(*(cluster.run(r) for r in REQUESTS))]


async def test_recorded_steps_answer_as_others_do(
    tmp_path: Path, recorders: list[Rerun], caplog: pytest.LogCaptureFixture
) -> None:
    """Through the handoff, with more requests than a batch holds; only the worker that decodes records."""
    config = make_config()
    model = write_hf(tmp_path / "tiny", config, make_oracle(config))
    expected = await answers(model, engine__cuda_graphs=False)
    assert recorders == []
    with caplog.at_level(logging.INFO, logger="baton.worker"):
        assert await answers(model) == expected
    (recorder,) = recorders
    assert recorder.num_replays >= 11
    told = [message for message in caplog.messages if "decode graph" in message]
    assert [message.split(" in ")[0] for message in told] == [
        f"decode-0: decode graph of {n} sequences" for n in (4, 3, 2, 1)
    ]


async def test_a_model_with_experts_is_not_recorded(tmp_path: Path, recorders: list[Rerun]) -> None:
    config = family_config("qwen3moe")
    model = write_hf(tmp_path / "moe", config, make_oracle(config))
    assert len(await answers(model)) == len(REQUESTS)
    assert [recorder.num_replays for recorder in recorders] == [0]
