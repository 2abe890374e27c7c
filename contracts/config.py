"""The one configuration tree: frozen, read once at start, unknown keys refused.

Sources, later wins: defaults < YAML file (`CONFIG`) < arguments of `serve run … key=value` / the launcher.
What one field allows stands at the field, what fields allow of each other in `_faults_between`; both are checked here,
before anything is started. What only a machine or the model's files can tell (is there a GPU, is the model of a known
family) is checked where they are read. `python -m contracts.config` prints docs/configuration.md from this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from contracts.config_faults import explain
from contracts.config_gateway import GatewayConfig
from contracts.config_planner import PlannerConfig
from contracts.config_pools import DecodePoolConfig, PoolConfig, PrefillPoolConfig, pool_faults
from contracts.config_section import Section
from contracts.config_slo import SloConfig
from contracts.errors import ConfigError

_WILDCARD_HOSTS = ("0.0.0.0", "::", "*")


class ModelConfig(Section):
    """What is served."""

    path: str | None = Field(
        None,
        description="Hugging Face directory, GGUF file (the first, if there are several), or hub id (org/name). Empty: the embedded SmolLM2-135M-Instruct.",
    )
    served_name: str | None = Field(
        None,
        description="Name clients use. Empty: taken from the path; `smollm2-135m-instruct` for the embedded model.",
    )
    adapters: dict[Annotated[str, Field(min_length=1, max_length=512)], str] = Field(
        default_factory=dict,
        description="LoRA adapters of the model (PEFT folders), e.g. {support: /srv/adapters/support}: checked at start and listed in /v1/models; requests for them are refused, since no worker applies them yet.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Weights, activations and KV. auto: bfloat16 where the device computes it, else float32.",
    )
    max_len: int | None = Field(
        None, ge=16, description="Context limit in tokens. Empty: what the model was trained for."
    )


class EngineConfig(Section):
    """One worker's engine."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where torch sees a GPU, else cpu."
    )
    quantization: Literal["auto", "none", "int8", "int4"] = Field(
        "auto",
        description="Weights in memory. auto: as the file holds them, where Q4_0, Q4_1 and Q8_0 of GGUF stay as they are; none: all expanded to model.dtype; int8, int4: other matrices are rounded to groups of 32 (int4: the vocabulary to 8 bits). Needs a C++ compiler on a CPU, Triton on a GPU.",
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block.")
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="Hard ceiling of the KV pool, of each rank. Empty: 1 GiB on CPU, 85% of the free memory on a GPU.",
    )
    num_blocks: int | None = Field(None, ge=2, description="KV blocks; overrides kv_cache_bytes.")
    kv_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="KV in memory and on its way. auto: as model.dtype; fp8: float8 (e4m3), one byte a number, on GPUs only; both pools then hold it. How it is scaled: docs/gpu-kernels.md.",
    )
    cuda_graphs: bool = Field(
        True,
        description="On a GPU, decode steps of up to max_num_seqs sequences are recorded at warm-up and replayed. Not with experts or several ranks.",
    )
    batch_invariant: bool = Field(
        False,
        description="The logits of a request have the same bits whatever shares its steps and however its prompt is cut, also where oneDNN would multiply faster. CPUs with a C++ compiler only, most of which do so anyway: docs/engine.md.",
    )
    compute_threads: int = Field(1, ge=1, description="CPU threads of the device thread (torch intra-op).")
    max_num_seqs: int = Field(64, ge=1, description="Sequences a decode worker runs or has reserved at once.")
    max_chunk_tokens: int = Field(
        256, ge=1, description="Prompt tokens computed in one step when no decode waits for it."
    )
    chunk_with_decodes: int = Field(
        64,
        ge=1,
        description="Prompt tokens computed in one step beside running decodes (local prefill, recompute); never more than max_chunk_tokens. With slo.itl_ms: only until the worker knows what fits.",
    )
    max_prefill_step_s: float = Field(
        0.3,
        gt=0,
        description="Prompt tokens computed in one step are cut to what takes about this long, as measured, but not below 64: a step cannot be interrupted, so short prompts wait for its end, and a request that ends frees its blocks up to a step later. Seldom reached on a GPU.",
    )
    max_waiting: int = Field(256, ge=1, description="Prompts a worker queues before it refuses.")
    stall_timeout_s: float = Field(
        30.0,
        gt=0,
        description="A worker whose running step is older than this ends its process and is replaced. Time that the process itself was stopped does not count.",
    )


