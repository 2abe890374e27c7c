from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contracts.config import EngineConfig
from contracts.request import SamplingParams
from prefill.pace import MIN_TOKENS, ChunkPace
from tests.builders import FakeSink, TinyWorker, make_request

LONG = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class Device:
    """Steps take a fixed time and so much per token; so does the clock of whoever watches."""

    def __init__(self, worker: TinyWorker, token_s: float, fixed_s: float = 0.0) -> None:
        self.now_s, self.token_s, self.fixed_s = 0.0, token_s, fixed_s
        self.steps: list[tuple[int, float]] = []
        execute = worker.runner.execute

        def slow(items):  # type: ignore[no-untyped-def]
            num_tokens = sum(len(item.token_ids) for item in items)
            step_s = self.fixed_s + num_tokens * self.token_s
            self.now_s += step_s
            self.steps.append((num_tokens, step_s))
            return execute(items)

        worker.runner.execute = slow  # type: ignore[method-assign]
        worker.prefill._clock = lambda: self.now_s


def test_chunks_of_a_long_prompt_grow_or_shrink_to_the_wanted_step() -> None:
    for token_s, expected in [(1 / 128, 128), (1 / 1024, 200), (1.0, MIN_TOKENS)]:
        worker = TinyWorker(
            num_blocks=1000, config=EngineConfig(max_chunk_tokens=200, max_prefill_step_s=1.0)
        )
        device = Device(worker, token_s)
        worker.start_remote(make_request(2000, sampling=LONG), FakeSink())
        worker.run()
        sizes = [num_tokens for num_tokens, _ in device.steps]
        assert sizes[0] == MIN_TOKENS
        assert set(sizes[1:-1]) == {expected}
        assert sum(sizes) == 2000


def test_a_device_that_slows_down_is_followed_within_a_few_steps() -> None:
    worker = TinyWorker(num_blocks=2000, config=EngineConfig(max_chunk_tokens=256, max_prefill_step_s=1.0))
    device = Device(worker, token_s=0.004)
    worker.start_remote(make_request(6000, sampling=LONG), FakeSink())
    for _ in range(4):
        worker.step()
    assert device.steps[-1][0] in (249, 250)
    device.token_s = 0.01
    for _ in range(6):
        worker.step()
    assert device.steps[-1][1] <= 1.05


def test_steps_beside_decodes_teach_nothing() -> None:
    """Their time is mostly the decodes'."""
    worker = TinyWorker(num_blocks=1000, config=EngineConfig(max_prefill_step_s=1.0, chunk_with_decodes=256))
    device = Device(worker, token_s=1 / 128)
    worker.start_local(make_request(100, sampling=SamplingParams(max_tokens=50, ignore_eos=True)))
    worker.step()
    worker.step()
    device.fixed_s = 100.0
    worker.start_remote(make_request(900, sampling=LONG), FakeSink())
    for _ in range(3):
        worker.step()
    assert [num_tokens for num_tokens, _ in device.steps] == [64, 36, 129, 129, 129]


@given(fixed_s=st.floats(0.0, 0.3), token_s=st.floats(1e-5, 0.01), first=st.integers(MIN_TOKENS, 4096))
def test_the_pace_settles_where_fixed_cost_and_tokens_fill_the_step(
    fixed_s: float, token_s: float, first: int
) -> None:
    pace, num_tokens = ChunkPace(1.0), first
    for _ in range(60):
        pace.learn(num_tokens, fixed_s + num_tokens * token_s)
        num_tokens = pace.num_tokens
    if num_tokens > MIN_TOKENS:  # a whole number of tokens: one more would not fit any more
        assert num_tokens / (num_tokens + 1) * 0.999 < fixed_s + num_tokens * token_s < 1.001
    else:
        assert fixed_s + (MIN_TOKENS + 1) * token_s > 1.0


def test_a_few_tokens_measure_only_the_fixed_cost() -> None:
    pace = ChunkPace(0.5)
    pace.learn(MIN_TOKENS - 1, 0.4)
    assert pace.num_tokens == MIN_TOKENS
    pace.learn(100, 0.0)
    assert pace.num_tokens > 1_000_000
