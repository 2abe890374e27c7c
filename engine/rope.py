"""Rotary frequencies: what a `Rope` says, worked out once per model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.spec import FactorRope, LinearRope, Llama3Rope, Rope, YarnRope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[D / 2] float32: theta^(-2i/D), scaled as `rope` says (Su et al., arXiv:2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearRope(factor):
            return frequencies / factor
        case FactorRope(factors):
            return frequencies / torch.tensor(factors)
        case Llama3Rope():
            return _llama3(frequencies, rope.scaling)
        case YarnRope():
            return _yarn(frequencies, rope.scaling, rope.theta)


def magnitude(rope: Rope) -> float:
    """What cosines and sines are multiplied by."""
    return rope.scaling.magnitude if isinstance(rope.scaling, YarnRope) else 1.0


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    old_len = scaling.original_max_position
    is_long = wavelengths > old_len / scaling.low_freq_factor
    is_short = wavelengths < old_len / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = (old_len / wavelengths - scaling.low_freq_factor) / span
    between = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(is_long, frequencies / scaling.factor, frequencies)
    return torch.where(~is_long & ~is_short, between, scaled)


def _yarn(frequencies: Tensor, scaling: YarnRope, theta: float) -> Tensor:
    """NTK by parts (arXiv:2309.00071, section 3.2); the ramp runs over the index of a frequency."""
    dim = 2 * len(frequencies)

    def index_of(num_turns: float) -> float:
        """The frequency, as an index, that turns so often within the original context."""
        return (
            dim * math.log(scaling.original_max_position / (num_turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(len(frequencies)) - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept
