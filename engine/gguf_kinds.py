"""The kinds in which a GGUF file holds its tensors: how large each is, and which can be expanded.

Asked of the library, which knows more kinds than it can expand. Whether a file has all that its header promises is
seen before the first tensor is read.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from contracts.errors import ConfigError
from engine.gguf_file import GgufFile, GgufTensor


def supported_quantizations() -> list[str]:
    """Names of the kinds that can be expanded."""
    return [kind.name for kind in GGMLQuantizationType if _can_expand(kind)]


def check_file(file: GgufFile) -> None:
    """Raises ConfigError for a kind that nobody can expand, for rows that are no whole number of blocks, and for a file
    that ends before its last tensor does, as half a download."""
    sizes = [path.stat().st_size for path in file.paths]
    ends = [0] * len(sizes)
    for tensor in file.tensors.values():
        _check_kind(tensor)
        ends[tensor.part] = max(ends[tensor.part], tensor.offset + num_bytes_of(tensor))
    for path, size, end in zip(file.paths, sizes, ends, strict=True):
        if size < end:
            raise ConfigError(f"{path} is not whole: expected at least {end} bytes but it has {size}")


def is_float(tensor: GgufTensor) -> bool:
    """Whether it is held as numbers of 16 bits or more."""
    return bool(GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)][0] == 1)


def num_blocks_of(tensor: GgufTensor) -> int:
    block_elements: int = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)][0]
    return math.prod(tensor.shape) // block_elements


def num_bytes_of(tensor: GgufTensor) -> int:
    block_bytes: int = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)][1]
    return num_blocks_of(tensor) * block_bytes


def _check_kind(tensor: GgufTensor) -> None:
    try:
        kind = GGMLQuantizationType(tensor.kind)
        name, is_known = kind.name, _can_expand(kind)
    except ValueError:
        name, is_known = f"number {tensor.kind}", False
    if not is_known:
        raise ConfigError(
            f"tensor {tensor.name}: unsupported quantization: expected one of "
            f"{', '.join(supported_quantizations())} but got {name}"
        )
    block_elements = GGML_QUANT_SIZES[kind][0]
    if not tensor.shape or tensor.shape[-1] % block_elements:
        raise ConfigError(
            f"tensor {tensor.name}: expected rows of a multiple of {block_elements} elements in {name} "
            f"but got shape {tensor.shape}"
        )


@cache
def _can_expand(kind: GGMLQuantizationType) -> bool:
    """Asks the library by expanding one block of zeros."""
    try:
        # NOTE: an empty block of some kinds has a scale of zero or NaN, which numpy would warn about.
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
