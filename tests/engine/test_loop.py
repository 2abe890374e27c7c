from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from contracts.errors import DeadlineError, EngineError, OutOfMemory, OverloadedError
from contracts.request import SamplingParams
from engine.loop import EndEvent, Event, StepLoop, TokenEvent
from engine.runner import StepItem
from engine.sampler import Sampler
from tests.builders import EOS_ID, FakeRunner, TinyWorker, make_request, oracle

LONG = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
WAIT_S = 10.0


def test_a_step_is_one_execute_and_one_emit_for_all_phases() -> None:
    worker = TinyWorker()
    worker.start_local(make_request(5, sampling=LONG))
    worker.step()
    worker.start_local(make_request(6, sampling=LONG))
    worker.start_local(make_request(7, sampling=LONG))
    num_emits = len(worker.emits)
    worker.step()
    assert [len(item.token_ids) for item in worker.runner.batches[-1]] == [1, 6, 7]
    assert len(worker.emits) == num_emits + 1
    assert [type(event) for event in worker.emits[-1]] == [TokenEvent] * 3


def test_commands_run_in_order_before_the_step() -> None:
    worker = TinyWorker()
    order: list[int] = []
    for number in range(3):
        worker.loop.submit(lambda number=number: order.append(number))  # type: ignore[misc]
    assert not worker.step()
    assert order == [0, 1, 2]


def test_a_failed_step_ends_only_its_requests_and_frees_their_blocks() -> None:
    worker = TinyWorker()
    doomed, later = make_request(9, sampling=LONG), make_request(10, sampling=LONG)
    worker.start_local(doomed)
    worker.step()
    worker.runner.broken_token = worker.outputs(doomed.request_id)[-1]
    worker.runner.error = RuntimeError("out of memory")
    worker.step()
    error = worker.error(doomed.request_id)
    assert isinstance(error, EngineError)
    assert "RuntimeError: out of memory" in error.message
    worker.start_local(later)
    worker.run()
    assert worker.outputs(later.request_id) == oracle(later)[0]
    assert worker.loop.counters().num_failed_steps == 1
    worker.assert_at_rest()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("host"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_a_step_without_memory_says_that_its_requests_may_go_on_elsewhere(error: Exception) -> None:
    worker = TinyWorker()
    request = make_request(4)
    worker.runner.broken_token, worker.runner.error = request.prompt_ids[0], error
    worker.start_local(request)
    worker.run()
    assert isinstance(worker.error(request.request_id), OutOfMemory)
    worker.assert_at_rest()


def test_what_a_failed_step_wrote_is_never_a_prefix() -> None:
    worker = TinyWorker()
    request = make_request(prompt_ids=[3] * 9 + [5], sampling=LONG)
    worker.runner.broken_token, worker.runner.error = 5, RuntimeError("boom")
    worker.start_local(request)
    worker.run()
    assert worker.pool.audit().cached == 0
    again = replace(request, request_id="again")
    worker.start_local(again)
    worker.run()
    assert worker.finished("again").num_cached_tokens == 0
    assert worker.outputs("again") == oracle(again)[0]


def test_a_deliberate_error_keeps_its_type() -> None:
    worker = TinyWorker()
    request = make_request(4)
    worker.runner.broken_token, worker.runner.error = (
        request.prompt_ids[0],
        OverloadedError("no device memory"),
    )
    worker.start_local(request)
    worker.run()
    assert isinstance(worker.error(request.request_id), OverloadedError)


def test_broken_logits_fail_the_step_not_the_loop() -> None:
    class NanRunner(FakeRunner):
        def execute(self, items: list[StepItem]) -> torch.Tensor:
            return super().execute(items) * float("nan")

    worker = TinyWorker()
    worker.loop = StepLoop(NanRunner(4), Sampler((EOS_ID,)), (worker.decode, worker.prefill), worker._emit)
    request = make_request(4)
    worker.start_local(request)
    worker.run()
    assert isinstance(worker.error(request.request_id), EngineError)
    worker.assert_at_rest()


def test_counters_add_up() -> None:
    worker = TinyWorker()
    request = make_request(10, sampling=LONG)
    worker.start_local(request)
    worker.run()
    counters = worker.loop.counters()
    assert counters.num_tokens == {"prefill": 10, "decode": 5}
    assert (counters.num_steps, counters.num_drawn, counters.num_failed_steps) == (6, 6, 0)
    assert counters.step_s > 0


class Threaded:
    """A TinyWorker whose loop runs in its thread; `ended` is set by the terminal event of `request_id`."""

    def __init__(self, request_id: str) -> None:
        self.worker = TinyWorker()
        self.ended = threading.Event()

        def emit(events: list[Event]) -> None:
            self.worker._emit(events)
            if any(isinstance(event, EndEvent) and event.request_id == request_id for event in events):
                self.ended.set()

        phases = (self.worker.decode, self.worker.prefill)
        self.worker.loop = StepLoop(self.worker.runner, Sampler((EOS_ID,)), phases, emit)


def test_an_idle_thread_wakes_for_a_command_and_shows_life() -> None:
    request = make_request(10, sampling=LONG)
    threaded = Threaded(request.request_id)
    loop = threaded.worker.loop
    loop.start()
    threaded.worker.start_local(request)
    assert threaded.ended.wait(WAIT_S)
    assert loop.step_age_s < WAIT_S
    loop.stop(WAIT_S)
    assert threaded.worker.outputs(request.request_id) == oracle(request)[0]
    assert not loop.submit(lambda: None)


def test_a_broken_command_ends_the_thread_and_says_why() -> None:
    now_s = [0.0]
    worker = TinyWorker()
    loop = StepLoop(worker.runner, Sampler(()), (worker.decode,), worker._emit, clock=lambda: now_s[0])

    def broken() -> None:
        raise KeyError("books")

    loop.start()
    assert loop.submit(broken)
    assert loop._thread is not None
    loop._thread.join(WAIT_S)
    now_s[0] = 100.0
    assert isinstance(loop.failure, KeyError)
    assert loop.step_age_s == pytest.approx(100.0)
    assert not loop.submit(lambda: None)


def test_stop_has_a_deadline() -> None:
    worker = TinyWorker()
    entered, leave = threading.Event(), threading.Event()

    def stuck() -> None:
        entered.set()
        leave.wait(WAIT_S)

    worker.loop.start()
    worker.loop.submit(stuck)
    assert entered.wait(WAIT_S)
    with pytest.raises(DeadlineError, match=r"within 0.0 s"):
        worker.loop.stop(0.0)
    leave.set()
    worker.loop.stop(WAIT_S)
