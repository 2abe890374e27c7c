"""Draws on the device: which rows go there, and that each token is the one the host would draw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from contracts.errors import EngineError
from contracts.request import SamplingParams
from engine.kernels import reference
from engine.model import select_draw
from engine.sampler import Sampler, SamplingRow

RANDOM = SamplingParams(max_tokens=8)
ON_HOST = [
    replace(RANDOM, num_logprobs=0),
    replace(RANDOM, temperature=0.0, num_logprobs=2),
    replace(RANDOM, presence_penalty=1.0),
    replace(RANDOM, logit_bias=((3, 1.0),)),
    replace(RANDOM, min_tokens=99),
    replace(RANDOM, temperature=1e-30),
]
ON_DEVICE = [
    RANDOM,
    replace(RANDOM, temperature=0.6, top_k=5),
    replace(RANDOM, top_p=0.8, seed=1 << 60),
    replace(RANDOM, temperature=1.4, min_p=0.1),
]
GREEDY = replace(RANDOM, temperature=0.0)


class CountedDraw:
    """reference.sample, and how many rows each call had."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def __call__(self, logits: torch.Tensor, limits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        assert limits.dtype == torch.float32
        assert uniforms.dtype == torch.float64
        self.num_rows.append(len(logits))
        return reference.sample(logits, limits, uniforms)


def make_rows(params: list[SamplingParams]) -> list[SamplingRow]:
    return [SamplingRow(p, 3 + i, {3: 1}) for i, p in enumerate(params)]


@pytest.mark.parametrize(
    ("params", "num_on_device"),
    [
        (ON_DEVICE * 8, [32]),
        ([*ON_DEVICE, *ON_HOST, GREEDY] * 4, [16]),
        ([*ON_HOST, GREEDY], []),
        ([GREEDY] * 3, []),
    ],
)
def test_a_batch_has_the_tokens_of_the_host(params: list[SamplingParams], num_on_device: list[int]) -> None:
    torch.manual_seed(1)
    logits, rows, draw = 3 * torch.randn(len(params), 200), make_rows(params), CountedDraw()
    assert Sampler((1,), draw).sample(logits, rows) == Sampler((1,)).sample(logits, rows)
    assert draw.num_rows == num_on_device


def test_broken_logits_are_an_error_there_too() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(EngineError, match="finite"):
            Sampler((), CountedDraw()).sample(torch.tensor([[0.0, value]]), make_rows([RANDOM]))


def test_a_warm_up_draws_once_where_that_compiles_something() -> None:
    draw = CountedDraw()
    Sampler((), draw).warm_up(50, torch.device("cpu"))
    assert draw.num_rows == [1]
    Sampler(()).warm_up(50, torch.device("cpu"))


def test_gpus_draw_and_cpus_leave_it_to_the_host() -> None:
    assert select_draw(torch.device("cpu")) is None
    assert select_draw(torch.device("cuda")) is not None
