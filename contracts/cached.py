"""What a worker tells coordinators of its prefix cache: so all of them know where a prefix is, whoever filled it."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

KEY_BYTES = 8
"""Of each block's hash (contracts/blocks.py): enough to guess by, and salted like it."""


@dataclass(frozen=True, slots=True)
class Cached:
    """Blocks that were stored and that were evicted since it last told, as `packed`. `is_all`: whatever it told before
    is void.
    """

    stored: bytes = b""
    evicted: bytes = b""
    is_all: bool = False


def packed(hashes: Iterable[bytes]) -> bytes:
    """The first bytes of each."""
    return b"".join([block_hash[:KEY_BYTES] for block_hash in hashes])


def keys_in(told: bytes) -> array[int]:
    """As `policy.prefix.keys_of` has them. What is over at the end, which only a broken peer sends, is ignored."""
    keys = array("Q", told[: len(told) // KEY_BYTES * KEY_BYTES])
    if sys.byteorder == "big":
        keys.byteswap()
    return keys
