"""The compiled kernels against `reference`, over the shapes that models have. Where no compiler works they are not
there, and neither are these tests (tests/engine/conftest.py says so)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import reference
from engine.kernels.native import kernels as native
from engine.kernels.native import ops
from engine.quantization import BlockKind, Quantized, quantize
from engine.spec import AttentionRule
from engine.weights import Linear
from tests.engine.attention import attended

NUM_BLOCKS, SLOTS = 40, 16


def make_blocks(kind: BlockKind, rows: int, columns: int, seed: int = 0) -> Quantized:
    """Random codes with scales of every sign and size that matters."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = columns // 32
    blocks = torch.randint(
        0, 256, (rows, num_groups, kind.block_bytes), generator=generator, dtype=torch.uint8
    )
    for at in range(0, 4 if kind is BlockKind.Q4_1 else 2, 2):
        scales = (torch.randn(rows, num_groups, 1, generator=generator) / 20).half()
        blocks[:, :, at : at + 2] = scales.view(torch.uint8)
    return Quantized(kind, blocks.view(rows, -1))


def make_kv(num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The middle layer of a slab of three."""
    return torch.randn(NUM_BLOCKS, 3, 2, num_kv_heads, SLOTS, head_dim).to(dtype)[:, 1]


@pytest.mark.parametrize("kind", BlockKind)
@pytest.mark.parametrize("rows", [1, 16, 50])
def test_packed_weights_are_the_numbers_of_the_file(kind: BlockKind, rows: int) -> None:
    blocks = make_blocks(kind, rows, 96)
    panels = ops.pack(blocks)
    assert torch.equal(ops.rows(panels, torch.arange(rows)), blocks.expanded())
    assert torch.equal(ops.linear(torch.eye(96), panels, None).T, blocks.expanded())
    assert torch.equal(ops.expand(panels), blocks.expanded().bfloat16())


@pytest.mark.parametrize("kind", BlockKind)
@pytest.mark.parametrize("columns", [32, 576])
def test_a_product_is_the_product_and_a_row_has_the_same_bits_in_every_batch(
    kind: BlockKind, columns: int
) -> None:
    torch.manual_seed(1)
    blocks, x, bias = make_blocks(kind, 70, columns), torch.randn(29, columns), torch.randn(70)
    panels = ops.pack(blocks)
    alone = torch.cat([ops.linear(row[None], panels, bias) for row in x])
    exact = F.linear(x.double(), blocks.expanded().double(), bias.double())
    torch.testing.assert_close(alone.double(), exact, rtol=1e-5, atol=1e-4)
    for num_rows in (*range(1, 17), 29):
        assert torch.equal(ops.linear(x[:num_rows], panels, bias), alone[:num_rows])


@pytest.mark.parametrize("kind", [*BlockKind, "numbers"])
@pytest.mark.parametrize("columns", [32, 576])
def test_a_product_of_bfloat16_rows_is_rounded_in_its_sum_only(kind: BlockKind | str, columns: int) -> None:
    torch.manual_seed(1)
    x, bias = torch.randn(29, columns).bfloat16(), torch.randn(70)
    if isinstance(kind, BlockKind):
        blocks = make_blocks(kind, 70, columns)
        panels, weight = ops.pack(blocks), blocks.expanded()
    else:
        weight = torch.randn(70, columns)
        panels, weight = ops.pack_numbers(weight.bfloat16()), weight.bfloat16().float()
    alone = torch.cat([ops.linear(row[None], panels, bias) for row in x])
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(alone.double(), exact, rtol=1e-5, atol=1e-4)
    for num_rows in (*range(1, 26), 29):
        assert torch.equal(ops.linear(x[:num_rows], panels, bias), alone[:num_rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [31, 576])
def test_packed_numbers_are_the_numbers(dtype: torch.dtype, columns: int) -> None:
    weight, row_ids = torch.randn(50, columns).to(dtype), torch.tensor([0, 49, 17])
    panels = ops.pack_numbers(weight)
    assert torch.equal(ops.rows(panels, row_ids), weight[row_ids].float())
    assert torch.equal(ops.linear(torch.eye(columns), panels, None).T, weight.float())
    assert torch.equal(ops.linear(torch.eye(columns, dtype=dtype), panels, None).T, weight.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_threads_change_no_bit(dtype: torch.dtype) -> None:
    panels, x = ops.pack(make_blocks(BlockKind.Q4_1, 200, 96)), torch.randn(24, 96).to(dtype)
    kv, q = make_kv(2, 64, dtype), torch.randn(40, 4, 64)
    rule = AttentionRule(0.125)
    before = torch.get_num_threads()

    def results() -> list[Tensor]:
        few = ops.linear(x[:3], panels, None)
        chunk = native.prefill_attention(q, kv, torch.arange(3), 0, rule)
        lens = torch.tensor([40, 3])
        decoded = attended(native, q[:2], kv, torch.arange(6).view(2, 3), lens, rule)
        return [few, ops.linear(x, panels, None), chunk, decoded]

    one = results()
    torch.set_num_threads(3)
    try:
        three = results()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(left, right) for left, right in zip(one, three, strict=True))


def test_no_rows_are_no_rows() -> None:
    panels = ops.pack(make_blocks(BlockKind.Q8_0, 20, 64))
    assert ops.linear(torch.empty(0, 64), panels, None).shape == (0, 20)
    assert ops.rows(panels, torch.empty(0, dtype=torch.int64)).shape == (0, 64)
    with pytest.raises(IndexError, match="below 20"):
        ops.rows(panels, torch.tensor([20]))


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (9, 3), (8, 2), (8, 1)])
@pytest.mark.parametrize(
    "rule",
    [AttentionRule(0.1), AttentionRule(0.1, window=40, cap=3.0), AttentionRule(0.1, window=17)],
    ids=["plain", "window and cap", "window"],
)
def test_attention_equals_reference_over_heads_and_lengths(
    head_dim: int, num_heads: int, num_kv_heads: int, rule: AttentionRule
) -> None:
    torch.manual_seed(2)
    kv = make_kv(num_kv_heads, head_dim)
    lens = torch.tensor([1, 16, 17, 150])
    table = torch.randint(0, NUM_BLOCKS, (4, 10))
    q = torch.randn(4, num_heads, head_dim)
    expected = reference.paged_attention(q, kv, table, lens, rule)
    decoded = attended(native, q, kv, table, lens, rule)
    torch.testing.assert_close(decoded, expected, rtol=1e-4, atol=2e-5)
    for row in range(4):
        alone = attended(native, q[row, None], kv, table[row, None], lens[row, None], rule)
        assert torch.equal(alone[0], decoded[row])
    for start, num_tokens in ((0, 1), (0, 70), (300, 33)):
        block_ids = torch.randperm(NUM_BLOCKS)[: -(-(start + num_tokens) // SLOTS)]
        q = torch.randn(num_tokens, num_heads, head_dim)
        expected = reference.prefill_attention(q, kv, block_ids, start, rule)
        found = native.prefill_attention(q, kv, block_ids, start, rule)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 3), (9, 3), (8, 2), (5, 1), (7, 1)])
@pytest.mark.parametrize("rule", [AttentionRule(0.125), AttentionRule(0.0625, window=17, cap=3.0)])
def test_attention_over_bfloat16_is_rounded_once(
    head_dim: int, num_heads: int, num_kv_heads: int, rule: AttentionRule
) -> None:
    torch.manual_seed(3)
    kv, q = make_kv(num_kv_heads, head_dim, torch.bfloat16), torch.randn(5, num_heads, head_dim)
    q = q.bfloat16().float()  # dot products of pairs take queries in bfloat16, as the keys are
    table, lens = torch.randint(0, NUM_BLOCKS, (5, 4)), torch.tensor([3, 64, 20, 33, 1])
    decoded = attended(native, q, kv, table, lens, rule)
    torch.testing.assert_close(
        decoded, reference.paged_attention(q, kv, table, lens, rule), rtol=2**-7, atol=1e-5
    )
    for row in range(5):
        alone = attended(native, q[row, None], kv, table[row, None], lens[row, None], rule)
        assert torch.equal(alone[0], decoded[row])
    torch.testing.assert_close(
        native.prefill_attention(q, kv, table[0], 30, rule),
        reference.prefill_attention(q, kv, table[0], 30, rule),
        rtol=2**-7,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_slots", [8, 16, 32])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 32), (8, 1, 128), (4, 2, 48), (16, 1, 80)])
@pytest.mark.parametrize(
    "rule", [AttentionRule(0.1), AttentionRule(0.1, cap=5.0), AttentionRule(0.1, window=70)]
)
def test_a_query_has_the_same_bits_in_a_prompt_in_a_piece_of_it_and_in_a_decode(
    rule: AttentionRule, shape: tuple[int, int, int], num_slots: int, dtype: torch.dtype
) -> None:
    (num_heads, num_kv_heads, head_dim), num_tokens = shape, 600
    torch.manual_seed(5)
    blocks = torch.randperm(-(-num_tokens // num_slots))
    kv = torch.randn(len(blocks), 2, num_kv_heads, num_slots, head_dim).to(dtype)
    q = torch.randn(num_tokens, num_heads, head_dim)
    whole = native.prefill_attention(q, kv, blocks, 0, rule)
    for low, high in itertools.pairwise((0, 7, 64, 300, 301, num_tokens)):
        piece = native.prefill_attention(q[low:high], kv, blocks, low, rule)
        assert torch.equal(piece, whole[low:high]), (low, high)
    rows = torch.tensor([0, 1, 15, 16, 17, 69, 70, 71, 255, 256, 300, 511, 512, 599])
    table = blocks.repeat(len(rows), 1)
    assert torch.equal(attended(native, q[rows], kv, table, rows + 1, rule), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
def test_what_lies_around_a_context_is_not_read(window: int | None, dtype: torch.dtype) -> None:
    kv, length = make_kv(1, 64, dtype), SLOTS + 5
    kv[3, :, :, 5:] = torch.nan  # behind it
    if window:
        kv[7, :, :, : length - window] = torch.nan  # before it
    table, q, rule = torch.tensor([[7, 3]]), torch.randn(1, 3, 64), AttentionRule(0.125, window=window)
    assert attended(native, q, kv, table, torch.tensor([length]), rule).isfinite().all()
    assert native.prefill_attention(q, kv, table[0], length - 1, rule).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_post", [False, True])
@pytest.mark.parametrize("width", [48, 53, 576])
def test_add_norm_equals_reference(dtype: torch.dtype, has_post: bool, width: int) -> None:
    torch.manual_seed(3)
    hidden, added = torch.randn(3, width), torch.randn(3, width).to(dtype)
    weight, post = torch.randn(width), torch.randn(width) if has_post else None
    expected = reference.add_norm(hidden.clone(), added, post, weight, 1e-5, dtype)
    found = native.add_norm(hidden.clone(), added, post, weight, 1e-5, dtype)
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right, rtol=rtol, atol=1e-5)
    first = native.add_norm(hidden.clone(), None, None, weight, 1e-5, dtype)[1]
    torch.testing.assert_close(
        first, reference.add_norm(hidden, None, None, weight, 1e-5, dtype)[1], rtol=rtol, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [6, 64])
def test_split_heads_equals_reference(dtype: torch.dtype, has_norms: bool, head_dim: int) -> None:
    torch.manual_seed(4)
    qkv = torch.randn(5, (4 + 2 * 2) * head_dim).to(dtype)
    rotation = reference.rope_table(torch.arange(5), torch.rand(head_dim // 2))
    norms = (torch.randn(6, head_dim) if has_norms else None, 1e-5)
    place = (torch.tensor([3, 3, 7, 0, 39]), torch.tensor([0, 15, 2, 1, 3]))
    ours = make_kv(2, head_dim, dtype)
    theirs = ours._base.clone()[:, 1]  # type: ignore[union-attr]
    expected = reference.split_heads(qkv, norms, rotation, theirs, place)
    found = native.split_heads(qkv, norms, rotation, ours, place)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [7, 64])
def test_gates_equal_reference(dtype: torch.dtype, inner: int) -> None:
    gate_up = (6 * torch.randn(3, 2 * inner)).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -30.0])
    for activation in ("silu", "gelu_tanh"):
        expected = reference.gated(gate_up, activation, dtype)
        found = native.gated(gate_up, activation, dtype)
        torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=2e-6)


@pytest.mark.parametrize(("kind", "steps"), [(BlockKind.Q8_0, 254), (BlockKind.Q4_1, 15)])
def test_rounded_weights_are_within_half_a_step(kind: BlockKind, steps: int) -> None:
    weight = torch.randn(10, 96)
    weight[0] = 0
    groups, found = weight.view(10, 3, 32), quantize(weight, kind).expanded().view(10, 3, 32)
    if kind is BlockKind.Q8_0:
        span = 2 * groups.abs().amax(-1, keepdim=True)
    else:
        span = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    # Half precision of scale and minimum takes a little more.
    assert ((found - groups).abs() <= 0.55 * span / steps + 2e-3 * span).all()


def test_a_packed_layer_keeps_one_copy() -> None:
    layer = Linear(None, torch.randn(20).bfloat16(), quantized=make_blocks(BlockKind.Q8_0, 20, 64))
    native.pack(layer)
    native.pack(layer)
    assert layer.quantized is None
    assert layer.weight is None
    assert native.linear(torch.randn(2, 64), layer).shape == (2, 20)
