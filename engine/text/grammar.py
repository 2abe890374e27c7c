"""What an output must follow, as a grammar: written down once, compiled anywhere, followed token by token.

    JSON Schema, regex, choice, EBNF, tool calls ──► source (tried; travels) ──► Grammars.compile ──► GrammarState
                                                                                   (one per output)

The source is all that crosses a process: every worker compiles it for itself and replays the tokens that are out
already, so a handoff, a preemption or a fail-over needs no state. The work is done by llguidance: a few milliseconds to
compile, some tens of microseconds per mask, both bounded by its own fuel; see docs/decisions.md.

EOS is no token of a grammar here: a model may have several, and the matcher knows one.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from contracts.errors import BatonError, EngineError, GrammarError, RequestError
from engine.text.exact import exact
from engine.text.reasons import reason_of, reason_of_gbnf
from engine.text.tokenizer import TextModel

MAX_SOURCE_BYTES = 256 * 1024
_EBNF = "%ebnf "  # no grammar begins so
NUM_KEPT = 256  # compiled grammars; a few hundred kB each at most, usually far less

# Between JSON's parts a space, or a line end and its indentation: spaces or tabs, since models that may mix them do so
# to the last one that is allowed. With more freedom some models write nothing else.
_JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": r"( |\n( {0,12}|\t{0,4}))?", "lenient": False}


def check_size(source: str) -> None:
    """Raises RequestError for a source that is too long, whatever it says."""
    num_bytes = len(source.encode())
    if num_bytes > MAX_SOURCE_BYTES:
        raise RequestError(f"expected a grammar of at most {MAX_SOURCE_BYTES} bytes but got {num_bytes}")


def json_grammar(schema: dict[str, Any], whitespace: str | None = None) -> str:
    """One JSON value of this schema; keys come in its order. `whitespace`: a regex of what may stand between its parts,
    "" for nothing.
    """
    options = dict(_JSON_OPTIONS)
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    if whitespace == "":
        del options["whitespace_pattern"]
        options["whitespace_flexible"] = False
    source = json.dumps(exact(schema))
    return str(LLMatcher.grammar_from_json_schema(source, overrides=options))  # type: ignore[arg-type]


def regex_grammar(pattern: str) -> str:
    """The whole output matches `pattern` (Rust's syntax: no look-around, no back-references)."""
    return str(LLMatcher.grammar_from_regex(pattern))


def choice_grammar(choices: Sequence[str]) -> str:
    """Exactly one of `choices`."""
    return lark_grammar("start: " + " | ".join(map(json.dumps, choices)))


def ebnf_grammar(text: str) -> str:
    """GBNF (a rule named `root`) or Lark (a rule named `start`), as it came: for `translated`.

    NOTE: to tell the two apart, and to translate the first, may take the library minutes.
    """
    return _EBNF + text


def translated(source: str) -> str:
    """The source as `Grammars.compile` takes it. Raises RequestError for what is neither GBNF nor Lark."""
    if not source.startswith(_EBNF):
        return source
    try:
        return lark_grammar(any_to_lark(source.removeprefix(_EBNF)))
    except (
        Exception
    ) as error:  # the translator raises whatever comes to hand, the bare class for a missing rule
        told = "it ends too early" if isinstance(error, IndexError) else reason_of_gbnf(str(error))
        raise RequestError(f"expected GBNF or Lark but {told}") from error


def lark_grammar(text: str) -> str:
    """llguidance's dialect of Lark: JSON Schemas inline (`%json`), special tokens by id (`<[7]>`)."""
    return str(LLMatcher.grammar_from_lark(text))


def inline_json(schema: dict[str, Any]) -> str:
    """A schema as it stands inside `lark_grammar`."""
    return "%json " + json.dumps({**exact(schema), "x-guidance": _JSON_OPTIONS})


def json_in_lark(source: str) -> str | None:
    """What `json_grammar` made, as it stands inside `lark_grammar`; None for any other source."""
    if not source.startswith('{"grammars"'):
        return None
    schema = json.loads(source)["grammars"][0]["json_schema"]
    return None if schema is None else f"%json {json.dumps(schema)}"


class GrammarState:
    """Where one output stands in its grammar. Not thread-safe; the engine thread's.

    `error` is set when the grammar cannot be followed any further (its own limits); from then on only EOS may come.
    """

    __slots__ = ("_eos_ids", "_matcher", "_vocab_size", "error")

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self.error: BatonError | None = None

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab_size]: the tokens that may come next, whether or not the output may end here instead."""
        if self.error is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            if not self._has_failed():
                mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
                mask[list(self._eos_ids)] = False
                return mask
        return np.zeros(self._vocab_size, dtype=np.bool_)

    def allows(self, token_id: int) -> bool:
        """Whether `allowed` has it, at a fraction of the cost of asking about all of them."""
        if self.error is not None or token_id in self._eos_ids or not 0 <= token_id < self._vocab_size:
            return False
        return bool(self._matcher.validate_tokens([token_id]) == 1)

    @property
    def may_end(self) -> bool:
        """Whether the output so far is complete, or no more can be said of it."""
        return self.error is not None or self._matcher.is_accepting()

    def advance(self, token_id: int) -> None:
        """Follow one token of the output. One that is not allowed sets `error`."""
        if token_id not in self._eos_ids and self.error is None:
            self._matcher.consume_token(token_id)
            self._has_failed()

    def copy(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._vocab_size, self._eos_ids)

    def _has_failed(self) -> bool:
        if self._matcher.is_error():
            self.error = GrammarError(f"the output cannot follow its grammar any further: {self.reason}")
        return self.error is not None

    @property
    def reason(self) -> str:
        """Why it cannot."""
        return reason_of(self._matcher.get_error()) or "nothing but an empty output follows it"


class Grammars:
    """Compiles for one model, and keeps what it compiled. Safe to call from any thread; a call may take milliseconds.

    The first call makes the model's token tree: some tenths of a second (see LazyGrammars.warm).
    """

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, GrammarState] = OrderedDict()

    def compile(self, source: str) -> GrammarState:
        """The state before the first token. Raises RequestError for what is no grammar, or too large a one."""
        check_size(source)
        with self._lock:
            state = self._kept.get(source)
            if state is None and self._tokenizer is None:
                self._tokenizer = LLTokenizer(_wrapped(self._text))
        if state is None:
            state = self._compiled(
                source
            )  # outside of the lock: others' grammars need not wait for a slow one
        with self._lock:
            state = self._kept.setdefault(source, state)
            self._kept.move_to_end(source)
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
            return state.copy()

    def _compiled(self, source: str) -> GrammarState:
        assert self._tokenizer is not None
        limits = LLParserLimits(verbose_errors=False)
        state = GrammarState(
            LLMatcher(self._tokenizer, source, log_level=0, limits=limits),
            self._text.vocab_size,
            self._text.eos_ids,
        )
        # The first mask shows what compiling does not: states that explode, tokens that cannot spell it.
        if state._has_failed() or not state.allowed().any() or state.error is not None:
            raise GrammarError(f"expected a grammar that an output can follow but {state.reason}")
        return state


class LazyGrammars:
    """`Grammars` of a model whose tokenizer is read by `warm`; safe from any thread.

    NOTE: reading a tokenizer holds the interpreter for a second or more, during which no stream gets a token and no
    heartbeat leaves: whoever serves calls `warm` before its first stream.
    """

    def __init__(self, load: Callable[[], TextModel]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None
        self._failure: str | None = None

    def warm(self) -> None:
        """Read the tokenizer, once. A model without one serves all the same, just no grammars."""
        with self._lock:
            if self._grammars is not None or self._failure is not None:
                return
            try:
                grammars = Grammars(self._load())
                grammars.compile(regex_grammar("a?"))
                self._grammars = grammars
            except (OSError, BatonError) as error:
                self._failure = str(error)

    def behind(self, source: str, token_ids: Sequence[int]) -> GrammarState:
        """The state behind these tokens of an output. Raises RequestError as `Grammars.compile` does, EngineError if
        this model's tokenizer cannot be read.
        """
        self.warm()
        if self._grammars is None:
            raise EngineError(f"expected a tokenizer beside the weights but: {self._failure}")
        state = self._grammars.compile(source)
        for token_id in token_ids:
            state.advance(token_id)
        return state


class _Vocabulary:
    """A `TextModel` in the form that llguidance reads."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self.tokens = [text.token_bytes(i) for i in range(text.vocab_size)]
        self.special_token_ids = sorted(text.special_ids | text.eos_ids)
        self.eos_token_id = min(text.eos_ids, default=0)
        self.bos_token_id = text.bos_id

    def __call__(self, data: bytes | str) -> list[int]:
        source = data if isinstance(data, str) else data.decode("utf-8", "replace")
        return self._text.encode(source, add_special_tokens=False)


def _wrapped(text: TextModel) -> TokenizerWrapper:
    return TokenizerWrapper(_Vocabulary(text))
