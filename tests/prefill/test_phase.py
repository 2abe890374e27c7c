from __future__ import annotations

from dataclasses import replace

import pytest

from contracts.config import EngineConfig
from contracts.errors import EngineError, HandoffError, OverloadedError
from contracts.request import SamplingParams
from engine.blocks import HoldState
from engine.loop import Work
from tests.builders import FakeSink, TinyWorker, make_request, oracle

LONG = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ONE = replace(LONG, max_tokens=1)


def chunks(worker: TinyWorker) -> list[list[int]]:
    return [[len(item.token_ids) for item in batch] for batch in worker.runner.batches]


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 64])
def test_every_chunking_gives_the_same_first_token(chunk: int) -> None:
    worker, sink = TinyWorker(config=EngineConfig(max_chunk_tokens=chunk)), FakeSink()
    request = make_request(17, sampling=LONG)
    seq = worker.start_remote(request, sink)
    worker.run()
    assert worker.outputs(request.request_id) == oracle(request)[0][:1]
    assert sink.readies == [0, *range(chunk, 17, chunk), 17]
    assert sink.state is not None
    assert sink.state.first_token.token_id == worker.outputs(request.request_id)[0]
    assert worker.runner.read(seq.block_ids, 17) == list(request.prompt_ids)


def test_short_prompts_share_a_step_and_a_long_one_takes_several() -> None:
    worker = TinyWorker(config=EngineConfig(max_chunk_tokens=10))
    for num_tokens in (4, 5, 23):
        worker.start_remote(make_request(num_tokens, sampling=LONG), FakeSink())
    worker.run()
    assert chunks(worker) == [[4, 5, 1], [10], [10], [2]]


def test_a_short_prompt_waits_one_step_behind_long_ones_which_keep_half_of_it() -> None:
    worker = TinyWorker(num_blocks=64, config=EngineConfig(max_chunk_tokens=10))
    first, second, short = (make_request(n, sampling=LONG) for n in (30, 25, 4))
    worker.start_remote(first, FakeSink())
    worker.step()
    for request in (second, short):
        worker.start_remote(request, FakeSink())
    worker.step()
    assert chunks(worker) == [[10], [4, 6]]
    assert len(worker.outputs(short.request_id)) == 1
    worker.run()
    assert chunks(worker)[2:] == [[10], [4, 6], [10], [9]]  # and order of arrival among the long ones
    for request in (first, second):
        assert worker.outputs(request.request_id) == oracle(request)[0][:1]


def test_short_prompts_of_more_than_half_a_step_pass_a_long_one_in_every_second() -> None:
    worker = TinyWorker(num_blocks=64, config=EngineConfig(max_chunk_tokens=10))
    long = make_request(35, sampling=LONG)
    shorts = [make_request(8, salt=str(number), sampling=LONG) for number in range(3)]
    worker.start_remote(long, FakeSink())
    worker.step()
    for request in shorts:
        worker.start_remote(request, FakeSink())
    worker.run()
    assert chunks(worker) == [[10], [8, 2], [10], [8, 2], [10], [1, 8]]
    for request in (long, *shorts):
        assert worker.outputs(request.request_id) == oracle(request)[0][:1]


def test_a_short_prompt_takes_no_block_that_one_before_it_waits_for() -> None:
    worker = TinyWorker(num_blocks=9, config=EngineConfig(max_chunk_tokens=8))
    running, long, short = (make_request(n, sampling=LONG) for n in (15, 14, 3))
    for request in (running, long, short):
        worker.start_remote(request, FakeSink())
    worker.run()
    assert [len(worker.outputs(each.request_id)) for each in (running, long, short)] == [1, 1, 1]
    tight = TinyWorker(num_blocks=8, config=EngineConfig(max_chunk_tokens=8))
    for request in (running, long, short):
        tight.start_remote(request, FakeSink())
    tight.run()
    assert [len(tight.outputs(each.request_id)) for each in (running, long, short)] == [1, 1, 0]


def test_chunks_are_smaller_beside_running_decodes() -> None:
    worker = TinyWorker(config=EngineConfig(max_chunk_tokens=10, chunk_with_decodes=3))
    worker.start_local(make_request(4, sampling=LONG))
    worker.step()
    worker.start_remote(make_request(8, sampling=LONG), FakeSink())
    worker.step()
    assert chunks(worker)[-1] == [1, 3]


