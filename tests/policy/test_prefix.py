"""The index tells the truth about leading blocks, and keeps tenants apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contracts.blocks import block_hashes
from policy.prefix import PrefixIndex, keys_of, tenant_salt

CHAINS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=20
)


def chain(branch: int, length: int) -> list[int]:
    """Chains share their first four blocks and differ after."""
    return [n if n < 4 else 1000 * (branch + 1) + n for n in range(length)]


@given(stored=CHAINS, branch=st.integers(0, 3), length=st.integers(1, 12))
def test_longest_is_what_a_walk_finds(stored: list[tuple[str, int, int]], branch: int, length: int) -> None:
    index = PrefixIndex()
    holds: dict[str, set[int]] = {}
    for worker, other, size in stored:
        index.add(worker, chain(other, size))
        holds.setdefault(worker, set()).update(chain(other, size))
    asked = chain(branch, length)
    expected = {}
    for worker, keys in holds.items():
        depth = next((n for n, key in enumerate(asked) if key not in keys), len(asked))
        if depth:
            expected[worker] = depth
    assert index.longest(asked) == expected


@given(stored=CHAINS, kept=st.integers(0, 11))
def test_evicted_ends_are_gone_and_beginnings_stay(stored: list[tuple[str, int, int]], kept: int) -> None:
    index = PrefixIndex()
    for worker, other, size in stored:
        index.add(worker, chain(other, size))
    worker, other, size = stored[0]
    index.remove(worker, chain(other, 12)[kept:])
    assert index.longest(chain(other, 12)).get(worker, 0) <= max(kept, 0)
    index.remove("nobody", chain(other, 12))


def tidied(index: PrefixIndex) -> PrefixIndex:
    while index.tidy():
        pass
    return index


def test_a_dropped_worker_is_never_named_and_leaves_when_it_is_tidied() -> None:
    index = PrefixIndex()
    index.add("a", [1, 2, 3])
    index.add("b", [1, 2])
    index.drop_worker("a")
    assert index.longest([1, 2, 3]) == {"b": 2}
    assert len(tidied(index)) == 2
    assert not index.tidy()
    index.add("a", [1])
    assert index.longest([1, 2]) == {"a": 1, "b": 2}


def test_tidying_takes_a_bounded_part_at_a_time_and_others_may_write_in_between() -> None:
    size = 3 * PrefixIndex.TIDIED + 1
    index = PrefixIndex()
    index.add("a", range(size))
    index.add("b", range(0, size, 2))
    index.drop_worker("a")
    num_calls = 1
    while index.tidy():
        index.remove("b", [2 * num_calls])
        index.add("c", [size + num_calls, 4])
        num_calls += 1
    assert num_calls == 4
    assert len(index) == -(-size // 2) - 2 + 3  # of b's without 2 and 6; three are new
    assert index.longest([0]) == {"b": 1}
    assert index.longest([4]) == {"c": 1}
    assert index.longest([size + 1, 4]) == {"c": 2}


@given(stored=CHAINS, dropped=st.sampled_from("abcd"), branch=st.integers(0, 3))
def test_tidying_changes_no_answer(stored: list[tuple[str, int, int]], dropped: str, branch: int) -> None:
    index = PrefixIndex()
    for worker, other, size in stored:
        index.add(worker, chain(other, size))
    index.drop_worker(dropped)
    before = index.longest(chain(branch, 12))
    assert tidied(index).longest(chain(branch, 12)) == before


def test_of_many_lives_of_workers_nothing_stays() -> None:
    """Neither their entries nor the groups of holders that they were in."""
    index = PrefixIndex()
    for life in range(1000):
        index.add(f"w{life}", range(8))
        index.add(f"v{life}", range(life % 8))
        if life:
            for name in "wv":
                index.drop_worker(f"{name}{life - 1}")
        tidied(index)
    assert len(index) == 8
    assert len(index._shared) <= 2
    assert len(index._slots) == len(index._names) == 2


def test_groups_of_holders_that_nobody_uses_any_more_are_forgotten() -> None:
    """Also where no worker ever leaves."""
    index, made = PrefixIndex(), set()
    for number in range(20 * PrefixIndex.SPARE_GROUPS):
        for digit in range(8):
            name = f"w{number // 3**digit % 3}{digit}"
            index.add(name, [number])
            index.remove(name, [number - 1])
            made.add(index._holders[number])
        index.tidy()
    while index.tidy():
        pass
    assert len(index._shared) <= 3 * PrefixIndex.SPARE_GROUPS < len(made) / 3


def test_the_oldest_entries_make_room() -> None:
    index = PrefixIndex(max_blocks=3)
    index.add("a", [1, 2, 3, 4])
    assert len(index) == 3
    assert index.longest([2, 3, 4]) == {"a": 3}


def test_a_full_index_makes_room_for_many_at_a_time() -> None:
    """One at a time, each would take as long as it takes to pass all that were forgotten before it."""
    index = PrefixIndex(max_blocks=640)
    index.add("a", range(641))
    assert len(index) == 640 - 640 // PrefixIndex.EVICTED_SHARE
    assert index.longest([11]) == {"a": 1}
    assert index.longest([10]) == {}


def test_holders_of_one_block_are_bounded() -> None:
    index = PrefixIndex()
    for number in range(200):
        index.add(f"w{number}", [7])
    assert len(index.longest([7])) == PrefixIndex.MAX_HOLDERS


def test_tenants_share_nothing() -> None:
    tokens = list(range(64))
    salts = [tenant_salt(b"secret", tenant) for tenant in ("one", "two")]
    one, two = (keys_of(block_hashes(tokens, 16, salt)) for salt in salts)
    assert not set(one) & set(two)
    assert tenant_salt(b"other", "one") != salts[0]
    index = PrefixIndex()
    index.add("a", one)
    assert index.longest(two) == {}
