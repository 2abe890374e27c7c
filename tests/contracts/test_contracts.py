"""Tickets, block hashes and errors: the small nouns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.blocks import BlockAudit, block_hashes, num_blocks_for, prompt_hash
from contracts.errors import BatonError, Fault, LeaseExpiredError, OverloadedError, from_wire, to_wire
from contracts.ticket import Ticket, is_genuine, sign

TOKENS = st.lists(st.integers(0, 50_000), max_size=80)
TICKET = Ticket("h", "r", "prefill-a", 1, "decode-b", 2, 40, b"p" * 16)


def test_a_signed_ticket_is_genuine_and_any_change_shows() -> None:
    ticket = sign(TICKET, b"secret")
    assert is_genuine(ticket, b"secret")
    assert not is_genuine(ticket, b"other")
    for change in (
        {"handoff_id": "x"},
        {"request_id": "x"},
        {"target_id": "decode-c"},
        {"target_incarnation": 3},
        {"num_tokens": 41},
        {"prompt_hash": b"q" * 16},
        {"mac": b""},
    ):
        assert not is_genuine(replace(ticket, **change), b"secret"), change  # type: ignore[arg-type]


@given(TOKENS, TOKENS, st.integers(1, 20))
def test_equal_hashes_mean_equal_prefixes(left: list[int], right: list[int], block_size: int) -> None:
    pairs = zip(block_hashes(left, block_size), block_hashes(right, block_size), strict=False)
    for number, (a, b) in enumerate(pairs, start=1):
        assert (a == b) == (left[: number * block_size] == right[: number * block_size])


@given(TOKENS, st.integers(1, 20))
def test_only_full_blocks_are_hashed(tokens: list[int], block_size: int) -> None:
    assert len(block_hashes(tokens, block_size)) == len(tokens) // block_size
    assert num_blocks_for(len(tokens), block_size) - len(tokens) // block_size in (0, 1)


def test_another_salt_shares_nothing() -> None:
    tokens = list(range(64))
    assert not set(block_hashes(tokens, 16, "a")) & set(block_hashes(tokens, 16, "b"))
    assert prompt_hash(tokens, "a") != prompt_hash(tokens, "b")


def test_an_audit_that_does_not_add_up_is_not_balanced() -> None:
    assert BlockAudit(10, 4, 3, 1, 1, 1, 0).is_balanced
    assert not BlockAudit(10, 4, 3, 1, 1, 0, 0).is_balanced
    assert not BlockAudit(10, 11, -1, 0, 0, 0, 0).is_balanced


@pytest.mark.parametrize("error", [OverloadedError("full", retry_after_s=2.0), LeaseExpiredError("late")])
def test_errors_keep_class_message_and_patience_between_processes(error: BatonError) -> None:
    back = from_wire(to_wire(error))
    assert (type(back), back.message, back.retry_after_s) == (type(error), error.message, error.retry_after_s)


def test_an_unexpected_exception_becomes_a_fault() -> None:
    assert type(from_wire(to_wire(KeyError("x")))) is Fault
