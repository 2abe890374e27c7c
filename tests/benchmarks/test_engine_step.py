"""What the engine benchmarks compute from their measurements; the measurements themselves are too slow for a test."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks import perplexity
from benchmarks.engine_models import MODES
from benchmarks.engine_step import BANDWIDTH_BYTES, REQUIRED, Clock, bounds_of, checks_of, rows_of
from tests.engine.tiny_models import make_config, make_oracle, write_hf

TIMES = {
    "read": BANDWIDTH_BYTES / 1e6,  # 1 GB/s
    **{f"linears {rows}": 10.0 * rows for rows in (1, 8, 256, 1024)},
    "head 1": 2.0,
    "head 8": 4.0,
    "prefill_1024": 15000.0,
    "prefill_256": 3000.0,
    "decode_b1_c256": 18.0,
    "decode_b8_c1000": 100.0,
    "int8_b1": 9.0,
    "int4_b1": 6.0,
    "invariant_prefill_256": 6000.0,
    "invariant_b1": 27.0,
    "invariant_b8": 150.0,
}


def test_a_bound_is_what_no_engine_could_leave_out() -> None:
    bounds = bounds_of(TIMES, kv_bytes_per_token=1000.0)
    assert bounds["prefill_1024"] == 10240.0
    assert bounds["decode_b1_c256"] == 12.0
    assert bounds["decode_b8_c1000"] == pytest.approx(80 + 4 + 8)  # 8 MB of KV at 1 GB/s
    assert bounds["int4_b1"] == bounds["int8_b1"] == 18.0


def test_what_was_not_measured_has_failed() -> None:
    checks = {check.name: check for check in checks_of(list(rows_of(TIMES, 1000.0)), None)}
    assert set(checks) == {*REQUIRED, "rss_overhead_mb"}
    assert [name for name, check in checks.items() if not check.is_ok] == [
        "decode_b1_c256",
        "rss_overhead_mb",
    ]
    assert not any(check.is_ok for check in checks_of([], 500.0))


def test_a_clock_keeps_the_shortest_time() -> None:
    clock = Clock()
    for times in (1, 1000, 1):
        clock.run("work", lambda: sum(range(times * 1000)))  # noqa: B023 (called at once)
    shortest = clock.best_ms["work"]
    clock.run("work", lambda: sum(range(10**6)))
    assert clock.best_ms["work"] == shortest


def test_perplexity_is_compared_with_expanded_weights() -> None:
    found, limits = {"none": 10.0, "int8": 10.02, "int4": 10.2}, perplexity.MAX_RATIO
    checks = {c.name: c for c in perplexity.checks_of(found, limits)}
    assert checks["perplexity_int8"].is_ok
    assert not checks["perplexity_int4"].is_ok
    assert math.isclose(checks["perplexity_int4"].value or 0.0, 1.02)
    assert not any(check.is_ok for check in perplexity.checks_of({"int8": 10.0}, limits))


def test_perplexity_of_any_model_in_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A random one has no use for precision."""
    config = make_config(hidden_size=96)
    write_hf(tmp_path, config, make_oracle(config))
    vocab = {chr(byte): byte - 0x20 for byte in range(0x21, 0x7F)} | {"\u0120": 0, "\u010a": 95}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert perplexity.main(["--model", str(tmp_path), "--tokens", "600"]) == 0
    lines = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    found = {mode: float(value) for mode, colon, value in lines if colon and mode in MODES}
    assert list(found) == list(MODES)
    assert list(found.values()) == [pytest.approx(found["none"], rel=0.05)] * 3


def test_each_window_begins_as_every_text_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Text:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + [2] * len(text)

    monkeypatch.setattr(perplexity, "load_text", lambda _path: Text())
    windows = list(perplexity.windows_of(Path("model"), 600))
    assert [(window[0], len(window)) for window in windows] == [(1, 513), (1, 89)]