class CoordinatorConfig(Section):
    """Admission, placement, deadlines."""

    num_replicas: int = Field(1, ge=1, description="Ingress replicas.")
    num_cpus: float = Field(0.5, ge=0, description="Ray CPUs per ingress replica.")
    placement: Literal["auto", "local"] = Field(
        "auto",
        description="auto: each request where it is predicted to be served best, or by load; local: decode workers read every prompt themselves, and prefill workers have nothing to do. For comparisons.",
    )
    max_queue: int = Field(
        128, ge=0, description="Requests waiting for a place; one more is refused with 503 + Retry-After."
    )
    max_running: int = Field(512, ge=1, description="Requests placed at once by one ingress replica.")
    queue_timeout_s: float = Field(
        60.0, gt=0, description="Longest wait for a place, then 503 + Retry-After."
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Longest life of a request, then 504 or an error event."
    )
    first_token_timeout_s: float = Field(
        120.0, gt=0, description="Longest wait of a placed request for its first token."
    )
    stall_timeout_s: float = Field(
        60.0, gt=0, description="Longest silence between two tokens of a placed request."
    )
    reserve_timeout_s: float = Field(
        5.0, gt=0, description="Longest wait for decode to grant or refuse blocks."
    )
    max_continuations: int = Field(
        3,
        ge=0,
        description="How often one request goes on elsewhere after a failure, before its error is shown. A worker that leaves in order does not count.",
    )
    continue_timeout_s: float = Field(
        120.0,
        gt=0,
        description="Longest wait of a request that lost its worker for a place on another one (or on the replacement).",
    )
    slow_reader_timeout_s: float = Field(
        60.0,
        gt=0,
        description="A client that takes no byte for this long is cut off. Ray Serve queues a stream before the socket, so there a slow client is seen late or not at all; its answer's length and deadline still bound it.",
    )
    keep_alive_s: float = Field(
        15.0, gt=0, description="Silence on a stream after which a comment line is sent."
    )
    peek_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Wait for the first token before the stream's 200 is sent; until then errors have a status.",
    )
    worker_timeout_s: float = Field(
        5.0, gt=0, description="A worker silent for this long counts as lost. Workers speak once a second."
    )


class TransferConfig(Section):
    """KV handoff."""

    host: str | None = Field(
        None,
        description="Address workers listen on and give to coordinators and peers. Empty: the interface that leads out; under `make serve` 127.0.0.1.",
    )
    transport: Literal["auto", "shm", "ucx", "tcp", "memory"] = Field(
        "auto",
        description="How blocks travel. auto: for each pair of workers the first of shm, ucx, tcp that passes the self-test. shm: memory that both map, one host only. ucx: NVLink, RDMA or TCP, as UCX_TLS of the environment says. tcp: plain sockets. memory: within one process, so only without prefill workers.",
    )
    checksum: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether each piece of KV carries a checksum (xxh3) that is verified before it is used. auto: between hosts.",
    )
    wire_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="What KV is on its way. auto: exactly what the target's blocks hold. fp8: rounded to e4m3 with a scale per block, layer and head, a half of bfloat16's bytes, if the peer has this setting as well. Answers may then differ from those of one engine.",
    )
    slot_bytes: int = Field(
        16 << 20,
        ge=4096,
        description="Size of one staging slot: what is copied and sent in one piece. Each piece costs some wake-ups of both workers; a large one holds up what else they do for as long as its copy takes.",
    )
    num_slots: int = Field(
        8,
        ge=2,
        description="Staging slots per worker: bounds what is in flight. Over shm each pair has as many, which take memory only when used.",
    )
    max_quarantined_share: float = Field(
        0.5,
        gt=0.0,
        le=1.0,
        description="Share of the slots that may wait for the last bytes of handoffs that are over; with more, for longer than a second, the worker says that it is not ready.",
    )
    lease_s: float = Field(
        30.0,
        gt=0,
        description="How long decode keeps a reservation that no prefill worker has in its line. From then on it lives as long as their connection, the request's own deadline at most.",
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="Longest connection set-up, self-test included.")
    progress_timeout_s: float = Field(
        10.0, gt=0, description="Longest wait for the peer's next step in a handoff."
    )
    peer_timeout_s: float = Field(5.0, gt=0, description="A peer silent for this long counts as lost.")
    probe_bytes: int = Field(
        8 << 20,
        ge=0,
        description="Bytes of the timed round of the transfer self-test; 0: no self-test, every path passes.",
    )


