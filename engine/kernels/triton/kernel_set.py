"""The kernel set of GPUs (`engine.model.Kernels`): Triton where it moves fewer bytes, torch's own matrix products.

Not in that protocol, and so not used by `engine.model` yet: the fused kernels of `norm`, `rope_write`, `gated`,
`sampling` and `grouped_linear`.
"""

from __future__ import annotations

from engine.kernels.reference import linear, logits, pack
from engine.kernels.triton.decode_attention import paged_attention
from engine.kernels.triton.prefill_attention import prefill_attention
from engine.kernels.triton.rope_write import write_kv

__all__ = ["linear", "logits", "pack", "paged_attention", "prefill_attention", "write_kv"]
