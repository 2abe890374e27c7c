"""What steps cost, before anybody asks: a few of each kind, on blocks that nobody has yet.

    prompts of growing length, at the start of a context and in it ─┬─► the faster of two runs each ──► samples
    decodes: more and more sequences, of a short and a long context ┘    until SWEEP_S have passed

The engine must be at rest. What is written into the blocks is of no meaning, and nobody finds it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, zip_longest

from contracts.blocks import num_blocks_for
from contracts.config import EngineConfig
from engine.blocks import BlockPool
from engine.loop import Executor, StepLoop
from engine.runner import StepItem
from policy.step_model import Sample, Work
from worker.steps import StepMeter

logger = logging.getLogger("baton.worker")

SWEEP_S = 3.0
"""After so long no further shape is begun. On a CPU the largest ones take half a second each."""

CHUNKS = (8, 16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8)
NUM_RUNS = 2  # others start at the same time: the faster one is the step


@dataclass(frozen=True, slots=True)
class Limits:
    """What this engine can do at most, in a step and in a sequence, which `num_blocks` hold."""

    num_blocks: int
    block_size: int
    max_tokens: int
    max_chunk: int
    max_seqs: int

    @classmethod
    def of(cls, engine: EngineConfig, pool: BlockPool, max_len: int) -> Limits:
        max_tokens = min(max_len, pool.num_blocks * pool.block_size)
        return cls(pool.num_blocks, pool.block_size, max_tokens, engine.max_chunk_tokens, engine.max_num_seqs)


Shape = tuple[list[StepItem], Work]


async def seed(meter: StepMeter, loop: StepLoop, engine: Executor, limits: Limits) -> None:
    """Sweep on the thread of `loop`, before its first step. Raises what a step raises."""
    swept: Future[None] = Future()

    def learn() -> None:
        try:
            meter.swept(sweep(engine, limits, SWEEP_S))
            swept.set_result(None)
        except Exception as error:
            swept.set_exception(error)

    begun_s = time.monotonic()
    loop.submit(learn)
    await asyncio.wrap_future(swept)
    logger.info("steps measured in %.1f s", time.monotonic() - begun_s)


def sweep(
    engine: Executor, limits: Limits, sweep_s: float, clock: Callable[[], float] = time.monotonic
) -> list[Sample]:
    """Measured steps, both kinds in turns, the small ones first. On the engine thread."""
    samples: list[Sample] = []
    begun_s = clock()
    turns = chain.from_iterable(zip_longest(_prompts(limits), _decodes(limits)))
    for items, work in filter(None, turns):
        if clock() - begun_s > sweep_s:
            break
        samples.append(Sample(work, min(_step_s(engine, items, clock) for _ in range(NUM_RUNS))))
    return samples


def _step_s(engine: Executor, items: list[StepItem], clock: Callable[[], float]) -> float:
    begun_s = clock()
    engine.execute(items).argmax(-1).tolist()  # as the simplest sampler would: waits for the device
    return max(clock() - begun_s, 1e-9)


def _prompts(limits: Limits) -> Iterator[Shape]:
    blocks = list(range(limits.num_blocks))
    for num_new in CHUNKS:
        for past in (0, num_new):
            if num_new <= limits.max_chunk and past + num_new <= limits.max_tokens:
                item = StepItem([0] * num_new, past, blocks[: _num_blocks(past + num_new, limits)], True)
                yield [item], Work().plus_chunk(num_new, past)


def _decodes(limits: Limits) -> Iterator[Shape]:
    """The blocks of each sequence begin elsewhere, or all would be read from the processor's cache."""
    longest = min(2 * CHUNKS[-1], limits.max_tokens)
    blocks = list(range(_num_blocks(longest, limits)))
    for num_seqs in BATCHES:
        for context in (limits.block_size, longest - 1):
            if num_seqs <= limits.max_seqs and context < limits.max_tokens:
                size = _num_blocks(context + 1, limits)
                starts = [index * len(blocks) // num_seqs for index in range(num_seqs)]
                tables = [(blocks[start:] + blocks[:start])[:size] for start in starts]
                items = [StepItem([0], context, table, True) for table in tables]
                yield items, Work(num_decodes=num_seqs, decode_context=num_seqs * context)


def _num_blocks(num_tokens: int, limits: Limits) -> int:
    return num_blocks_for(num_tokens, limits.block_size)
