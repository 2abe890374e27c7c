"""A client's body as typed parameters: what is built, in range; what is not built, refused by name.

Four kinds of fields:

    known      validated here, true being no 1 and "1" no number; null means absent, as every client assumes
    notes      nothing comes of them (`user`, `metadata`, `store`, …); validated like the known ones
    refused    known to the world, not built here or of another endpoint, and dropping it would change the answer:
               UnsupportedError naming it
    anything   accepted and ignored, because real clients send extras, unless it looks like a known field misspelt,
               whose loss would change the answer

Messages and prompts have too many forms for a schema with readable errors; prompts.py reads them.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from contracts.errors import RequestError, UnsupportedError
from coordinator.fields import read_model, refuse, refuse_misspelt, refuse_misspelt_within
from coordinator.promises import Tier

MAX_STOPS = 4
MAX_STOP_CHARS = 1000
MAX_TOP_LOGPROBS = 20
MAX_MASKED = 128 * 1024
_READ_ELSEWHERE = (
    "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "modalities", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object",
    "guided_whitespace_pattern",
)  # fmt: skip


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Verbosity = Literal["low", "medium", "high"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Bias = Annotated[float, Field(ge=-100, le=100)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class StreamOptions(BaseModel):
    """`include_obfuscation` is ignored. `include_timings`: see Params."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    include_obfuscation: bool | None = None
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_timings: bool | None = None


