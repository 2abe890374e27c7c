"""What KV takes from this worker to each peer: begun with the connection's self-test, learnt from all transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from contracts.messages import PeerStatus
from policy.link_model import LinkFit


class LinkMeters:
    """One for each connection, from the time that it is ready."""

    START: ClassVar[tuple[float, float]] = (0.001, 1.0)  # latency in s, and GB/s where no self-test was made

    def __init__(self) -> None:
        self._fits: dict[str, tuple[tuple[str, float], LinkFit]] = {}

    def moved(self, peer_id: str, num_bytes: int, seconds: float) -> None:
        """As of `KvEndpoint.on_moved`."""
        known = self._fits.get(peer_id)
        if known is not None:
            known[1].observe(num_bytes, seconds)

    def told(self, peers: Sequence[PeerStatus]) -> tuple[PeerStatus, ...]:
        """`peers` with what is known of the way to each that is ready. Another path, or a new test, is a new start."""
        latency_s, unmeasured = self.START
        kept = {}
        for peer in peers:
            if peer.is_ready:
                path, known = (peer.transport, peer.gigabytes_per_s), self._fits.get(peer.worker_id)
                if known is None or known[0] != path:
                    known = path, LinkFit(latency_s, 1e9 * (peer.gigabytes_per_s or unmeasured))
                kept[peer.worker_id] = known
        self._fits = kept
        return tuple(
            replace(peer, link=kept[peer.worker_id][1].report()) if peer.worker_id in kept else peer
            for peer in peers
        )
