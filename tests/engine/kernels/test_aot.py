"""Kernels compiled for GPUs that are not here, by the compiler that ships with Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.kernels import cpu, reference
from engine.kernels.native import kernels as native
from engine.kernels.triton import kernel_set
from engine.kernels.triton.aot import ARCHITECTURES, SHARED_BYTES, Compiled
from engine.model import select_kernels

ROOT = Path(__file__).resolve().parents[3]
KERNELS = {
    "_add_rms_norm", "_decode", "_gate", "_merge", "_prefill", "_product", "_rope_write", "_sample", "_write",
}  # fmt: skip


@pytest.mark.slow
def test_no_kernel_spills_on_any_gpu() -> None:
    """In a process of its own: in this one kernels are interpreted. About a minute, then Triton's cache has them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "engine.kernels.triton.aot", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    found = [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]
    assert not [str(kernel) for kernel in found if not kernel.is_ok], done.stderr
    assert done.returncode == 0, done.stderr
    assert {(kernel.kernel, kernel.arch) for kernel in found} == {
        (name, arch) for name in KERNELS for arch in ARCHITECTURES
    }
    assert all(0 < kernel.registers <= 255 for kernel in found)


def test_spills_and_too_much_shared_memory_are_faults() -> None:
    fine = Compiled("case", "_decode", 80, 4, 100, SHARED_BYTES[80], 0)
    assert fine.is_ok
    assert not replace(fine, spill_bytes=8).is_ok
    assert not replace(fine, shared_bytes=SHARED_BYTES[80] + 1).is_ok
    assert replace(fine, shared_bytes=SHARED_BYTES[80] + 1, arch=90).is_ok


def test_each_device_has_its_kernel_set() -> None:
    assert select_kernels(torch.device("cpu")) in (native, cpu)  # cpu where there is no compiler
    assert select_kernels(torch.device("cuda")) is kernel_set
    assert select_kernels(torch.device("meta")) is reference
