"""The KV slab: one tensor that holds the keys and values of every block of every layer.

Layout [N blocks, L, 2 (K, V), K kv heads, S slots, D]: one block across all layers is one contiguous run of bytes, so
passing a block on is one copy; within a layer one [S, D] plane is contiguous, so attention gathers whole planes.
Who owns which block is not known here.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contracts.blocks import KvLayout
from contracts.errors import ConfigError
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KvSlab:
    """`data` [N, L, 2, K, S, D], contiguous."""

    data: Tensor

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KvSlab:
        """A zeroed slab. Raises ConfigError if a size is not positive.

        NOTE: zeroed, not empty: attention reads the unused slots of a block and multiplies them by zero, and zero
        times the NaN that uninitialised memory may hold is NaN.
        """
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"expected num_blocks and block_size >= 1 but got {num_blocks} and {block_size}"
            )
        shape = (num_blocks, spec.num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim)
        return cls(_zeros(shape, dtype, torch.device(device)))

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def num_layers(self) -> int:
        return self.data.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[3]

    @property
    def block_size(self) -> int:
        return self.data.shape[4]

    @property
    def head_dim(self) -> int:
        return self.data.shape[5]

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def bytes_per_block(self) -> int:
        return self.data[0].numel() * self.data.element_size()

    @property
    def layout(self) -> KvLayout:
        dtype = str(self.dtype).removeprefix("torch.")
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, dtype)

    def layer(self, index: int) -> Tensor:
        """View [N, 2, K, S, D] of one layer."""
        return self.data[:, index]


def shared_file(spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> int:
    """A file descriptor of zeroed memory without a name for `shared_slab`; pages come into being when first used."""
    shape = (num_blocks, spec.num_layers, 2, spec.num_kv_heads, block_size, spec.head_dim)
    file = os.memfd_create("baton-kv-rank", os.MFD_CLOEXEC)
    os.ftruncate(file, math.prod(shape) * dtype.itemsize)
    return file


def shared_slab(file: int, shape: tuple[int, ...], dtype: torch.dtype) -> KvSlab:
    """The slab [N, L, 2, K, S, D] that lies in `file`, which may be closed afterwards.

    Raises ConfigError if the file is of another size: reading beyond its end would end the process.
    """
    num_bytes, found = math.prod(shape) * dtype.itemsize, os.fstat(file).st_size
    if found != num_bytes:
        raise ConfigError(f"kv slab: expected {num_bytes} bytes {shape} but got {found}")
    return KvSlab(torch.frombuffer(mmap.mmap(file, num_bytes), dtype=dtype).view(shape))


_ALIGNMENT_BYTES = 4096


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor whose pages, on a CPU, come into being when they are first used.

    torch.zeros writes every byte, which for 1 GiB takes seconds at start; numpy asks the kernel for zero pages.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(raw[begin : begin + num_bytes]).view(dtype).view(shape)


def num_blocks_for(num_bytes: int, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """How many blocks a budget of `num_bytes` holds. Raises ConfigError if not even one."""
    layout = KvLayout(
        spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, str(dtype).removeprefix("torch.")
    )
    num_blocks = num_bytes // layout.bytes_per_block
    if num_blocks < 1:
        raise ConfigError(f"kv budget: expected at least {layout.bytes_per_block} bytes but got {num_bytes}")
    return num_blocks
