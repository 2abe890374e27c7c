from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.config import EngineConfig
from contracts.errors import OverloadedError
from contracts.request import GenerateRequest, SamplingParams, Token
from engine.blocks import HoldState
from tests.builders import EOS_ID, NUM_VOCAB, FakeSink, TinyWorker, make_request, oracle

LONG = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_two_workers_give_what_one_gives() -> None:
    request = make_request(10, sampling=replace(LONG, temperature=0.8, seed=11))
    prefill, sink = TinyWorker(), FakeSink()
    prefill.start_remote(request, sink)
    prefill.run()
    assert sink.state is not None
    decode = TinyWorker()
    assert decode.receive(request, sink.state.first_token) is not None
    decode.run()
    together = prefill.outputs(request.request_id) + decode.outputs(request.request_id)
    assert together == oracle(request)[0]
    assert decode.finished(request.request_id).reason == "length"
    decode.assert_at_rest()


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    worker = TinyWorker()
    request = make_request(12, sampling=LONG)
    worker.start_local(request)
    worker.run()
    turn = (*request.prompt_ids, *worker.outputs(request.request_id), 1, 2)
    second = make_request(prompt_ids=turn, sampling=LONG)
    worker.start_local(second)
    worker.run()
    # 24 tokens fill six blocks of 4, but the last one was drawn and never computed
    assert worker.finished(second.request_id).num_cached_tokens == 20
    assert worker.outputs(second.request_id) == oracle(second)[0]


def test_received_blocks_are_found_as_soon_as_they_are_adopted() -> None:
    worker, request = TinyWorker(), make_request(12, sampling=LONG)
    seq = worker.receive(request, Token(0, oracle(request)[0][0]))
    assert seq is not None
    worker.decode.adopt(seq)
    hold = worker.decode.reserve(make_request(prompt_ids=(*request.prompt_ids, 1)), HoldState.RESERVED)
    assert hold is not None
    assert hold.num_cached_tokens == 12


@pytest.mark.parametrize(
    ("sampling", "reason", "stop_token_id"),
    [
        (SamplingParams(max_tokens=40, temperature=0.0, logit_bias=((EOS_ID, 3.0),)), "stop", None),
        (SamplingParams(40, 0.0, ignore_eos=True, stop_token_ids=(3,), logit_bias=((3, 3.0),)), "stop", 3),
        (SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True), "length", None),
        (SamplingParams(40, 0.0, min_tokens=5, logit_bias=((EOS_ID, 50.0),)), "stop", None),
    ],
)
def test_ends(sampling: SamplingParams, reason: str, stop_token_id: int | None) -> None:
    worker = TinyWorker()
    request = make_request(10, sampling=sampling)
    worker.start_local(request)
    worker.run()
    assert (worker.outputs(request.request_id), reason) == oracle(request)
    finished = worker.finished(request.request_id)
    assert (finished.reason, finished.stop_token_id) == (reason, stop_token_id)
    assert len(worker.outputs(request.request_id)) >= sampling.min_tokens
    worker.assert_at_rest()


def test_the_models_length_ends_a_sequence() -> None:
    worker = TinyWorker(max_model_len=13)
    request = make_request(10, sampling=LONG)
    worker.start_local(request)
    worker.run()
    assert len(worker.outputs(request.request_id)) == 3
    assert worker.finished(request.request_id).reason == "length"


def test_reservations_are_bounded_by_sequences_and_by_blocks() -> None:
    worker = TinyWorker(num_blocks=8, config=EngineConfig(max_num_seqs=2))
    one = worker.decode.reserve(make_request(10), HoldState.RESERVED)
    assert worker.decode.reserve(make_request(20), HoldState.RESERVED) is None  # 6 blocks, 5 are left
    two = worker.decode.reserve(make_request(3), HoldState.RESERVED)
    assert one is not None
    assert two is not None
    assert worker.decode.reserve(make_request(3), HoldState.RESERVED) is None
    assert worker.pool.audit().reserved == 4
    worker.pool.release(two)  # a lease that ran out, elsewhere
    assert worker.decode.reserve(make_request(3), HoldState.RESERVED) is not None


def test_a_reservation_is_not_given_twice() -> None:
    worker = TinyWorker()
    request = make_request(10)
    assert worker.decode.reserve(request, HoldState.RESERVED) is not None
    assert worker.decode.reserve(request, HoldState.RESERVED) is None


def test_reservations_come_back_when_local_prefill_ends_the_request() -> None:
    worker = TinyWorker(config=EngineConfig(max_num_seqs=1))
    for _ in range(3):
        assert worker.start_local(make_request(5, sampling=replace(LONG, max_tokens=1))) is not None
        worker.run()
    assert worker.decode.num_waiting == 0


