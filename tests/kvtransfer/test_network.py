"""Two hosts on one machine: network namespaces joined by a veth pair, which is slowed, lossy or cut.

Skipped, with the reason, where this process may not make namespaces or the kernel has no such queue.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.kvtransfer.peers import Place
from tests.kvtransfer.scene import LIMIT_S, STATES, Scene, check_survivor, scene_between

PREFILL_HOST, DECODE_HOST = "10.213.7.1", "10.213.7.2"
LOSSY_SILENCE_S = 3.0

transports = pytest.mark.parametrize("transport", ["tcp", "ucx"])


class Network:
    """Two namespaces and the cable between them."""

    def __init__(self) -> None:
        self.prefill = Place(f"baton-p{os.getpid()}", PREFILL_HOST, "baton-vp")
        self.decode = Place(f"baton-d{os.getpid()}", DECODE_HOST, "baton-vd")

    def up(self) -> None:
        """Raises CalledProcessError where it is not allowed."""
        for place in (self.prefill, self.decode):
            command("ip", "netns", "add", place.namespace)
        names = "baton-vp", "baton-vd"
        p, d = self.prefill.namespace, self.decode.namespace
        command(
            "ip", "link", "add", names[0], "netns", p, "type", "veth", "peer", "name", names[1], "netns", d
        )
        for place, name in zip((self.prefill, self.decode), names, strict=True):
            self.inside(place, "ip", "address", "add", f"{place.host}/24", "dev", name)
            self.inside(place, "ip", "link", "set", name, "up")
            self.inside(place, "ip", "link", "set", "lo", "up")
        for place, name in zip((self.prefill, self.decode), names, strict=True):
            self._wait_for_carrier(place, name)

    def down(self) -> None:
        for place in (self.prefill, self.decode):
            subprocess.run(["ip", "netns", "delete", place.namespace], capture_output=True)

    def plug(self, is_in: bool) -> None:
        self.inside(self.prefill, "ip", "link", "set", "baton-vp", "up" if is_in else "down")

    def shape(self, *queue: str) -> None:
        """Both directions. Raises CalledProcessError if the kernel has no such queue."""
        for place, name in ((self.prefill, "baton-vp"), (self.decode, "baton-vd")):
            self.inside(place, "tc", "qdisc", "add", "dev", name, "root", *queue)

    def inside(self, place: Place, *words: str) -> str:
        return command("ip", "netns", "exec", place.namespace, *words)

    def _wait_for_carrier(self, place: Place, name: str) -> None:
        """The kernel takes a moment to find out, and UCX uses no device without."""
        deadline_s = time.monotonic() + LIMIT_S
        while self.inside(place, "cat", f"/sys/class/net/{name}/operstate").strip() != "up":
            assert time.monotonic() < deadline_s, name


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need ip and tc, which are not installed")
    made = Network()
    try:
        try:
            made.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this process may not make network namespaces: {error.stderr.strip()}")
        yield made
    finally:
        made.down()


async def hand_over(s: Scene, handoff_id: str) -> None:
    await s.reach("delivered", handoff_id)
    await s.rest()


async def test_auto_takes_no_shared_memory_between_hosts(network: Network) -> None:
    async with scene_between(network.prefill, network.decode, transport="auto", connect_timeout_s=20.0) as s:
        transport, notes = await s.prefill.ask("path")
        assert transport in ("ucx", "tcp")
        assert "shm is not used" in notes
        await hand_over(s, "h")


@transports
@pytest.mark.parametrize(
    "queue",
    [
        # Too short a queue for what is sent: what does not fit is lost.
        pytest.param(("tbf", "rate", "2mbit", "burst", "3kb", "limit", "6kb"), id="narrow"),
        pytest.param(("netem", "delay", "20ms", "loss", "2%"), id="far"),
    ],
)
async def test_a_slow_and_lossy_network_is_no_failure(
    network: Network, transport: str, queue: tuple[str, ...]
) -> None:
    try:
        network.shape(*queue)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel has no {queue[0]}: {error.stderr.strip()}")
    async with scene_between(
        network.prefill, network.decode, transport=transport, connect_timeout_s=20.0, peer_timeout_s=20.0
    ) as s:
        for number in range(3):
            await hand_over(s, f"h{number}")


@transports
@pytest.mark.parametrize("state", STATES)
async def test_a_cable_that_is_pulled_ends_both_sides_and_plugged_in_they_go_on(
    network: Network, transport: str, state: str
) -> None:
    async with scene_between(
        network.prefill,
        network.decode,
        transport=transport,
        connect_timeout_s=10.0,
        peer_timeout_s=LOSSY_SILENCE_S,
    ) as s:
        await s.reach(state, "h")
        network.plug(False)
        begun_s = time.monotonic()
        await check_survivor(s, "prefill", state)
        await check_survivor(s, "decode", state)
        await asyncio.gather(s.prefill.ask("fenced"), s.decode.ask("fenced"))
        assert time.monotonic() - begun_s < 2 * LIMIT_S
        network.plug(True)
        await s.check_again(2)
