"""Workers of several ranks, in real processes over gloo: they answer as one rank does, and live and die together."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from pathlib import Path

import pytest
import torch

from contracts.config import PoolConfig, load_config
from contracts.errors import ConfigError, WorkerLostError
from coordinator.app import make_phases
from coordinator.handles import worker_options
from engine.embedded import check_model
from engine.parallel.windows import FarBlocks
from engine.runner import StepItem
from tests.engine.golden import BLOCK_SIZE, NUM_BLOCKS, greedy, read_cases
from tests.engine.test_golden import GOLDEN
from tests.engine.tiny_models import PROMPT, make_config, make_oracle, write_hf
from tests.local.cluster import SECRET, local_cluster, overrides
from tests.local.cluster import greedy as greedy_request
from tests.ranks import ProcessRank, Starter, starter
from worker.loading import load_engine
from worker.ranks import RankTask, gather_ranks
from worker.worker import Worker

WAIT_S = 60.0
NUM_COMPARED = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config()
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", config, make_oracle(config))


@pytest.mark.slow
def test_three_ranks_answer_the_golden_prompts_as_one(embedded_model_path: Path) -> None:
    cases = read_cases(GOLDEN)
    changes = {
        "model.dtype": "float32",
        "engine.num_blocks": NUM_BLOCKS,
        "engine.block_size": BLOCK_SIZE,
        "decode.tensor_parallel_size": 3,
    }
    with starter() as started:
        config = load_config(None, changes)
        zero = gather_ranks(config, "decode", "d", embedded_model_path, started.start)
        engine = load_engine(config, embedded_model_path, zero)
        assert len(zero.slabs(engine.slab)) == 3
        outputs = greedy(engine.runner, cases, NUM_COMPARED)
        zero.close()
        assert started.exit_codes() == [0, 0]
    for case, output in zip(cases, outputs, strict=True):
        num_certain = min(case.num_certain, NUM_COMPARED)
        assert output[:num_certain] == case.output_ids[:num_certain]


@pytest.mark.slow
@pytest.mark.parametrize("keeps_blocks", [False, True])
@pytest.mark.parametrize(("num_prefill_ranks", "num_decode_ranks"), [(2, 1), (1, 2)])
async def test_groups_of_different_sizes_hand_over_to_each_other(
    tiny: Path, num_prefill_ranks: int, num_decode_ranks: int, keeps_blocks: bool
) -> None:
    """`keeps_blocks`: also where rank 0 copies through the windows of the others, as on GPUs."""
    requests = [greedy_request(f"r{i}", PROMPT[i:], 12, ignore_eos=True) for i in range(3)]
    async with local_cluster(tiny, engine__num_blocks=64) as cluster:
        expected = [(await cluster.run(request))[0] for request in requests]
    with starter(keeps_blocks) as started:
        sections = {
            "prefill__tensor_parallel_size": num_prefill_ranks,
            "decode__tensor_parallel_size": num_decode_ranks,
        }
        async with local_cluster(
            tiny, start_rank=started.start, engine__num_blocks=64, **sections
        ) as cluster:
            answers = await asyncio.gather(*(cluster.run(request) for request in requests))
            is_far = [isinstance(slab, FarBlocks) for w in cluster.workers.values() for slab in w._slabs[1:]]
            handed = sum(worker._desk.num_handoffs for worker in cluster.workers.values())
        assert [tokens for tokens, _ in answers] == expected
        assert handed == len(requests)
        assert is_far == [keeps_blocks]
        assert started.exit_codes() == [0]


@pytest.mark.slow
async def test_a_killed_rank_ends_the_worker(tiny: Path) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    with starter() as started:
        config = load_config(overrides=overrides(engine__num_blocks=64) | {"decode.tensor_parallel_size": 2})
        worker = Worker(
            "decode", "d", config, SECRET, make_phases,
            lambda reason: loop.call_soon_threadsafe(told.put_nowait, reason) and None, started.start,
        )  # fmt: skip
        await worker.start(tiny, "127.0.0.1")
        worker.check_health()
        started.ranks[0].process.kill()
        async with asyncio.timeout(WAIT_S):
            assert "rank 1 of 2 is gone" in await told.get()
        assert not worker._status().is_ready
        with pytest.raises(WorkerLostError, match="rank 1"):
            worker._runner.execute([StepItem([3], 0, [0], True)])
        await worker.close()


@pytest.mark.slow
def test_a_step_that_fails_on_one_rank_is_the_end_of_both(tiny: Path) -> None:
    config = load_config(None, {"decode.tensor_parallel_size": 2, "engine.num_blocks": 8})
    with starter() as started:
        zero = gather_ranks(config, "decode", "d", tiny, started.start)
        engine = load_engine(config, tiny, zero)
        zero.slabs(engine.slab)
        # What is wrong before it starts is no step at all.
        with pytest.raises(Exception, match="new tokens"):
            engine.runner.execute([StepItem([], 0, [0], True)])
        assert zero.failure is None
        with pytest.raises(WorkerLostError), zero.step([StepItem([1], 0, [0], True)]):
            raise torch.OutOfMemoryError("none left")
        assert "none left" in (zero.failure or "")
        zero.close()


@pytest.mark.slow
def test_why_a_rank_could_not_start_is_told(tiny: Path, tmp_path: Path) -> None:
    class Astray(Starter):
        def start(self, task: RankTask) -> ProcessRank:
            return super().start(dataclasses.replace(task, model_path=tmp_path / "absent"))

    config = load_config(None, {"decode.tensor_parallel_size": 2, "engine.num_blocks": 8})
    started = Astray()
    zero = gather_ranks(config, "decode", "d", tiny, started.start)
    with pytest.raises(ConfigError, match=r"a rank did not start: .*absent"):
        load_engine(config, tiny, zero)
    zero.close()
    assert started.exit_codes() == [1]


def test_a_rank_that_ends_before_it_is_here_is_told(tiny: Path) -> None:
    class Dead:
        def trouble(self) -> str | None:
            return "killed"

    config = load_config(None, {"decode.tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="a rank did not start: killed"):
        gather_ranks(config, "decode", "d", tiny, lambda _task: Dead())


def test_a_stranger_is_no_rank(tiny: Path) -> None:
    """Somebody who found the socket, but not the token, and a rank that is not missing."""
    held: list[socket.socket] = []

    class Stranger:
        def __init__(self, task: RankTask) -> None:
            for said in (
                b"x" * 32 + (1).to_bytes(8, "little"),
                task.place.token + (7).to_bytes(8, "little"),
                b"",
            ):
                end = socket.socket(socket.AF_UNIX)
                end.settimeout(WAIT_S)
                end.connect(task.place.address)
                end.sendall(b"\x01" + len(said).to_bytes(8, "little") + said)
                held.append(end)

        def trouble(self) -> str | None:
            return "only strangers came"

    config = load_config(None, {"decode.tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="only strangers came"):
        gather_ranks(config, "decode", "d", tiny, Stranger)
    assert [end.recv(1) for end in held] == [b"", b"", b""]
    for end in held:
        end.close()


async def test_ranks_that_nobody_starts_are_refused(tiny: Path) -> None:
    config = load_config(overrides=overrides() | {"decode.tensor_parallel_size": 2})
    worker = Worker("decode", "d", config, SECRET, make_phases)
    with pytest.raises(ConfigError, match=r"decode.tensor_parallel_size: expected 1"):
        await worker.start(tiny, "127.0.0.1")


def test_ranks_get_one_node_and_a_share_each() -> None:
    """The replica takes the first bundle; what pins it to a node is asked for once."""
    pool = PoolConfig(tensor_parallel_size=3, num_cpus=0.2, num_gpus=1, resources={"decode": 1})
    options = worker_options(pool)
    each = {"CPU": 0.2, "GPU": 1.0}
    assert options["placement_group_bundles"] == [{**each, "decode": 1.0}, each, each]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert "placement_group_bundles" not in worker_options(PoolConfig())


def test_ranks_that_ask_for_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode.num_cpus: expected more than 0"):
        load_config(None, {"decode.tensor_parallel_size": 2, "decode.num_cpus": 0})


def test_a_number_of_ranks_that_the_model_does_not_allow_is_refused_before_anything_starts(
    embedded_model_path: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=r"decode.tensor_parallel_size: expected one of 1, 3 for .* but got 2"
    ):
        check_model(
            embedded_model_path, {"prefill.tensor_parallel_size": 3, "decode.tensor_parallel_size": 2}
        )
