"""What is remembered of one request: the only thing that metrics are made from.

    scheduled ─► sent ─► chunk, chunk, … ─► end          all in seconds since the run's start, client's clock
       t_0                t_1        t_n

`scheduled_s` is when the arrival process wanted the request, not when the client found time for it; so the client's
own lateness counts against the measured system and is visible (`send_lag_s`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

Outcome = Literal["ok", "error", "cancelled", "timeout"]
"""ok: the stream ended as the protocol wants; error: refused, broken off or an error event; cancelled: the client left
(Ctrl-C, end of the run); timeout: the client's patience ended."""

STAGES = ("queue", "prefill", "handoff", "decode")
"""A server's account of one request; queue + prefill + decode is the whole."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Only chunks that carry text (content or reasoning) are listed; `chunk_tokens[i]` counts tokens since
    the chunk before, among them those that had no text of their own.

    `asked_*`: what the plan wanted. `prompt_tokens`, `completion_tokens`, `cached_tokens`: the server's usage, None
    where it reports none. `stages`: seconds by stage (STAGES), where the server told them, by its clock; the handoff is
    a part of decode, and missing where the server did not know it. `label` separates groups of one run (steady, long,
    …); `turn` counts within a conversation. `is_length_fixed`: the server was told to answer with exactly
    `asked_output_tokens`.
    """

    request_id: str
    scheduled_s: float
    sent_s: float | None = None
    end_s: float | None = None
    chunk_times_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    outcome: Outcome = "ok"
    status: int | None = None
    error: str = ""
    finish_reason: str | None = None
    asked_input_tokens: int | None = None
    asked_output_tokens: int | None = None
    is_length_fixed: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    stages: dict[str, float] | None = None
    label: str = ""
    turn: int = 0

    @property
    def num_output_tokens(self) -> int:
        """From the usage, since a chunk may hold several tokens; else what the chunks add up to."""
        return self.completion_tokens if self.completion_tokens is not None else sum(self.chunk_tokens)

    @property
    def num_input_tokens(self) -> int:
        return self.prompt_tokens if self.prompt_tokens is not None else (self.asked_input_tokens or 0)

    @property
    def has_right_length(self) -> bool:
        return not self.is_length_fixed or self.num_output_tokens == self.asked_output_tokens

    @property
    def is_good(self) -> bool:
        """Complete and of the length that was asked for: what may count as attained at all."""
        return self.outcome == "ok" and self.has_right_length

    @property
    def is_rejected(self) -> bool:
        """Refused for load, before any work: 429 or 503."""
        return self.outcome == "error" and self.status in (429, 503)

    @property
    def send_lag_s(self) -> float | None:
        return None if self.sent_s is None else self.sent_s - self.scheduled_s


_FIELDS = {field.name for field in fields(Record)}


def to_json(record: Record) -> dict[str, Any]:
    return asdict(record)


def from_json(content: dict[str, Any]) -> Record:
    """Raises ValueError for what is no record. Unknown keys are an error: a record of another version is not ours."""
    unknown = sorted(content.keys() - _FIELDS)
    if unknown or not {"request_id", "scheduled_s"} <= content.keys():
        raise ValueError(f"expected a record with request_id and scheduled_s but got keys {sorted(content)}")
    if content.get("outcome", "ok") not in get_args(Outcome):
        raise ValueError(f"outcome: expected one of {get_args(Outcome)} but got {content['outcome']!r}")
    stages = content.get("stages")
    if stages is not None and not _is_account(stages):
        raise ValueError(f"stages: expected seconds for some of {STAGES} but got {stages!r:.80}")
    lists = {name: tuple(content.get(name, ())) for name in ("chunk_times_s", "chunk_tokens")}
    if len(lists["chunk_times_s"]) != len(lists["chunk_tokens"]):
        raise ValueError("expected as many chunk_tokens as chunk_times_s")
    return Record(**{**content, **lists})


def _is_account(stages: object) -> bool:
    if not isinstance(stages, dict) or not stages.keys() <= set(STAGES):
        return False
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in stages.values())


def write_jsonl(path: Path, records: Iterable[Record]) -> None:
    """One record a line. The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(to_json(record), separators=(",", ":"), allow_nan=False) + "\n")
    os.replace(partial, path)


def read_jsonl(path: Path) -> Iterator[Record]:
    """Raises ValueError naming the line that is no record."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield from_json(json.loads(line))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path.name}:{number}: {error}") from error
