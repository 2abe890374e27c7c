"""The sampling kernel, under Triton's interpreter, against `reference`, and that against the engine's sampler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contracts.errors import EngineError
from contracts.request import SamplingParams
from engine.kernels import reference
from engine.kernels.triton import sampling
from engine.sampler import choose, uniform

# temperature, top_k, top_p, min_p
LIMITS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.5, 0, 0.6, 0.0),
    (1.0, 40, 0.9, 0.0),
    (1.0, 3, 0.99, 0.0),
    (2.0, 0, 1.0, 0.2),
    (1.3, 1, 0.5, 0.1),
]


def make_logits(num_rows: int, num_vocab: int, is_tied: bool) -> Tensor:
    torch.manual_seed(num_vocab)
    logits = 3 * torch.randn(num_rows, num_vocab)
    logits[:, ::7] = -torch.inf  # masked tokens
    return logits.round() if is_tied else logits


def make_uniforms(num_rows: int) -> Tensor:
    return torch.tensor([uniform(seed, 3) for seed in range(num_rows)], dtype=torch.float64)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("num_vocab", [9, 1000])
def test_reference_draws_as_the_engine(num_vocab: int, is_tied: bool) -> None:
    limits = LIMITS * 20
    logits = make_logits(len(limits), num_vocab, is_tied)
    drawn = reference.sample(logits, torch.tensor(limits), make_uniforms(len(limits)))
    for row, (temperature, top_k, top_p, min_p) in enumerate(limits):
        params = SamplingParams(
            max_tokens=4, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=row
        )
        assert drawn[row] == choose(logits[row].double().numpy(), params, 3), limits[row]


@pytest.mark.parametrize(("num_vocab", "is_tied"), [(300, False), (2500, True)])
def test_kernel_draws_as_the_reference(num_vocab: int, is_tied: bool) -> None:
    limits, uniforms = torch.tensor(LIMITS), make_uniforms(len(LIMITS))
    logits = make_logits(len(LIMITS), num_vocab, is_tied)
    assert torch.equal(sampling.sample(logits, limits, uniforms), reference.sample(logits, limits, uniforms))


def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_token() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -torch.inf]]).expand(2, 4).contiguous()
    limits = torch.tensor([[1.0, 0, 1.0, 0.0]] * 2)
    drawn = sampling.sample(logits, limits, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert drawn.tolist() == [0, 2]


def test_no_rows_and_wrong_shapes() -> None:
    none = torch.empty(0, dtype=torch.float64)
    assert sampling.sample(torch.empty(0, 9), torch.empty(0, 4), none).shape == (0,)
    with pytest.raises(EngineError, match=r"limits \[R, 4\]"):
        sampling.sample(torch.empty(2, 9), torch.empty(2, 3), torch.empty(2))
