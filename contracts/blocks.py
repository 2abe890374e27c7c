"""What both sides of a handoff, the prefix index and the audit agree on about KV blocks.

The audit of a worker counts every block in exactly one state, strongest first:
quarantined > in_handoff > running > reserved > cached > free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from contracts.errors import ConfigError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one token's KV: [num_layers, 2 (K, V), num_kv_heads, head_dim] of dtype ("float32" |
    "bfloat16" | "float16" | "float8_e4m3fn").

    `scales`: digest of what float8 numbers are multiplied by; the same bytes mean the same only where it is the same.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    scales: str = ""

    @property
    def bytes_per_token(self) -> int:
        itemsize = _ITEM_BYTES.get(self.dtype)
        if itemsize is None:
            raise ConfigError(f"kv dtype: expected {', '.join(_ITEM_BYTES)} but got {self.dtype!r}")
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


def head_ranges(num_kv_heads: int, degree: int) -> list[range]:
    """The kv heads that each of `degree` ranks holds: as even as can be, the first ranks have one more.

    With more ranks than heads, neighbours hold the same head. Raises ConfigError if a number is not positive.
    """
    if num_kv_heads < 1 or degree < 1:
        raise ConfigError(f"expected num_kv_heads and degree >= 1 but got {num_kv_heads} and {degree}")
    if degree > num_kv_heads:
        return [range(head, head + 1) for head in (rank * num_kv_heads // degree for rank in range(degree))]
    each, more = divmod(num_kv_heads, degree)
    starts = [rank * each + min(rank, more) for rank in range(degree + 1)]
    return [range(low, high) for low, high in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class BlockAudit:
    """Invariant 3: the six states sum to `total`, at every step, on every worker."""

    total: int
    free: int
    cached: int
    running: int
    reserved: int
    in_handoff: int
    quarantined: int

    @property
    def is_balanced(self) -> bool:
        states = (self.free, self.cached, self.running, self.reserved, self.in_handoff, self.quarantined)
        return min(states) >= 0 and sum(states) == self.total

    @property
    def num_available(self) -> int:
        """Blocks that can be granted now: free ones and cached ones nobody uses."""
        return self.free + self.cached


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def num_shared_at_most(num_tokens: int, block_size: int) -> int:
    """Blocks of a prompt that a cache can supply: whole ones, and not the last token, whose logits are wanted."""
    return (num_tokens - 1) // block_size


def block_hashes(
    token_ids: Sequence[int], block_size: int, salt: str = "", parent: bytes = b""
) -> list[bytes]:
    """Chained hash of each FULL block: h_i = H(h_{i-1}, tokens of block i), h_{-1} = `parent` or H(salt).

    16 bytes each; equal hashes mean equal token prefixes under an equal salt.
    """
    chain = parent or hashlib.blake2b(salt.encode(), digest_size=16).digest()
    hashes = []
    full = len(token_ids) // block_size * block_size
    for low, high in pairwise(range(0, full + 1, block_size)):
        packed = b"".join(t.to_bytes(4, "little") for t in token_ids[low:high])
        chain = hashlib.blake2b(chain + packed, digest_size=16).digest()
        hashes.append(chain)
    return hashes


def prompt_hash(token_ids: Sequence[int], salt: str = "") -> bytes:
    """Hash of a whole token sequence; binds a handoff to the prompt it was made for."""
    packed = b"".join(t.to_bytes(4, "little") for t in token_ids)
    return hashlib.blake2b(salt.encode() + b"\0" + packed, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """Who holds blocks: one line of the audit's detail."""

    request_id: str
    state: str
    num_blocks: int
    age_s: float
