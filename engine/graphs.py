"""Decode steps that are recorded once and replayed: for a GPU one launch instead of some hundred, which Python would
have to make in less time than the GPU needs.

    capture    for each bucket (a number of sequences): static inputs ──► the forward pass, recorded ──► static logits
    step       all items are single tokens, and no more than the largest bucket ──► the smallest bucket that holds them
                   items fill the first rows; padding rows compute on a scratch block that nobody owns
                   inputs are copied in, the graph is replayed, the first rows of the logits are the answer
               anything else ──► None: the caller computes it as usual

What a graph reads and writes lies at fixed addresses: weights, slab, the inputs here, logits. Nothing here asks what
records and replays (`Recorder`); on a GPU it is `cuda_graphs.CudaRecorder`.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.kv import KvSlab
from engine.model import DecodeGroup, Model, StepPlan
from engine.runner import Captured, StepItem

logger = logging.getLogger(__name__)

Compute = Callable[[], Tensor]


class Recorder(Protocol):
    """What a device records with."""

    def record(self, compute: Compute) -> Compute:
        """Run `compute`; what does the same to the same memory, and answers with the same tensor every time.

        Raises RuntimeError if it cannot be recorded.
        """

    def used_bytes(self) -> int:
        """Memory of the device in use now."""


_NUM_FIELDS = 4  # token, position, block, context length


def buckets_up_to(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 6, 8, 12, 16, 24, … and `max_num_seqs`: at most a third of a large batch is padding."""
    powers = [1 << exponent for exponent in range(max_num_seqs.bit_length())]
    between = [(low + high) // 2 for low, high in pairwise(powers) if low > 1]
    return tuple(sorted({n for n in (*powers, *between) if n < max_num_seqs} | {max_num_seqs}))


@dataclass(frozen=True, slots=True)
class _Graph:
    """Inputs of one bucket of B sequences, and what computes from them. `fields` [4, B], `table` [B, M] int64."""

    fields: Tensor
    table: Tensor
    replay: Compute


class DecodeGraphs:
    """Graphs of one model and slab; implements runner.Graphs. One thread at a time captures or runs."""

    def __init__(
        self, model: Model, slab: KvSlab, buckets: Sequence[int], max_model_len: int, recorder: Recorder
    ) -> None:
        """`max_model_len` bounds how long a table is; longer sequences are computed as usual."""
        assert slab.num_scratch, "padding rows need a scratch block"
        self._model = model
        self._slab = slab
        self._buckets = sorted(buckets)
        self._recorder = recorder
        self._num_columns = -(-max_model_len // slab.block_size)
        self._graphs: dict[int, _Graph] = {}

    def capture(self, captured: Captured) -> None:
        """Record every bucket, the largest first: what later ones need then fits into the memory of earlier ones.

        Where that fails, there are no graphs, and one warning.
        """
        used_bytes = self._recorder.used_bytes
        for num_seqs in reversed(self._buckets):
            begun_s, before = time.monotonic(), used_bytes()
            try:
                self._graphs[num_seqs] = self._captured(num_seqs)
            except RuntimeError as error:
                logger.warning("decode runs without graphs: %d sequences: %s", num_seqs, error)
                self._graphs.clear()
                return
            captured(num_seqs, time.monotonic() - begun_s, used_bytes() - before)

    def run(self, items: Sequence[StepItem]) -> Tensor | None:
        """Logits [number of wanted, V] of a step, valid until the next one; None: not a step of a graph."""
        num_seqs = next((size for size in self._buckets if size >= len(items)), None)
        if num_seqs is None or num_seqs not in self._graphs:
            return None
        size = self._slab.block_size
        if any(len(item.token_ids) != 1 or item.start >= self._num_columns * size for item in items):
            return None
        graph = self._graphs[num_seqs]
        self._fill(graph, items)
        logits = graph.replay()
        wanted = [row for row, item in enumerate(items) if item.num_logits]
        return logits[: len(items)] if len(wanted) == len(items) else logits[wanted]

    def _captured(self, num_seqs: int) -> _Graph:
        device, scratch = self._slab.device, self._slab.num_blocks
        fields = torch.zeros(_NUM_FIELDS, num_seqs, dtype=torch.int64, device=device)
        table = torch.full((num_seqs, self._num_columns), scratch, dtype=torch.int64, device=device)
        rows = torch.arange(num_seqs, device=device)
        fields[2], fields[3] = scratch, 1
        tokens, positions, block_ids, lens = fields.unbind()

        def compute() -> Tensor:
            plan = StepPlan(
                tokens,
                positions,
                block_ids,
                positions % self._slab.block_size,
                rows,
                (DecodeGroup(rows, table, lens),),
                (),
            )
            return self._model.forward(plan, self._slab)

        return _Graph(fields, table, self._recorder.record(compute))

    def _fill(self, graph: _Graph, items: Sequence[StepItem]) -> None:
        """Two copies. Columns beyond a context keep what they held: valid blocks, which are not read."""
        size, scratch = self._slab.block_size, self._slab.num_blocks
        num_padding = graph.fields.shape[1] - len(items)
        used = [item.block_ids[: item.start // size + 1] for item in items]
        width = max(map(len, used))
        fields = [
            [*(item.token_ids[0] for item in items), *([0] * num_padding)],
            [*(item.start for item in items), *([0] * num_padding)],
            [*(blocks[-1] for blocks in used), *([scratch] * num_padding)],
            [*(item.start + 1 for item in items), *([1] * num_padding)],
        ]
        table = np.full((graph.fields.shape[1], width), scratch, np.int64)
        for row, blocks in enumerate(used):
            table[row, : len(blocks)] = np.frombuffer(array("q", blocks), np.int64)
        # NOTE: not `non_blocking`: the source is gone when the device may still read it.
        graph.fields.copy_(torch.tensor(fields, dtype=torch.int64))
        graph.table[:, :width].copy_(torch.from_numpy(table))
