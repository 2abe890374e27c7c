"""coordinator/progress.py: only Baton's own lines are shown, each once; a failed start is told in one line."""

from __future__ import annotations

from pathlib import Path

from coordinator.progress import WorkerLog, reason_of

OWN = "2026-01-01 10:00:00,123 INFO baton.worker: decode-0: weights 128 of 513 MB\n"
SERVE = "INFO 2026-01-01 10:00:00,123 baton_Decode 1a2b -- replica started\n"


def log_file(run_dir: Path) -> Path:
    logs = run_dir / "session_2026-01-01" / "logs"
    logs.mkdir(parents=True)
    return logs / "worker-ab-01-77.err"


def test_only_lines_of_our_loggers_are_shown(tmp_path: Path) -> None:
    shown: list[str] = []
    log_file(tmp_path).write_text(SERVE + OWN + "Traceback (most recent call last):\n")
    WorkerLog(tmp_path, shown.append).read()
    assert shown == ["decode-0: weights 128 of 513 MB"]


def test_a_line_is_shown_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    shown: list[str] = []
    path, log = log_file(tmp_path), WorkerLog(tmp_path, shown.append)
    path.write_text(OWN[:40])
    log.read()
    assert shown == []
    path.write_text(OWN)
    log.read()
    log.read()
    assert shown == ["decode-0: weights 128 of 513 MB"]


def test_what_was_written_last_is_shown_at_the_end(tmp_path: Path) -> None:
    shown: list[str] = []
    with WorkerLog(tmp_path, shown.append):
        log_file(tmp_path).write_text(OWN)
    assert shown == ["decode-0: weights 128 of 513 MB"]


def test_the_reason_is_the_message_of_the_exception_that_ended_the_replica() -> None:
    report = (
        "The deployment failed to start 1 times in a row. Error:\n"
        "ray::ServeReplica:baton:Decode.initialize_and_get_metadata() (pid=7)\n"
        '  File "x.py", line 1, in f\n'
        "struct.error: short\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "RuntimeError: Traceback (most recent call last):\n"
        '  File "y.py", line 2, in g\n'
        "contracts.errors.ConfigError: expected a GGUF file but it ends early\n"
    )
    assert reason_of(report) == "expected a GGUF file but it ends early"
    assert reason_of("x\nKeyError: 'a'\n") == "KeyError: 'a'"
    assert reason_of("one line only") == "one line only"
    assert reason_of("") == "no message"
