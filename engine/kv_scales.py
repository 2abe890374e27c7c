"""What float8 KV is multiplied by: a power of two for each layer, side and kv head, known before anything is computed.

    number in the slab = e4m3(x / scale), at most 448

float8 keeps its relative precision over 2^-6 … 448, so a scale only has to keep large numbers from being cut: it is 1
unless the weights say that more will come.

    keys, heads with a norm     a normed head has length sqrt(D) before its weights: a bound
    keys and values, with bias  the bias alone, twice, since what is added to it is not known (Qwen2's keys need it)
    all others                  1

Of the weights alone and in powers of two, so that two workers of one checkpoint have the same scales whatever they
compute with; the handoff compares them (`KvLayout.scales`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.rope import magnitude
from engine.weights import LayerWeights, LoadedModel

LARGEST = 448.0
"""The largest number of e4m3."""
_HEADROOM = 2.0


def scales_of(model: LoadedModel) -> Tensor:
    """[L, 2, K] float32."""
    layers = zip(model.spec.layers, model.weights.layers, strict=True)
    found = [_bounds(weights, model) * _turned(magnitude(spec.rope)) for spec, weights in layers]
    return torch.stack(found).div(LARGEST).clamp(min=1.0).log2().ceil().exp2()


def _turned(rope_magnitude: float) -> Tensor:
    """[2, 1]: rotation multiplies keys."""
    return torch.tensor([[rope_magnitude], [1.0]])


def _bounds(layer: LayerWeights, model: LoadedModel) -> Tensor:
    """[2, K]: what keys and values may reach; 0: nothing is known."""
    spec = model.spec
    bounds = torch.zeros(2, spec.num_kv_heads)
    if layer.qkv.bias is not None:
        bias = layer.qkv.bias.float().cpu().view(-1, spec.head_dim)[spec.num_heads :]
        keys, values = torch.split(bias, spec.num_kv_heads)
        bounds[0] = _HEADROOM * _longest_pair(keys)
        bounds[1] = _HEADROOM * values.abs().amax(-1)
    if layer.head_norms is not None:
        weight = layer.head_norms.float().cpu()[spec.num_heads :]
        bounds[0] = math.sqrt(spec.head_dim) * weight.abs().amax(-1)
    return bounds


def _longest_pair(heads: Tensor) -> Tensor:
    """[K] of heads [K, D]: rotation turns numbers i and i + D / 2 about each other."""
    low, high = heads.chunk(2, dim=-1)
    return torch.hypot(low, high).amax(-1)
