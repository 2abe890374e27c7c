"""A worker's prefix cache as coordinators are told of it: all of it once, and then what has changed.

    a coordinator comes ──► all()          each beat, and whenever a request has left ──► latest(), to everybody

Whoever is told all after the latest of the others misses nothing: what changes in between is told again.
"""

from __future__ import annotations

from contracts.cached import Cached, packed
from engine.blocks import BlockPool


class CacheNews:
    """Of one pool. Any thread."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        pool.watch()

    def all(self) -> Cached:
        return Cached(packed(self._pool.indexed()), is_all=True)

    def latest(self) -> Cached | None:
        """None: nothing has changed."""
        stored, evicted = self._pool.take_news()
        return Cached(packed(stored), packed(evicted)) if stored or evicted else None