def test_beside_decodes_a_chunk_is_what_fits_where_that_is_known() -> None:
    """Asked with the step's decodes, the tokens before the chunk and the cap; None: the fixed share."""
    answers: list[int | None] = [5, 0, None, 2]
    asked: list[tuple[int, int, int]] = []

    def limit(decodes: list[Work], past: int, cap: int) -> int | None:
        asked.append((len(decodes), past, cap))
        return answers[len(asked) - 1]

    worker = TinyWorker(config=EngineConfig(max_chunk_tokens=10, chunk_with_decodes=3))
    worker.loop._chunk_limit = limit
    worker.start_local(make_request(4, sampling=LONG))
    worker.step()
    worker.start_remote(make_request(10, sampling=LONG), FakeSink())
    for _ in answers:
        worker.step()
    assert chunks(worker)[1:] == [[1, 5], [1], [1, 3], [1, 2]]
    assert asked == [(1, 0, 10), (1, 5, 10), (1, 5, 10), (1, 8, 10)]


def test_the_blocks_wait_for_the_handoff_and_then_stay_as_cache() -> None:
    worker, sink = TinyWorker(), FakeSink()
    request = make_request(10, sampling=LONG)
    worker.start_remote(request, sink)
    worker.run()
    assert worker.pool.audit().in_handoff == 3
    assert worker.ends(request.request_id) == []
    worker.loop.submit(lambda: worker.prefill.handed_off(request.request_id, None))
    worker.run()
    assert worker.pool.audit().cached == 2
    worker.assert_at_rest()


def test_the_token_is_told_before_the_sink() -> None:
    """A transfer that is over at once must not overtake the first token."""
    worker = TinyWorker()
    request = make_request(10, sampling=LONG)

    class Checking(FakeSink):
        def finish(self, state: object) -> None:
            assert len(worker.outputs(request.request_id)) == 1
            super().finish(state)  # type: ignore[arg-type]

    sink = Checking()
    worker.start_remote(request, sink)
    worker.run()
    assert sink.state is not None


def test_a_first_token_that_ends_the_request_needs_no_handoff() -> None:
    worker, sink = TinyWorker(), FakeSink()
    request = make_request(10, sampling=ONE)
    worker.start_remote(request, sink)
    worker.run()
    assert worker.finished(request.request_id).reason == "length"
    assert (sink.state, sink.num_aborts) == (None, 1)
    assert worker.pool.audit().in_handoff == 3
    worker.prefill.handed_off(request.request_id, None)
    worker.assert_at_rest()


def test_a_local_prompt_goes_on_to_decode_with_its_own_blocks() -> None:
    worker = TinyWorker()
    request = make_request(10, sampling=LONG)
    seq = worker.start_local(request)
    assert seq is not None
    worker.step()
    assert worker.decode.running == [seq]
    assert not worker.prefill.has_work()
    worker.run()
    assert worker.outputs(request.request_id) == oracle(request)[0]
    worker.assert_at_rest()


def test_a_full_prefix_hit_computes_only_the_rest_of_the_last_block() -> None:
    worker = TinyWorker()
    first, second = make_request(9, sampling=ONE), make_request(9, sampling=ONE)
    for request in (first, second):
        worker.start_local(request)
        worker.run()
    assert chunks(worker) == [[9], [1]]
    assert worker.outputs(second.request_id) == worker.outputs(first.request_id)
    assert worker.finished(second.request_id).num_cached_tokens == 8


def test_blocks_are_shared_while_the_first_owner_still_runs() -> None:
    worker = TinyWorker(config=EngineConfig(max_chunk_tokens=8))
    prompt = list(range(16))
    first = make_request(prompt_ids=prompt, sampling=LONG)
    second = make_request(prompt_ids=[*prompt[:8], 1, 1, 1], sampling=LONG)
    worker.start_remote(first, FakeSink())
    worker.step()
    worker.start_remote(second, FakeSink())
    worker.run()
    assert chunks(worker) == [[8], [8], [3]]


def test_a_failover_goes_on_from_the_tokens_sent() -> None:
    worker, whole = TinyWorker(), make_request(10, sampling=replace(LONG, temperature=0.9, seed=3))
    expected = oracle(whole)[0]
    rest = replace(whole, request_id="rest", output_ids=tuple(expected[:4]))
    worker.start_local(rest)
    worker.run()
    assert worker.outputs("rest") == expected[4:]


