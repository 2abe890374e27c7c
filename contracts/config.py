"""The one configuration tree: frozen, read once at start, unknown keys refused.

Sources, later wins: defaults < YAML file (`CONFIG`) < arguments of `serve run … key=value` / the launcher.
`python -m contracts.config` prints docs/configuration.md from this file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contracts.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Section):
    """What is served."""

    path: str | None = Field(
        None,
        description="Hugging Face directory, GGUF file, or hub id (org/name). Empty: the embedded SmolLM2-135M-Instruct.",
    )
    served_name: str | None = Field(
        None,
        description="Name clients use. Empty: taken from the path; `smollm2-135m-instruct` for the embedded model.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Weights, activations and KV. auto: bfloat16 where the device computes it, else float32.",
    )
    max_len: int | None = Field(
        None, ge=16, description="Context limit in tokens. Empty: what the model was trained for."
    )


class EngineConfig(_Section):
    """One worker's engine."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where torch sees a GPU, else cpu."
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block.")
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="Hard ceiling of the KV pool. Empty: 1 GiB on CPU, 85% of the free memory on a GPU.",
    )
    num_blocks: int | None = Field(None, ge=2, description="KV blocks; overrides kv_cache_bytes.")
    compute_threads: int = Field(1, ge=1, description="CPU threads of the device thread (torch intra-op).")
    max_num_seqs: int = Field(64, ge=1, description="Sequences a decode worker runs or has reserved at once.")
    max_chunk_tokens: int = Field(
        256, ge=1, description="Prompt tokens computed in one step when no decode waits for it."
    )
    chunk_with_decodes: int = Field(
        64,
        ge=1,
        description="Prompt tokens computed in one step beside running decodes (local prefill, recompute).",
    )
    max_waiting: int = Field(256, ge=1, description="Prompts a worker queues before it refuses.")
    stall_timeout_s: float = Field(
        30.0, gt=0, description="A step older than this makes the worker unhealthy."
    )


class PoolConfig(_Section):
    """One pool: a Serve deployment."""

    num_replicas: int = Field(
        1, ge=0, description="Workers in the pool. 0 prefill workers: colocated serving."
    )
    num_cpus: float = Field(0.5, ge=0, description="Ray CPUs per worker.")
    num_gpus: float = Field(0.0, ge=0, description="Ray GPUs per worker.")
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="Custom Ray resources per worker, e.g. {prefill: 1}; pins pools to node types.",
    )
    health_check_period_s: float = Field(
        1.0, gt=0, description="How often Serve asks the worker whether it is well."
    )
    health_check_timeout_s: float = Field(
        10.0, gt=0, description="A worker that does not answer in this time is replaced."
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="How long a stopping worker may finish its requests."
    )


class CoordinatorConfig(_Section):
    """Admission, placement, deadlines."""

    num_replicas: int = Field(1, ge=1, description="Ingress replicas.")
    num_cpus: float = Field(0.5, ge=0, description="Ray CPUs per ingress replica.")
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
    max_attempts: int = Field(
        3, ge=1, description="Placements tried for one request before its error is shown."
    )
    slow_reader_timeout_s: float = Field(
        60.0, gt=0, description="A client that takes no byte for this long is cut off."
    )
    keep_alive_s: float = Field(
        15.0, gt=0, description="Silence on a stream after which a comment line is sent."
    )
    peek_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Wait for the first token before the stream's 200 is sent; until then errors have a status.",
    )
    worker_timeout_s: float = Field(5.0, gt=0, description="A worker silent for this long counts as lost.")


class TransferConfig(_Section):
    """KV handoff."""

    host: str | None = Field(
        None,
        description="Address workers listen on for coordinators and peers. Empty: the interface that leads out.",
    )
    transport: Literal["auto", "ucx", "tcp", "memory"] = Field(
        "auto", description="How blocks travel. auto: best that works."
    )
    slot_bytes: int = Field(1 << 20, ge=4096, description="Size of one staging slot.")
    num_slots: int = Field(16, ge=2, description="Staging slots per worker: bounds what is in flight.")
    lease_s: float = Field(
        30.0, gt=0, description="How long decode keeps a reservation whose KV has not fully arrived."
    )
    connect_timeout_s: float = Field(5.0, gt=0, description="Longest connection set-up, self-test included.")
    progress_timeout_s: float = Field(
        10.0, gt=0, description="Longest wait for the peer's next step in a handoff."
    )
    peer_timeout_s: float = Field(5.0, gt=0, description="A peer silent for this long counts as lost.")
    probe_bytes: int = Field(8 << 20, ge=0, description="Bytes of the transfer self-test.")


