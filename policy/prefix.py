"""Which worker holds how much of a prompt: an index over chained block hashes.

A block's hash covers all tokens before it and the salt (contracts/blocks.py), so equal hashes mean equal prefixes.
Salts differ by tenant: nobody can learn by timing what another tenant asked. Keys are the hash's first 8 bytes: a
collision (one in 10¹³ at a million blocks per look-up) costs one wrong guess; workers compare whole hashes.

Life of an entry: a worker reports a stored block -> listed -> reported evicted, or its worker is dropped and `tidy`
comes by, or the index is over `max_blocks` and the entry is among the oldest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

Key = int
_Holders = tuple[int, ...]


def tenant_salt(secret: bytes, tenant: str) -> str:
    """Salt of a tenant's block hashes; without `secret` nobody can compute it."""
    return hashlib.blake2b(tenant.encode(), key=secret[:64], digest_size=16).hexdigest()


def keys_of(hashes: Iterable[bytes]) -> list[Key]:
    return [int.from_bytes(block_hash[:8], "little") for block_hash in hashes]


class PrefixIndex:
    """About 140 bytes a block: one dict entry, one int, and a tuple of holders shared by all blocks with the same."""

    MAX_PROBES: ClassVar[int] = 256  # of one look-up; holders change at few places along one prompt
    TIDIED: ClassVar[int] = 64  # entries at a time: 0.05 ms
    SPARE_GROUPS: ClassVar[int] = 1024  # of holders, which are made as blocks come and go
    # NOTE: many at once. A dict finds its oldest entry by passing all that were deleted before it: one by one, a full
    # index of a million blocks took 0.3 ms for each.
    EVICTED_SHARE: ClassVar[int] = 64  # of all blocks, one in so many goes when there are too many
    MAX_HOLDERS: ClassVar[int] = 32  # listed per block; what more workers hold draws nobody anywhere

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[Key, _Holders] = {}
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}  # live slots only
        self._next_slot = 0
        self._shared: dict[_Holders, _Holders] = {}
        self._num_groups = 0  # of holders, when all was tidy
        self._has_dropped = False  # workers, since the last tidying began
        self._untidy: Iterator[Key] | None = None  # what it has not come to yet

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, worker_id: str, keys: Iterable[Key]) -> None:
        """The worker stored these blocks."""
        slot = self._slots.get(worker_id)
        if slot is None:
            slot = self._slots[worker_id] = self._next_slot
            self._next_slot += 1
            self._names[slot] = worker_id
        alone = self._share((slot,))
        holders = self._holders
        for key in keys:
            known = holders.get(key)
            if known is None:
                holders[key] = alone
            elif slot not in known:
                live = [s for s in known if s in self._names]
                if len(live) < self.MAX_HOLDERS:
                    holders[key] = self._share((*live, slot))
        if len(holders) > self._max_blocks:
            num_over = len(holders) - self._max_blocks + self._max_blocks // self.EVICTED_SHARE
            for key in list(islice(holders, num_over)):
                del holders[key]

    def remove(self, worker_id: str, keys: Iterable[Key]) -> None:
        """The worker evicted these blocks. Unknown ones are ignored."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        for key in keys:
            known = self._holders.get(key)
            if known is None or slot not in known:
                continue
            self._keep(key, (s for s in known if s != slot))

    def drop_worker(self, worker_id: str) -> None:
        """The worker is gone: its entries count no more at once, and leave memory with `tidy`."""
        slot = self._slots.pop(worker_id, None)
        if slot is not None:
            del self._names[slot]
            self._has_dropped = True

    def tidy(self) -> bool:
        """Forget a part of what nobody asks for: entries of dropped workers, and groups of holders that no block has.
        TIDIED entries at most, so call it often; whether there is more to do.
        """
        if self._untidy is None:
            if not self._has_dropped and len(self._shared) <= 2 * self._num_groups + self.SPARE_GROUPS:
                return False
            self._untidy, self._shared, self._has_dropped = iter(tuple(self._holders)), {}, False
        keys = list(islice(self._untidy, self.TIDIED))
        for key in keys:
            self._keep(key, self._holders.get(key, ()))
        if len(keys) < self.TIDIED:
            self._untidy, self._num_groups = None, len(self._shared)
        return self._untidy is not None or self._has_dropped

    def longest(self, keys: Sequence[Key]) -> dict[str, int]:
        """Leading blocks of `keys` that each worker holds; workers without the first are absent.

        Workers evict from the end of a chain, so who holds a block holds those before it: the places where holders
        change are found by halving, not by walking.
        """
        found: dict[int, int] = {}
        if not keys:
            return {}
        get = self._holders.get
        first = get(keys[0])
        if first is None:
            return {}
        last = get(keys[-1])
        names, size = self._names, len(keys)
        if first is last:  # the usual case: one conversation at one place
            return {names[slot]: size for slot in first if slot in names}
        probes = self.MAX_PROBES
        stack: list[tuple[int, _Holders | None, int, _Holders | None]] = [(0, first, size - 1, last)]
        while stack and probes > 0:
            low, at_low, high, at_high = stack.pop()
            if at_low is None:
                continue
            if at_low is at_high or high - low <= 1:
                for slot in at_low:
                    found[slot] = max(found.get(slot, 0), low + 1)
                if at_high is not None:
                    for slot in at_high:
                        found[slot] = max(found.get(slot, 0), high + 1)
                continue
            middle = (low + high) // 2
            at_middle = get(keys[middle])
            probes -= 1
            if at_middle is None:
                stack.append((low, at_low, middle, None))
            else:
                stack += [(low, at_low, middle, at_middle), (middle, at_middle, high, at_high)]
        start = set(first)
        return {names[slot]: depth for slot, depth in found.items() if slot in names and slot in start}

    def _keep(self, key: Key, holders: Iterable[int]) -> None:
        """As the holders of a block, as far as they live."""
        live = tuple(slot for slot in holders if slot in self._names)
        if live:
            self._holders[key] = self._share(live)
        else:
            self._holders.pop(key, None)

    def _share(self, holders: _Holders) -> _Holders:
        return self._shared.setdefault(holders, holders)
