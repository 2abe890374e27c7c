"""What the compiler makes of each kernel for GPUs that are not there: registers, shared memory, spills.

    python -m engine.kernels.triton.aot [--arch 80 90 100] [--all] [--json]

    case: a wrapper called on small CPU tensors ──► launch ──► Triton, told that the GPU is sm_N ──► ptxas ──► cubin
                                                                              cuobjdump reads what the cubin uses

Shapes that a kernel is not specialized for do not matter here; tiles, head sizes and dtypes do. Compiled kernels stay
in Triton's cache, by content. Exit status 1 if a kernel spills or needs more shared memory than the GPU has.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from engine.kernels.grouped import GroupedWeight
from engine.kernels.triton import (
    decode_attention,
    gated,
    grouped_linear,
    norm,
    prefill_attention,
    rope_write,
    sampling,
)
from engine.kernels.triton.launch import redirect
from engine.spec import AttentionRule

ARCHITECTURES = (80, 90, 100)
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that one program may have (CUDA C++ Programming Guide, technical specifications)."""
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")

Case = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel of one case. `spill_bytes`: stack and local memory of a thread."""

    case: str
    kernel: str
    arch: int
    num_warps: int
    registers: int
    shared_bytes: int
    spill_bytes: int

    @property
    def is_ok(self) -> bool:
        return self.spill_bytes == 0 and self.shared_bytes <= SHARED_BYTES[self.arch]

    def __str__(self) -> str:
        return (
            f"{'ok  ' if self.is_ok else 'FAIL'} sm_{self.arch:<4} {self.case:<30} {self.kernel:<14} "
            f"{self.num_warps:>2} warps {self.registers:>3} registers {self.shared_bytes:>6} bytes shared "
            f"{self.spill_bytes:>5} spilled"
        )


class _AbsentGpu:
    """What Triton asks of a driver when it compiles but does not run. A device number per target keeps caches apart."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def absent_gpu(arch: int) -> Iterator[list[tuple[Any, int]]]:
    """Inside, every launch compiles for sm_`arch` and appends (compiled kernel, number of warps)."""
    kernels: list[tuple[Any, int]] = []

    def compile_only(
        kernel: Any, grid: tuple[int, ...], args: tuple[object, ...], options: dict[str, Any]
    ) -> None:
        kernels.append((kernel.run(*args, grid=grid, warmup=True, **options), options["num_warps"]))

    driver = triton.runtime.driver
    driver.set_active(_AbsentGpu(arch))
    redirect(compile_only, (arch // 10, arch % 10))
    try:
        yield kernels
    finally:
        redirect(None, None)
        if torch.cuda.is_available():  # without a GPU there is no driver to go back to
            driver.reset_active()


def compile_case(name: str, case: Case, arch: int) -> list[Compiled]:
    """The kernels that `case` would launch on sm_`arch`."""
    with absent_gpu(arch) as kernels:
        case()
    found = []
    for kernel, num_warps in kernels:
        registers, spill_bytes = _usage(kernel.asm["cubin"])
        found.append(
            Compiled(name, kernel.name, arch, num_warps, registers, kernel.metadata.shared, spill_bytes)
        )
    return found


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of a thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True, timeout=60
        ).stdout
    usage = _USAGE.search(shown)
    assert usage is not None, f"cuobjdump said {shown!r}"
    registers, stack_bytes, local_bytes = map(int, usage.groups())
    return registers, stack_bytes + local_bytes


# --- cases ------------------------------------------------------------------------------------------------------------


def cases(is_whole: bool = False) -> dict[str, Case]:
    """Every kernel, at large tiles; `is_whole`: and whatever else a dtype, a head size or a batch makes of it."""
    plain, both = AttentionRule(0.1), AttentionRule(0.1, window=64, cap=30.0)
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    found: dict[str, Case] = {
        "swiglu": lambda: gated.swiglu(torch.zeros(1, 4096, dtype=bf16), bf16),
        "add_rms_norm 16384": partial(_norm, 16384),
        "rope_write 256 norm float8": partial(_rope_write, 256, fp8, True),
        "write_kv 128": partial(_write_kv, 128, bf16),
        "sample": lambda: sampling.sample(torch.zeros(1, 4096), torch.zeros(1, 4), torch.zeros(1)),
        "linear int4 minima 256": partial(_linear, "int4 minima", 256),
        "decode 128 float8": partial(_decode, 128, fp8, plain),
        "prefill 256 bfloat16 window cap": partial(_prefill, 256, bf16, both, 256),
    }
    if not is_whole:
        return found
    found["geglu"] = lambda: gated.geglu(torch.zeros(1, 4096, dtype=bf16), bf16)
    for hidden in (576, 4096):
        found[f"add_rms_norm {hidden}"] = partial(_norm, hidden)
    for head_dim, dtype in product((64, 80, 96, 128, 256), (bf16, torch.float32, fp8)):
        name = f"{head_dim} {str(dtype).removeprefix('torch.')}"
        found[f"write_kv {name}"] = partial(_write_kv, head_dim, dtype)
        for has_norm in (False, True):
            found[f"rope_write {name}{' norm' if has_norm else ''}"] = partial(
                _rope_write, head_dim, dtype, has_norm
            )
        for rule in (plain, both):
            kind = name if rule is plain else f"{name} window cap"
            found[f"decode {kind}"] = partial(_decode, head_dim, dtype, rule)
            for num_tokens in (32, 256):
                found[f"prefill {kind} {num_tokens}"] = partial(_prefill, head_dim, dtype, rule, num_tokens)
    for weights, num_tokens, dtype in product(
        ("int8", "int4", "int4 minima"), (1, 64, 256), (bf16, torch.float32)
    ):
        name = f"linear {weights} {num_tokens} {str(dtype).removeprefix('torch.')}"
        found[name] = partial(_linear, weights, num_tokens, dtype)
    return found


def _layer(head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(2, 2, 2, 2, 16, head_dim, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)[
        :, 0
    ].view(dtype)


def _scales(dtype: torch.dtype) -> Tensor | None:
    return torch.ones(2, 2) if dtype == torch.float8_e4m3fn else None


def _decode(head_dim: int, dtype: torch.dtype, rule: AttentionRule) -> None:
    table, lens = torch.zeros(1, 64, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    q = torch.zeros(1, 16, head_dim, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
    decode_attention.paged_attention(q, _layer(head_dim, dtype), table, lens, rule, _scales(dtype))


def _prefill(head_dim: int, dtype: torch.dtype, rule: AttentionRule, num_tokens: int) -> None:
    q = torch.zeros(num_tokens, 16, head_dim, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
    block_ids = torch.zeros(num_tokens // 16, dtype=torch.int64)
    prefill_attention.prefill_attention(q, _layer(head_dim, dtype), block_ids, 0, rule, _scales(dtype))


def _norm(hidden: int) -> None:
    x = torch.zeros(1, hidden)
    norm.add_rms_norm(x, x.bfloat16(), torch.ones(hidden), 1e-5, torch.bfloat16)


def _rope_write(head_dim: int, dtype: torch.dtype, has_norm: bool) -> None:
    heads = torch.zeros(1, 20, head_dim, dtype=torch.bfloat16)
    table, at = torch.zeros(1, 1, head_dim // 2), torch.zeros(1, dtype=torch.int64)
    weight = (torch.ones(18, head_dim), 1e-6) if has_norm else None
    rope_write.rope_write(heads, (table, table), _layer(head_dim, dtype), (at, at), weight, _scales(dtype))


def _write_kv(head_dim: int, dtype: torch.dtype) -> None:
    k, at = torch.zeros(1, 2, head_dim), torch.zeros(1, dtype=torch.int64)
    rope_write.write_kv(_layer(head_dim, dtype), k, k.bfloat16(), at, at, _scales(dtype))


def _linear(kind: str, num_tokens: int, x_dtype: torch.dtype = torch.bfloat16) -> None:
    scales = torch.zeros(128, 128, dtype=torch.float16)
    bits, width, dtype = (8, 4096, torch.int8) if kind == "int8" else (4, 2048, torch.uint8)
    minima = scales if kind == "int4 minima" else None
    weight = GroupedWeight(bits, torch.zeros(128, width, dtype=dtype), scales, minima)
    grouped_linear.grouped_linear(torch.zeros(num_tokens, 4096, dtype=x_dtype), weight)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.triton.aot", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel instead of a table")
    parser.add_argument(
        "--all", action="store_true", help="every variant of every kernel: ten minutes instead of one"
    )
    options = parser.parse_args(arguments)
    is_ok = True
    for name, case in cases(options.all).items():
        for arch in options.arch:
            for found in compile_case(name, case, arch):
                is_ok &= found.is_ok
                print(json.dumps(asdict(found)) if options.json else found, flush=True)
    return 0 if is_ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
