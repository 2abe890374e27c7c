"""What of a request must survive its workers, and whether it may go on after an error. Pure: no I/O, no clock.

    attempt 1 ──tokens──► lost ──may go on──► attempt 2, from prompt + tokens sent ──► … ──► one end
                            └── refused: the error is the end

Workers keep nothing that is needed here: the draw is keyed by (seed, position), penalties and `min_tokens` follow from
`output_ids`, and text (stop strings, half characters) is made above the flow from the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from contracts.ends import end_after
from contracts.errors import BatonError, DrainingError, EngineError, TryAgain
from contracts.request import Finished, GenerateRequest


@dataclass(frozen=True, slots=True)
class Spoken:
    """What an attempt gave: its tokens, and when the first and the last of them came."""

    token_ids: tuple[int, ...]
    first_s: float
    last_s: float


class Story:
    """One request over all its attempts. `arrived_s` on its owner's clock; `avoid`: workers that failed it."""

    def __init__(
        self,
        request: GenerateRequest,
        eos_ids: frozenset[int],
        max_continuations: int,
        arrived_s: float = 0.0,
    ) -> None:
        self.arrived_s = arrived_s
        self._request = request
        self._eos_ids = eos_ids
        self._max_continuations = max_continuations
        self._known = list(request.output_ids)
        self._num_attempts = 0
        self._num_continuations = 0
        self._has_faulted = False
        self._num_cached = len(request.prompt_ids)
        self._is_read = False  # an attempt gave the first token
        self.last_error: BatonError | None = None
        self.avoid: frozenset[str] = frozenset()

    @property
    def is_resumed(self) -> bool:
        """An attempt was lost: the request was accepted before, and maybe has tokens out."""
        return self.last_error is not None

    @property
    def num_known(self) -> int:
        """Output tokens that the client has."""
        return len(self._known)

    def next_attempt(self) -> GenerateRequest:
        """The request with an id of its own, so that a late word about an earlier attempt is nobody's."""
        self._num_attempts += 1
        return replace(
            self._request,
            request_id=f"{self._request.request_id}.{self._num_attempts}",
            output_ids=tuple(self._known),
        )

    def sent(self, token_ids: Iterable[int]) -> None:
        """An attempt is over, and the client has these of it."""
        self._known += token_ids

    def finished(self, end: Finished) -> Finished:
        """The end with what only the whole story knows: the least cache hits of the attempts up to the first token.

        A continuation finds the request's own blocks in the cache; nobody was spared their computing. What a prefill
        worker found for an attempt that gave no token was never told, and counts as nothing.
        """
        cached = self._num_cached if self._is_read else min(self._num_cached, end.num_cached_tokens)
        return replace(end, num_cached_tokens=cached)

    def end(self) -> Finished | None:
        """The end that a lost worker did not come to tell, if the last token sent was the last one.

        The model's length bounds `max_tokens` before all attempts.
        """
        num_known = len(self._known)
        if num_known == len(self._request.output_ids):
            return None
        end = end_after(self._known[-1], num_known, self._request.sampling, self._eos_ids)
        return end and self.finished(end)

    def lost(self, error: BatonError, worker_ids: list[str], num_cached: int) -> bool:
        """An attempt on `worker_ids` failed. Whether another may follow.

        Counted are failures, so that a request which fails every worker ends; a worker that leaves in order is none.
        A failed step goes on once: its other sequences did nothing wrong, and a fault of the request itself, or of the
        model, shows again.
        """
        if not self._is_read:
            self._num_cached = min(self._num_cached, num_cached)
            self._is_read = len(self._known) > len(self._request.output_ids)
        self.last_error = error
        self.avoid |= frozenset(worker_ids)
        if isinstance(error, DrainingError):
            return True
        if isinstance(error, EngineError):
            if self._has_faulted:
                return False
            self._has_faulted = True
        elif not isinstance(error, TryAgain):
            return False
        self._num_continuations += 1
        return self._num_continuations <= self._max_continuations
