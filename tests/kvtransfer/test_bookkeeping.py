"""ChunkPlan, Arrivals, SlotTable, Credits and SendSlots: whatever the order of events, nothing is lost or doubled."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import HandoffError, ProtocolError
from kvtransfer.incoming import Arrivals
from kvtransfer.plan import MAX_SENDS, ChunkPlan
from kvtransfer.slots import (
    KEPT,
    KEPT_SLOTS,
    QUARANTINE_GRACE_S,
    WINDOW,
    Credits,
    QuarantineBudget,
    SendSlots,
    SlotCounts,
    SlotTable,
)

sizes = st.integers(0, 70)


@settings(max_examples=60)
@given(st.data(), sizes, st.integers(1, 8), st.integers(1, 20))
def test_a_plan_cuts_every_token_once_and_no_piece_is_too_long(
    data: st.DataObject, num_tokens: int, block_size: int, max_tokens: int
) -> None:
    start = data.draw(st.integers(0, num_tokens))
    least_whole = data.draw(st.integers(1, 80))
    plan = ChunkPlan(start, num_tokens, block_size, max_tokens, least_whole)
    arrivals = Arrivals(start, num_tokens)
    damaged: Counter[int] = Counter()
    num_sent = 0
    for num_ready in [*data.draw(st.lists(sizes, max_size=6)), num_tokens]:
        plan.ready(num_ready)
        while plan.has_next:
            assert plan.is_under_way
            assert not plan.is_complete
            chunk = plan.next()
            num_sent += 1
            assert chunk.high - chunk.low <= max_tokens
            assert chunk.high <= max(num_ready, start) or num_ready >= num_tokens
            arrivals.check(chunk.number, chunk.low, chunk.high)
            is_ok = damaged[chunk.number] >= MAX_SENDS - 1 or data.draw(st.booleans())
            damaged[chunk.number] += not is_ok
            if is_ok:
                assert not arrivals.has(chunk.number)
                arrivals.add(chunk.number, chunk.low, chunk.high)
            plan.done(chunk.number, is_ok)
            plan.done(chunk.number, is_ok)  # a duplicate
    assert plan.is_complete
    assert num_sent == plan.num_wanted
    assert arrivals.is_complete(plan.num_chunks, num_tokens)
    assert not arrivals.is_complete(plan.num_chunks + 1, num_tokens)


@settings(max_examples=60)
@given(st.lists(sizes, max_size=6), sizes, st.integers(1, 8), st.integers(1, 20))
def test_a_plan_without_an_end_sends_full_blocks_until_it_is_told_the_end(
    readies: list[int], num_tokens: int, block_size: int, max_tokens: int
) -> None:
    plan, arrivals = ChunkPlan(0, None, block_size, max_tokens), Arrivals(0, num_tokens)

    def send() -> int:
        high = 0
        while plan.has_next:
            chunk = plan.next()
            high = chunk.high
            arrivals.check(chunk.number, chunk.low, chunk.high)
            arrivals.add(chunk.number, chunk.low, chunk.high)
            plan.done(chunk.number, True)
        return high

    for num_ready in (min(count, num_tokens) for count in readies):
        plan.ready(num_ready)
        assert send() % block_size == 0
        assert not plan.is_sent
    plan.end(num_tokens)
    send()
    assert plan.is_complete
    assert arrivals.is_complete(plan.num_chunks, num_tokens)


def test_the_part_of_a_block_at_the_end_goes_alone_behind_enough_whole_ones() -> None:
    def cuts(num_tokens: int, least_whole: int) -> list[tuple[int, int]]:
        plan = ChunkPlan(0, num_tokens, 4, 20, least_whole)
        plan.ready(num_tokens)
        chunks = [plan.next() for _ in range(plan.num_chunks)]
        return [(chunk.low, chunk.high) for chunk in chunks]

    assert cuts(18, 16) == [(0, 16), (16, 18)]
    assert cuts(18, 17) == [(0, 18)]
    assert cuts(16, 1) == [(0, 16)]
    assert cuts(3, 1) == [(0, 3)]
    assert cuts(39, 16) == [(0, 20), (20, 36), (36, 39)]


def test_a_piece_damaged_too_often_is_a_typed_error() -> None:
    plan = ChunkPlan(0, 4, 4, 4)
    plan.ready(4)
    for _ in range(MAX_SENDS - 1):
        plan.done(plan.next().number, False)
    number = plan.next().number
    with pytest.raises(HandoffError, match=r"tokens \[0, 4\) arrived damaged 3 times"):
        plan.done(number, False)


@settings(max_examples=60)
@given(st.lists(st.tuples(sizes, sizes), max_size=8), sizes, sizes)
def test_arrivals_are_complete_only_if_no_token_is_missing(
    ranges: list[tuple[int, int]], start: int, num_tokens: int
) -> None:
    arrivals, seen = Arrivals(start, num_tokens), set[int]()
    count = 0
    for low, high in ranges:
        try:
            arrivals.check(count, low, high)
        except ProtocolError:
            assert not start <= low < high <= num_tokens
            continue
        arrivals.add(count, low, high)
        seen |= set(range(low, high))
        count += 1
    assert arrivals.is_complete(count, num_tokens) == (
        start <= num_tokens and seen == set(range(start, num_tokens))
    )


def test_a_chunk_that_changes_its_range_is_nonsense() -> None:
    arrivals = Arrivals(0, 8)
    arrivals.add(0, 0, 4)
    arrivals.check(0, 0, 4)
    with pytest.raises(ProtocolError, match="expected chunk 0"):
        arrivals.check(0, 4, 8)


flows = st.tuples(st.integers(0, 1), st.sampled_from(["", "a", "b"]))
events = st.sampled_from(["want", "keep", "begin", "finish", "quarantine", "unused", "peer", "drop"])


@settings(max_examples=60)
@given(st.lists(st.tuples(events, flows, st.integers(0, 5)), max_size=40))
def test_slots_sum_up_and_each_has_one_owner(script: list[tuple[str, tuple[int, str], int]]) -> None:
    table = SlotTable(8)
    credits = Credits(table)
    granted: dict[int, tuple[int, str]] = {}
    receiving: set[int] = set()
    for event, flow, number in script:
        mine = [slot for slot, owner in granted.items() if owner == flow]
        if event == "want":
            credits.want(flow, number)
        elif event == "keep":
            credits.keep(flow[0], number - 1)
        elif event == "begin":
            owners = (flow, (flow[0], KEPT)) if flow[1] else (flow,)
            is_mine = granted.get(number) in owners and number not in receiving
            assert table.try_begin(number, flow) == is_mine
            if is_mine:
                receiving.add(number)
                granted[number] = flow
        elif event == "finish" and number in receiving:
            table.finish(number)
            receiving.discard(number)
            del granted[number]
        elif event == "quarantine":
            assert table.quarantine(flow) == bool(mine)
        elif event == "unused":
            table.release_unused(flow)
            table.release_unused((flow[0], KEPT))  # changes nothing
            granted = {s: o for s, o in granted.items() if o != flow or s in receiving}
        elif event == "peer":
            credits.drop_peer(flow[0])
            table.release_peer(flow[0])
            granted = {s: o for s, o in granted.items() if o[0] != flow[0]}
            receiving &= set(granted)
        elif event == "drop":
            credits.drop(flow)
        for owner, slots in credits.hand_out().items():
            assert not set(slots) & set(granted)
            granted |= dict.fromkeys(slots, owner)
        counts = table.counts()
        assert counts.free == table.num_free == 8 - len(granted)
        assert counts.free + counts.granted + counts.receiving + counts.quarantined + counts.kept == 8
        assert counts.kept == sum(owner[1] == KEPT for owner in granted.values()) <= 2
    for connection in (0, 1):
        table.release_peer(connection)
    assert table.counts() == SlotCounts(8, 0, 0, 0)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=6))
def test_credits_go_round_and_nobody_waits_for_more_than_one_turn_of_the_others(wants: list[int]) -> None:
    table = SlotTable(1)
    credits = Credits(table)
    for index, total in enumerate(wants):
        credits.want((0, str(index)), total)
        credits.want((0, str(index)), total)
    served: Counter[int] = Counter()
    order: list[int] = []
    while given_out := credits.hand_out():
        ((flow, (slot,)),) = given_out.items()
        order.append(int(flow[1]))
        served[int(flow[1])] += 1
        table.finish(slot)
    assert [served[index] for index in range(len(wants))] == wants
    for round_number in range(max(wants)):
        size = sum(total > round_number for total in wants)
        assert len(set(order[:size])) == size
        order = order[size:]


def test_a_quarantine_over_its_budget_is_trouble_after_a_moment_until_slots_are_back() -> None:
    now_s, table = [0.0], SlotTable(4)
    budget = QuarantineBudget(table, 1.5, lambda: now_s[0])
    for flow in ("a", "b"):
        table.grant((0, flow))
        table.quarantine((0, flow))
        assert budget.trouble() is None
    now_s[0] += QUARANTINE_GRACE_S
    assert budget.trouble() == "expected at most 1.5 staging slots in quarantine but 2 are"
    table.release_unused((0, "a"))
    assert budget.trouble() is None
    table.grant((0, "c"))
    table.quarantine((0, "c"))
    assert budget.trouble() is None


def test_one_flow_holds_a_window_of_slots_and_the_rest_is_for_others() -> None:
    table = SlotTable(2 * WINDOW)
    credits = Credits(table)
    credits.want((0, "a"), 100)
    first = credits.hand_out()[0, "a"]
    assert len(first) == WINDOW
    assert credits.hand_out() == {}
    credits.want((0, "b"), 1)
    assert list(credits.hand_out()) == [(0, "b")]
    table.finish(first[0])
    assert list(credits.hand_out()) == [(0, "a")]


def test_connections_keep_a_share_of_the_slots_in_turn_and_never_the_last_ones() -> None:
    table = SlotTable(16)
    credits = Credits(table)
    for connection in range(5):
        credits.keep(connection, 9)
    given = credits.hand_out()
    assert {flow[0]: len(slots) for flow, slots in given.items()} == {0: 1, 1: 1, 2: 1, 3: 1}
    assert table.try_begin(given[0, KEPT][0], (0, "a"))
    (again,) = credits.hand_out()
    assert again == (4, KEPT)  # who has waited is before who has just used one
    credits.drop_peer(4)
    table.release_peer(4)
    assert list(credits.hand_out()) == [(0, KEPT)]
    alone = Credits(SlotTable(16))
    alone.keep(0, 9)
    assert [len(slots) for slots in alone.hand_out().values()] == [KEPT_SLOTS]
    few = Credits(SlotTable(3))
    few.keep(0, 9)
    assert few.hand_out() == {}


def test_who_waits_for_a_send_slot_is_called_in_turn() -> None:
    slots, called = SendSlots(1, 16), list[str]()
    first, second = (lambda: called.append("first")), (lambda: called.append("second"))
    slot = slots.try_take(first)
    assert slot == 0
    assert slots.try_take(first) is None
    assert slots.try_take(second) is None
    slots.give_back(slot)
    assert called == ["first"]
    slots.pass_on()
    assert called == ["first", "second"]
    slots.pass_on()
    assert called == ["first", "second"]
    assert slots.num_free == 1
