"""Recorded workloads: who arrived when, with how long a prompt and answer, and what it shared with others.

Formats, told apart by their header or keys:

    Azure        TIMESTAMP,ContextTokens,GeneratedTokens            date and time, 100 ns grain
    Vidur        arrived_at,num_prefill_tokens,num_decode_tokens    seconds; without arrived_at: lengths only
    ServeGen     arrival_s,[client_id,]input_tokens,output_tokens   seconds
    Mooncake     {"timestamp": ms, "input_length", "output_length", "hash_ids": one per 512 tokens}
    vLLM runs    {"arrival_time": s, "input_toks", "output_toks"}   LLMServingSim's recordings

Lines that begin with # are comments (licences of the excerpts in benchmarks/data).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

DATA = Path(__file__).parent / "data"
MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_GRAIN_S = 3.0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`time_s` None: the source records lengths only. `block_ids`: equal ids in front are equal prompt text, one id
    per `block_tokens` tokens, the last block cut to the prompt's end.
    """

    time_s: float | None
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


def read_trace(path: Path, max_requests: int | None = None) -> list[TraceRequest]:
    """Requests by time, times from 0 on. Raises ValueError naming the line that does not fit a known format.

    Requests without an answer (a failed call, in some sources) are dropped.
    """
    with path.open(encoding="utf-8", newline="") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip() and line[0] != "#")
        first = next(lines, None)
        if first is None:
            raise ValueError(f"{path.name}: expected a trace but got an empty file")
        rows = _json_rows(path, first, lines) if first[1].startswith("{") else _csv_rows(path, first, lines)
        found = [row for row in islice(rows, max_requests) if row.output_tokens > 0]
    found.sort(key=lambda request: request.time_s or 0.0)  # stable: lengths keep the file's order
    start_s = found[0].time_s if found else None
    if start_s is None:
        return found
    return [replace(row, time_s=(row.time_s or 0.0) - start_s) for row in found]


def find_trace(name: str) -> Path:
    """A file, or the name of an excerpt in benchmarks/data, with or without its ending."""
    path = Path(name)
    if path.is_file():
        return path
    for candidate in sorted(DATA.iterdir()):
        if name in (candidate.name, candidate.stem) and candidate.suffix in (".csv", ".jsonl"):
            return candidate
    known = ", ".join(sorted(file.stem for file in DATA.iterdir() if file.suffix in (".csv", ".jsonl")))
    raise ValueError(f"trace: expected a file or one of {known} but got {name!r}")


def scaled(
    requests: Iterable[TraceRequest], length_scale: float, max_tokens: int | None = None
) -> list[TraceRequest]:
    """Lengths times `length_scale` (at least 1 token); with `max_tokens`, longer requests are left out, not cut: a cut
    workload would be another one without saying so.
    """
    if not length_scale > 0:
        raise ValueError(f"length_scale: expected more than 0 but got {length_scale}")

    def scale(num_tokens: int) -> int:
        return max(1, round(num_tokens * length_scale))

    result = []
    for request in requests:
        small = replace(
            request,
            input_tokens=scale(request.input_tokens),
            output_tokens=scale(request.output_tokens),
            block_tokens=scale(request.block_tokens),
        )
        if max_tokens is None or small.input_tokens + small.output_tokens <= max_tokens:
            result.append(small)
    return result


def ideal_hit_ratio(requests: Sequence[TraceRequest]) -> float:
    """Share of prompt tokens that an unlimited prefix cache would hold, counting whole leading blocks."""
    seen: set[int] = set()
    num_hit = num_tokens = 0
    for request in requests:
        hit = 0
        for block_id in request.block_ids:
            if block_id not in seen:
                break
            hit += request.block_tokens
        num_hit += min(hit, request.input_tokens)
        num_tokens += request.input_tokens
        seen.update(request.block_ids)
    return num_hit / num_tokens if num_tokens else 0.0


_Line = tuple[int, str]
_Read = Callable[[dict[str, str]], TraceRequest]


def _azure(row: dict[str, str]) -> TraceRequest:
    moment, _, fraction = row["TIMESTAMP"].partition(".")
    seconds = datetime.fromisoformat(f"{moment}+00:00").timestamp() + float(
        f"0.{fraction.rstrip('Z') or '0'}"
    )
    return TraceRequest(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _vidur(row: dict[str, str]) -> TraceRequest:
    time_s = float(row["arrived_at"]) if "arrived_at" in row else None
    return TraceRequest(time_s, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))


def _servegen(row: dict[str, str]) -> TraceRequest:
    return TraceRequest(float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"]))


_CSV: tuple[tuple[str, _Read], ...] = (
    ("ContextTokens", _azure),
    ("num_prefill_tokens", _vidur),
    ("input_tokens", _servegen),
)


def _csv_rows(path: Path, first: _Line, lines: Iterator[_Line]) -> Iterator[TraceRequest]:
    names = next(csv.reader([first[1]]))
    read = next((read for column, read in _CSV if column in names), None)
    if read is None:
        raise ValueError(f"{path.name}: expected the header of a known trace but got {first[1].strip()!r}")
    for number, line in lines:
        values = next(csv.reader([line]))
        try:
            yield read(dict(zip(names, values, strict=True)))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path.name}:{number}: {error}") from error


def _json_rows(path: Path, first: _Line, lines: Iterator[_Line]) -> Iterator[TraceRequest]:
    for number, line in (first, *lines):
        try:
            row = json.loads(line)
            if "input_length" in row:
                yield TraceRequest(
                    row["timestamp"] / 1000.0,
                    int(row["input_length"]),
                    int(row["output_length"]),
                    tuple(row.get("hash_ids", ())),
                )
            else:
                yield TraceRequest(
                    float(row["arrival_time"]), int(row["input_toks"]), int(row["output_toks"])
                )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name}:{number}: expected a known trace row: {error!r}") from error
