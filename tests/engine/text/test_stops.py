"""Stop strings: found across tokens, never shown, nothing else held back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.text.stops import StopMatcher

AB = st.text("ab", max_size=6)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


def reference(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(STOPS, st.lists(AB, max_size=8), st.booleans())
def test_any_split_gives_what_the_whole_text_gives(
    stops: list[str], pieces: list[str], include: bool
) -> None:
    assert run(stops, pieces, include) == reference(stops, "".join(pieces), include)


@given(STOPS, st.lists(AB, max_size=8))
def test_held_back_is_only_a_beginning_of_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen, shown = "", ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_earliest_completion_wins_over_list_order() -> None:
    assert run(["five", "two"], ["one two ", "three five"]) == ("one ", "two")


def test_a_stop_at_the_start_leaves_nothing() -> None:
    assert run(["x"], ["x"]) == ("", "x")


def test_text_before_min_tokens_never_stops() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("ab a", can_stop=False) == "ab a"
    assert matcher.push("b") == "b"
    assert matcher.push("ab") == ""
    assert matcher.matched == "ab"