class ServerConfig(_Section):
    """The HTTP edge."""

    host: str = Field(
        "127.0.0.1", description="Address to listen on (launcher only; `serve run` has its own options)."
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on (launcher only).")
    admin_key: str | None = Field(
        None, description="Bearer key for /debug/*. Empty: /debug/* answers on loopback only."
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Largest request body.")
    max_choices: int = Field(128, ge=1, description="Largest n × prompts of one request.")


class BatonConfig(_Section):
    """Everything."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="What is served.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="One worker's engine.")
    prefill: PoolConfig = Field(default_factory=PoolConfig, description="The pool that reads prompts.")
    decode: PoolConfig = Field(
        default_factory=lambda: PoolConfig(),
        description="The pool that writes answers. At least one replica.",
    )
    coordinator: CoordinatorConfig = Field(
        default_factory=CoordinatorConfig, description="Admission, placement, deadlines."
    )
    transfer: TransferConfig = Field(default_factory=TransferConfig, description="KV handoff.")
    server: ServerConfig = Field(default_factory=ServerConfig, description="The HTTP edge.")

    @property
    def is_colocated(self) -> bool:
        """No prefill pool: decode workers read prompts themselves."""
        return self.prefill.num_replicas == 0


def load_config(path: str | Path | None = None, overrides: dict[str, Any] | None = None) -> BatonConfig:
    """The tree from a YAML file and dotted overrides (`{"engine.block_size": 32}`).

    Raises ConfigError naming the field, what was expected and what came.
    """
    tree: dict[str, Any] = {}
    if path:
        try:
            tree = yaml.safe_load(Path(path).read_text()) or {}
        except OSError as error:
            raise ConfigError(
                f"CONFIG: expected a readable YAML file but {path}: {error.strerror}"
            ) from error
        except yaml.YAMLError as error:
            raise ConfigError(f"CONFIG: expected YAML but {path}: {error}") from error
        if not isinstance(tree, dict):
            raise ConfigError(f"CONFIG: expected a mapping in {path} but got {type(tree).__name__}")
    for dotted, value in (overrides or {}).items():
        _put(tree, dotted, value)
    try:
        config = BatonConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors(include_url=False)]
        raise ConfigError("; ".join(lines)) from None
    if config.decode.num_replicas < 1:
        raise ConfigError(
            "decode.num_replicas: expected at least 1 but got 0 (without prefill workers, decode reads prompts itself)"
        )
    return config


def cache_dir() -> Path:
    """Where models and run files are kept: $BATON_CACHE, else ~/.cache/baton."""
    return Path(os.environ.get("BATON_CACHE") or Path.home() / ".cache" / "baton")


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for name in parents:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{dotted}: expected {name} to be a section but it is {type(child).__name__}")
        tree = child
    tree[leaf] = value


def _explain(detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "config"
    if detail["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    return f"{where}: {detail['msg'].lower()} but got {str(detail['input'])[:80]!r}"


def _reference() -> str:
    lines = [
        "# Configuration",
        "",
        "Generated by `python -m contracts.config` from `contracts/config.py`; a test keeps it in step.",
        "A YAML file (`make serve CONFIG=file.yaml`, `serve run coordinator.app:build config=file.yaml`) holds any part of it.",
    ]
    for name, section in BatonConfig.model_fields.items():
        cls: Any = section.annotation
        lines += [
            "",
            f"## {name}",
            "",
            str(section.description),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for key, item in cls.model_fields.items():
            kind = (
                str(item.annotation)
                .replace("typing.", "")
                .replace("<class '", "")
                .replace("'>", "")
                .replace("|", "or")
            )
            default = item.get_default(call_default_factory=True)
            shown = "" if default is None else default
            bounds = " ".join(str(bound) for bound in item.metadata)
            lines.append(
                f"| `{name}.{key}` | {kind}{' ' + bounds if bounds else ''} | `{shown}` | {item.description} |"
            )
    return "\n".join(lines).replace("| `` |", "| – |") + "\n"


if __name__ == "__main__":
    print(_reference(), end="")
