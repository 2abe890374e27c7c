"""A step's work as tensors: index tensors are made once here and shared by all layers.

StepItem* ─┬─► Graphs: a recorded decode step, if it is one of those ──────────────────┬─► logits of the wanted rows
           └─► StepPlan (tokens, slots, decode groups, chunks) ──► Model.forward ──────┘

A step is complete when its caller has its result: either its logits, whose reading waits for the device, or nothing,
and then `execute` itself waits. So whoever is told of a step may read its KV by any way, and its time is the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from contracts.errors import ConfigError, EngineError
from engine.kv import FP8, KvSlab
from engine.model import Chunk, DecodeGroup, Model, StepPlan

MAX_PADDING = 2
"""Decodes share an attention call if the longest has at most this many times the blocks of the shortest."""
GPU_CHUNKS = (40, 200)
"""Tokens for which GPU kernels have tiles of their own, besides few: up to 64, and more. Compiled when first met."""


@dataclass(frozen=True, slots=True)
class StepItem:
    """One sequence's share of a step: new `token_ids` at positions `start` …; `block_ids` cover them and all before.

    `want_logits`: of the last token; `want_all_logits`: of each.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    want_logits: bool
    want_all_logits: bool = False

    @property
    def num_logits(self) -> int:
        return len(self.token_ids) if self.want_all_logits else int(self.want_logits)


Within = Callable[[Sequence[StepItem]], AbstractContextManager[None]]
"""What a step's computation happens in: rank 0 tells the others there (engine.parallel.leader)."""


Captured = Callable[[int, float, int], None]
"""(sequences, seconds, bytes of memory) of each recorded step."""


class Graphs(Protocol):
    """engine.graphs.DecodeGraphs."""

    def capture(self, captured: Captured) -> None: ...

    def run(self, items: Sequence[StepItem]) -> Tensor | None:
        """Logits as of `Runner.execute`, valid until the next step; None: to be computed as usual."""


class Runner:
    """The model on its device, with the slab it writes. One thread calls `execute`."""

    def __init__(
        self,
        model: Model,
        slab: KvSlab,
        num_threads: int = 1,
        within: Within = lambda _items: nullcontext(),
        graphs: Graphs | None = None,
    ) -> None:
        """Raises ConfigError if `slab` was not made for this model."""
        spec = model.spec
        dtype = model.dtype if slab.scales is None else FP8
        expected = (spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, model.device.type)
        found = (slab.num_layers, slab.num_kv_heads, slab.head_dim, slab.dtype, slab.device.type)
        if found != expected:
            raise ConfigError(
                f"kv slab: expected layers, kv heads, head dim, dtype, device {expected} but got {found}"
            )
        self._model = model
        self._slab = slab
        self._num_threads = num_threads
        self._within = within
        self._graphs = graphs
        self._has_set_threads = False

    @torch.no_grad()
    def execute(self, items: Sequence[StepItem]) -> Tensor:
        """Run all items as one step: logits [sum of num_logits, V] float32, in item order, valid until the next step.

        Raises EngineError if an item has no token, too few blocks, or goes past the model's context.
        """
        if not self._has_set_threads:
            torch.set_num_threads(self._num_threads)  # per calling thread
            self._has_set_threads = True
        for item in items:
            self._check(item)
        with self._within(items):
            logits = None if self._graphs is None else self._graphs.run(items)
            if logits is None:
                logits = self._model.forward(self._plan(items), self._slab)
        if not len(logits) and self._slab.device.type == "cuda":
            torch.cuda.current_stream(self._slab.device).synchronize()
        return logits

    @torch.no_grad()
    def warm_up(
        self, captured: Captured = lambda _num_seqs, _seconds, _num_bytes: None, chunks: Sequence[int] = ()
    ) -> None:
        """A chunk and a decode on the first block, so that the first request pays for no set-up; then graphs are
        captured. `chunks`: of so many tokens as well."""
        size = self._slab.block_size
        for length in (max(1, size - 1), *chunks):
            num_tokens = min(length, self._model.spec.max_position)
            # The same block again and again: what it holds does not matter.
            self.execute([StepItem([0] * num_tokens, 0, [0] * -(-num_tokens // size), True)])
        self.execute([StepItem([0], max(0, size - 1), [0], True)])
        self._slab.clear(0)
        if self._graphs is not None:
            self._graphs.capture(captured)
        self._has_set_threads = False  # the engine thread is another one

    def _plan(self, items: Sequence[StepItem]) -> StepPlan:
        size = self._slab.block_size
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        wanted: list[int] = []
        decodes: list[tuple[int, StepItem]] = []
        chunks: list[Chunk] = []
        for item in items:
            low, end = len(tokens), item.start + len(item.token_ids)
            tokens += item.token_ids
            positions += range(item.start, end)
            blocks += [item.block_ids[position // size] for position in range(item.start, end)]
            wanted += range(len(tokens) - item.num_logits, len(tokens))
            if len(item.token_ids) == 1:
                decodes.append((low, item))
            else:
                used = self._index(item.block_ids[: -(-end // size)])
                chunks.append(Chunk(low, len(tokens), item.start, used))
        position_index = self._index(positions)
        return StepPlan(
            self._index(tokens),
            position_index,
            self._index(blocks),
            position_index % size,
            self._index(wanted),
            tuple(self._groups(decodes)),
            tuple(chunks),
        )

    def _groups(self, decodes: list[tuple[int, StepItem]]) -> list[DecodeGroup]:
        """Decodes by length, so that one long sequence does not pad all short ones."""
        size = self._slab.block_size
        ordered = sorted(decodes, key=lambda pair: pair[1].start)
        groups: list[list[tuple[int, StepItem]]] = []
        for row, item in ordered:
            shortest = groups[-1][0][1].start // size + 1 if groups else 0
            if groups and item.start // size + 1 <= MAX_PADDING * shortest:
                groups[-1].append((row, item))
            else:
                groups.append([(row, item)])
        return [self._group(group) for group in groups]

    def _group(self, group: list[tuple[int, StepItem]]) -> DecodeGroup:
        size = self._slab.block_size
        num_blocks = group[-1][1].start // size + 1
        table = [
            [*item.block_ids[: item.start // size + 1], *([0] * (num_blocks - item.start // size - 1))]
            for _, item in group
        ]
        return DecodeGroup(
            self._index([row for row, _ in group]),
            self._index(table),
            self._index([item.start + 1 for _, item in group]),
        )

    def _check(self, item: StepItem) -> None:
        num_slots = len(item.block_ids) * self._slab.block_size
        end = item.start + len(item.token_ids)
        if not item.token_ids or end > num_slots:
            raise EngineError(
                f"expected 1 to {num_slots - item.start} new tokens but got {len(item.token_ids)}"
            )
        # The kernels do not look: a block that is not there is another's memory.
        if min(item.block_ids) < 0 or max(item.block_ids) >= self._slab.num_blocks:
            raise EngineError(
                f"expected block ids within 0 to {self._slab.num_blocks - 1} but got {list(item.block_ids)}"
            )
        if item.start < 0 or end > self._model.spec.max_position:
            raise EngineError(
                f"expected positions within 0 to {self._model.spec.max_position} but got {item.start} to {end}"
            )

    def _index(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._slab.device)
