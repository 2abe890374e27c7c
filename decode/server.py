"""The Serve deployment of the decode pool. Everything but the name and the role is the chassis."""

from __future__ import annotations

from ray import serve

from worker.serving import ServedWorker


@serve.deployment(name="Decode")
class DecodeServer(ServedWorker):
    """Writes answers; reads a prompt itself when there is no prefill worker for it."""

    role = "decode"
