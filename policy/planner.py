"""How many workers read for others: role flips first (seconds, no reload), replica counts second.

A plan is a number of readers: so many are labelled prefill and read prompts only, all others are mixed; with none all
are mixed. Nobody is told to write only: a writer without time left reads nothing anyway. For every plan the step model
says which request rate it could sustain at the mix of the last seconds:

    readers   util · 1 / T_prefill(prompt)                              each, in large chunks
    mixed     B streams and C prompt tokens per step of the promised gap: B from the rate by Little's law,
              C what is left of the step (policy/chunks.py), also used for prompts

The plan of most worth is wanted: worth is that rate, and for all mixed a dead-band more, since that fits whatever comes
next. It is taken when it is worth a dead-band more than the present one twice in a row, at once when the present one
cannot carry the demand, and never back before the cool-down has passed (only the first change after the start may be
corrected at once). Who becomes a reader drains first: it takes no new streams, and its epoch tells late orders apart.
With three workers or fewer all are mixed: there is nothing to gain from specialists one cannot spare.
Replicas are asked for by the same rates: as many as carry the demand, refused requests too, at the target utilisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

from contracts.roles import RoleLabel
from policy.chunks import Cadence
from policy.fleet import WorkerState
from policy.step_model import StepModel, Work

SMALL = 3
"""Workers up to which all are mixed."""


class Prompts(NamedTuple):
    """Means of prompts: all their tokens, and those not found in any cache."""

    tokens: float
    new_tokens: float


@dataclass(frozen=True, slots=True)
class Mix:
    """The demand of the last seconds: the rate of all requests, and the means of those that were not refused. Admission
    refuses the dearest first, so that a few of them may be most of what was asked for, and nobody will read them.
    `new_tokens`: prompt tokens not found in any cache; `prompt_tokens`: all. `asked`: of the refused as well; None:
    nobody was refused.
    """

    requests_per_s: float
    prompt_tokens: float
    new_tokens: float
    output_tokens: float
    cadence: Cadence
    asked: Prompts | None = None

    def of_all(self) -> Mix:
        """What workers enough would serve."""
        if self.asked is None:
            return self
        return replace(self, prompt_tokens=self.asked.tokens, new_tokens=self.asked.new_tokens, asked=None)


class Demand:
    """An exponentially weighted Mix: `window_s` is the age at which a request counts 1/e.

    Mean output is tokens written per answer ended, both in the window: answers still running count with what they have
    (the estimator of an exponential life under censoring), so longer answers are noticed before the first has ended.
    """

    SHORT_SHARE: ClassVar[float] = 0.1
    SHORT_STEP: ClassVar[float] = 0.1
    LEAST_SERVED: ClassVar[float] = 0.05  # share of all; below, they say nothing about what could be served

    def __init__(self, cadence: Cadence, window_s: float = 10.0, expected_output: float = 200.0) -> None:
        self._cadence = cadence
        self._window_s = window_s
        self._written, self._ended = expected_output, 1.0
        self._count = self._prompt = self._new = 0.0
        self._refused = (0.0, 0.0, 0.0)  # of these, in the same order
        self._short = expected_output / 10
        self._since_s: float | None = None
        self._updated_s = 0.0

    def arrived(self, prompt_tokens: int, new_tokens: int, now_s: float) -> None:
        self._decay(now_s)
        self._count += 1.0
        self._prompt += prompt_tokens
        self._new += new_tokens

    def refused(self, prompt_tokens: int, new_tokens: int, arrived_s: float, now_s: float) -> None:
        """One that had arrived, with the same numbers."""
        self._decay(now_s)
        weight = math.exp((arrived_s - now_s) / self._window_s)
        count, prompt, new = self._refused
        self._refused = count + weight, prompt + weight * prompt_tokens, new + weight * new_tokens

    def wrote(self, num_tokens: int, now_s: float) -> None:
        """Tokens of all streams since the last call."""
        self._decay(now_s)
        self._written += num_tokens

    def finished(self, output_tokens: int, now_s: float) -> None:
        self._decay(now_s)
        self._ended += 1.0
        # A quantile by small steps: down for a shorter one, up for a longer one, at rest where a tenth is shorter.
        below = 1.0 if output_tokens < self._short else 0.0
        self._short *= math.exp(self.SHORT_STEP * (self.SHORT_SHARE - below))

    @property
    def expected_output(self) -> int:
        return max(1, int(self._written / max(self._ended, 1e-9)))

    @property
    def short_output(self) -> float:
        """The length that nine of ten answers exceed."""
        return self._short

    def mix(self, now_s: float) -> Mix | None:
        """None before anybody came."""
        self._decay(now_s)
        if self._count < 1e-3 or self._since_s is None:
            return None
        # The weights of a window not yet full sum to less than window_s.
        seconds = self._window_s * (1.0 - math.exp(-max(now_s - self._since_s, 0.1) / self._window_s))
        asked = Prompts(self._prompt / self._count, self._new / self._count)
        num_refused, prompt, new = self._refused
        num_served, served = self._count - num_refused, asked
        if num_served > self.LEAST_SERVED * self._count:
            served = Prompts((self._prompt - prompt) / num_served, (self._new - new) / num_served)
        return Mix(
            self._count / seconds,
            *served,
            self.expected_output,
            self._cadence,
            asked if num_refused else None,
        )

    def _decay(self, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = self._updated_s = now_s
        keep = math.exp((self._updated_s - now_s) / self._window_s)
        self._count, self._prompt, self._new = self._count * keep, self._prompt * keep, self._new * keep
        count, prompt, new = self._refused
        self._refused = count * keep, prompt * keep, new * keep
        if self._ended > 1.0:  # the last answer is remembered until there is another
            self._written, self._ended = self._written * keep, self._ended * keep
        self._updated_s = now_s


@dataclass(frozen=True, slots=True)
class Flip:
    """A worker's new role, which it takes up fully once it has finished what it has in its old one."""

    worker_id: str
    role: RoleLabel
    epoch: int


