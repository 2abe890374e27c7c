"""What every Backend must do, the scripted one and the real one alike. Subclass it and give it a backend.

A subclass provides `backend` (a fixture), prompts of its vocabulary in `prompt_ids`, and `settled`, which
returns when the backend works for nobody (and fails the test if that takes too long).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from contracts.errors import BatonError, ContextLengthError, DeadlineError
from contracts.request import Finished, GenerateRequest, SamplingParams, Token
from coordinator.backend import Backend
from tests.coordinator.streams import Stream

_NUMBERS = count()


class BackendConformance:
    prompt_ids: tuple[int, ...] = (72, 105)
    timeout_s: float = 30.0

    async def settled(self, backend: Backend) -> None:
        raise NotImplementedError

    def make_request(self, max_tokens: int = 4, **sampling: object) -> GenerateRequest:
        params = replace(SamplingParams(max_tokens, temperature=0.0, ignore_eos=True), **sampling)  # type: ignore[arg-type]
        return GenerateRequest(f"conformance-{next(_NUMBERS)}", self.prompt_ids, params)

    async def collect(self, stream: Stream) -> tuple[list[Token], list[Finished]]:
        tokens, ends = [], []
        async with asyncio.timeout(self.timeout_s):
            async for item in stream:
                if isinstance(item, Finished):
                    ends.append(item)
                else:
                    assert not ends, "a token after the end"
                    tokens.append(item)
        return tokens, ends

    @pytest.mark.parametrize("max_tokens", [1, 2, 5])
    async def test_one_terminal_event_comes_last_and_the_length_is_exact(
        self, backend: Backend, max_tokens: int
    ) -> None:
        tokens, ends = await self.collect(Stream(backend, self.make_request(max_tokens), 30.0))
        assert [token.index for token in tokens] == list(range(max_tokens))
        assert [end.reason for end in ends] == ["length"]
        await self.settled(backend)

    async def test_the_same_request_has_the_same_answer(self, backend: Backend) -> None:
        first, _ = await self.collect(Stream(backend, self.make_request(5), 30.0))
        again, _ = await self.collect(Stream(backend, self.make_request(5), 30.0))
        assert [token.token_id for token in first] == [token.token_id for token in again]

    async def test_a_stop_token_is_delivered_and_then_ends(self, backend: Backend) -> None:
        free, _ = await self.collect(Stream(backend, self.make_request(5), 30.0))
        stop_id = free[0].token_id
        tokens, ends = await self.collect(
            Stream(backend, self.make_request(5, stop_token_ids=(stop_id,)), 30.0)
        )
        assert [token.token_id for token in tokens] == [stop_id]
        assert [(end.reason, end.stop_token_id) for end in ends] == [("stop", stop_id)]

    async def test_logprobs_come_with_every_token_when_asked(self, backend: Backend) -> None:
        tokens, _ = await self.collect(Stream(backend, self.make_request(3, num_logprobs=2), 30.0))
        assert all(token.logprob is not None and token.logprob <= 0 for token in tokens)
        assert [len(token.top) for token in tokens] == [2, 2, 2]

    async def test_closing_in_the_middle_ends_the_work(self, backend: Backend) -> None:
        stream = Stream(backend, self.make_request(200), 30.0)
        async with asyncio.timeout(self.timeout_s):
            await anext(stream)
        await stream.aclose()
        await self.settled(backend)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    async def test_cancelling_the_reader_ends_the_work(self, backend: Backend) -> None:
        reader = asyncio.create_task(self.collect(Stream(backend, self.make_request(500), 30.0)))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await self.settled(backend)

    async def test_closing_before_the_first_token_is_asked_for_does_nothing(self, backend: Backend) -> None:
        stream = Stream(backend, self.make_request(), 30.0)
        await stream.aclose()
        await self.settled(backend)

    async def test_what_cannot_fit_is_refused_with_a_typed_error(self, backend: Backend) -> None:
        limit = backend.capacity().max_total_tokens
        with pytest.raises(ContextLengthError):
            await self.collect(Stream(backend, self.make_request(limit), 30.0))
        await self.settled(backend)

    async def test_a_deadline_that_has_passed_is_a_typed_error(self, backend: Backend) -> None:
        with pytest.raises(DeadlineError):
            await self.collect(Stream(backend, self.make_request(200), 0.0))
        await self.settled(backend)

    async def test_many_at_once_each_get_their_own_end(self, backend: Backend) -> None:
        streams = [Stream(backend, self.make_request(1 + i % 4), 30.0) for i in range(8)]
        for i, (tokens, ends) in enumerate(await asyncio.gather(*map(self.collect, streams))):
            assert len(tokens) == 1 + i % 4
            assert len(ends) == 1
        await self.settled(backend)

    async def test_audit_and_readiness_answer_and_balance(self, backend: Backend) -> None:
        assert backend.readiness().is_ready
        try:
            audits = await backend.audit()
        except BatonError as error:
            raise AssertionError("a ready backend has an audit") from error
        assert audits
        assert all(worker.audit.is_balanced for worker in audits)
