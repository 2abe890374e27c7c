from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from contracts.blocks import block_hashes
from contracts.errors import ConfigError
from engine.blocks import BlockPool, Hold, HoldState

RUNNING = HoldState.RUNNING


def acquired(pool: BlockPool, token_ids: list[int], num_tokens: int = 0, salt: str = "") -> Hold:
    hold = pool.acquire("r", token_ids, max(num_tokens, len(token_ids)), RUNNING, salt)
    assert hold is not None
    return hold


def computed(pool: BlockPool, token_ids: list[int], salt: str = "") -> Hold:
    hold = acquired(pool, token_ids, salt=salt)
    pool.publish(hold, token_ids, len(token_ids))
    return hold


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="got 0 and 4"):
        BlockPool(0, 4)


def test_a_computed_prefix_is_shared_and_only_whole_blocks_of_it() -> None:
    pool = BlockPool(8, 4)
    first = computed(pool, list(range(10)))
    second = acquired(pool, [*range(9), 99, 98])
    assert second.num_cached_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert not set(second.block_ids[2:]) & set(first.block_ids)


def test_the_last_token_of_a_full_hit_is_left_to_compute() -> None:
    pool = BlockPool(8, 4)
    pool.release(computed(pool, list(range(8))))
    assert acquired(pool, list(range(8))).num_cached_tokens == 4
    assert acquired(pool, list(range(9))).num_cached_tokens == 8


def test_what_becomes_cached_and_what_is_evicted_is_told_once() -> None:
    pool = BlockPool(3, 4)
    pool.watch()
    first, second = block_hashes(range(8), 4), block_hashes(range(50, 58), 4)
    pool.release(computed(pool, list(range(9))))
    assert pool.take_news() == (first, [])
    assert pool.take_news() == ([], [])
    pool.release(computed(pool, list(range(50, 58))))  # takes the free block, and the end of the other prefix
    assert pool.take_news() == (second, [first[1]])
    assert set(pool.indexed()) == {first[0], *second}


def test_of_a_block_that_came_and_went_the_last_word_is_told() -> None:
    pool = BlockPool(1, 4)
    pool.watch()
    for low in (0, 10):
        pool.release(computed(pool, list(range(low, low + 4))))
    assert pool.take_news() == (block_hashes(range(10, 14), 4), block_hashes(range(4), 4))


def test_a_pool_that_nobody_watches_remembers_nothing() -> None:
    pool = BlockPool(3, 4)
    pool.release(computed(pool, list(range(9))))
    assert pool.take_news() == ([], [])


def test_what_is_not_computed_is_not_shared() -> None:
    pool = BlockPool(8, 4)
    hold = acquired(pool, list(range(10)))
    pool.publish(hold, list(range(10)), 7)
    assert acquired(pool, list(range(10))).num_cached_tokens == 4


def test_salts_do_not_share() -> None:
    pool = BlockPool(8, 4)
    computed(pool, list(range(10)), salt="a")
    assert acquired(pool, list(range(10)), salt="b").num_cached_tokens == 0


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    pool = BlockPool(8, 4)
    hold = acquired(pool, [1, 2, 3], num_tokens=4)
    assert pool.grow(hold, 9)
    pool.publish(hold, [1, 2, 3, 4, 5], 4)
    pool.publish(hold, [1, 2, 3, 4, 5, 6, 7, 8, 9], 8)
    pool.release(hold)
    assert acquired(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).num_cached_tokens == 8


def test_a_refused_acquire_changes_nothing() -> None:
    pool = BlockPool(4, 4)
    pool.release(computed(pool, list(range(9))))
    hold = acquired(pool, [50] * 5)
    before = pool.audit()
    assert pool.acquire("r2", list(range(12)), 20, RUNNING) is None
    assert not pool.grow(hold, 20)
    assert pool.audit() == before
    assert len(hold.block_ids) == 2
    pool.check()


def test_a_cached_block_counts_once_when_it_is_both_prefix_and_room() -> None:
    """Three cached blocks, one plain: a prompt that shares two of them can get two more, not four."""
    pool = BlockPool(4, 4)
    pool.release(computed(pool, list(range(12))))
    assert pool.acquire("r", list(range(9)), 20, RUNNING) is None
    hold = acquired(pool, list(range(9)), num_tokens=16)
    assert hold.num_cached_tokens == 8
    assert pool.num_available == 0
    pool.check()


def test_plain_blocks_go_first_then_the_oldest_prefix_from_its_end() -> None:
    pool = BlockPool(5, 4)
    pool.release(computed(pool, [1] * 8))
    pool.release(computed(pool, [2] * 8))
    acquired(pool, [3] * 4)
    assert pool.audit().cached == 4
    acquired(pool, [4] * 4)  # evicts the second block of the oldest prefix
    assert acquired(pool, [1] * 8, num_tokens=8).num_cached_tokens == 4
    assert pool.audit().cached == 1
    pool.check()


def test_the_first_to_publish_is_shared_and_the_copy_is_plain() -> None:
    pool = BlockPool(6, 4)
    one, two = acquired(pool, [1] * 5), acquired(pool, [1] * 5)
    pool.publish(two, [1] * 5, 5)
    pool.publish(one, [1] * 5, 5)
    assert acquired(pool, [1] * 5).block_ids[0] == two.block_ids[0]
    pool.release(one)
    assert pool.audit().cached == 0
    pool.check()


