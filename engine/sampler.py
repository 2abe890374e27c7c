"""Logits in, one token per row out; the order of what happens to them is in contracts.request.SamplingParams.

Each row is drawn alone, in float64, by the inverse CDF over the kept tokens in token-id order, with a uniform number
that is a hash of (seed, output position). So a row's token does not depend on who shares the batch, on the batch's
size or on the worker.

    on the device, all at once    rows that want nothing but argmax; with `Draw` (GPUs) also those drawn from raw logits
    on the host, each alone       penalties, biases, masks, grammars, logprobs; without `Draw` every draw

What the device found comes back in one copy, for which the calling thread waits: it is the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from contracts.errors import EngineError
from contracts.request import SamplingParams, Token
from engine.text.grammar import GrammarState

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON cannot carry

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NUCLEUS_GUESS = 512  # tokens that hold top_p of the mass in all but flat distributions

_BARRED = np.float32(-np.inf)

_MIN_DEVICE_TEMPERATURE = 1e-3
"""Below it float32 weights overflow or vanish; the host has more room."""

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""As kernels.reference.sample: logits [R, V], limits [R, 4], uniforms [R] -> token ids [R]; waits for nothing."""

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to draw one row: `position` in the output, the output's token counts, the prompt's tokens (needed only if
    there is a repetition penalty), the output itself (only for bad token sequences), and where its grammar stands."""

    params: SamplingParams
    position: int
    output_counts: Mapping[int, int] = field(default_factory=dict)
    prompt_ids: AbstractSet[int] = frozenset()
    output_ids: Sequence[int] = ()
    grammar: GrammarState | None = None

    @property
    def is_plain(self) -> bool:
        """Drawn from the raw logits: no penalty, bias or mask."""
        p = self.params
        return (
            self.grammar is None
            and not (p.logit_bias or p.allowed_token_ids or p.bad_token_ids)
            and self.position >= p.min_tokens
            and (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0)
        )

    @property
    def is_argmax(self) -> bool:
        """Nothing but the best raw logit is asked for."""
        return self.params.temperature == 0.0 and self.params.num_logprobs is None and self.is_plain

    def is_best(self, token_id: int) -> bool:
        """Whether the best raw logit, that of `token_id`, is the answer. A grammar that allows this token need not be
        asked which others it allows."""
        if self.grammar is None:
            return self.is_argmax
        return self.is_masked_argmax and self.grammar.allows(token_id)

    @property
    def is_raw_draw(self) -> bool:
        """Nothing but a token drawn from the raw logits, in float32."""
        return (
            self.params.temperature >= _MIN_DEVICE_TEMPERATURE
            and self.params.num_logprobs is None
            and self.is_plain
        )

    @property
    def is_masked_argmax(self) -> bool:
        """Nothing but the best raw logit that the grammar allows."""
        return self.grammar is not None and replace(self, grammar=None).is_argmax


class Sampler:
    """Draws tokens for one model. `eos_token_ids` are masked until a row's `min_tokens` are out. `draw`: how many rows
    are drawn at once where the logits are; None: on the host."""

    def __init__(self, eos_token_ids: Sequence[int], draw: Draw | None = None) -> None:
        self._eos_ids = tuple(eos_token_ids)
        self._draw_all = draw

    def warm_up(self, num_vocab: int, device: torch.device) -> None:
        """One draw on the device, so that no request waits until its kernel is compiled."""
        if self._draw_all is not None:
            params = SamplingParams(max_tokens=1, top_k=2, top_p=0.9)
            self.sample(torch.zeros(1, num_vocab, device=device), [SamplingRow(params, 0)])

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Token]:
        """logits [R, V] float32 on any device, rows R -> R tokens.

        Raises EngineError if a row's largest logit is not a finite number.
        """
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise EngineError(f"expected logits [{len(rows)}, V] but got {list(logits.shape)}")
        if not rows:
            return []
        found = self._on_device(logits, rows)
        drawn = [index for index, row in enumerate(rows) if index not in found]
        host = dict(zip(drawn, logits[drawn].cpu().numpy(), strict=True)) if drawn else {}
        return [
            self._draw(host[index], row) if index in host else Token(row.position, found[index])
            for index, row in enumerate(rows)
        ]

    def _on_device(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> dict[int, int]:
        """Row -> token, of those rows that need no look at their logits on the host."""
        maxima, best = logits.max(dim=-1)  # the lowest id on ties
        results = [maxima.double(), best.double()]
        raw = [] if self._draw_all is None else [i for i, row in enumerate(rows) if row.is_raw_draw]
        if raw and self._draw_all is not None:
            chosen = logits if len(raw) == len(rows) else logits[raw]
            limits = torch.tensor([_limits(rows[i].params) for i in raw], dtype=torch.float32)
            uniforms = [uniform(rows[i].params.seed, rows[i].position) for i in raw]
            places = (limits.to(logits.device), torch.tensor(uniforms, dtype=torch.float64).to(logits.device))
            results.append(self._draw_all(chosen, *places).double())
        # One copy; a float64 holds every id exactly.
        flat: list[float] = torch.cat(results).tolist()
        num_rows = len(rows)
        highest, best_ids, drawn = flat[:num_rows], flat[num_rows : 2 * num_rows], flat[2 * num_rows :]
        if not all(map(math.isfinite, highest)):
            raise EngineError(f"expected finite logits but the rows' maxima are {highest}")
        found = {
            index: int(best_ids[index]) for index, row in enumerate(rows) if row.is_best(int(best_ids[index]))
        }
        return found | {index: int(token_id) for index, token_id in zip(raw, drawn, strict=True)}

    def _draw(self, logits: NDArray[np.float32], row: SamplingRow) -> Token:
        if row.grammar is not None and row.is_masked_argmax:
            mask = self._grammar_mask(row.grammar, len(logits), row.params.ignore_eos)
            return Token(row.position, int(np.where(mask, logits, _BARRED).argmax()))
        raw = logits.astype(np.float64)
        with np.errstate(over="ignore", invalid="raise", divide="ignore"):
            token_id = choose(self._adjusted(raw, row), row.params, row.position)
            return _with_logprobs(raw, row, token_id)

    def _adjusted(self, raw: Floats, row: SamplingRow) -> Floats:
        """Penalties, bias and the min_tokens mask applied to a copy; `raw` itself if there are none."""
        if row.is_plain:
            return raw
        params, scores = row.params, raw.copy()
        num_vocab = len(scores)
        if params.repetition_penalty != 1.0:
            seen = _ids(row.prompt_ids | row.output_counts.keys(), num_vocab)
            values = scores[seen]
            scores[seen] = np.where(
                values > 0, values / params.repetition_penalty, values * params.repetition_penalty
            )
        if row.output_counts and (params.presence_penalty or params.frequency_penalty):
            drawn = _ids(row.output_counts.keys(), num_vocab)
            counts = np.array([row.output_counts[int(token_id)] for token_id in drawn], dtype=np.float64)
            scores[drawn] -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        for token_id, bias in params.logit_bias:
            if 0 <= token_id < num_vocab:
                scores[token_id] += bias
        return self._masked(scores, row)

    def _masked(self, scores: Floats, row: SamplingRow) -> Floats:
        """`scores`, -inf where a token is barred. What bars all of what is left is passed over: some token has to
        come. The grammar is asked first, so it is never what is passed over.
        """
        params, num_vocab = row.params, len(scores)
        if row.grammar is not None:
            scores = np.where(self._grammar_mask(row.grammar, num_vocab, params.ignore_eos), scores, -np.inf)
        if params.allowed_token_ids:
            barred = np.ones(num_vocab, dtype=np.bool_)
            barred[_ids(params.allowed_token_ids, num_vocab)] = False
            scores = _without(scores, barred)
        if bad := _bad_ids(params.bad_token_ids, row.output_ids):
            scores = _without(scores, _ids(bad, num_vocab))
        if row.position < params.min_tokens:
            scores = _without(scores, _ids((*self._eos_ids, *params.stop_token_ids), num_vocab))
        return scores

    def _grammar_mask(self, grammar: GrammarState, num_vocab: int, ignore_eos: bool) -> Mask:
        """[V]: what may come next. Where the output may end, with any EOS; ends that are ignored only if all else is
        barred."""
        mask = np.zeros(num_vocab, dtype=np.bool_)
        allowed = grammar.allowed()[:num_vocab]
        mask[: len(allowed)] = allowed
        eos_ids = _ids(self._eos_ids, num_vocab)
        may_end = grammar.may_end
        mask[eos_ids] = False
        if may_end and not (ignore_eos and mask.any()):
            mask[eos_ids] = True
        return mask


def _limits(params: SamplingParams) -> tuple[float, float, float, float]:
    return params.temperature, params.top_k, params.top_p, params.min_p


def choose(scores: Floats, params: SamplingParams, position: int) -> int:
    """Draw from scores [V] by temperature, top_k, top_p and min_p; the highest score if `temperature` is 0.

    The kept set is cut in the order of (score descending, id ascending), so ties at its border fall to lower ids.
    """
    if params.temperature == 0.0:
        return int(scores.argmax())
    ids: Ids | None = None  # None: all; index arrays over the vocabulary cost more than the draw itself
    if 0 < params.top_k < len(scores):
        ids = _top(scores, params.top_k)
        scores = scores[ids]
    # Differences are <= 0: a tiny temperature gives -inf, whose weight is 0, and never +inf.
    weights = np.exp((scores - scores.max()) / params.temperature)
    if params.top_p < 1.0:
        ids, weights = _narrow(ids, weights, _nucleus(weights, params.top_p))
    if params.min_p > 0.0:
        ids, weights = _narrow(ids, weights, np.flatnonzero(weights >= params.min_p * weights.max()))
    cdf = np.cumsum(weights)
    index = int(np.searchsorted(cdf, uniform(params.seed, position) * cdf[-1], side="right"))
    if index == len(cdf):  # the product was rounded up to the sum: the last token with any weight is meant
        index = int(np.flatnonzero(weights)[-1])
    return index if ids is None else int(ids[index])


def _narrow(ids: Ids | None, weights: Floats, kept: Ids) -> tuple[Ids, Floats]:
    return (kept if ids is None else ids[kept]), weights[kept]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: splitmix64's finaliser (Steele et al. 2014) over seed, then position."""
    mixed = _mix(_mix(seed & _MASK64) + (position + 1) * _GOLDEN & _MASK64)
    return (mixed >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _top(values: Floats, count: int) -> Ids:
    """Ids, ascending, of the `count` largest values, lower ids first among equals. O(V)."""
    border = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > border)
    tied = np.flatnonzero(values == border)
    return np.sort(np.concatenate([above, tied[: count - len(above)]]))


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest weights that hold `top_p` of the sum; at least one."""
    target = top_p * float(weights.sum())
    count = min(_NUCLEUS_GUESS, len(weights))
    while True:
        candidates = _top(weights, count)
        ranked = candidates[np.argsort(-weights[candidates], kind="stable")]
        mass = np.cumsum(weights[ranked])
        if mass[-1] >= target or count == len(weights):
            num_kept = min(int(np.searchsorted(mass, target)) + 1, count)
            return np.sort(ranked[:num_kept])
        count = min(count * 16, len(weights))


def _without(scores: Floats, barred: Ids | Mask) -> Floats:
    masked = scores.copy()
    masked[barred] = -np.inf
    return masked if np.isfinite(masked.max()) else scores


def _bad_ids(sequences: Sequence[tuple[int, ...]], output_ids: Sequence[int]) -> set[int]:
    """The last tokens of those sequences whose other tokens have just been drawn."""
    return {
        sequence[-1]
        for sequence in sequences
        if len(sequence) == 1 or tuple(output_ids[-(len(sequence) - 1) :]) == sequence[:-1]
    }


def _ids(token_ids: AbstractSet[int] | Sequence[int], num_vocab: int) -> Ids:
    """Ascending, distinct, and only those that the model has: a client may name any number."""
    return np.array(sorted({t for t in token_ids if 0 <= t < num_vocab}), dtype=np.int64)


def logprobs_of(
    logits: torch.Tensor, token_ids: Sequence[int], count: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """For each row of logits [T, V]: the logprob of its token, and the `count` best as (token_id, logprob)."""
    rows = logits.cpu().numpy()
    with np.errstate(over="ignore", invalid="raise", divide="ignore"):
        return [
            _row_logprobs(row.astype(np.float64), token_id, count)
            for row, token_id in zip(rows, token_ids, strict=True)
        ]


def _with_logprobs(raw: Floats, row: SamplingRow, token_id: int) -> Token:
    count = row.params.num_logprobs
    if count is None:
        return Token(row.position, token_id)
    logprob, top = _row_logprobs(raw, token_id, count)
    return Token(row.position, token_id, logprob, top)


def _row_logprobs(raw: Floats, token_id: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    highest = float(raw.max())
    log_sum = highest + math.log(float(np.exp(raw - highest).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        ids = _top(raw, min(count, len(raw)))
        ranked = ids[np.argsort(-raw[ids], kind="stable")]
        top = tuple((int(t), _clamped(float(raw[t]) - log_sum)) for t in ranked)
    return _clamped(float(raw[token_id]) - log_sum), top


def _clamped(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