def test_the_youngest_is_preempted_and_nothing_is_said_twice() -> None:
    worker = TinyWorker(num_blocks=7, config=EngineConfig(max_num_seqs=3))
    requests = [make_request(prompt_ids=[n] * 7, sampling=LONG) for n in (1, 2, 3)]
    for request in requests:
        assert worker.start_local(request) is not None
    seen_oldest = []
    while worker.step():
        seen_oldest.append(requests[0].request_id in worker.prefill.waiting)
    assert worker.decode.num_preemptions > 0
    assert not any(seen_oldest)
    for request in requests:
        assert worker.outputs(request.request_id) == oracle(request)[0]
        assert worker.finished(request.request_id).num_cached_tokens == 0
    worker.assert_at_rest()


def test_a_preempted_sequence_comes_before_prompts_that_wait() -> None:
    worker = TinyWorker(num_blocks=5)
    requests = [make_request(prompt_ids=[n] * 7, sampling=LONG) for n in (1, 2)]
    for request in requests:
        worker.start_local(request)
    worker.start_remote(make_request(prompt_ids=[3] * 9), FakeSink())
    while not worker.decode.num_preemptions:
        assert worker.step()
    assert next(iter(worker.prefill.waiting)) == requests[1].request_id


def test_nothing_is_reserved_while_a_preempted_sequence_waits() -> None:
    worker = TinyWorker(num_blocks=5)
    for n in (1, 2):
        assert worker.start_local(make_request(prompt_ids=[n] * 7, sampling=LONG)) is not None
    while not worker.prefill.waiting:
        assert worker.step()
    assert worker.pool.num_available > 0
    assert worker.decode.reserve(make_request(2), HoldState.RESERVED) is None
    worker.run()
    assert worker.decode.reserve(make_request(2), HoldState.RESERVED) is not None


def test_the_oldest_sits_out_while_a_reservation_holds_the_blocks() -> None:
    worker = TinyWorker(num_blocks=5)
    request = make_request(7, sampling=LONG)
    worker.start_local(request)
    worker.step()
    hold = worker.decode.reserve(make_request(prompt_ids=[1] * 9), HoldState.RESERVED)
    assert hold is not None
    worker.run()
    assert worker.ends(request.request_id) == []
    assert worker.decode.reserve(make_request(1), HoldState.RESERVED) is None
    worker.loop.submit(lambda: worker.pool.release(hold))
    worker.run()
    assert worker.outputs(request.request_id) == oracle(request)[0]
    worker.assert_at_rest()


def test_what_can_never_fit_ends_with_a_typed_error() -> None:
    worker = TinyWorker(num_blocks=3)
    request = make_request(7, sampling=LONG)
    worker.start_local(request)
    worker.run()
    error = worker.error(request.request_id)
    assert isinstance(error, OverloadedError)
    assert error.message == "13 tokens do not fit 3 blocks"
    # the KV of 12 tokens fitted, so 6 tokens came
    assert worker.outputs(request.request_id) == oracle(request)[0][:6]
    worker.assert_at_rest()


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_cancel_frees_in_every_state(num_steps: int) -> None:
    worker = TinyWorker()
    request = make_request(10, sampling=LONG)
    worker.start_local(request)
    for _ in range(num_steps):
        worker.step()
    worker.cancel(request.request_id)
    worker.run()
    assert worker.ends(request.request_id) == []
    worker.assert_at_rest()


def test_cancel_of_a_preempted_sequence() -> None:
    worker = TinyWorker(num_blocks=5)
    requests = [make_request(prompt_ids=[n] * 7, sampling=LONG) for n in (1, 2)]
    for request in requests:
        worker.start_local(request)
    while not worker.prefill.waiting:
        worker.step()
    worker.cancel(requests[1].request_id)
    worker.run()
    assert worker.outputs(requests[0].request_id) == oracle(requests[0])[0]
    assert worker.ends(requests[1].request_id) == []
    worker.assert_at_rest()


def test_a_handoff_that_arrives_after_its_cancellation_is_ignored() -> None:
    worker = TinyWorker()
    request = make_request(10, sampling=LONG)
    prefill, sink = TinyWorker(), FakeSink()
    prefill.start_remote(request, sink)
    prefill.run()
    assert sink.state is not None
    assert worker.receive(request, sink.state.first_token) is not None
    worker.decode.cancel(request.request_id)  # before the queued adopt
    worker.run()
    assert worker.runner.batches == []
    worker.assert_at_rest()


@dataclass(frozen=True)
class Arrival:
    """At `step`, a request arrives over `path`; `cancel_at` steps later (None: never) its client leaves."""

    step: int
    path: str  # local | received | handed off
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cancel_at: int | None


SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 2, 12, 14, 16]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 9),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    min_tokens=st.sampled_from([0, 3]),
    ignore_eos=st.sampled_from([True, True, False]),
)
# Few different prompts, so that prefixes are shared often.
PROMPTS = st.builds(
    lambda head, tail: tuple((head * 8)[:8] + tail) if head else tuple(tail),
    st.sampled_from([[], [1], [1, 2]]),
    st.lists(st.integers(0, NUM_VOCAB - 1), min_size=1, max_size=6),
)
ARRIVALS = st.builds(
    Arrival,
    step=st.integers(0, 5),
    path=st.sampled_from(["local", "local", "local", "received", "handed off"]),
    prompt_ids=PROMPTS,
    sampling=SAMPLING,
    cancel_at=st.sampled_from([None, None, None, 0, 1, 4]),
)


class Story:
    """Drives random arrivals through one worker and keeps what it must remember about them."""

    def __init__(self, worker: TinyWorker, arrivals: list[Arrival]) -> None:
        self.worker = worker
        self.due = sorted(enumerate(arrivals), key=lambda pair: pair[1].step)
        self.started: dict[str, Arrival] = {}
        self.requests: dict[str, GenerateRequest] = {}
        self.cancelled: set[str] = set()
        self.sinks: dict[str, FakeSink] = {}
        self.num_before: dict[str, int] = {}

    def play(self) -> None:
        now = 0
        is_busy = True
        while self.due or is_busy or any(self._may_be_cancelled()):
            self._arrive(now)
            self._cancel(now)
            is_busy = self.worker.step()
            self._settle()
            is_busy = is_busy or self.worker.loop.has_work
            now += 1
            assert now < 2000, "no progress"

    def _arrive(self, now: int) -> None:
        waiting = []
        for number, arrival in self.due:
            if arrival.step > now or not self._start(number, arrival):
                waiting.append((number, arrival))
            else:
                self.started[f"s{number}"] = replace(arrival, step=now)
        self.due = waiting

    def _start(self, number: int, arrival: Arrival) -> bool:
        request_id = f"s{number}"
        request = make_request(
            prompt_ids=arrival.prompt_ids, request_id=request_id, sampling=arrival.sampling
        )
        self.requests[request_id] = request
        if arrival.path == "handed off":
            self.sinks[request_id] = FakeSink()
            self.worker.start_remote(request, self.sinks[request_id])
            return True
        if arrival.path == "received" and len(oracle(request)[0]) > 1:
            prefill, sink = TinyWorker(), FakeSink()
            prefill.start_remote(request, sink)
            prefill.run()
            assert sink.state is not None
            self.num_before[request_id] = 1
            return self.worker.receive(request, sink.state.first_token) is not None
        return self.worker.start_local(request) is not None

    def _may_be_cancelled(self) -> list[str]:
        return [
            request_id
            for request_id, arrival in self.started.items()
            if arrival.cancel_at is not None and request_id not in self.cancelled
        ]

    def _cancel(self, now: int) -> None:
        for request_id in self._may_be_cancelled():
            arrival = self.started[request_id]
            if now >= arrival.step + (arrival.cancel_at or 0):
                self.cancelled.add(request_id)
                if not self.worker.ends(request_id):
                    self.worker.cancel(request_id)
                    if request_id in self.sinks:
                        self.sinks[request_id].abort()

    def _settle(self) -> None:
        """Transfers end one step after they were finished or aborted."""
        for request_id, sink in list(self.sinks.items()):
            if sink.state is not None or sink.num_aborts:
                del self.sinks[request_id]
                self.worker.loop.submit(lambda rid=request_id: self.worker.prefill.handed_off(rid, None))  # type: ignore[misc]


@settings(max_examples=120)
@given(
    arrivals=st.lists(ARRIVALS, min_size=3, max_size=8),
    num_blocks=st.integers(15, 22),
    chunk=st.sampled_from([1, 3, 8, 64]),
    max_num_seqs=st.sampled_from([2, 8, 8]),
)
def test_every_request_ends_once_with_the_oracles_tokens(
    arrivals: list[Arrival], num_blocks: int, chunk: int, max_num_seqs: int
) -> None:
    """Random arrivals, leavers, tiny pools, shared prefixes: tokens are the oracle's and no block is lost."""
    config = EngineConfig(max_chunk_tokens=chunk, chunk_with_decodes=2, max_num_seqs=max_num_seqs)
    worker = TinyWorker(num_blocks, 2, config)
    story = Story(worker, arrivals)
    story.play()
    worker.assert_at_rest()
    assert worker.decode.num_waiting == 0
    for request_id, arrival in story.started.items():
        expected, reason = oracle(story.requests[request_id])
        got = worker.outputs(request_id)
        num_before = story.num_before.get(request_id, 0)
        assert got == expected[num_before : num_before + len(got)]
        if request_id in story.cancelled:
            assert len(worker.ends(request_id)) <= 1
        elif arrival.path == "handed off" and len(expected) > 1:
            assert (len(got), worker.ends(request_id)) == (1, [])
        else:
            assert worker.finished(request_id).reason == reason
            assert len(got) == len(expected) - num_before
