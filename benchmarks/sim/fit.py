"""Step costs from request times alone, and recorded vLLM runs to learn them from.

While a request writes n tokens its engine makes n - 1 steps. What those steps computed for everybody is known from the
times of all requests, and their sum of seconds is linear in it, so least squares over requests give the costs:

    last - first = a·(n - 1) + b·Σ prompt tokens read + d·Σ decodes + e·Σ decode context      over the same time

Prompts are taken to be read, and tokens to be written, evenly between their ends. The term for attention among prompt
tokens is left out: recordings of short prompts do not tell it from b.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.sim.devices import Device

_Array = npt.NDArray[np.float64]
LEAST_OUTPUT = 8  # a window of fewer steps is mostly rounding


@dataclass(frozen=True, slots=True)
class Timeline:
    """What was recorded of a request, in seconds: `scheduled_s`: reading began."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    scheduled_s: float
    first_s: float
    last_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(self.output_tokens - 1, 1)


def read_timelines(path: Path) -> list[Timeline]:
    """Rows of benchmarks/data/vllm, by arrival. Raises ValueError for a file that is none."""
    with path.open(encoding="utf-8") as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        try:
            found = [
                Timeline(
                    float(row["arrived_s"]),
                    int(row["prompt_tokens"]),
                    int(row["output_tokens"]),
                    float(row["scheduled_s"]),
                    float(row["first_token_s"]),
                    float(row["last_token_s"]),
                )
                for row in rows
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: expected recorded requests but got {error!r}") from error
    return sorted(found, key=lambda timeline: timeline.arrived_s)


def fit_device(
    timelines: Sequence[Timeline], num_learnt: int, engine: Device, num_engines: int = 1
) -> Device:
    """`engine` with the costs that the first `num_learnt` requests saw. Several engines that step together (data
    parallel ranks of a mixture of experts) are taken to share all work evenly.

    Raises ValueError where nobody wrote LEAST_OUTPUT tokens.
    """
    learnt = [timeline for timeline in timelines[:num_learnt] if timeline.output_tokens >= LEAST_OUTPUT]
    if not learnt:
        raise ValueError(f"expected answers of {LEAST_OUTPUT} tokens or more but got none")
    features = _features(timelines, learnt)
    features[:, 1:] /= num_engines
    lengths_s = np.array([timeline.last_s - timeline.first_s for timeline in learnt])
    base_s, token_s, stream_s, context_s = _non_negative(features / lengths_s[:, None])
    return Device(
        engine.name,
        base_s,
        token_s,
        0.0,
        base_s,
        stream_s,
        context_s,
        0.0,
        engine.kv_bytes_per_token,
        engine.kv_tokens,
        engine.link_bytes_per_s,
        engine.max_streams,
        stream_s,
    )


def _features(timelines: Sequence[Timeline], windows: Sequence[Timeline]) -> _Array:
    """[windows, 4]: steps, prompt tokens, decodes, context of decodes."""
    begun = np.array([timeline.scheduled_s for timeline in timelines])
    first = np.array([timeline.first_s for timeline in timelines])
    last = np.array([timeline.last_s for timeline in timelines])
    prompts = np.array([float(timeline.prompt_tokens) for timeline in timelines])
    outputs = np.array([float(timeline.output_tokens) for timeline in timelines])
    tokens_per_s = (outputs - 1) / np.maximum(last - first, 1e-9)
    found = np.zeros((len(windows), 4))
    for number, window in enumerate(windows):
        start_s, end_s = window.first_s, window.last_s
        reading = np.clip(np.minimum(first, end_s) - np.maximum(begun, start_s), 0.0, None)
        low, high = np.maximum(first, start_s), np.minimum(last, end_s)
        written = np.clip(high - low, 0.0, None) * tokens_per_s
        contexts = prompts + ((low + high) / 2 - first) * tokens_per_s
        found[number] = (
            window.output_tokens - 1,
            (reading / np.maximum(first - begun, 1e-9) * prompts).sum(),
            written.sum(),
            (written * contexts).sum(),
        )
    return found


def _non_negative(relative: _Array) -> list[float]:
    """Least squares of relative · x = 1; whatever comes out below zero is left out and the rest fitted again."""
    scales = np.maximum(relative.max(axis=0), 1e-12)
    active = list(range(relative.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq((relative / scales)[:, active], np.ones(len(relative)), rcond=None)
        if (found >= 0).all():
            break
        del active[int(np.argmin(found))]
    values = np.zeros(relative.shape[1])
    values[active] = found / scales[active]
    return [float(value) for value in values]
