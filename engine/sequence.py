"""One request as the step loop sees it: its tokens so far, how many of them have KV, and the blocks that hold it.

    token_ids    | prompt_ids | output_ids (sent before this worker) | drawn here |
    KV in blocks |<------------- num_computed ------------->|

Both phases speak of `Sequence`; only the engine thread changes one. `EndRules` decides after which token it is over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as SequenceOf

from contracts.errors import ConfigError
from contracts.request import Finished, GenerateRequest, SamplingParams, Token
from engine.blocks import Hold
from engine.sampler import SamplingRow


class Sequence:
    """A request under way.

    `arrival_s` (monotonic) decides who is oldest. `num_cached_tokens` is what the client is told: the prompt tokens
    that were not computed for it. `is_ended` is set with the terminal event or the cancellation, never unset.
    """

    __slots__ = (
        "_prompt_set",
        "arrival_s",
        "hold",
        "is_ended",
        "num_cached_tokens",
        "num_computed",
        "output_counts",
        "request",
        "token_ids",
    )

    def __init__(
        self, request: GenerateRequest, hold: Hold | None = None, arrival_s: float | None = None
    ) -> None:
        self.request = request
        self.hold = hold
        self.arrival_s = time.monotonic() if arrival_s is None else arrival_s
        self.token_ids: list[int] = [*request.prompt_ids, *request.output_ids]
        self.output_counts: Counter[int] = Counter(request.output_ids)
        self.num_computed = 0
        self.num_cached_tokens = 0
        self.is_ended = False
        self._prompt_set: frozenset[int] | None = None

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

    def append(self, token_id: int) -> None:
        """Add the token just drawn; it has no KV yet."""
        self.token_ids.append(token_id)
        self.output_counts[token_id] += 1

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
            self.sampling, self.num_outputs, self.output_counts, self.prompt_set if penalised else frozenset()
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

    def finished(self, seq: Sequence) -> Finished | None:
        """The terminal event if the last token of `seq` was its last one, else None.

        A stop token counts from `min_tokens` on: before that the sampler does not draw one. `stop_token_id` names a
        token of the request's `stop_token_ids`; it is None for the model's own EOS.
        """
        params, token_id = seq.sampling, seq.token_ids[-1]
        if seq.num_outputs > params.min_tokens:
            if token_id in params.stop_token_ids:
                return Finished("stop", seq.num_cached_tokens, stop_token_id=token_id)
            if token_id in self._eos_ids and not params.ignore_eos:
                return Finished("stop", seq.num_cached_tokens)
        if seq.num_outputs >= params.max_tokens:
            return Finished("length", seq.num_cached_tokens)
        if self._max_model_len is not None and seq.num_tokens >= self._max_model_len:
            return Finished("length", seq.num_cached_tokens)
        return None
