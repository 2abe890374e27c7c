"""The KV slab: one tensor that holds the keys and values of every block of every layer.

Layout [N blocks, L, 2 (K, V), K kv heads, S slots, D]: one block across all layers is one contiguous run of bytes, so
passing a block on is one copy; within a layer one [S, D] plane is contiguous, so attention gathers whole planes.
Who owns which block is not known here.

    SlabPlan ──allocate──► KvSlab                         of this process
       └──────shared_file──► descriptor ──shared_slab──►  of a rank, mapped by rank 0 too

A slab may have scratch blocks behind those that are handed out: what is written for nobody goes there.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from contracts.blocks import KvLayout, head_ranges
from contracts.errors import ConfigError
from engine.spec import ModelSpec

KvDtype = Literal["auto", "fp8"]
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, eq=False)
class SlabPlan:
    """What a slab is to be. `scales` [L, 2, K] float32: what the numbers of a float8 slab are multiplied by.

    Raises ConfigError if a size is not positive.
    """

    spec: ModelSpec
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    scales: Tensor | None = None
    num_scratch: int = 0

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.block_size < 1:
            raise ConfigError(
                f"expected num_blocks and block_size >= 1 but got {self.num_blocks} and {self.block_size}"
            )
        assert (self.scales is not None) == (self.dtype == FP8), "scales belong to float8"

    @property
    def shape(self) -> tuple[int, ...]:
        spec = self.spec
        num_all = self.num_blocks + self.num_scratch
        return (num_all, spec.num_layers, 2, spec.num_kv_heads, self.block_size, spec.head_dim)

    def allocate(self) -> KvSlab:
        """A zeroed slab.

        NOTE: zeroed, not empty: attention reads the unused slots of a block and multiplies them by zero, and zero
        times the NaN that uninitialised memory may hold is NaN.
        """
        scales = None if self.scales is None else self.scales.to(self.device)
        return KvSlab(_zeros(self.shape, self.dtype, self.device), self.num_scratch, scales)

    def shared_file(self) -> int:
        """A file descriptor of zeroed memory without a name for `shared_slab`."""
        return shared_file(math.prod(self.shape) * self.dtype.itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class KvSlab:
    """`storage` [N + scratch blocks, L, 2, K, S, D], contiguous. `scales`: as `SlabPlan.scales`."""

    storage: Tensor
    num_scratch: int = 0
    scales: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KvSlab:
        """A slab without scratch blocks."""
        return SlabPlan(spec, num_blocks, block_size, dtype, torch.device(device)).allocate()

    @property
    def data(self) -> Tensor:
        """[N, L, 2, K, S, D]: the blocks that may be handed out."""
        return self.storage[: self.num_blocks]

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[0] - self.num_scratch

    @property
    def num_layers(self) -> int:
        return self.storage.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.storage.shape[3]

    @property
    def block_size(self) -> int:
        return self.storage.shape[4]

    @property
    def head_dim(self) -> int:
        return self.storage.shape[5]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def bytes_per_block(self) -> int:
        return self.storage[0].numel() * self.storage.element_size()

    @property
    def layout(self) -> KvLayout:
        return KvLayout(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            dtype_name(self.dtype),
            _digest(self.scales),
        )

    def layer(self, index: int) -> Tensor:
        """View [N + scratch blocks, 2, K, S, D] of one layer."""
        return self.storage[:, index]

    def layer_scales(self, index: int) -> Tensor | None:
        """[2, K] of a float8 slab."""
        return None if self.scales is None else self.scales[index]

    def clear(self, block_id: int) -> None:
        """Zeros, as at the start."""
        self.storage[block_id].view(torch.uint8).zero_()


def resolve_kv_dtype(name: KvDtype, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` is the model's `dtype`. Raises ConfigError for fp8 on a CPU, which has no kernels for it."""
    if name == "auto":
        return dtype
    if device.type == "cpu":
        raise ConfigError(f"engine.kv_dtype: expected auto on a CPU but got {name}")
    return FP8


def dtype_name(dtype: torch.dtype) -> str:
    """As `KvLayout.dtype` has it."""
    return str(dtype).removeprefix("torch.")


def _digest(scales: Tensor | None) -> str:
    if scales is None:
        return ""
    return hashlib.blake2b(scales.float().cpu().numpy().tobytes(), digest_size=8).hexdigest()


def whole_layout(mine: KvSlab, scales: Sequence[Tensor | None], num_kv_heads: int) -> KvLayout:
    """Of the slabs of all ranks together, of which `mine` is one. `scales`: of each rank's, which only float8 has."""
    held = [
        (slice(h.start, h.stop), s)
        for h, s in zip(head_ranges(num_kv_heads, len(scales)), scales, strict=True)
    ]
    whole: Tensor | None = None
    if mine.scales is not None:
        whole = torch.empty(mine.num_layers, 2, num_kv_heads)
        for heads, part in held:
            assert part is not None, "all ranks have slabs of one dtype"
            whole[:, :, heads] = part.cpu()
    return replace(mine.layout, num_kv_heads=num_kv_heads, scales=_digest(whole))


def shared_file(num_bytes: int) -> int:
    """A file descriptor of zeroed memory without a name, all of its pages there."""
    file = os.memfd_create("baton-kv-rank", os.MFD_CLOEXEC)
    os.posix_fallocate(file, 0, num_bytes)
    return file


def shared_slab(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> KvSlab:
    """The slab [N, L, 2, K, S, D] that lies in `file`, which may be closed afterwards.

    Raises ConfigError if the file is of another size: reading beyond its end would end the process.
    """
    num_bytes, found = math.prod(shape) * dtype.itemsize, os.fstat(file).st_size
    if found != num_bytes:
        raise ConfigError(f"kv slab: expected {num_bytes} bytes {shape} but got {found}")
    return KvSlab(shared_bytes(file).view(dtype).view(shape))


def shared_bytes(file: int) -> Tensor:
    """All of `file`, which may be closed afterwards, as uint8."""
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


_ALIGNMENT_BYTES = 4096
_PAGE_BYTES = mmap.PAGESIZE


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor, all of its pages there.

    NOTE: a page that comes into being when it is first written stalls whoever writes it, a step with streams or the
    arrival of a prompt: milliseconds for a large page on a virtual machine. numpy asks the kernel for zero pages, so
    one byte of each is enough, where torch.zeros writes them all once more.
    """
    if device.type != "cpu":
        return torch.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=device).view(
            dtype
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    raw[::_PAGE_BYTES] = 0
    begin = -raw.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(raw[begin : begin + num_bytes]).view(dtype).view(shape)


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """What a block takes."""
    layout = KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, dtype_name(dtype))
    return layout.bytes_per_block


def num_blocks_for(num_bytes: int, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """How many blocks a budget of `num_bytes` holds. Raises ConfigError if not even one."""
    each = block_bytes(spec, block_size, dtype)
    if num_bytes < each:
        raise ConfigError(f"kv budget: expected at least {each} bytes but got {num_bytes}")
    return num_bytes // each
