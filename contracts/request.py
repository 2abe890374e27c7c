"""One generation as the engine sees it: token ids in, token ids out. Text never goes below the coordinator.

A client's choice (one of `n`) is one `GenerateRequest`. Its draw at output position i depends only on
(weights, prompt, parameters, seed, i), so a request may move between workers at any token: whoever
continues it gets
`output_ids`, the tokens the client already has, and goes on at position len(output_ids).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Order: penalties, logit_bias, masks (allowed and bad tokens, min_tokens,
    grammar), temperature, top_k, top_p, min_p, draw.

    `temperature` 0 is argmax (after penalties and bias). `top_k` 0 is off. `num_logprobs` None: none asked;
    k: the drawn
    token's logprob and the k best, all before temperature, penalties, bias and masks. `num_prompt_logprobs`: the
    same for the prompt, told with the first token. `logit_bias` is (token_id, bias) pairs.

    `allowed_token_ids` empty: all. `bad_token_ids`: sequences whose last token is not drawn after the others.
    `grammar`: what the whole output must follow, in the form of engine/text/grammar.py; empty: nothing. Its state
    follows from the tokens, as the penalties' does.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`request_id` is minted by the coordinator, unique per choice and attempt; never a client's string.

    `salt` separates prefix caches (tenant); blocks are shared only between equal salts.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[int, ...] = ()
    salt: str = ""

    @property
    def cache_key(self) -> str:
        """What separates prefix caches. A prompt whose logprobs are wanted is computed whole: it meets nobody's blocks,
        not even those of an attempt before."""
        return self.salt if self.sampling.num_prompt_logprobs is None else f"{self.salt}\0{self.request_id}"

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose KV must exist before the next draw: prompt + tokens already sent."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_total_tokens(self) -> int:
        """Upper bound of tokens this request will ever hold KV for (the last drawn token needs none)."""
        return len(self.prompt_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """What the model thought of one token of the prompt. None and empty for the first one, which nothing precedes."""

    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One drawn token. `index` is its position in the output (0 = first); `top` is (token_id, logprob),
    best first. `prompt`: one entry per prompt token, on the first token alone and only if asked for.
    """

    index: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: tuple[PromptLogprob, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Nothing but an id is told."""
        return self.logprob is None and not self.top and not self.prompt


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one request's time went, by the coordinator's clock, over all its attempts.

        arrival ──queue──► placed ──prefill──► first token ──decode──► end
                                                    └─handoff─┘

    queue + prefill + decode is the whole; the handoff is a part of decode, since prefill sends the first token itself.
    Attempts that brought no token are split likewise: waiting for a place is queue, the rest is prefill. What a lost
    worker costs after the first token is decode.

    `handoff_s`: from the end of prefill's compute until decode had the KV, by prefill's clock. 0 if there was none;
    None if the request was over before prefill told.
    """

    queue_s: float
    prefill_s: float
    handoff_s: float | None
    decode_s: float
    num_attempts: int = 1

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Finished:
    """The good terminal event. `reason` is "stop" (EOS or stop token) or "length".

    `timings` is the coordinator's, None from a worker; two ends are equal however long they took.
    """

    reason: str
    num_cached_tokens: int = 0
    stop_token_id: int | None = None
    timings: Timings | None = field(default=None, compare=False)


TokenSink = Callable[[Token], bool]
"""Takes each drawn token exactly once, in order (EOS and stop tokens too); False when it wants no more. Called while
the worker's words are read, once a token: it must be quick, and a fault of it ends its own request alone.
"""
