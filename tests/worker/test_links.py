"""What a worker tells of its links."""

from __future__ import annotations

import pytest

from contracts.messages import PeerStatus
from contracts.steps import LinkReport
from worker.links import LinkMeters

MIB = 1 << 20


def peer(worker_id: str = "d", gigabytes_per_s: float = 10.0, **changes: object) -> PeerStatus:
    return PeerStatus(worker_id, True, "shm", gigabytes_per_s, **changes)  # type: ignore[arg-type]


def link(meters: LinkMeters, *peers: PeerStatus) -> LinkReport:
    told = meters.told(peers)[0].link
    assert told is not None
    return told


def test_the_self_test_is_the_start() -> None:
    meters = LinkMeters()
    assert link(meters, peer()).bytes_per_s == pytest.approx(10e9)
    assert link(meters, peer("e", 0.0)).bytes_per_s == pytest.approx(1e9)  # it was not made


def test_transfers_are_learnt_from_by_pair() -> None:
    meters = LinkMeters()
    both = peer("d"), peer("e")
    meters.told(both)
    for _ in range(50):
        meters.moved("d", 64 * MIB, 0.001 + 64 * MIB / 1e9)
    first, second = (told.link for told in meters.told(both))
    assert first is not None
    assert second is not None
    assert first.bytes_per_s < 2e9
    assert (first.num_transfers, second.num_transfers) == (50, 0)
    assert second.bytes_per_s == pytest.approx(10e9)


@pytest.mark.parametrize(
    "after", [PeerStatus("d", True, "tcp", 10.0), PeerStatus("d", True, "shm", 9.0)], ids=["path", "test"]
)
def test_a_new_connection_is_learnt_anew(after: PeerStatus) -> None:
    meters = LinkMeters()
    meters.told([peer()])
    for _ in range(50):
        meters.moved("d", 64 * MIB, 1.0)
    assert link(meters, after).num_transfers == 0


def test_of_a_peer_that_is_not_ready_nothing_is_told() -> None:
    meters = LinkMeters()
    meters.told([peer()])
    [told] = meters.told([PeerStatus("d", False, "shm", detail="is silent")])
    assert told.link is None
    meters.moved("d", MIB, 1.0)
    assert link(meters, peer()).num_transfers == 0
    meters.told([])
    meters.moved("d", MIB, 1.0)