def test_release_is_idempotent_and_moves_after_it_are_ignored() -> None:
    pool = BlockPool(4, 4)
    hold = acquired(pool, [1] * 8)
    pool.release(hold)
    pool.release(hold)
    pool.move(hold, HoldState.QUARANTINED)
    pool.publish(hold, [1] * 8, 8)
    assert pool.audit().free == 4
    pool.check()


def test_a_shared_block_counts_in_its_strongest_state() -> None:
    pool = BlockPool(8, 4)
    first = computed(pool, list(range(9)))
    second = acquired(pool, list(range(9)))
    pool.move(second, HoldState.IN_HANDOFF)
    audit = pool.audit()
    assert (audit.running, audit.in_handoff, audit.free) == (1, 3, 4)
    pool.move(first, HoldState.QUARANTINED)
    audit = pool.audit()
    assert (audit.quarantined, audit.in_handoff) == (3, 1)


def test_owners_are_listed_with_their_age() -> None:
    now_s = [10.0]
    pool = BlockPool(8, 4, clock=lambda: now_s[0])
    pool.acquire("a", [1] * 5, 5, HoldState.RESERVED)
    now_s[0] = 12.5
    (owner,) = pool.owners()
    assert (owner.request_id, owner.state, owner.num_blocks, owner.age_s) == ("a", "reserved", 2, 2.5)


def test_threads_do_not_lose_blocks() -> None:
    pool = BlockPool(16, 4)

    def work(seed: int) -> None:
        for turn in range(200):
            tokens = [seed % 2] * (5 + turn % 20)
            hold = pool.acquire(f"{seed}", tokens, len(tokens), RUNNING)
            if hold is not None:
                pool.grow(hold, len(tokens) + 4)
                pool.publish(hold, tokens, len(tokens))
                pool.release(hold)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.num_available == 16
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random owners on a small pool. `written` is what a device would hold: (block, slot) -> tokens up to there."""

    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, 2)
        self.pool.watch()
        self.told: set[bytes] = set()
        self.tokens: dict[Hold, list[int]] = {}
        self.num_computed: dict[Hold, int] = {}
        self.written: dict[tuple[int, int], tuple[str, list[int]]] = {}

    def _compute(self, hold: Hold, num_tokens: int) -> None:
        tokens = self.tokens[hold]
        for position in range(self.num_computed[hold], num_tokens):
            place = (hold.block_ids[position // 2], position % 2)
            self.written[place] = (hold.salt, tokens[: position + 1])
        self.num_computed[hold] = max(self.num_computed[hold], num_tokens)
        self.pool.publish(hold, tokens, self.num_computed[hold])

    @rule(
        target=holds,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        extra=st.integers(0, 3),
        state=st.sampled_from(HoldState),
        salt=st.sampled_from(["", "x"]),
    )
    def acquire(self, tokens: list[int], extra: int, state: HoldState, salt: str) -> Hold | None:
        before = self.pool.audit()
        hold = self.pool.acquire("r", tokens, len(tokens) + extra, state, salt)
        if hold is None:
            assert self.pool.audit() == before
            assert before.num_available < -(-(len(tokens) + extra) // 2)
            return None
        self.tokens[hold] = list(tokens)
        self.num_computed[hold] = hold.num_cached_tokens
        assert hold.num_cached_tokens < len(tokens)
        assert len(hold.block_ids) == -(-(len(tokens) + extra) // 2)
        for position in range(hold.num_cached_tokens):
            place = (hold.block_ids[position // 2], position % 2)
            assert self.written[place] == (salt, tokens[: position + 1])
        return hold

    @rule(hold=holds, share=st.floats(0, 1))
    def compute(self, hold: Hold | None, share: float) -> None:
        if hold in self.tokens:
            self._compute(hold, round(share * len(self.tokens[hold])))

    @rule(hold=holds, token=st.integers(0, 1))
    def generate(self, hold: Hold | None, token: int) -> None:
        if hold in self.tokens and self.pool.grow(hold, len(self.tokens[hold]) + 1):
            self._compute(hold, len(self.tokens[hold]))
            self.tokens[hold].append(token)

    @rule(hold=holds, state=st.sampled_from(HoldState))
    def move(self, hold: Hold | None, state: HoldState) -> None:
        if hold is not None:
            self.pool.move(hold, state)

    @rule(hold=consumes(holds))
    def release(self, hold: Hold | None) -> None:
        if hold is not None:
            self.pool.release(hold)
            self.tokens.pop(hold, None)

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        self.pool.check()

    @rule()
    def tell(self) -> None:
        stored, evicted = self.pool.take_news()
        self.told = (self.told - set(evicted)) | set(stored)
        assert self.told == set(self.pool.indexed())

    @invariant()
    def nobody_wrote_into_what_is_computed(self) -> None:
        """So two holds share a block only where their tokens (and salts) are the same."""
        for hold, tokens in self.tokens.items():
            for position in range(self.num_computed[hold]):
                place = (hold.block_ids[position // 2], position % 2)
                assert self.written[place] == (hold.salt, tokens[: position + 1])

    def teardown(self) -> None:
        for hold in list(self.tokens):
            self.pool.release(hold)
        assert self.pool.num_available == 10
        self.pool.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40)
