"""One HTTP generation request, planned: what the engine is asked for, and which choices each output answers.

    parameters + prompts ─► limits (nothing is computed for what cannot fit) ─► Job

A choice is `prompt_index * n + k` (best_of instead of n, where more are drawn than answered). At temperature 0 all k
of a prompt are the same text, so one output answers them.
"""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from contracts.errors import ContextLengthError, RequestError
from contracts.request import GenerateRequest, SamplingParams
from coordinator.backend import Capacity
from coordinator.prompts import Prompt
from coordinator.reading import Reading
from coordinator.schema import Params
from coordinator.shape import PLAIN, Shape
from engine.text.tokenizer import TextModel

Endpoint = Literal["chat", "completions", "responses"]

_PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_"}
_PROMPT_PARAMS = {"chat": "messages", "completions": "prompt", "responses": "input"}
_DEFAULT_COMPLETION_TOKENS = 16
# Below this the division by the temperature overflows in low precision; the draw is an argmax anyway.
_MIN_TEMPERATURE = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class OutputPlan:
    """One output and the choices it answers. Compared by identity: it is a key, and prompts are long.

    `request` None: the prompt is echoed and nothing is generated. `is_prompt_only`: one token is drawn for what the
    model thinks of the prompt, and not shown.
    """

    indices: tuple[int, ...]
    prompt: Prompt
    request: GenerateRequest | None
    is_prompt_only: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """Everything about one HTTP request that does not change.

    `completion_id` is what the client sees as `id`; `grammar_param`: the field that a grammar came from.
    """

    endpoint: Endpoint
    completion_id: str
    created: int
    model: str
    params: Params
    plans: tuple[OutputPlan, ...]
    prompts: tuple[Prompt, ...]
    reading: Reading = Reading()  # noqa: RUF009 - immutable
    grammar_param: str | None = None
    mirror: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt once, whatever n is."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def stops(self) -> Sequence[str]:
        """Strings that an output ends at. One that is calls and nothing else has no text that could end."""
        return () if self.reading.is_forced else self.params.stop

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.num_outputs

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that choice `index` answers."""
        return self.prompts[index // self.params.num_outputs]


def make_job(
    endpoint: Endpoint,
    model: str,
    params: Params,
    prompts: list[Prompt],
    text: TextModel,
    capacity: Capacity,
    shape: Shape = PLAIN,
) -> Job:
    """Raises ContextLengthError for what does not fit, RequestError for ids outside the vocabulary."""
    completion_id = f"{_PREFIXES[endpoint]}{uuid.uuid4().hex}"
    entropy = secrets.randbits(63)
    masks = _masks(params, text, capacity.num_logits or text.vocab_size, shape)
    plans = []
    for p, prompt in enumerate(prompts):
        max_tokens = _max_tokens(endpoint, params, len(prompt.ids), capacity.max_total_tokens)
        indices = range(p * params.num_outputs, (p + 1) * params.num_outputs)
        is_prompt_only = max_tokens == 0 and params.num_prompt_logprobs is not None
        if max_tokens == 0 and not is_prompt_only:
            plans.append(OutputPlan(tuple(indices), prompt, None))
            continue
        for k, sampling in enumerate(_samplings(params, text, max(max_tokens, 1), masks, p, entropy)):
            is_shared = sampling.temperature == 0 or is_prompt_only
            request = GenerateRequest(
                f"{completion_id}-{indices[k]}", prompt.ids, sampling, salt=params.cache_salt
            )
            answered = tuple(indices) if is_shared else (indices[k],)
            plans.append(OutputPlan(answered, prompt, request, is_prompt_only))
            if is_shared:
                break
    return Job(
        endpoint,
        completion_id,
        int(time.time()),
        model,
        params,
        tuple(plans),
        tuple(prompts),
        shape.reading,
        shape.param,
        shape.mirror,
    )


def check_num_choices(params: Params, num_prompts: int, max_choices: int) -> None:
    """Raises RequestError if n (or best_of) × prompts is more than one request may ask for."""
    count = params.num_outputs
    name = "n" if count == params.n else "best_of"
    if count * num_prompts > max_choices:
        raise RequestError(
            f"{name}: expected at most {max_choices} choices in all but got {name}={count} × {num_prompts} prompts",
            param=name,
        )


def _max_tokens(endpoint: Endpoint, params: Params, prompt_len: int, limit: int) -> int:
    """What the client asked for must fit; a default is cut to what fits."""
    rest = limit - prompt_len
    name, asked = params.token_limit
    default = min(rest, _DEFAULT_COMPLETION_TOKENS) if endpoint == "completions" else rest
    if rest < 1 and asked != 0:
        raise ContextLengthError(
            f"expected a prompt of at most {limit - 1} tokens (limit {limit}) but got {prompt_len}",
            param=_PROMPT_PARAMS[endpoint],
        )
    if asked is not None:
        if asked > rest:
            raise ContextLengthError(
                f"{name}: expected prompt and output within {limit} tokens but got {prompt_len} + {asked}",
                param=name,
            )
        return asked
    if params.min_tokens > default:
        raise RequestError(
            f"min_tokens: expected at most {default}, the limit of this output, but got {params.min_tokens}",
            param="min_tokens",
        )
    return default


def _samplings(
    params: Params,
    text: TextModel,
    max_tokens: int,
    masks: _Masks,
    prompt_index: int,
    entropy: int,
) -> list[SamplingParams]:
    """One for each output of a prompt; one alone at temperature 0."""
    defaults = text.sampling_defaults
    temperature = _given(params.temperature, defaults.get("temperature", 1.0))
    if 0 < temperature < _MIN_TEMPERATURE:
        temperature = _MIN_TEMPERATURE
    top_p = _given(params.top_p, defaults.get("top_p", 1.0))
    top_k = int(_given(params.top_k, defaults.get("top_k", 0)))
    found = []
    for k in range(1 if temperature == 0 else params.num_outputs):
        seed = (
            derive_seed(entropy, prompt_index, k) if params.seed is None else derive_seed(params.seed, 0, k)
        )
        found.append(
            SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                # top_p=0 keeps the best token alone.
                top_p=top_p if top_p > 0 else 1.0,
                top_k=max(top_k, 0) if top_p > 0 else 1,
                min_p=_given(params.min_p, defaults.get("min_p", 0.0)),
                seed=seed,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=_given(params.repetition_penalty, defaults.get("repetition_penalty", 1.0)),
                logit_bias=masks.bias,
                min_tokens=params.min_tokens,
                stop_token_ids=masks.stop_ids,
                ignore_eos=params.ignore_eos,
                num_logprobs=params.num_drawn_logprobs,
                num_prompt_logprobs=params.num_prompt_logprobs,
                allowed_token_ids=masks.allowed,
                bad_token_ids=masks.bad,
                grammar=masks.grammar,
            )
        )
    return found


def derive_seed(seed: int, prompt_index: int, choice: int) -> int:
    """The client's own seed for its first choice; for the others a number that depends on nothing else.

    int64.
    """
    if prompt_index == 0 and choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed},{prompt_index},{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class _Masks:
    """What is the same for all outputs of a job."""

    bias: tuple[tuple[int, float], ...]
    allowed: tuple[int, ...]
    bad: tuple[tuple[int, ...], ...]
    stop_ids: tuple[int, ...]
    grammar: str


def _masks(params: Params, text: TextModel, num_logits: int, shape: Shape) -> _Masks:
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
    ):
        for token_id in ids:
            if token_id >= num_logits:
                raise RequestError(f"{name}: expected ids below {num_logits} but got {token_id}", param=name)
    allowed = tuple(sorted(set(params.allowed_token_ids)))
    stop_ids = () if shape.reading.is_forced else tuple(dict.fromkeys(params.stop_token_ids))
    bias, bad = _logit_bias(params, num_logits), _bad_ids(params, text)
    return _Masks(bias, allowed, bad, stop_ids, shape.grammar)


def _bad_ids(params: Params, text: TextModel) -> tuple[tuple[int, ...], ...]:
    """A word as it is spelt at the beginning of a text and behind a space."""
    spelt = (
        tuple(text.encode(f"{space}{word.lstrip()}", add_special_tokens=False))
        for word in params.bad_words
        for space in ("", " ")
    )
    return tuple(dict.fromkeys(ids for ids in spelt if ids))


def _logit_bias(params: Params, num_logits: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for key, value in params.logit_bias.items():
        # As JSON writes numbers: of `065` and `65`, one would be dropped.
        is_id = key.isascii() and key.isdecimal() and len(key) < 12 and str(int(key)) == key
        if not is_id or int(key) >= num_logits:
            raise RequestError(
                f"logit_bias: expected token ids from 0 to {num_logits - 1} as keys but got {key[:20]!r}",
                param="logit_bias",
            )
        pairs[int(key)] = value
    return tuple(sorted(pairs.items()))
