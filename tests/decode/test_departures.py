"""Running sequences that leave for another worker: the same tokens, blocks kept until the transfer is over, one end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contracts.config import EngineConfig
from contracts.errors import HandoffError
from contracts.request import SamplingParams
from engine.blocks import HoldState
from tests.builders import FakeSink, TinyWorker, make_request, oracle

LONG = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
LOST = HandoffError("lost")


def leaving(
    worker: TinyWorker, num_steps: int = 3, max_tokens: int = 999, sampling: SamplingParams = LONG
) -> tuple[str, FakeSink, int]:
    """(id, sink, known tokens) of a request that runs and begins to leave; the last of its tokens is not told of."""
    request = make_request(10, sampling=sampling)
    assert worker.start_local(request) is not None
    for _ in range(num_steps):
        assert worker.step()
    sink = FakeSink()
    num_known = 10 + len(worker.outputs(request.request_id)) - 1
    assert worker.decode.migrate(request.request_id, sink, num_known, max_tokens)
    return request.request_id, sink, num_known


@pytest.mark.parametrize("num_meanwhile", [0, 1, 5])
@pytest.mark.parametrize(
    "sampling", [LONG, replace(LONG, temperature=0.9, seed=4, frequency_penalty=0.5, repetition_penalty=1.2)]
)
def test_the_other_worker_goes_on_where_this_one_stopped(
    num_meanwhile: int, sampling: SamplingParams
) -> None:
    here, there = TinyWorker(), TinyWorker()
    name, sink, _ = leaving(here, sampling=sampling)
    known = here.outputs(name)[:-1]
    for _ in range(num_meanwhile):
        assert here.step()
    here.decode.pass_on(name)
    here.run()
    assert sink.state is not None
    assert list(sink.state.output_ids) == here.outputs(name)[len(known) : -1]
    request = make_request(10, request_id=name, sampling=sampling)
    seq = there.receive(replace(request, output_ids=tuple(known)), sink.state)
    assert seq is not None
    there.run()
    assert here.ends(name) == []
    assert here.outputs(name) + there.outputs(name) == oracle(request)[0]
    assert there.finished(name).reason == "length"
    assert here.decode.handed_off(name, None) is False
    here.assert_at_rest()
    there.assert_at_rest()


def test_the_transfer_hears_of_each_block_that_fills_up_and_of_all_at_the_end() -> None:
    worker = TinyWorker()
    name, sink, num_known = leaving(worker, num_steps=1)
    assert (sink.readies, num_known) == ([10], 10)
    for _ in range(6):
        worker.step()
    assert sink.readies == [10, 12, 16]
    worker.decode.pass_on(name)
    assert sink.readies == [10, 12, 16, 16]
    worker.decode.pass_on(name)  # a second word changes nothing
    worker.decode.handed_off(name, None)
    worker.assert_at_rest()


def test_blocks_stay_in_handoff_until_the_transfer_is_over() -> None:
    worker = TinyWorker()
    name, _, _ = leaving(worker)
    num_blocks = worker.pool.audit().running
    assert worker.pool.owners()[0].state == "running"
    worker.decode.pass_on(name)
    assert worker.pool.audit().in_handoff == num_blocks
    (owner,) = worker.pool.owners()
    assert (owner.request_id, owner.state) == (name, "in_handoff")
    assert worker.decode.num_waiting == 1
    worker.decode.handed_off(name, None)
    worker.assert_at_rest()


def test_a_transfer_that_fails_in_time_changes_nothing() -> None:
    worker = TinyWorker()
    name, sink, _ = leaving(worker)
    worker.step()
    assert worker.decode.handed_off(name, LOST) is True
    worker.decode.pass_on(name)  # too late a word of the transfer that failed
    worker.run()
    assert sink.state is None
    assert worker.outputs(name) == oracle(make_request(10, sampling=LONG))[0]
    assert worker.finished(name).reason == "length"
    worker.assert_at_rest()


def test_a_transfer_that_fails_after_the_stop_ends_the_request_once() -> None:
    worker = TinyWorker()
    name, _, _ = leaving(worker)
    worker.decode.pass_on(name)
    assert worker.decode.handed_off(name, LOST) is False
    worker.run()
    assert worker.error(name) is LOST
    worker.assert_at_rest()


def test_an_end_is_told_before_the_transfer_hears_that_it_is_not_needed() -> None:
    worker = TinyWorker()
    name, sink, _ = leaving(worker)
    at_abort: list[int] = []
    sink.abort = lambda: at_abort.append(len(worker.ends(name)))  # type: ignore[method-assign]
    worker.run()
    assert at_abort == [1]
    assert worker.finished(name).reason == "length"
    assert worker.pool.audit().in_handoff > 0
    assert worker.decode.handed_off(name, None) is False
    worker.assert_at_rest()


def test_a_failed_step_ends_one_that_leaves_like_any_other() -> None:
    worker = TinyWorker()
    name, sink, _ = leaving(worker)
    worker.runner.error, worker.runner.broken_token = RuntimeError("device"), worker.outputs(name)[-1]
    worker.step()
    assert worker.error(name).code == "engine_error"
    assert sink.num_aborts == 1
    worker.decode.handed_off(name, None)
    worker.assert_at_rest()


@pytest.mark.parametrize("has_stopped", [False, True])
def test_a_cancelled_request_keeps_its_blocks_only_until_the_transfer_is_over(has_stopped: bool) -> None:
    worker = TinyWorker()
    name, _, _ = leaving(worker)
    if has_stopped:
        worker.decode.pass_on(name)
    worker.cancel(name)
    worker.run()
    assert worker.pool.audit().in_handoff > 0
    assert worker.decode.handed_off(name, LOST) is False
    assert worker.ends(name) == []
    worker.assert_at_rest()


def test_it_stops_when_the_target_has_no_room_for_more() -> None:
    worker = TinyWorker()
    name, sink, num_known = leaving(worker, max_tokens=15)
    worker.run()
    assert sink.readies[-1] == 15
    assert sink.state is not None
    assert num_known + len(sink.state.output_ids) == 15
    worker.decode.handed_off(name, None)
    worker.assert_at_rest()


def test_it_leaves_at_once_where_it_finds_no_block_and_is_not_preempted() -> None:
    worker = TinyWorker(num_blocks=6, config=EngineConfig(max_num_seqs=3))
    oldest = make_request(prompt_ids=[1] * 7, sampling=LONG)
    assert worker.start_local(oldest) is not None
    name, sink, _ = leaving(worker, num_steps=1)
    worker.run()
    assert worker.decode.num_preemptions == 0
    assert sink.state is not None
    assert worker.ends(oldest.request_id) == []  # it sits out until the transfer is over
    worker.loop.submit(lambda: worker.decode.handed_off(name, None) and None)
    worker.run()
    assert worker.outputs(oldest.request_id) == oracle(oldest)[0]
    worker.assert_at_rest()


def test_only_what_runs_may_leave_and_only_with_what_the_target_can_know() -> None:
    worker, sink = TinyWorker(), FakeSink()
    request = make_request(10, sampling=LONG)
    assert not worker.decode.migrate(request.request_id, sink, 5, 99)
    assert worker.start_local(request) is not None
    assert not worker.decode.migrate(request.request_id, sink, 5, 99)  # its prompt is not read yet
    worker.step()
    assert not worker.decode.migrate(
        request.request_id, sink, 11, 99
    )  # all of its tokens: nothing is left to tell
    assert not worker.decode.migrate(request.request_id, sink, 10, 9)  # more than there is room for
    assert sink.readies == []
    assert worker.decode.handed_off(request.request_id, LOST) is True  # whoever refused is told that it stays
    worker.run()
    assert worker.finished(request.request_id).reason == "length"


def test_room_for_what_is_drawn_elsewhere_is_reserved_with_the_rest() -> None:
    worker = TinyWorker(num_blocks=8)
    hold = worker.decode.reserve(make_request(10), HoldState.RESERVED, num_more=9)
    assert hold is not None
    assert len(hold.block_ids) == 5
    assert worker.decode.reserve(make_request(10), HoldState.RESERVED, num_more=9) is None
    worker.pool.release(hold)
