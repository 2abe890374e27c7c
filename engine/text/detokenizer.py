"""Token ids to text as they come, never half a character.

    push(id) ─► text that is complete ─► … ─► flush() ─► what never became a character, as U+FFFD

The joined pieces equal `TextModel.decode` of all ids: both are the same bytes read as UTF-8. Nearly every token is
whole characters behind whole characters, and its text is looked up; only around a character that comes in parts is
anything decoded.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.tokenizer import TextModel

_MAX_CHAR_BYTES = 4


class Detokenizer:
    """One output's decoder.

    A prompt that ends inside a character (token-id prompts) has it completed by the output.
    """

    def __init__(
        self,
        text: TextModel,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        silent_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids`: special tokens that are text all the same. `silent_ids`: tokens that are none here."""
        self._text = text
        self._whole_texts = text.whole_texts
        self._hidden = (text.special_ids - shown_ids if skip_special_tokens else frozenset()) | silent_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b"".join(map(text.token_bytes, prompt_ids[-_MAX_CHAR_BYTES:]))
        begun = _unfinished(tail)
        self._decoder.decode(begun)
        self._is_between = not begun  # characters, not within one

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        if token_id in self._hidden:
            return ""
        if self._is_between and (whole := self._whole_texts[token_id]) is not None:
            return whole
        text = self._decoder.decode(self._text.token_bytes(token_id))
        self._is_between = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """The rest, at the end of the output."""
        return self._decoder.decode(b"", final=True)


def _unfinished(data: bytes) -> bytes:
    """The incomplete character at the end of `data`, if there is one."""
    for start in range(max(0, len(data) - _MAX_CHAR_BYTES + 1), len(data)):
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            if decoder.decode(data[start:]) == "":
                return data[start:]
        except UnicodeDecodeError:
            continue
    return b""
