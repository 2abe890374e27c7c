"""Prompt tokens beside decodes: what fits before the tightest next token, nothing under pressure, never starved."""

from __future__ import annotations

from engine.loop import Work
from engine.sequence import Sequence
from tests.builders import make_request
from worker.chunks import STARVED_STEPS, ChunkSizer
from worker.steps import StepMeter

ITL_S = 0.050
CAP = 10_000


def work(name: str, num_tokens: int, past: int, wants_token: bool = True) -> Work:
    """As it is after its step."""
    seq = Sequence(make_request(past + num_tokens, request_id=name))
    seq.num_computed = past + num_tokens
    return Work(seq, num_tokens, wants_token)


def decode(name: str) -> Work:
    return work(name, 1, 100)


class Bench:
    """A worker whose decode steps take 20 ms and whose prompt tokens take 100 µs each."""

    def __init__(self, is_taught: bool = True) -> None:
        self.now_s = 0.0
        self.meter = StepMeter()
        self.sizer = ChunkSizer(self.meter, ITL_S, lambda: self.now_s)
        for number in range(100 if is_taught else 0):
            self.meter.stepped([decode("other")] * (1 + number % 4), 0.020)
            num_tokens, past = 50 + 10 * (number % 9), 10 * (number % 7)
            self.meter.stepped(
                [work("prompt", num_tokens, past, wants_token=False)], 0.010 + 1e-4 * num_tokens
            )

    def step(self, *names: str, step_s: float = 0.020) -> None:
        self.now_s += step_s
        self.sizer.stepped([decode(name) for name in names], step_s)

    def fitting(self, *names: str) -> int | None:
        return self.sizer.fitting([decode(name) for name in names], 0, CAP)


def test_nothing_is_said_before_steps_of_both_kinds_are_known() -> None:
    assert Bench(is_taught=False).fitting("a") is None


def test_the_chunk_fills_the_time_to_the_next_token() -> None:
    bench = Bench()
    bench.step("a", step_s=0.001)
    chunk = bench.fitting("a")
    assert chunk is not None
    assert 250 < chunk < 450  # about 47 ms, less 10 ms for the step itself, at 100 µs


def test_time_saved_is_spent_up_to_half_a_gap() -> None:
    bench = Bench()
    bench.step("a", step_s=0.001)
    fresh = bench.fitting("a")
    for _ in range(10):
        bench.step("a")  # each 27 ms early
    early = bench.fitting("a")
    assert fresh is not None
    assert early is not None
    assert fresh < early < 2 * fresh


def test_a_late_stream_gets_all_the_time_and_the_prompt_none() -> None:
    bench = Bench()
    for _ in range(4):
        bench.step("a", step_s=0.070)
    assert bench.fitting("a") == 0


def test_the_tightest_stream_decides() -> None:
    bench = Bench()
    for _ in range(4):
        bench.step("late", step_s=0.070)
    bench.step("late", "new")
    assert bench.fitting("late", "new") == 0
    chunk = bench.fitting("new")
    assert chunk is not None
    assert chunk > 0


def test_a_prompt_is_not_starved_for_ever() -> None:
    bench = Bench()
    found = []
    for _ in range(2 * (STARVED_STEPS + 1)):
        bench.step("a", step_s=0.070)
        found.append(bench.fitting("a"))
    # Its first step is in time, as far as anybody knows; None is the fixed share.
    assert found.count(None) == 1
    assert found.count(0) >= 2 * STARVED_STEPS - 1


def test_streams_that_ended_count_no_more() -> None:
    bench = Bench()
    for _ in range(4):
        bench.step("late", step_s=0.070)
    bench.step("new")
    assert set(bench.sizer._streams) == {"new"}
