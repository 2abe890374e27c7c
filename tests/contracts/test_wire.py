"""The codec: what goes in comes out, and whatever comes in ends in a message or a ProtocolError."""

from __future__ import annotations

import random
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import wire
from contracts.errors import ProtocolError
from contracts.messages import PROTOCOL_VERSION, Message, Ping, Tokens
from contracts.request import Token


def fill(hint: Any, rng: random.Random) -> Any:
    """Some value of a message's type. Hypothesis' own `from_type` needs seconds for these unions."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return hint(**{name: fill(kind, rng) for name, kind in get_type_hints(hint).items()})  # type: ignore[operator]
    if origin is Literal:
        return rng.choice(args)
    if origin is tuple:
        inner = [args[0]] * rng.randrange(4) if args[-1] is Ellipsis else args
        return tuple(fill(kind, rng) for kind in inner)
    if origin is dict:
        return {fill(args[0], rng): fill(args[1], rng) for _ in range(rng.randrange(3))}
    if args:  # X | None
        return fill(rng.choice(args), rng)
    values = {
        int: rng.choice([0, 1, -1, 2**63 - 1, rng.randrange(50_000)]),
        float: rng.choice([0.0, -1.5, 1e300, rng.random()]),
        str: rng.choice(["", "a", "prefill-a1", "é€𝄞", "x" * 300]),
        bytes: rng.randbytes(rng.randrange(20)),
        bool: rng.random() < 0.5,
        type(None): None,
    }
    return values[hint]


MESSAGES = st.builds(
    lambda cls, seed: fill(cls, random.Random(seed)), st.sampled_from(get_args(Message)), st.integers(0, 9999)
)


@given(MESSAGES)
def test_every_message_survives_the_wire(message: Any) -> None:
    assert wire.decode(wire.encode(message)) == message


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(payload)


@given(MESSAGES, st.data())
def test_a_damaged_frame_is_a_message_or_a_protocol_error(message: Any, data: st.DataObject) -> None:
    payload = bytearray(wire.encode(message))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] ^= data.draw(st.integers(1, 255))
    try:
        decoded = wire.decode(bytes(payload))
    except ProtocolError:
        return
    assert type(decoded) in wire.KINDS.values()


@given(MESSAGES, st.data())
def test_a_truncated_frame_is_a_protocol_error(message: Any, data: st.DataObject) -> None:
    payload = wire.encode(message)
    with pytest.raises(ProtocolError):
        wire.decode(payload[: data.draw(st.integers(0, len(payload) - 1))])


def test_unknown_fields_of_a_newer_peer_are_ignored() -> None:
    raw = msgpack.unpackb(wire.encode(Ping(7)))
    assert wire.decode(msgpack.packb({**raw, "added_later": 1})) == Ping(7)


def test_another_version_is_refused_with_both_versions() -> None:
    raw = msgpack.unpackb(wire.encode(Ping(7)))
    with pytest.raises(ProtocolError, match=rf"version {PROTOCOL_VERSION} but peer sent 99"):
        wire.decode(msgpack.packb({**raw, "v": 99}))


def test_a_wrong_type_names_the_field() -> None:
    raw = msgpack.unpackb(wire.encode(Ping(7)))
    with pytest.raises(ProtocolError, match=r"'ping': field 'number'"):
        wire.decode(msgpack.packb({**raw, "number": "many"}))


def test_one_frame_carries_a_step_of_tokens() -> None:
    plain = [(f"r{i}", Token(i, 5)) for i in range(64)]
    frame = Tokens.of([*plain, ("told", Token(0, 5, -0.5, ((5, -0.5), (6, -1.5))))])
    assert len(frame.plain) == 64
    assert wire.decode(wire.encode(frame)) == frame


def test_what_is_no_message_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="expected a message"):
        wire.encode(Token(0, 1))  # type: ignore[arg-type]


def test_keys_that_are_no_strings_are_a_protocol_error() -> None:
    raw = msgpack.unpackb(wire.encode(Ping(7)))
    with pytest.raises(ProtocolError, match="field names"):
        wire.decode(msgpack.packb({**raw, b"number": 1}))
