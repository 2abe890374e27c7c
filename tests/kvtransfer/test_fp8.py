"""KV rounded to 8 bits on its way: how far off it may be, who agrees to it, and what a model makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contracts.blocks import KvLayout
from contracts.errors import ConfigError
from contracts.messages import HandoffState
from engine.kv import KvSlab
from engine.model import Model
from engine.runner import Runner, StepItem
from engine.weights import load_model
from kvtransfer.endpoint import KvEndpoint
from kvtransfer.fp8 import LARGEST, Fp8Source, Fp8Target
from kvtransfer.pages import Pages
from kvtransfer.reshard import Reshard
from tests.engine.golden import BLOCK_SIZE, NUM_BLOCKS, read_cases
from tests.kvtransfer.tools import (
    HOST,
    LAYOUT,
    SECRET,
    Handoff,
    Pair,
    Side,
    decode_side,
    make_config,
    make_info,
    make_slab,
    until,
)

GOLDEN = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"
BLOCKS = [4, 5, 6, 2]
NUM_CASES, NUM_COMPARED = 6, 16


def dense(slab: Tensor, block_ids: list[int]) -> Tensor:
    """[tokens, L, 2, K, D] in float32."""
    return slab[block_ids].permute(0, 4, 1, 2, 3, 5).flatten(0, 1).float()


def allowed(values: Tensor) -> Tensor:
    """By how much each of `values` [tokens, L, 2, K, D] may be off, if no scale is larger than that of all tokens."""
    scale = values.abs().amax((0, 4), keepdim=True) / LARGEST
    return torch.maximum(values.abs() / 16, scale / 1024) * 1.01


@settings(max_examples=30)
@given(st.data(), st.sampled_from(["float32", "bfloat16"]), st.sampled_from([4, 8]))
def test_what_arrives_is_within_the_known_error_and_nothing_else_is_written(
    data: st.DataObject, dtype: str, target_size: int
) -> None:
    low = data.draw(st.integers(0, 15))
    high = data.draw(st.integers(low + 1, 16))
    theirs = replace(LAYOUT, dtype=dtype, block_size=target_size)
    source, target = make_slab(1), make_slab(2, theirs)
    before = target.clone()
    sender, receiver = Fp8Source(Reshard(Pages(source, LAYOUT), theirs)), Fp8Target(Pages(target, theirs))
    wire = torch.zeros(sender.num_bytes(low, high) + 8, dtype=torch.uint8)
    sender.gather(BLOCKS, low, high, wire)
    assert not wire[-8:].any()
    assert receiver.num_bytes(low, high) == sender.num_bytes(low, high)
    targets = BLOCKS[: 16 // target_size]
    receiver.scatter(targets, low, high, wire)

    sent, arrived = dense(source, BLOCKS)[low:high], dense(target, targets)[low:high]
    room = allowed(sent) + (sent.abs() / 128 if dtype == "bfloat16" else 0)
    assert bool(((arrived - sent).abs() <= room).all())
    mask = torch.ones(len(target), dtype=torch.bool)
    mask[targets] = False
    assert torch.equal(target[mask], before[mask])
    others = torch.ones(16, dtype=torch.bool)
    others[low:high] = False
    assert torch.equal(dense(target, targets)[others], dense(before, targets)[others])


def test_zeros_stay_zeros_and_large_and_small_heads_do_not_mix() -> None:
    source, target = make_slab(1), make_slab(2)
    source[4, 0, 0, 0] = 0.0
    source[4, 0, 0, 1] *= 1e6
    source[4, 1, 1, 0] *= 1e-6
    sender, receiver = Fp8Source(Pages(source, LAYOUT)), Fp8Target(Pages(target, LAYOUT))
    wire = torch.empty(sender.num_bytes(0, 4), dtype=torch.uint8)
    sender.gather([4], 0, 4, wire)
    receiver.scatter([7], 0, 4, wire)
    sent, arrived = dense(source, [4]), dense(target, [7])
    assert bool(((arrived - sent).abs() <= allowed(sent)).all())
    assert not target[7, 0, 0, 0].any()


async def hand_over(ours: str, theirs: str, num_tokens: int = 30) -> tuple[Handoff, int]:
    """A handoff between endpoints of these settings, and the bytes it took."""
    async with decode_side(make_config(wire_dtype=theirs)) as (decode, port):
        prefill = Side("p", 1, make_config(wire_dtype=ours))
        try:
            await prefill.endpoint.start(HOST)
            prefill.endpoint.set_peers([make_info(port)])
            await until(lambda: prefill.endpoint.peer_statuses()[0].is_ready)
            handoff = Pair(prefill, decode, port).handoff(num_tokens)
            handoff.expect()
            handoff.open()
            result = await handoff.result()
            assert result.error is None
            assert isinstance(await handoff.outcome(), HandoffState)
        finally:
            await prefill.endpoint.close()
    return handoff, result.num_bytes


async def test_a_pair_that_agrees_sends_little_more_than_a_byte_for_each_number() -> None:
    handoff, num_bytes = await hand_over("fp8", "fp8")
    sent = handoff.pair.prefill.tokens(handoff.sources)[: handoff.num_tokens]
    arrived = handoff.pair.decode.tokens(handoff.targets)[: handoff.num_tokens]
    assert bool(((arrived - sent).abs() <= allowed(sent)).all())
    assert sent.numel() < num_bytes < 1.5 * sent.numel()


@pytest.mark.parametrize(("ours", "theirs"), [("fp8", "auto"), ("auto", "fp8"), ("auto", "auto")])
async def test_without_agreement_nothing_is_rounded(ours: str, theirs: str) -> None:
    handoff, _ = await hand_over(ours, theirs)
    assert handoff.arrived == handoff.num_tokens


def test_a_layout_that_gains_nothing_is_refused() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=2, head_dim=2, block_size=4, dtype="float32")
    slab = torch.zeros(4, 2, 2, 2, 4, 2)
    with pytest.raises(ConfigError, match="wire_dtype: fp8 needs head_dim >= 4 but got 2"):
        KvEndpoint(("p", 1), "tiny", layout, slab, make_config(wire_dtype="fp8"), SECRET)


@pytest.mark.slow
def test_after_a_rounded_handoff_the_next_token_is_mostly_the_same(embedded_model_path: Path) -> None:
    """Each time after the right tokens so far: one that differs does not count again in all that follow."""
    model = load_model(embedded_model_path, torch.float32)
    slab = KvSlab.allocate(model.spec, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
    runner, pages = Runner(Model(model), slab, num_threads=1), Pages(slab.data, slab.layout)
    same = []
    for case in read_cases(GOLDEN)[:NUM_CASES]:
        prompt, right = case.prompt_ids, case.output_ids[:NUM_COMPARED]
        table = list(range(-(-(len(prompt) + len(right)) // BLOCK_SIZE)))
        runner.execute([StepItem(prompt, 0, table, True)])
        wire = torch.empty(pages.num_bytes(0, len(prompt)), dtype=torch.uint8)
        Fp8Source(pages).gather(table, 0, len(prompt), wire)
        Fp8Target(pages).scatter(table, 0, len(prompt), wire)
        for place in range(1, len(right)):
            past = len(prompt) + place - 1
            logits = runner.execute([StepItem([right[place - 1]], past, table, True)])
            same.append(int(logits.argmax()) == right[place])
    assert sum(same) >= 0.9 * len(same)
