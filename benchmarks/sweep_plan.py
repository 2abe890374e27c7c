"""What a sweep is: its definition, checked as a whole before anything starts, and the cells it makes.

axes      modes × splits × lengths × loads × seeds     a cell each; a resumed sweep may have more or fewer
settings  all else                                     the same for every cell, so a resumed sweep must not differ
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from benchmarks.client import Endpoint
from benchmarks.metrics import Slo
from benchmarks.servers import Arm, Launch
from benchmarks.spec import Lengths, LoadSpec, PrefixSpec, TraceSpec, TurnSpec
from benchmarks.traces import find_trace

MIN_SEEDS = 3
TRACE = "trace:"
AXES = ("modes", "splits", "lengths", "loads", "seeds", "interleave")

_Positive = Annotated[float, Field(gt=0)]


class Sweep(BaseModel):
    """A YAML file of these keys, or the flags of the same names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    modes: tuple[str, ...] = Field(("disaggregated", "colocated"), min_length=1)
    splits: tuple[str, ...] = Field(("1:1",), min_length=1)
    lengths: tuple[str, ...] = Field(("256/64",), min_length=1)
    """Prompt/answer tokens, each N or LOW:HIGH; or trace:NAME, the lengths and prefixes of a recorded workload."""
    loads: tuple[_Positive, ...] = Field((0.5, 1.0, 2.0), min_length=1)
    """Requests/s of open arrivals (of conversations, if they have turns), streams at once of closed ones, times the
    recorded rate of arrival=trace."""
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=MIN_SEEDS)
    interleave: bool = True
    """Seed by seed through all servers, so that a machine that slows down favours none; else each server once."""

    arrival: Literal["poisson", "gamma", "constant", "trace", "closed"] = "poisson"
    burstiness: _Positive = 1.0
    length_scale: _Positive = 1.0
    """Of traces: multiplies prompt and answer lengths; requests longer than max_tokens after it are left out."""
    max_tokens: int | None = Field(None, ge=1)
    jitter_s: float = Field(0.0, ge=0)
    """Grain of a trace's recorded times (Mooncake: 3)."""
    prefix_tokens: int = Field(0, ge=0)
    """Prompts begin with one of num_prefixes shared texts of this length."""
    num_prefixes: int = Field(1, ge=1)
    turns: int = Field(1, ge=1)
    """Of a conversation: each adds a prompt and an answer of these lengths to what was said."""
    think_time_s: float = Field(0.0, ge=0)
    num_requests: int = Field(20, ge=1)
    duration_s: float = Field(0.0, ge=0)
    """Open arrivals only: enough requests for this long, at least num_requests."""
    num_warmups: int = Field(2, ge=0)
    ramp_s: float = Field(0.0, ge=0)
    drain_s: float = Field(0.0, ge=0)
    slo_ttft_ms: _Positive | None = None
    slo_tpot_ms: _Positive | None = None
    timeout_s: _Positive = 600.0
    endpoint: Endpoint = "chat"
    is_plain: bool = False
    tokenizer: str = ""
    model: str = ""
    """Baton's own: what it serves. With --url: the name to ask for."""
    config: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("modes", "splits", "lengths", "loads", "seeds")
    @classmethod
    def _no_doubles(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) != len(values):
            raise ValueError(f"expected different values but got {', '.join(map(str, values))}")
        return values

    @field_validator("lengths")
    @classmethod
    def _check_lengths(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if value.startswith(TRACE):
                find_trace(value.removeprefix(TRACE))
            else:
                parse_lengths(value)
        return values

    @model_validator(mode="after")
    def _check_work(self) -> Sweep:
        traces = [value for value in self.lengths if value.startswith(TRACE)]
        if self.arrival == "trace" and len(traces) < len(self.lengths):
            raise ValueError(
                f"lengths: expected trace:NAME beside arrival=trace but got {', '.join(self.lengths)}"
            )
        if traces and self.prefix_tokens:
            raise ValueError("prefix_tokens: expected no trace beside it, since a trace has its own prefixes")
        if self.turns > 1 and self.endpoint != "chat":
            raise ValueError(f"turns: expected endpoint=chat but got {self.endpoint}")
        return self

    @model_validator(mode="after")
    def _check_loads(self) -> Sweep:
        if self.arrival == "closed":
            for load in self.loads:
                if load != int(load) or load > self.num_requests:
                    raise ValueError(
                        f"loads: expected whole numbers of streams up to num_requests={self.num_requests} "
                        f"but got {load:g}"
                    )
        if self.duration_s and self.arrival in ("closed", "trace"):
            raise ValueError(f"duration_s: expected arrivals at a rate but got arrival={self.arrival}")
        return self

    @property
    def slo(self) -> Slo | None:
        if self.slo_ttft_ms is None and self.slo_tpot_ms is None:
            return None
        ttft_s, tpot_s = (None if ms is None else ms / 1000 for ms in (self.slo_ttft_ms, self.slo_tpot_ms))
        return Slo(ttft_s, tpot_s)

    @property
    def launch(self) -> Launch:
        return Launch(self.model, Path(self.config) if self.config else None, self.settings)

    def arms(self) -> list[Arm]:
        """Raises ValueError for a mode that there is not. Splits of one total are one colocated arm."""
        return list(dict.fromkeys(Arm.of(mode, split) for split in self.splits for mode in self.modes))

    def identity(self, target: str) -> dict[str, Any]:
        """What all cells of a folder have in common. `target`: "launcher", or the name of a given server."""
        fixed = self.model_dump(mode="json", exclude={*AXES, "config", "settings"})
        configuration = self.launch.tree() if target == "launcher" else {}
        return {"target": target, **fixed, "configuration": configuration}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `arm` None: a server that was given by URL, called `series`."""

    series: str
    arm: Arm | None
    arrival: str
    lengths: str
    load: float
    seed: int

    @property
    def name(self) -> str:
        """Of its files; different cells have different names."""
        series = self.series.replace(" ", "-").replace(":", "-")
        lengths = self.lengths.replace(TRACE, "trace-").replace(":", "to").replace("/", "-")
        return f"{series}_{lengths}_{self.arrival}-{self.load:g}_seed{self.seed}"

    @property
    def title(self) -> str:
        unit = {"closed": "streams", "trace": "× the trace's rate"}.get(self.arrival, "requests/s")
        work = self.lengths.removeprefix(TRACE) if self.trace else f"{self.lengths} tokens"
        return f"{self.series}, {work}, {self.load:g} {unit}, seed {self.seed}"

    @property
    def trace(self) -> str | None:
        """Name or file of the recorded workload, if it is one."""
        return self.lengths.removeprefix(TRACE) if self.lengths.startswith(TRACE) else None

    @property
    def run_seed(self) -> int:
        """Of the prompts and arrivals: the same for every server, different at every load.

        NOTE: with the plain seed a second load would bring the first one's prompts again, and measure a prefix cache.
        """
        return zlib.crc32(f"{self.lengths}/{self.arrival}/{self.load:g}/{self.seed}".encode())

    def spec(self, sweep: Sweep, url: str) -> LoadSpec:
        is_closed, is_recorded = self.arrival == "closed", self.arrival == "trace"
        num_requests = sweep.num_requests
        if not is_closed:
            num_requests = max(num_requests, round(self.load * sweep.duration_s))
        work: dict[str, Any] = {}
        if self.trace:
            time_scale = self.load if is_recorded else 1.0
            work["trace"] = TraceSpec(
                self.trace, time_scale, sweep.length_scale, sweep.max_tokens, sweep.jitter_s
            )
        else:
            work["input_tokens"], work["output_tokens"] = parse_lengths(self.lengths)
        if sweep.prefix_tokens:
            work["prefix"] = PrefixSpec(sweep.prefix_tokens, sweep.num_prefixes)
        return LoadSpec(
            url,
            model="" if self.arm else sweep.model,
            endpoint=sweep.endpoint,
            is_plain=sweep.is_plain,
            tokenizer=Path(sweep.tokenizer) if sweep.tokenizer else None,
            arrival=sweep.arrival,
            rate=1.0 if is_closed or is_recorded else self.load,
            burstiness=sweep.burstiness,
            concurrency=int(self.load) if is_closed else 1,
            num_requests=num_requests,
            turns=TurnSpec(sweep.turns, sweep.think_time_s),
            seed=self.run_seed,
            slo=sweep.slo,
            num_warmups=sweep.num_warmups,
            ramp_s=sweep.ramp_s,
            drain_s=sweep.drain_s,
            timeout_s=sweep.timeout_s,
            **work,
        )


def cells(sweep: Sweep, given: str | None = None) -> list[Cell]:
    """In the order in which they run. `given`: the name of a server that runs already, instead of the modes.

    Raises ValueError for a mode that there is not.
    """
    arms: list[Arm | None] = [None] if given is not None else [*sweep.arms()]
    grid = [(arm, seed) for seed in sweep.seeds for arm in arms]
    if not sweep.interleave:
        grid = [(arm, seed) for arm in arms for seed in sweep.seeds]
    return [
        Cell(arm.name if arm else given or "", arm, sweep.arrival, lengths, load, seed)
        for arm, seed in grid
        for lengths in sweep.lengths
        for load in sweep.loads
    ]


def parse_lengths(text: str) -> tuple[Lengths, Lengths]:
    """`256/64`, `128:512/32`: prompt and answer. Raises ValueError for anything else."""
    before, slash, after = text.partition("/")
    if not slash:
        raise ValueError(f"expected PROMPT/ANSWER tokens but got {text!r}")
    return Lengths.parse(before), Lengths.parse(after)


def read_sweep(file: Path | None, flags: Mapping[str, Any]) -> Sweep:
    """The definition of a YAML file, with flags over it. Raises ValueError naming the key; OSError."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8")) if file else {}
    if not isinstance(tree, dict):
        raise ValueError(f"{file}: expected a mapping but got {type(tree).__name__}")
    try:
        return Sweep.model_validate({**tree, **flags})
    except ValidationError as error:
        raise ValueError("; ".join(map(_explain, error.errors(include_url=False)))) from None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """`num_requests: 20 before, 30 now; …`, empty if they are the same."""
    keys: Sequence[str] = sorted(before.keys() | now.keys())
    return "; ".join(
        f"{key}: {before.get(key)!r} before, {now.get(key)!r} now"
        for key in keys
        if before.get(key) != now.get(key)
    )


def _explain(detail: Any) -> str:
    where = ".".join(map(str, detail["loc"]))
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        message = f"unknown key; known: {', '.join(Sweep.model_fields)}"
    return f"{where}: {message}" if where else message
