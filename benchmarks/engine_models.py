"""The embedded model as its weights may be kept: expanded, or rounded to 8 or 4 bits.

none    every matrix expanded to `dtype`
int8    the expanded matrices rounded to groups of 32 with a scale
int4    the file's own blocks (Q4_1; the vocabulary Q8_0)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch

from engine.embedded import ensure_embedded_model
from engine.quantization import BlockKind, quantize
from engine.weights import Linear, LoadedModel, ModelWeights, load_model

Mode = Literal["none", "int8", "int4"]
MODES: tuple[Mode, ...] = ("none", "int8", "int4")


def load_mode(mode: Mode, dtype: torch.dtype) -> LoadedModel:
    """Raises ConfigError if the file cannot be had."""
    model = load_model(ensure_embedded_model(), dtype, quantization="auto" if mode == "int4" else "none")
    return replace(model, weights=_rounded(model.weights)) if mode == "int8" else model


def weight_bytes(weights: ModelWeights) -> int:
    """Of all matrices, each once. Before they are packed."""
    return sum(_num_bytes(matrix) for matrix in _matrices(weights))


def linears(model: LoadedModel) -> list[tuple[int, int]]:
    """(out, in) of every product of a layer, all layers."""
    return [_shape(matrix) for layer in model.weights.layers for matrix in layer.matrices]


def _rounded(weights: ModelWeights) -> ModelWeights:
    for matrix in _matrices(weights):
        assert matrix.weight is not None, "already packed"
        matrix.quantized, matrix.weight = quantize(matrix.weight, BlockKind.Q8_0), None
    return weights


def _matrices(weights: ModelWeights) -> Iterator[Linear]:
    yield weights.lm_head
    if weights.embedding is not weights.lm_head:
        yield weights.embedding
    for layer in weights.layers:
        yield from layer.matrices


def _num_bytes(matrix: Linear) -> int:
    kept = matrix.weight if matrix.quantized is None else matrix.quantized.blocks
    assert kept is not None, "already packed"
    return kept.numel() * kept.element_size()


def _shape(matrix: Linear) -> tuple[int, int]:
    if matrix.quantized is not None:
        return matrix.quantized.shape
    assert matrix.weight is not None, "already packed"
    return matrix.weight.shape[0], matrix.weight.shape[1]