PlanCause = Literal[
    "small", "no_demand", "labels", "dead_band", "cool_down", "unconfirmed", "gain", "starving"
]
"""small: too few for specialists. labels: the same plan, carried out by workers whose labels are not of it (such as
have just started). The next three: nobody moves.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """`num_prefill`: readers now, `wanted_prefill`: of the plan of most worth. `rates`: sustainable requests/s of every
    plan weighed, {number of readers: rate}; 0 readers: all are mixed. `num_workers`: replicas wanted for the demand at
    the target utilisation. `reason`: the cause in words.
    """

    flips: tuple[Flip, ...]
    num_prefill: int
    wanted_prefill: int
    num_workers: int
    rates: dict[int, float]
    cause: PlanCause
    reason: str


@dataclass(frozen=True, slots=True)
class PlanRules:
    dead_band: float = 0.05
    cool_down_s: float = 10.0
    confirmations: int = 2
    utilization: float = 0.85
    local_utilization: float = 0.8
    replica_utilization: float = 0.8
    replica_dead_band: float = 0.15
    prefill_chunk: int = 4096
    max_streams: int = 256


def sustainable_rate(
    model: StepModel, mix: Mix, num_readers: int, num_writers: int, kv_tokens: int, rules: PlanRules
) -> float:
    """Requests/s that this plan carries with every promise kept; see the module's head for the formula.
    `num_writers`: they read, too.
    """
    reader_s = model.prefill_s(
        max(1, int(mix.new_tokens)), int(mix.prompt_tokens - mix.new_tokens), rules.prefill_chunk
    )
    reader_rate = num_readers * rules.utilization / max(reader_s, 1e-9)
    if num_writers == 0:
        return 0.0
    context = mix.prompt_tokens + mix.output_tokens / 2
    most_streams = min(rules.max_streams, 0.95 * kv_tokens / max(context, 1.0))
    gap_s = mix.cadence.gap_s
    chunk_past = int(mix.prompt_tokens / 2)
    # No step is shorter than that of one stream alone.
    shortest_s = model.decode_step_s(1, context)
    low, high = 0.0, num_writers * most_streams / max(mix.output_tokens * shortest_s, 1e-9)
    for _ in range(24):
        rate = (low + high) / 2
        # Full steps last the whole gap; so many streams are alive at a time.
        streams = rate * mix.output_tokens * gap_s / num_writers
        fits = streams <= most_streams and (
            model.decode_step_s(streams, streams * context) * model.margin <= gap_s
        )
        if fits and rate > reader_rate:
            decodes = Work(0, 0, math.ceil(streams), int(streams * context))
            chunk = model.largest_chunk(decodes, chunk_past, gap_s, rules.prefill_chunk)
            local_rate = rules.local_utilization * num_writers * chunk / gap_s / max(mix.new_tokens, 1.0)
            fits = reader_rate + local_rate >= rate
        if fits:
            low = rate
        else:
            high = rate
    return low


class Planner:
    """One step of `plan` every second or so; keeps what hysteresis needs."""

    MAX_SPLITS: ClassVar[int] = 16  # weighed at once; around the best of a coarse grid a finer one follows

    def __init__(self, rules: PlanRules, kv_tokens: int) -> None:
        self._rules = rules
        self._kv_tokens = kv_tokens
        self._flipped_s = -math.inf
        self._is_all_mixed = False
        self._asked = self._direction = 0  # +1 towards more readers
        self._confirmed = 0
        self._epoch = 0
        self._num_workers = 0

    def plan(self, mix: Mix | None, workers: Sequence[WorkerState], now_s: float) -> Plan:
        """What to change now; `reason` says why, or why not."""
        live = [worker for worker in workers if worker.is_open]
        num_prefill = sum(worker.role == "prefill" for worker in live)
        self._num_workers = self._num_workers or len(live)
        if len(live) <= SMALL:
            return self._small(mix, live)
        if mix is None:
            replicas = self._replicas(mix, {}, len(live))
            return Plan((), num_prefill, num_prefill, replicas, {}, "no_demand", "no demand seen")
        model = _typical(live).model
        # Where all are mixed, readers can only be such as have just started.
        present = 0 if self._is_all_mixed else num_prefill
        rates = self._rates(model, mix, len(live), present)
        wanted, best, cause, reason = self._hysteresis(mix, rates, present, now_s)
        if wanted != present:
            if self._direction:  # the first change is made knowing least: it may be corrected at once
                self._flipped_s = now_s
            self._confirmed, self._direction = 0, 1 if wanted > present else -1
        self._is_all_mixed = wanted == 0
        flips = self._flips(live, num_prefill, wanted)
        if flips and wanted == present:
            cause, reason = "labels", f"labels of {_named(wanted)}"
        carried = rates if mix.asked is None else self._rates(model, mix.of_all(), len(live), present)
        replicas = self._replicas(mix, carried, len(live))
        return Plan(tuple(flips), num_prefill, best, replicas, rates, cause, reason)

    def _small(self, mix: Mix | None, live: Sequence[WorkerState]) -> Plan:
        self._is_all_mixed = True
        flips = tuple(self._flip(worker, "mixed") for worker in live if worker.role != "mixed")
        rates: dict[int, float] = {}
        carried = rates
        if mix is not None and live:
            model, size = _typical(live).model, len(live)
            rates, carried = (
                {0: sustainable_rate(model, which, 0, size, self._kv_tokens, self._rules)}
                for which in (mix, mix.of_all())
            )
        replicas = self._replicas(mix, carried, len(live))
        return Plan(flips, 0, 0, replicas, rates, "small", "three workers or fewer: all mixed")

    def _rates(self, model: StepModel, mix: Mix, size: int, present: int) -> dict[int, float]:
        """Rates rise with readers while prompts are what is short, and fall once writers are: one peak."""
        rates: dict[int, float] = {}

        def weigh(num_readers: int) -> float:
            if num_readers not in rates:
                rates[num_readers] = sustainable_rate(
                    model, mix, num_readers, size - num_readers, self._kv_tokens, self._rules
                )
            return rates[num_readers]

        weigh(min(present, size - 1))
        low, high = 0, size - 1
        while True:
            stride = max(1, (high - low) // self.MAX_SPLITS)
            best = max((*range(low, high + 1, stride), high), key=weigh)
            if stride == 1:
                return dict(sorted(rates.items()))
            low, high = max(0, best - stride), min(size - 1, best + stride)

    def _hysteresis(
        self, mix: Mix, rates: dict[int, float], present: int, now_s: float
    ) -> tuple[int, int, PlanCause, str]:
        """(readers from now on, readers of the plan of most worth, the cause, in words)."""
        rules = self._rules
        worth = rates | {0: rates[0] * (1.0 + rules.dead_band)}
        best = max(worth, key=lambda n: (worth[n], -abs(n - present)))
        if present not in rates:
            return best, best, "labels", "somebody must write"
        gain = f"{_named(best)} carry {rates[best] / max(rates[present], 1e-9) - 1.0:+.1%}"
        if best == present or worth[best] < (1.0 + rules.dead_band) * worth[present]:
            self._confirmed = 0
            return present, best, "dead_band", f"dead-band: {gain}"
        direction = 1 if best > present else -1
        self._confirmed = self._confirmed + 1 if direction == self._asked else 1
        self._asked = direction
        if direction != self._direction and now_s - self._flipped_s < rules.cool_down_s:
            return present, best, "cool_down", f"cool-down: {gain}"
        if rates[present] < mix.requests_per_s:
            return best, best, "starving", f"{gain}: starving"
        if self._confirmed < rules.confirmations:
            return present, best, "unconfirmed", f"to be confirmed: {gain}"
        return best, best, "gain", gain

    def _flips(self, live: Sequence[WorkerState], present: int, wanted: int) -> list[Flip]:
        """Whoever has least to finish in its old role goes first. All who do not read for others are mixed."""
        readers = sorted((w for w in live if w.role == "prefill"), key=lambda w: w.prefill_free_s)
        others = sorted((w for w in live if w.role != "prefill"), key=lambda w: w.num_streams)
        flips = [self._flip(worker, "prefill") for worker in others[: max(wanted - present, 0)]]
        others = others[len(flips) :] + readers[: max(present - wanted, 0)]
        return flips + [self._flip(worker, "mixed") for worker in others if worker.role != "mixed"]

    def _flip(self, worker: WorkerState, role: RoleLabel) -> Flip:
        self._epoch = max(self._epoch, worker.epoch) + 1
        return Flip(worker.worker_id, role, self._epoch)

    def _replicas(self, mix: Mix | None, rates: dict[int, float], size: int) -> int:
        """Workers that carry the demand at the target utilisation, moved only out of the dead-band. Two carry none; at
        most twice those there are, since a rate of next to nothing says that a promise cannot be kept at all.
        """
        rules = self._rules
        load = 0.0 if mix is None else mix.requests_per_s / max(max(rates.values(), default=0.0), 1e-9)
        wanted = max(2, min(math.ceil(size * load / rules.replica_utilization), 2 * size))
        if abs(wanted - self._num_workers) > rules.replica_dead_band * self._num_workers:
            self._num_workers = wanted
        return self._num_workers


def _named(num_readers: int) -> str:
    return f"{num_readers} readers" if num_readers else "all mixed"


def _typical(workers: Sequence[WorkerState]) -> WorkerState:
    """The median by speed: one slow worker must not speak for all."""
    ordered = sorted(workers[:: max(1, len(workers) // 64)], key=lambda w: w.model.mixed.token_s)
    return ordered[len(ordered) // 2]
