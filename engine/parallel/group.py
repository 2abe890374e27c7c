"""What ranks tell each other while a step runs: sums of the residual stream, and rank 0 all logits.

torch.distributed's process groups, made directly: no state of the process, so that one can hold several workers, as
tests do. Between the sums of a step each rank computes alone; a rank that is gone shows as an error of the others' next
sum (gloo) or as silence (NCCL), which the connection to it tells at once (parallel/leader.py, parallel/follower.py).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from contracts.errors import ConfigError
from engine.parallel.shards import Shard

LOOPBACK = "127.0.0.1"  # all ranks of a worker are on one host


class Ranks(Protocol):
    """What a model asks of the others."""

    def total(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same bits on each. x may be overwritten."""

    def joined(self, columns: Tensor, num_columns: int) -> Tensor:
        """On rank 0 [R, num_columns], all ranks' columns [R, …] side by side; elsewhere [0, num_columns]."""


class _Alone:
    def total(self, x: Tensor) -> Tensor:
        return x

    def joined(self, columns: Tensor, num_columns: int) -> Tensor:
        return columns


ALONE: Ranks = _Alone()
"""One rank that has all of the model."""


class Group:
    """Implements Ranks over NCCL on GPUs, over gloo elsewhere."""

    def __init__(self, shard: Shard, store: Any, device: torch.device, timeout_s: float) -> None:
        """Returns when all ranks are here. `timeout_s`: of this, and of any wait of one rank for another.

        Raises ConfigError if the ranks do not meet, or if there is no NCCL for a GPU.
        """
        self._shard = shard
        self._is_gpu = device.type == "cuda"
        try:
            self._group = _make_group(shard, store, device, timedelta(seconds=timeout_s))
            self.total(torch.ones(1, device=device))
        except RuntimeError as error:
            raise ConfigError(
                f"expected {shard.size} ranks to meet but rank {shard.rank}: {error}"
            ) from error

    def total(self, x: Tensor) -> Tensor:
        # In float32 whatever the products gave: the stream is float32 too.
        mine = x.float().contiguous()
        if self._is_gpu:
            self._group.allreduce([mine]).wait()
            return mine
        # In the order of ranks: a ring's order depends on where in a batch a number lies.
        parts = [torch.empty_like(mine) for _ in range(self._shard.size)]
        self._group.allgather([parts], [mine]).wait()
        summed = parts[0]
        for part in parts[1:]:
            summed += part
        return summed

    def joined(self, columns: Tensor, num_columns: int) -> Tensor:
        num_rows, size = len(columns), self._shard.size
        widths = [len(Shard(rank, size).vocabulary(num_columns)) for rank in range(size)]
        # A gather wants equal sizes; shares of a vocabulary differ by one.
        padded = columns.new_zeros(num_rows, max(widths))
        padded[:, : columns.shape[1]] = columns
        pieces = [torch.empty_like(padded) for _ in widths] if self._shard.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group.gather([pieces] if pieces else [], [padded], options).wait()
        if not pieces:
            return columns.new_empty(0, num_columns)
        return torch.cat([piece[:, :width] for piece, width in zip(pieces, widths, strict=True)], dim=1)


def _make_group(shard: Shard, store: Any, device: torch.device, timeout: timedelta) -> Any:
    """A ProcessGroup. torch gives these classes no types."""
    if device.type != "cuda":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timeout
        return gloo(store, shard.rank, shard.size, options)
    if not dist.is_nccl_available():
        raise ConfigError("tensor_parallel_size: expected a torch with NCCL for GPUs but it has none")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, shard.rank, shard.size, options)
