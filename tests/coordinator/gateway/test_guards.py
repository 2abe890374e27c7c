"""Guards: nothing that they look for passes in two halves, and nothing else is changed."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import ConfigError, Fault
from coordinator.gateway.guards import Edit, GuardedText, Guards, Refusal, Window, load_hook
from examples.mask_emails import EMAIL

MASKS = ["examples.mask_emails:mask_answer"]
HERE = __name__


async def uncertain(window: Window) -> list[Edit]:
    """Edits that overlap each other and what is sent."""
    return [Edit(0, len(window.text), "all"), Edit(1, 2, "b")]


async def outside(window: Window) -> list[Edit]:
    return [Edit(0, len(window.text) + 1, "")]


async def forever(window: Window) -> list[Edit]:
    await asyncio.Event().wait()
    return []


async def refuse(window: Window) -> list[Edit]:
    if "secret" in window.text:
        raise Refusal("the answer has a secret in it")
    return []


def not_async(window: Window) -> list[Edit]:
    return []


def guarded(*hooks: str, width: int = 64, timeout_s: float = 5.0) -> GuardedText:
    return GuardedText(Guards([], hooks, width, timeout_s), "acme")


async def run(text: GuardedText, pieces: list[str]) -> str:
    parts = [await text.push(piece) for piece in pieces]
    return "".join(parts) + await text.push("", is_last=True)


WORDS = st.sampled_from(["a", "ann@example.org", "@", ".", " ", "x.y@z.co", "org", "bob", "\n", "é"])


@settings(max_examples=60)
@given(st.lists(WORDS, max_size=12), st.data())
def test_however_the_text_is_cut_it_comes_out_as_if_it_had_come_at_once(
    words: list[str], data: st.DataObject
) -> None:
    text = " ".join(words)  # or the rest of one match would be the beginning of another
    # As long as no address is longer than the window, which is what the window promises.
    width = max([1, *(len(match[0]) for match in EMAIL.finditer(text))])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    out = asyncio.run(run(guarded(*MASKS, width=width), pieces))
    assert out == EMAIL.sub("[e-mail]", text)


@settings(max_examples=30)
@given(st.text(max_size=60), st.integers(1, 8))
def test_without_anything_to_find_nothing_changes(text: str, width: int) -> None:
    assert EMAIL.search(text) is None
    assert asyncio.run(run(guarded(*MASKS, width=width), list(text))) == text


async def test_no_more_than_the_window_is_held_back() -> None:
    text = guarded(*MASKS, width=8)
    sent = ""
    for i in range(100):
        sent += await text.push(chr(97 + i % 26))
        assert len(sent) == max(i + 1 - 8, 0)


async def test_a_match_that_never_ends_is_not_held_for_ever() -> None:
    text = guarded(f"{HERE}:uncertain", width=4)
    shown = [await text.push("x") for _ in range(40)]
    assert any(shown)
    assert len(text._held) <= 9


async def test_overlapping_edits_become_one_that_covers_both() -> None:
    assert await guarded(f"{HERE}:uncertain").push("abcdef", is_last=True) == "all"


@pytest.mark.parametrize("hook", ["outside", "forever"])
async def test_a_guard_that_breaks_or_hangs_fails_the_request(hook: str) -> None:
    with pytest.raises(Fault, match=hook):
        await guarded(f"{HERE}:{hook}", timeout_s=0.01).push("abc", is_last=True)


async def test_a_refusal_is_the_guards_own_word() -> None:
    with pytest.raises(Refusal, match="secret in it"):
        await guarded(f"{HERE}:refuse", width=2).push("a secret")


@pytest.mark.parametrize("path", ["nowhere.at_all:f", f"{HERE}:missing", f"{HERE}:not_async"])
def test_a_hook_that_cannot_work_is_told_at_start(path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(path)):
        load_hook(path)
