"""A recorder that needs no device, and runners with and without recorded decode steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.graphs import Compute, DecodeGraphs
from engine.kv import KvSlab, SlabPlan
from engine.model import Model
from engine.runner import Runner
from engine.weights import LoadedModel
from tests.engine.tiny_models import BLOCK_SIZE

NUM_BLOCKS = 64
MAX_LEN = 48


@dataclass
class Rerun:
    """Implements graphs.Recorder: a replay runs the function again, into the tensor of the first run."""

    fails_at: int = 0
    num_replays: int = 0
    results: list[Tensor] = field(default_factory=list)

    def record(self, compute: Compute) -> Compute:
        if len(self.results) + 1 == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = compute()
        self.results.append(result)

        def replay() -> Tensor:
            self.num_replays += 1
            result.copy_(compute())
            return result

        return replay

    def used_bytes(self) -> int:
        return 1000 * len(self.results)


def make_slab(model: LoadedModel) -> KvSlab:
    return SlabPlan(model.spec, NUM_BLOCKS, BLOCK_SIZE, torch.float32, num_scratch=1).allocate()


def make_runners(
    model: LoadedModel, buckets: tuple[int, ...], recorder: Rerun
) -> tuple[tuple[Runner, KvSlab], tuple[Runner, KvSlab]]:
    """(with graphs, without), both warm."""
    ready, pairs = Model(model), []
    for has_graphs in (True, False):
        slab = make_slab(model)
        graphs = DecodeGraphs(ready, slab, buckets, MAX_LEN, recorder) if has_graphs else None
        runner = Runner(ready, slab, graphs=graphs)
        runner.warm_up()
        pairs.append((runner, slab))
    return pairs[0], pairs[1]
