from __future__ import annotations

import logging

import pytest

from worker.progress import shown_weights


def test_each_quarter_of_the_weights_is_logged_with_bytes_and_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("worker.progress.time.monotonic", lambda: now_s)
    show = shown_weights("decode-0")
    with caplog.at_level(logging.INFO, logger="baton.worker"):
        for num_done in range(0, 401, 50):
            now_s += 0.5
            show(num_done << 20, 400 << 20)
    assert caplog.messages == [
        f"decode-0: weights {done} of 400 MB in {seconds} s"
        for done, seconds in [(100, 1.5), (200, 2.5), (300, 3.5), (400, 4.5)]
    ]