class Notes(BaseModel):
    """What a client says for records, and hints. Nothing comes of them, but they are what they should be."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    verbosity: Verbosity | None = None
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = None
    request_id: str | None = None
    rid: str | None = None
    session_id: str | None = None
    stream_interval: int | None = Field(None, ge=1)
    guided_decoding_backend: str | None = None
    truncation_side: Literal["left", "right"] | None = None
    # Never read: a client's field must not reach the KV layer.
    kv_transfer_params: dict[str, Any] | None = None


class Params(Notes):
    """What both endpoints share. None: the model's or OpenAI's default.

    `include_timings`, here or in `stream_options`, is Baton's own: it adds to the usage (a stream then ends with one)

        "timings_ms": {"queue", "prefill", "handoff", "decode", "attempts"}

    of the output that took longest; see contracts.request.Timings. `handoff` may be null, and the whole is null
    where a stop string ended an output or nothing was generated.
    """

    model: str | None = Field(None, max_length=512)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    n: int = Field(1, ge=1)
    stop: Annotated[list[Stop], FailFast(), Field(max_length=MAX_STOPS), BeforeValidator(_as_list)] = []
    stop_token_ids: Annotated[list[TokenId], FailFast(), Field(max_length=128)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    logit_bias: dict[str, Bias] = Field({}, max_length=4096)
    allowed_token_ids: Annotated[list[TokenId], FailFast(), Field(min_length=1, max_length=MAX_MASKED)] = []
    bad_words: Annotated[list[Word], FailFast(), Field(max_length=128)] = []
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    cache_salt: str = Field("", max_length=128, pattern=r"^[^@/\\\x00]*$")
    stream: bool = False
    stream_options: StreamOptions | None = None
    include_timings: bool = False
    echo: bool = False
    service_tier: Tier | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return {key: value for key, value in body.items() if value is not None}

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """(name of the field that counts, its value)."""
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted per token; None: no logprobs at all."""
        raise NotImplementedError

    @property
    def num_outputs(self) -> int:
        """Drawn for each prompt; `n` of them are answered."""
        return self.n

    @property
    def num_drawn_logprobs(self) -> int | None:
        """As `num_logprobs`, for the engine."""
        return self.num_logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives wanted per token of the prompt, in whichever form; None: nothing of it."""
        return self.prompt_logprobs

    @property
    def includes_timings(self) -> bool:
        return self.include_timings or bool(self.stream_options and self.stream_options.include_timings)

    @property
    def includes_usage(self) -> bool:
        """Of a stream; timings come in the usage."""
        return self.includes_timings or bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class ChatParams(Params):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=64)
    include_reasoning: bool = True
    reasoning_effort: Effort | None = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionParams(Params):
    """`POST /v1/completions`."""

    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_outputs(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def num_drawn_logprobs(self) -> int | None:
        """The best are found by their logprobs."""
        return 0 if self.logprobs is None and self.num_outputs > self.n else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """With `echo` the prompt is listed like the output."""
        asked = [
            count
            for count in (self.prompt_logprobs, self.logprobs if self.echo else None)
            if count is not None
        ]
        return max(asked, default=None)


# Field -> values that ask for nothing, and so may pass. Any other value is refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "logprob_token_ids": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "grammar": (),
    "stop_regex": ([],),
    "no_stop_trim": (False,),
    "input_ids": (),
    "input_embeds": (),
    "prompt_embeds": (),
    "lora_path": (),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "suffix": ("",),
    "priority": (0,),  # a number orders requests among each other; here classes do: x-baton-class
    "spaces_between_special_tokens": (True,),
    "separate_reasoning": (True,),
    "vllm_xargs": ({},),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
}

# Of another endpoint, and known here only to be refused: to drop one would answer something else than was asked.
_OF_CHATS: dict[str, tuple[Any, ...]] = {
    "messages": (), "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "max_completion_tokens": (), "top_logprobs": (0,), "continue_final_message": (False,), "reasoning_effort": (),
    "include_reasoning": (True,), "add_generation_prompt": (True,), "chat_template_kwargs": ({},),
}  # fmt: skip
_OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {"prompt": (), "best_of": (1,)}
_OF_RESPONSES: dict[str, tuple[Any, ...]] = {
    "input": (), "instructions": (), "max_output_tokens": (), "text": (), "reasoning": (), "include": ([],),
    "previous_response_id": (), "conversation": (), "background": (False,), "truncation": ("disabled",),
    "max_tool_calls": (), "context_management": (),
}  # fmt: skip

AnyParams = TypeVar("AnyParams", bound=Params)


def parse_chat(body: dict[str, Any]) -> ChatParams:
    """Raises RequestError naming the first field that is wrong, UnsupportedError for one that is not built."""
    refuse(body, _OF_COMPLETIONS, "only completions have it")
    params = _validated(ChatParams, body)
    if params.top_logprobs and not params.logprobs:
        raise RequestError("top_logprobs: expected logprobs=true beside it", param="top_logprobs")
    if params.add_generation_prompt and params.continue_final_message:
        # The default of the first is no wish of the client's.
        if body.get("add_generation_prompt") is not None:
            raise RequestError(
                "continue_final_message: expected add_generation_prompt=false beside it but both are true",
                param="continue_final_message",
            )
        params = params.model_copy(update={"add_generation_prompt": False})
    taken = {
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
    }
    for key in sorted(taken & params.chat_template_kwargs.keys()):
        raise UnsupportedError(
            f"chat_template_kwargs.{key}: cannot be set here", param="chat_template_kwargs"
        )
    effort = params.reasoning_effort
    if effort is None:
        return params
    # As templates know it, behind what the client tells the template itself.
    told = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
    return params.model_copy(update={"chat_template_kwargs": told | params.chat_template_kwargs})


def parse_completion(body: dict[str, Any]) -> CompletionParams:
    """Raises RequestError naming the first field that is wrong, UnsupportedError for one that is not built."""
    if body.get("logprobs") is False:
        body = {**body, "logprobs": None}
    # Benchmarks send both names of the limit to both endpoints.
    refuse(body, {**_OF_CHATS, "max_completion_tokens": (body.get("max_tokens"),)}, "only chats have it")
    params = _validated(CompletionParams, body)
    if params.best_of is not None and params.best_of < params.n:
        raise RequestError(
            f"best_of: expected at least n={params.n} but got {params.best_of}", param="best_of"
        )
    if params.stream and params.num_outputs > params.n:
        raise RequestError(
            "best_of: expected stream=false beside it: the best is known at the end", param="best_of"
        )
    if params.max_tokens == 0 and not params.echo:
        raise RequestError("max_tokens: expected at least 1 (0 only with echo) but got 0", param="max_tokens")
    return params


def _validated(kind: type[AnyParams], body: dict[str, Any]) -> AnyParams:
    _refuse_unbuilt(body)
    refuse_misspelt(body, _answering_fields(kind), _known_fields(kind))
    refuse_misspelt_within(body.get("stream_options"), StreamOptions.model_fields, "stream_options")
    params = read_model(kind, body)
    if body.get("stream_options") and not params.stream:
        raise RequestError("stream_options: expected stream=true beside it", param="stream_options")
    if params.prompt_logprobs is not None and params.stream:
        raise RequestError("prompt_logprobs: expected stream=false beside it", param="prompt_logprobs")
    _, limit = params.token_limit
    if limit is not None and params.min_tokens > limit:
        raise RequestError(
            f"min_tokens: expected at most {limit}, the limit of this output, but got {params.min_tokens}",
            param="min_tokens",
        )
    return params


def _refuse_unbuilt(body: dict[str, Any]) -> None:
    refuse(body, REFUSED, "not supported by this server")
    refuse(body, _OF_RESPONSES, "only responses have it")
    modalities = body.get("modalities")
    if modalities not in (None, [], ["text"]):
        raise UnsupportedError("modalities: only text is supported", param="modalities")


@cache
def _known_fields(kind: type[Params]) -> frozenset[str]:
    return frozenset((*kind.model_fields, *REFUSED, *_OF_RESPONSES, *_READ_ELSEWHERE))


@cache
def _answering_fields(kind: type[Params]) -> frozenset[str]:
    """Those that an answer depends on."""
    return frozenset((*(kind.model_fields.keys() - Notes.model_fields.keys()), *_READ_ELSEWHERE))