class ServerConfig(Section):
    """The HTTP edge."""

    host: str = Field(
        "127.0.0.1", description="Address to listen on (launcher only; `serve run` has its own options)."
    )
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on (launcher only).")
    admin_key: str | None = Field(
        None, min_length=1, description="Bearer key for /debug/*. Empty: /debug/* answers on loopback only."
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Largest request body.")
    max_choices: int = Field(128, ge=1, description="Largest n × prompts of one request.")


class BatonConfig(Section):
    """Everything."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="What is served.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="One worker's engine.")
    prefill: PrefillPoolConfig = Field(
        default_factory=PrefillPoolConfig, description="The pool that reads prompts."
    )
    decode: DecodePoolConfig = Field(
        default_factory=DecodePoolConfig, description="The pool that writes answers."
    )
    coordinator: CoordinatorConfig = Field(
        default_factory=CoordinatorConfig, description="Admission, placement, deadlines."
    )
    transfer: TransferConfig = Field(default_factory=TransferConfig, description="KV handoff.")
    slo: SloConfig = Field(default_factory=SloConfig, description="The two promises to users.")
    planner: PlannerConfig = Field(
        default_factory=PlannerConfig,
        description="Roles and numbers of workers that follow the demand. Works with slo only.",
    )
    server: ServerConfig = Field(default_factory=ServerConfig, description="The HTTP edge.")
    gateway: GatewayConfig = Field(
        default_factory=GatewayConfig, description="Keys, limits, usage, batches, hooks. All off by default."
    )

    @property
    def is_colocated(self) -> bool:
        """No prefill pool: decode workers read prompts themselves."""
        return self.prefill.num_replicas == 0

    @property
    def is_planned(self) -> bool:
        """Workers change their roles. Without promises there is nothing to weigh by."""
        return self.planner.enabled and self.slo.is_set and not self.is_colocated

    def pool(self, role: Literal["prefill", "decode"]) -> PoolConfig:
        return self.prefill if role == "prefill" else self.decode

    @model_validator(mode="after")
    def _check_between(self) -> BatonConfig:
        faults = list(_faults_between(self))
        if faults:
            raise ValueError("; ".join(faults))
        return self


def _faults_between(config: BatonConfig) -> Iterator[str]:
    """What each field allows and all of them together do not. Defaults give way in silence, explicit values never."""
    engine, transfer = config.engine, config.transfer
    if transfer.transport == "memory" and not config.is_colocated:
        yield (
            "transfer.transport: expected auto, shm, ucx or tcp but got 'memory', which ends at its own process "
            f"(prefill.num_replicas={config.prefill.num_replicas})"
        )
    if transfer.host in _WILDCARD_HOSTS:
        yield (
            "transfer.host: expected an address that other workers can connect to, or none, "
            f"but got {transfer.host!r}"
        )
    if engine.num_blocks is not None and config.model.max_len is not None:
        num_needed = -(-config.model.max_len // engine.block_size)
        if engine.num_blocks < num_needed:
            yield (
                f"engine.num_blocks: expected at least {num_needed} (model.max_len={config.model.max_len} in blocks of "
                f"{engine.block_size} tokens) but got {engine.num_blocks}"
            )
    if (
        "chunk_with_decodes" in engine.model_fields_set
        and engine.chunk_with_decodes > engine.max_chunk_tokens
    ):
        yield (
            f"engine.chunk_with_decodes: expected at most engine.max_chunk_tokens={engine.max_chunk_tokens} "
            f"but got {engine.chunk_with_decodes}"
        )
    for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
        yield from pool_faults(role, pool, config.is_planned)


def load_config(path: str | Path | None = None, overrides: dict[str, Any] | None = None) -> BatonConfig:
    """The tree from a YAML file and dotted overrides (`{"engine.block_size": 32}`).

    Raises ConfigError naming the field, what was expected and what came.
    """
    tree = _read(Path(path).expanduser()) if path else {}
    for dotted, value in (overrides or {}).items():
        _put(tree, dotted, value)
    try:
        return BatonConfig.model_validate(tree)
    except ValidationError as error:
        lines = [explain(detail, _keys()) for detail in error.errors(include_url=False)]
        raise ConfigError("; ".join(lines)) from None


def _keys() -> dict[str, list[str]]:
    """The names of all fields by section."""
    sections: dict[str, Any] = {name: field.annotation for name, field in BatonConfig.model_fields.items()}
    return {name: list(section.model_fields) for name, section in sections.items()}


def cache_dir() -> Path:
    """Where models and run files are kept: $BATON_CACHE, else ~/.cache/baton."""
    return Path(os.environ.get("BATON_CACHE") or Path.home() / ".cache" / "baton")


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"CONFIG: expected a readable YAML file but {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"CONFIG: expected YAML but {path}: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"CONFIG: expected a mapping in {path} but got {type(tree).__name__}")
    # A section whose lines are all commented out reads as None.
    return {name: section for name, section in tree.items() if section is not None}


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for name in parents:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{dotted}: expected {name} to be a section but it is {type(child).__name__}")
        tree = child
    tree[leaf] = value


if __name__ == "__main__":
    from contracts.config_reference import reference

    print(reference(), end="")
