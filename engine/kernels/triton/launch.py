"""How a kernel starts, and what every wrapper needs to know about the device.

    wrapper: checks, picks tiles ──► launch ─┬─► runs        on a GPU, or on CPU tensors under TRITON_INTERPRET=1
                                             └─► compiles    inside `aot.absent_gpu`: for a GPU that is not there

What changes from step to step (lengths, starts, table widths) is not specialized: Triton would compile a kernel anew,
for seconds, when such a number first is 1 or a multiple of 16.

What is compiled ahead of time is what would be launched: same wrapper, same tiles, same specialization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from contracts.errors import EngineError

NUM_PROCESSORS_WITHOUT_GPU = 8

_hook: Callable[..., None] | None = None
_capability: tuple[int, int] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """Start `kernel` unless its grid is empty."""
    if 0 in grid:
        return
    options["enable_fp_fusion"] = True  # Triton will change its default
    if _hook is not None:
        _hook(kernel, grid, args, options)
    else:
        kernel[grid](*args, **options)


def redirect(hook: Callable[..., None] | None, capability: tuple[int, int] | None) -> None:
    """Hand each launch to `hook(kernel, grid, args, options)` instead, as if on a GPU of `capability`; None ends it."""
    global _hook, _capability
    _hook, _capability = hook, capability


def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of the GPU; (0, 0) under the interpreter."""
    if _capability is not None:
        return _capability
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def compute_dtype(dtype: torch.dtype, device: torch.device) -> Any:
    """What tiles are multiplied in, for a slab or weight of `dtype`; float8 is widened to bfloat16, which is exact.

    NOTE: Triton's interpreter keeps bfloat16 as bits and multiplies those, so there it is float32.
    """
    if dtype == torch.float32 or capability(device) == (0, 0):
        return tl.float32
    return tl.float16 if dtype == torch.float16 else tl.bfloat16


def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return NUM_PROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def padded(size: int, least: int = 16) -> int:
    """The power of two that a tile needs for `size`."""
    return max(int(triton.next_power_of_2(size)), least)


def check_last_contiguous(**tensors: Tensor) -> None:
    """Raises EngineError for a tensor whose last dimension has gaps: kernels take a stride for every other."""
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.stride(-1) != 1:
            raise EngineError(
                f"{name}: expected a contiguous last dimension but got strides {tensor.stride()}"
            )


def check_layer(kv: Tensor, num_heads: int, head_dim: int) -> None:
    """Raises EngineError unless kv [N, 2, K, S, D] is a layer of a slab that fits H query heads of size D."""
    expected = (kv.shape[2] * kv.shape[3] * kv.shape[4], kv.shape[3] * kv.shape[4], kv.shape[4], 1)
    if kv.ndim != 5 or kv.shape[1] != 2 or kv.stride()[1:] != expected:
        raise EngineError(
            f"kv: expected a layer [N, 2, K, S, D] of a slab but got {list(kv.shape)} {kv.stride()}"
        )
    if kv.shape[4] != head_dim or num_heads % kv.shape[2]:
        raise EngineError(
            f"q: expected heads of size {kv.shape[4]}, a multiple of {kv.shape[2]}, but got {num_heads} of {head_dim}"
        )


def check_same_device(**tensors: Tensor | None) -> None:
    """Raises EngineError if a kernel would follow an address of another device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise EngineError(f"expected tensors on one device but got {devices}")
