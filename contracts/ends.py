"""After which token an answer is over: for workers, and for a coordinator whose worker died before it said so."""

from __future__ import annotations

from collections.abc import Container

from contracts.request import Finished, SamplingParams


def end_after(
    token_id: int, num_outputs: int, sampling: SamplingParams, eos_ids: Container[int]
) -> Finished | None:
    """The end that `token_id`, the last of `num_outputs` tokens, brings, or None: the answer goes on.

    A stop token counts from `min_tokens` on: before that none is drawn. `stop_token_id` names a token of the request's
    `stop_token_ids`; it is None for the model's own EOS.
    """
    if sampling.grammar and token_id in eos_ids:
        # Drawn only where the grammar lets it be, and, if it is to be ignored, where nothing else may follow.
        return Finished("stop")
    if num_outputs > sampling.min_tokens:
        if token_id in sampling.stop_token_ids:
            return Finished("stop", stop_token_id=token_id)
        if token_id in eos_ids and not sampling.ignore_eos:
            return Finished("stop")
    return Finished("length") if num_outputs >= sampling.max_tokens else None
