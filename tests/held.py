"""What an object holds, counted, so that a test can say that it does not grow."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

_OURS = ("contracts.", "policy.", "kvtransfer.", "coordinator.")
_CONTAINERS = (dict, list, set, frozenset, tuple, deque, OrderedDict)


def held_by(roots: Iterable[object]) -> Counter[str]:
    """All that is reachable from `roots` through objects of ours and containers, by type; containers by their sizes."""
    seen: set[int] = set()
    counts: Counter[str] = Counter()
    left = list(roots)
    while left:
        each = left.pop()
        kind = type(each)
        if id(each) in seen or not (kind in _CONTAINERS or kind.__module__.startswith(_OURS)):
            continue
        seen.add(id(each))
        counts[kind.__name__] += len(each) if isinstance(each, _CONTAINERS) else 1
        left += [inner for inner in gc.get_referents(each) if not isinstance(inner, type)]
    return counts
