"""The `gateway` section of the configuration tree: who may use the server, how much, and what is kept of it.

A part of contracts/config.py in a file of its own; read once at start like the rest. Everything is off by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field, model_validator

from contracts.config_section import Section
from contracts.service import CLASSES, ServiceClass

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_HOOK = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"

TenantName = Annotated[str, Field(pattern=_NAME, max_length=64)]
"""Names a tenant in files, ledgers and cache salts; without `/`, which ends it there."""
Hook = Annotated[str, Field(pattern=_HOOK)]
"""`package.module:function`."""


class TenantLimits(Section):
    """What one tenant may take. Empty: no limit."""

    requests_per_minute: int | None = Field(
        None, ge=1, description="Generation requests per minute and tenant, then 429. Empty: no limit."
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Prompt and output tokens per minute and tenant, then 429. Output counts when it is drawn, so a tenant may go below zero once and then waits until that is made up. Empty: no limit.",
    )
    max_concurrent: int | None = Field(
        None, ge=1, description="Generation requests open at once per tenant, then 429. Empty: no limit."
    )
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens of one output: more is refused, a default is cut to it. Empty: what the context holds.",
    )
    classes: list[ServiceClass] = Field(
        default_factory=lambda: list(CLASSES),
        min_length=1,
        description="Classes that a tenant's requests may have (x-baton-class, service_tier), then 403; the first is the default. Lines of batches are batch whatever stands here.",
    )


class Upstream(Section):
    """A model that another server serves."""

    url: str = Field(
        description="The other server, without /v1: scheme://host[:port][/path].",
        pattern=r"^https?://[^/\s]+",
    )
    model: str | None = Field(None, description="The model's name there. Empty: the same.")
    key_file: str | None = Field(
        None, description="File with the API key that the other server asks for. Empty: it asks for none."
    )


class GatewayConfig(TenantLimits):
    """Keys, limits, the usage ledger, batches, hooks. The limits here are those of tenants without limits of their own."""

    keys_file: str | None = Field(
        None,
        description="File of API keys (`python -m coordinator.gateway.keys`). Set: every request needs a key, except /health, /ready, /metrics, /version and /debug/*. Empty: no keys, one tenant.",
    )
    tenants: dict[TenantName, TenantLimits] = Field(
        default_factory=dict,
        description="Limits by tenant, e.g. {acme: {requests_per_minute: 600}}; what is missing there has no limit.",
    )
    max_request_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Deadline of each request, but not of lines of batches; a client may ask for less with the header x-request-timeout (seconds). Empty: coordinator.request_timeout_s alone.",
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description="Origins whose web pages may call the server, e.g. [https://chat.example.com]; [*] for all. Empty: none.",
    )
    aliases: dict[str, str] = Field(
        default_factory=dict, description="Further names of the model: {alias: served name}."
    )
    upstreams: dict[str, Upstream] = Field(
        default_factory=dict,
        description="Models that other servers with OpenAI's endpoints serve, under this one's keys, limits and guards, e.g. {big: {url: 'http://10.0.0.7:8000'}}.",
    )
    fallbacks: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Models to be asked in turn when one cannot take a request now, e.g. {big: [small]}: this server's own or those of upstreams.",
    )
    state_dir: str | None = Field(
        None,
        description="Folder of files, batches and the usage ledger. Empty: `state/<server.port>` in Baton's cache folder. Made when first needed.",
    )
    usage_url: str | None = Field(
        None,
        description="SQLAlchemy URL of the usage ledger. Empty: SQLite in state_dir if keys_file is set, else no ledger.",
    )
    usage_flush_s: float = Field(
        5.0, gt=0, description="How often usage is written; a crash loses at most what came since."
    )
    idempotency_ttl_s: float = Field(
        600.0, gt=0, description="How long an answer is kept for the same Idempotency-Key."
    )
    response_cache: bool = Field(
        False,
        description="Answer a repeated deterministic request (temperature 0 or a seed) from memory.",
    )
    response_cache_ttl_s: float = Field(3600.0, gt=0, description="How long such an answer is kept.")
    stored_answer_bytes: int = Field(
        64 << 20, ge=0, description="Memory for kept answers of each of the two kinds; the oldest go first."
    )
    max_file_bytes: int = Field(100 << 20, ge=1024, description="Largest uploaded file.")
    max_files_bytes: int = Field(
        1 << 30, ge=1024, description="Most bytes of files that one tenant may keep."
    )
    batch_concurrency: int = Field(
        4,
        ge=1,
        description="Batch lines at work at once. Without slo: one alone while other requests are open.",
    )
    batch_max_requests: int = Field(50_000, ge=1, description="Most lines of one batch.")
    input_guards: list[Hook] = Field(
        default_factory=list,
        description="Async callables (`package.module:function`) that see, change or refuse each request's body, in order.",
    )
    output_guards: list[Hook] = Field(
        default_factory=list,
        description="Async callables that see, change or refuse the text of each answer, in order.",
    )
    guard_window_chars: int = Field(
        128,
        ge=1,
        le=65536,
        description="Characters of an answer held back so that output guards see what is longer than one token; the longest thing that they can be sure to find.",
    )
    guard_timeout_s: float = Field(5.0, gt=0, description="Longest run of one guard; then the request fails.")

    @model_validator(mode="after")
    def _check_origins(self) -> GatewayConfig:
        for origin in self.cors_origins:
            if origin != "*" and not (origin.startswith(("http://", "https://")) and origin.count("/") == 2):
                raise ValueError(
                    f"gateway.cors_origins: expected scheme://host[:port] or * but got {origin[:80]!r}"
                )
        return self

    def names_of(self, model: str, adapters: Iterable[str] = ()) -> list[str]:
        """Every name that a client may use, where `model` is the server's own, with `adapters`."""
        served = [model, *adapters, *self.upstreams]
        return served + [alias for alias, name in self.aliases.items() if name in served]

    def limits_of(self, tenant: str) -> TenantLimits:
        """The tenant's own limits, else the section's."""
        return self.tenants.get(tenant, self)


def type_text(annotation: Any) -> str | None:
    """How the reference page writes the types that only this section has; None: as the others."""
    if annotation == dict[TenantName, TenantLimits]:
        return "tenant: limits"
    if annotation == dict[str, Upstream]:
        return "name: server"
    if annotation == dict[str, list[str]]:
        return "name: names"
    if annotation == dict[str, str]:
        return "name: name"
    if getattr(annotation, "__origin__", None) is list:
        return "list of str"
    return None
