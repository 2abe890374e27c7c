"""One request as the step loop sees it: its tokens so far, how many of them have KV, and the blocks that hold it.

    token_ids    | prompt_ids | output_ids (sent before this worker) | drawn here |
    KV in blocks |<------------- num_computed ------------->|

Both phases speak of `Sequence`; only the engine thread changes one. `EndRules` decides after which token it is over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch

from contracts.ends import end_after
from contracts.errors import BatonError, ConfigError
from contracts.request import Finished, GenerateRequest, PromptLogprob, SamplingParams, Token
from engine.blocks import Hold
from engine.sampler import SamplingRow, logprobs_of
from engine.text.grammar import GrammarState


class Sequence:
    """A request under way.

    `arrival_s` (monotonic) decides who is oldest. `num_cached_tokens` is what the client is told: the prompt tokens
    that were not computed for it. `is_ended` is set with the terminal event or the cancellation, never unset.

    `grammar` comes as it stands behind `output_ids`, and follows the tokens from here on.
    """

    __slots__ = (
        "_prompt_logprobs",
        "_prompt_set",
        "arrival_s",
        "grammar",
        "hold",
        "is_ended",
        "num_cached_tokens",
        "num_computed",
        "output_counts",
        "request",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerateRequest,
        hold: Hold | None = None,
        arrival_s: float | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        assert (grammar is not None) == bool(request.sampling.grammar), request.request_id
        self.request = request
        self.hold = hold
        self.grammar = grammar
        self.arrival_s = time.monotonic() if arrival_s is None else arrival_s
        self.token_ids: list[int] = [*request.prompt_ids, *request.output_ids]
        self.output_counts: Counter[int] = Counter(request.output_ids)
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.is_ended = False
        self._prompt_set: frozenset[int] | None = None
        self._prompt_logprobs: list[PromptLogprob] = [PromptLogprob()]

    def __repr__(self) -> str:
        return f"Sequence({self.request_id}, {self.num_computed}/{self.num_tokens} tokens)"

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        """Generated tokens, those sent before this worker included; the position of the next draw."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def block_ids(self) -> SequenceOf[int]:
        """The block table; empty while no blocks are held."""
        return self.hold.block_ids if self.hold is not None else ()

    @property
    def prompt_set(self) -> frozenset[int]:
        """The distinct prompt tokens. Made when first asked for: only the repetition penalty does."""
        if self._prompt_set is None:
            self._prompt_set = frozenset(self.request.prompt_ids)
        return self._prompt_set

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of prompt tokens are still to be read; never again once the first token is out."""
        return self.sampling.num_prompt_logprobs is not None and self.num_outputs == 0

    def read_prompt(self, logits: torch.Tensor) -> None:
        """Logits [n, V] of the n tokens from `num_computed` on: each tells of the token after it."""
        count = self.sampling.num_prompt_logprobs
        assert count is not None
        following = self.token_ids[self.num_computed + 1 : self.num_computed + 1 + len(logits)]
        found = logprobs_of(logits[: len(following)], following, count)
        self._prompt_logprobs += [PromptLogprob(logprob, top) for logprob, top in found]

    def told(self, token: Token) -> Token:
        """The first token, with the prompt's logprobs if they were asked for."""
        if self.sampling.num_prompt_logprobs is None or token.index > 0:
            return token
        # Nothing of such a prompt comes out of the cache: GenerateRequest.cache_key.
        assert len(self._prompt_logprobs) == self.num_prompt, (self, len(self._prompt_logprobs))
        return replace(token, prompt=tuple(self._prompt_logprobs))

    def append(self, token_id: int) -> None:
        """Add the token just drawn; it has no KV yet."""
        self.token_ids.append(token_id)
        self.output_counts[token_id] += 1
        if self.grammar is not None:
            self.grammar.advance(token_id)

    def take_over(self, first_token: Token, num_cached_tokens: int = 0) -> None:
        """Go on from a handoff: KV of all known tokens is in `hold`, and `first_token` is drawn and sent."""
        assert first_token.index == self.num_outputs, (first_token, self.num_outputs)
        self.num_computed = self.num_tokens
        self.num_cached_tokens = num_cached_tokens
        self.append(first_token.token_id)

    def sampling_row(self) -> SamplingRow:
        """What the sampler needs to draw the next token."""
        penalised = self.sampling.repetition_penalty != 1.0
        return SamplingRow(
            self.sampling,
            self.num_outputs,
            self.output_counts,
            self.prompt_set if penalised else frozenset(),
            self.token_ids[self.num_prompt :] if self.sampling.bad_token_ids else (),
            self.grammar,
        )


class EndRules:
    """When a sequence is over. `max_model_len` None: the model's length is checked elsewhere.

    Raises ConfigError if `max_model_len` is not positive.
    """

    def __init__(self, eos_token_ids: SequenceOf[int], max_model_len: int | None = None) -> None:
        if max_model_len is not None and max_model_len < 1:
            raise ConfigError(f"max_model_len: expected at least 1 but got {max_model_len}")
        self._eos_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len

    def end(self, seq: Sequence) -> Finished | BatonError | None:
        """How `seq` ends with its last token, or None: it goes on. An error is the grammar's: it can go no further."""
        if seq.grammar is not None and (error := seq.grammar.error) is not None:
            return error
        return self.finished(seq)

    def finished(self, seq: Sequence) -> Finished | None:
        """The terminal event if the last token of `seq` was its last one, else None."""
        end = end_after(seq.token_ids[-1], seq.num_outputs, seq.sampling, self._eos_ids)
        if end is None and self._max_model_len is not None and seq.num_tokens >= self._max_model_len:
            end = Finished("length")
        return end and replace(end, num_cached_tokens=seq.num_cached_tokens)
