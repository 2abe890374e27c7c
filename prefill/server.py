"""The Serve deployment of the prefill pool. Everything but the name and the role is the chassis."""

from __future__ import annotations

from ray import serve

from worker.serving import ServedWorker


@serve.deployment(name="Prefill")
class PrefillServer(ServedWorker):
    """Reads prompts, hands their KV to decode workers."""

    role = "prefill"
