"""Each kernel set against `reference`, and `reference` against the textbook."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import cpu, reference
from engine.kernels.native import kernels as native
from engine.kernels.native.build import library
from engine.model import Kernels
from engine.spec import AttentionRule
from engine.weights import Linear
from tests.engine.attention import attended

KERNEL_SETS: list[Kernels] = [reference, cpu] if library() is None else [reference, cpu, native]
H, K, D, S, L, N = 6, 2, 16, 4, 3, 12
PLAIN = AttentionRule(scale=D**-0.5)
RULES = {
    "plain": PLAIN,
    "window of one": AttentionRule(D**-0.5, window=1),
    "short window": AttentionRule(D**-0.5, window=5),
    "whole blocks": AttentionRule(D**-0.5, window=8),
    "window past the context": AttentionRule(D**-0.5, window=50),
    "cap": AttentionRule(0.4, cap=1.5),
    "window and cap": AttentionRule(0.3, window=6, cap=2.0),
}


def make_layer(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The middle layer [N, 2, K, S, D] of a random slab: strided as in use."""
    torch.manual_seed(seed)
    return torch.randn(N, L, 2, K, S, D).to(dtype)[:, 1]


def textbook(q: Tensor, kv: Tensor, block_ids: list[int], num_context: int, rule: AttentionRule) -> Tensor:
    """q [T, H, D] are the last T of `num_context` positions."""
    keys, values = (
        kv[block_ids, side].transpose(0, 1).reshape(K, -1, D)[:, :num_context].float() for side in (0, 1)
    )
    keys, values = keys.repeat_interleave(H // K, 0), values.repeat_interleave(H // K, 0)
    scores = q.transpose(0, 1).float() @ keys.transpose(1, 2) * rule.scale
    if rule.cap is not None:
        scores = rule.cap * torch.tanh(scores / rule.cap)
    at, of = torch.arange(num_context - len(q), num_context)[:, None], torch.arange(num_context)
    is_seen = (of <= at) & (of > at - (rule.window or num_context))
    probs = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return (probs @ values).transpose(0, 1).to(kv.dtype)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_paged_attention_is_attention_over_each_context(
    kernels: Kernels, dtype: torch.dtype, rule: AttentionRule
) -> None:
    kv = make_layer(dtype)
    table = torch.tensor([[3, 1, 7], [5, 0, 0], [2, 9, 0]])
    lens = torch.tensor([11, 1, 8])
    q = torch.randn(3, H, D)
    out = attended(kernels, q, kv, table, lens, rule)
    for row in range(3):
        expected = textbook(q[row : row + 1], kv, table[row].tolist(), int(lens[row]), rule)
        rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out[row : row + 1], expected, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 7), (5, 4), (0, 40), (8, 32)])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_prefill_attention_is_causal_over_the_past(
    kernels: Kernels, start: int, num_tokens: int, rule: AttentionRule
) -> None:
    kv = make_layer()
    block_ids = torch.tensor([4, 11, 0, 9, 1, 2, 3, 5, 6, 7])[: -(-(start + num_tokens) // S)]
    q = torch.randn(num_tokens, H, D)
    out = kernels.prefill_attention(q, kv, block_ids, start, rule)
    expected = textbook(q, kv, block_ids.tolist(), start + num_tokens, rule)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", [reference, cpu])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_query_tiles_do_not_change_prefill(
    module: Kernels, rule: AttentionRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, q, block_ids = make_layer(), torch.randn(30, H, D), torch.arange(9)
    whole = module.prefill_attention(q, kv, block_ids, 3, rule)
    monkeypatch.setattr(module, "MAX_QUERY_ROWS", 7)
    tiled = module.prefill_attention(q, kv, block_ids, 3, rule)
    torch.testing.assert_close(tiled, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_blocks_behind_the_window_are_not_read(kernels: Kernels) -> None:
    kv = make_layer()
    kv[torch.tensor([4, 11])] = torch.nan  # positions 0 to 7
    rule = AttentionRule(D**-0.5, window=3)
    table = torch.tensor([4, 11, 0, 9])
    assert kernels.prefill_attention(torch.randn(5, H, D), kv, table, 10, rule).isfinite().all()
    lens = torch.tensor([11])
    assert attended(kernels, torch.randn(1, H, D), kv, table[None], lens, rule).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_touches_only_its_slots(dtype: torch.dtype) -> None:
    first, second = make_layer(dtype), make_layer(dtype)
    k, v = torch.randn(5, K, D), torch.randn(5, K, D)
    block_ids, slots = torch.tensor([11, 11, 0, 4, 7]), torch.tensor([0, 3, 2, 1, 3])
    reference.write_kv(first, k, v, block_ids, slots)
    cpu.write_kv(second, k, v, block_ids, slots)
    slab, untouched = second._base, make_layer(dtype)._base
    assert slab is not None
    assert untouched is not None
    assert torch.equal(first, second)
    assert torch.equal(second[11, 0, :, 3], k[1].to(dtype))
    assert torch.equal(second[4, 1, :, 1], v[3].to(dtype))
    assert torch.equal(slab[:, [0, 2]], untouched[:, [0, 2]])
    assert (second != untouched[:, 1]).any(-1).sum() == 5 * 2 * K


@pytest.mark.parametrize("num_rows", [1, 3, 8, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_float32_product_is_the_product(num_rows: int, has_bias: bool) -> None:
    weight, x = torch.randn(40, 24), torch.randn(num_rows, 24)
    bias = torch.randn(40) if has_bias else None
    layer = Linear(weight, bias)
    cpu.pack(layer)
    cpu.pack(layer)
    assert layer.weight is None
    torch.testing.assert_close(cpu.linear(x, layer), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 8])
def test_bfloat16_product_rounds_no_more_than_its_result(num_rows: int) -> None:
    weight, bias = torch.randn(40, 24).bfloat16(), torch.randn(40).bfloat16()
    x = torch.randn(num_rows, 24).bfloat16()
    layer = Linear(weight, bias)
    cpu.pack(layer)
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(cpu.linear(x, layer).double(), exact, rtol=2**-8, atol=1e-2)


def test_a_shared_weight_survives_packing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = Linear(torch.randn(40, 24).to(dtype), is_shared=True)
        cpu.pack(layer)
        assert layer.weight is not None


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("num_rows", [1, 8])
def test_best_logits_are_exact_in_bfloat16(kernels: Kernels, num_rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(500, 64).bfloat16()
    head = Linear(weight, is_shared=True)
    x = 3 * torch.randn(num_rows, 64).bfloat16()
    kernels.pack(head)
    logits = kernels.logits(x, head)
    exact = x.float() @ weight.float().T
    assert logits.dtype == torch.float32
    best = exact.topk(8).indices
    torch.testing.assert_close(logits.gather(1, best), exact.gather(1, best), rtol=1e-5, atol=1e-4)
    assert torch.equal(logits.topk(8).indices, best)


def test_rope_turns_halves_by_the_position() -> None:
    inv_freq = torch.tensor([1.0, 0.1])
    cos, sin = reference.rope_table(torch.tensor([0, 2]), inv_freq)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]])
    turned = torch.view_as_complex(torch.stack((x[..., :2], x[..., 2:]), -1)) * torch.polar(
        torch.ones(2, 1, 2), (torch.tensor([0.0, 2.0])[:, None] * inv_freq)[:, None]
    )
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(reference.rope(x, cos, sin), expected)


def test_rms_norm_has_unit_mean_square_before_its_weight() -> None:
    x = 5 * torch.randn(3, 32)
    normed = reference.rms_norm(x, torch.full((32,), 2.0), 1e-6)
    torch.testing.assert_close(normed.pow(2).mean(-1), torch.full((3,), 4.0), rtol=1e-4, atol=0)


def test_swiglu_gates_the_second_half() -> None:
    out = reference.swiglu(torch.tensor([[0.0, 1.0, 7.0, 3.0]]))
    torch.testing.assert_close(out, torch.tensor([[0.0, 3.0 / (1 + torch.tensor(-1.0).exp().item())]]))


def test_geglu_gates_with_the_tanh_gelu() -> None:
    gate = torch.tensor([0.5, -1.0])
    cubic = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    out = reference.geglu(torch.cat((gate, torch.tensor([7.0, 3.0])))[None])
    torch.testing.assert_close(out[0], cubic * torch.tensor([7.0, 3.0]))


def test_each_head_is_normed_alone() -> None:
    x = torch.randn(4, 3, D) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    weight = torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, D)
    normed = reference.head_norm(x, weight, 1e-6)
    torch.testing.assert_close(
        normed.pow(2).mean(-1), torch.tensor([1.0, 4.0, 9.0]).expand(4, 3), rtol=1e-4, atol=0
    )


def test_routing_takes_the_best_and_normalizes_if_asked() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    probs, chosen = reference.route(logits, 2, False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(probs, logits.softmax(-1)[:, [1, 2]])
    normalized, _ = reference.route(logits, 2, True)
    torch.testing.assert_close(normalized.sum(-1), torch.ones(1))