def test_no_room_means_waiting_in_order() -> None:
    worker = TinyWorker(num_blocks=5)
    sinks = [FakeSink(), FakeSink(), FakeSink()]
    requests = [make_request(n, sampling=LONG) for n in (12, 11, 3)]
    for request, sink in zip(requests, sinks, strict=True):
        worker.start_remote(request, sink)
    worker.run()
    assert [sink.state is not None for sink in sinks] == [True, False, False]
    assert worker.prefill.num_waiting == 2
    worker.loop.submit(lambda: worker.prefill.handed_off(requests[0].request_id, None))
    worker.run()
    assert all(sink.state is not None for sink in sinks)


def test_too_many_waiting_and_too_long_are_refused_at_once() -> None:
    worker = TinyWorker(num_blocks=4, config=EngineConfig(max_waiting=1))
    waiting, refused, too_long = make_request(12), make_request(11), make_request(17)
    sinks = {request.request_id: FakeSink() for request in (waiting, refused, too_long)}
    for request in (waiting, refused, too_long):
        worker.prefill.add(worker.sequence(request), sinks[request.request_id], None)
    for request in (refused, too_long):
        assert isinstance(worker.error(request.request_id), OverloadedError)
        assert sinks[request.request_id].num_aborts == 1
    assert worker.ends(waiting.request_id) == []


def test_a_failed_step_aborts_the_handoff_and_blocks_wait_for_it() -> None:
    worker, sink = TinyWorker(), FakeSink()
    request = make_request(10, sampling=LONG)
    worker.runner.broken_token, worker.runner.error = request.prompt_ids[0], RuntimeError("boom")
    worker.start_remote(request, sink)
    worker.run()
    error = worker.error(request.request_id)
    assert isinstance(error, EngineError)
    assert sink.num_aborts == 1
    assert worker.pool.audit().in_handoff == 3
    worker.prefill.handed_off(request.request_id, error)
    worker.assert_at_rest()


def test_a_transfer_that_fails_while_computing_stops_the_computation() -> None:
    worker = TinyWorker(config=EngineConfig(max_chunk_tokens=4))
    request = make_request(12, sampling=LONG)
    worker.start_remote(request, FakeSink())
    worker.step()
    worker.loop.submit(lambda: worker.prefill.handed_off(request.request_id, HandoffError("peer lost")))
    worker.run()
    assert len(worker.runner.batches) == 1
    worker.assert_at_rest()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_cancel_with_a_sink_leaves_blocks_to_the_transfer(num_steps: int) -> None:
    """Waiting (0 steps), running (1, 2) and in_handoff (3)."""
    worker, sink = TinyWorker(config=EngineConfig(max_chunk_tokens=4)), FakeSink()
    request = make_request(11, sampling=LONG)
    worker.start_remote(request, sink)
    worker.loop._run_commands()
    for _ in range(num_steps):
        worker.step()
    num_events = len(worker.events)
    hold = worker.prefill.cancel(request.request_id)
    assert (hold is None) == (num_steps == 0)
    worker.run()
    assert len(worker.runner.batches) == num_steps
    assert worker.pool.audit().in_handoff == (3 if num_steps else 0)
    worker.prefill.handed_off(request.request_id, None)
    assert len(worker.events) == num_events
    worker.assert_at_rest()


def test_cancel_without_a_sink_frees_at_once() -> None:
    worker = TinyWorker(config=EngineConfig(max_chunk_tokens=4))
    request = make_request(11, sampling=LONG)
    worker.start_local(request)
    worker.step()
    assert worker.prefill.cancel(request.request_id) is None
    worker.decode.cancel(request.request_id)
    assert worker.events == []
    worker.assert_at_rest()


def test_a_cancellation_that_overtook_the_command_wins() -> None:
    worker = TinyWorker()
    request = make_request(11)
    hold = worker.decode.reserve(request, HoldState.RESERVED)
    assert hold is not None
    worker.pool.release(hold)
    worker.prefill.add(worker.sequence(request), None, hold)
    worker.run()
    assert worker.runner.batches == []
    worker.assert_at_rest()


def test_unknown_requests_are_ignored() -> None:
    worker = TinyWorker()
    assert worker.prefill.cancel("nobody") is None
    worker.prefill.handed_off("nobody", None)
    worker.assert_at_rest()
