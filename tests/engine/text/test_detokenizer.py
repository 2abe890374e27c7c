"""A stream of pieces is the text of the whole, whatever the tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import TextModel
from tests.engine.text.builders import make_text

TEXT = make_text()
IDS = st.lists(st.integers(0, 257), max_size=40)


def stream(
    text: TextModel, ids: list[int], prompt_ids: list[int] | None = None, skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(text, prompt_ids or [], skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@given(IDS, st.booleans())
def test_the_joined_stream_equals_the_decoded_whole(ids: list[int], skip: bool) -> None:
    assert "".join(stream(TEXT, ids, skip=skip)) == TEXT.decode(ids, skip_special_tokens=skip)


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_no_piece_of_valid_text_is_half_a_character(line: str) -> None:
    pieces = stream(TEXT, list(line.encode()))
    assert "".join(pieces) == line
    assert sum(piece.count("\ufffd") for piece in pieces) == line.count("\ufffd")


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), st.data())
def test_a_prompt_cut_inside_a_character_is_completed(line: str, data: st.DataObject) -> None:
    raw = list(line.encode())
    cut = data.draw(st.integers(0, len(raw)))
    shown = len(bytes(raw[:cut]).decode("utf-8", "ignore"))
    assert "".join(stream(TEXT, raw[cut:], raw[:cut])) == line[shown:]


def test_a_cut_character_ends_as_one_replacement() -> None:
    assert stream(TEXT, list("😀".encode()[:3])) == ["", "", "", "\ufffd"]
