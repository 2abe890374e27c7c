"""Decode attention as the model asks a kernel set for it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model import Kernels
from engine.spec import AttentionRule


def attended(
    kernels: Kernels, q: Tensor, kv: Tensor, table: Tensor, lens: Tensor, rule: AttentionRule
) -> Tensor:
    """q [B, H, D], one row a sequence -> [B, H, D] in kv's dtype."""
    out = torch.empty(q.shape, dtype=kv.dtype)
    group = (torch.arange(len(q)), table.contiguous(), lens)
    kernels.attend_decodes(q.float().contiguous(), kv, group, rule, out)
    return out
