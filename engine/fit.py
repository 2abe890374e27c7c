"""Whether a model fits into memory, asked before the first weight is read.

    needed = weights + the matrix being packed + activations of one step + KV cache + decode graphs + what the
             libraries take

Two workers that start at the same moment see the same free memory; each is right for itself alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from contracts.errors import ConfigError
from engine.spec import ModelSpec
from engine.tensor_names import largest_matrix, weight_bytes

AvailableBytes = Callable[[torch.device], int | None]

NUM_STEP_TOKENS = 1024
"""Tokens of the largest step that is planned for."""
NUM_STEP_LOGITS = 16
"""Rows of logits of that step; each is a vocabulary of float32."""
LIBRARY_BYTES = 64 << 20
"""Scratch buffers of torch and oneDNN beyond tensors."""

GRAPH_BYTES = 16 << 20
"""What a driver is given for one recorded step beyond tensors: an allowance, to be measured on a GPU."""
_COPIES_OF_LOGITS = 3
"""Of the largest graph: the product, the best of each row, and what is refined."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes, by what they are for."""

    weights: int
    packing: int
    activations: int
    kv_cache: int
    graphs: int = 0

    @property
    def total(self) -> int:
        parts = (self.weights, self.packing, self.activations, self.kv_cache, self.graphs)
        return sum(parts) + LIBRARY_BYTES


def need_of(
    spec: ModelSpec,
    dtype: torch.dtype,
    kv_bytes: int = 0,
    quantized_bytes: int | None = None,
    graph_buckets: Sequence[int] = (),
) -> Need:
    """What serving `spec` takes with weights of `dtype` (or `quantized_bytes` of them), `kv_bytes` of KV cache and
    recorded decode steps of so many sequences."""
    width = _width(spec)
    logits = NUM_STEP_LOGITS * spec.vocab_size
    return Need(
        weights=weight_bytes(spec, dtype.itemsize) if quantized_bytes is None else quantized_bytes,
        # Packed for float32, or widened to it for each call where the CPU has no bfloat16 instructions.
        packing=largest_matrix(spec) * torch.float32.itemsize,
        activations=(NUM_STEP_TOKENS * 2 * width + logits) * torch.float32.itemsize,
        kv_cache=kv_bytes,
        graphs=graph_bytes(spec, graph_buckets),
    )


def graph_bytes(spec: ModelSpec, buckets: Sequence[int]) -> int:
    """What recorded decode steps take: each its logits, all together the largest one's activations.

    Their block tables are numbers per block, and not counted. A step with experts is not recorded: the host asks which
    of them were chosen.
    """
    if not buckets or spec.is_sparse:
        return 0
    logits = (sum(buckets) + _COPIES_OF_LOGITS * max(buckets)) * spec.vocab_size
    activations = max(buckets) * 2 * _width(spec)
    return (logits + activations) * torch.float32.itemsize + len(buckets) * GRAPH_BYTES


def _width(spec: ModelSpec) -> int:
    """Numbers of a token's widest activation."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    return max(2 * spec.intermediate_size, heads * spec.head_dim, 2 * spec.hidden_size)


def check_fit(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    kv_bytes: int,
    available: AvailableBytes,
    quantized_bytes: int | None = None,
    num_ranks: int = 1,
    graph_buckets: Sequence[int] = (),
    rounded_bytes: Callable[[], Mapping[str, int]] = dict,
) -> None:
    """Raises ConfigError saying what is needed, what there is, and what to try. Unknown free memory is no reason.

    Of a model on `num_ranks` ranks, `spec` and the bytes are one rank's; ranks on a CPU share its memory.
    `rounded_bytes`: of the weights by what engine.quantization may be instead; asked only for what does not fit.
    """
    need, free = need_of(spec, dtype, kv_bytes, quantized_bytes, graph_buckets), available(device)
    if device.type != "cpu":  # there only blocks are packed: their codes are copied, a byte each at most
        need = replace(need, packing=largest_matrix(spec))
    if free is not None and device.type == "cpu":
        free //= num_ranks
    if free is None or need.total <= free:
        return
    working = need.total - need.weights - need.kv_cache
    parts = f"weights {_size(need.weights)}, KV cache {_size(need.kv_cache)}, working memory {_size(working)}"
    each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
    raise ConfigError(
        f"the model does not fit: needs {_size(need.total)} ({parts}){each}, {device.type} has {_size(free)}; "
        f"try {_advice(dtype, need, free, rounded_bytes())}"
    )


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device; for a CPU what the kernel can give without swapping, within the limit of a container.

    None where neither is to be learnt.
    """
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    known = [value for value in (_meminfo_bytes(_MEMINFO), _cgroup_bytes(_CGROUP)) if value is not None]
    return min(known, default=None)


def _advice(dtype: torch.dtype, need: Need, free: int, rounded_bytes: Mapping[str, int]) -> str:
    tries: list[str] = []
    without_kv = need.total - need.kv_cache
    if need.kv_cache and without_kv < free:
        tries.append(
            f"a KV cache of {_size(free - without_kv)} or less (engine.kv_cache_bytes or engine.num_blocks)"
        )
    if need.graphs and need.total - need.graphs <= free:
        tries.append("engine.cuda_graphs false")
    if dtype == torch.float32:
        halved = need.total - need.weights // 2
        tries.append(f"model.dtype bfloat16 (needs {_size(halved)})")
    for mode, num_bytes in rounded_bytes.items():
        if num_bytes < need.weights:
            tries.append(f"engine.quantization {mode} (needs {_size(need.total - need.weights + num_bytes)})")
    return ", ".join([*tries, "a smaller model", "a machine with more memory"])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"


def _meminfo_bytes(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _cgroup_bytes(folder: Path) -> int | None:
    """What a container (cgroup v2) may still take: its limit less its use; file pages can be dropped."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit == "max":
        return None
    droppable = sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
    return max(0, int(limit) - used + droppable)
