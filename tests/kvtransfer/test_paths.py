"""Which way a pair takes: the best that passes the self-test, the next if it does not, and what is told about it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.processes import own_kib
from contracts.channel import connect
from contracts.errors import ConfigError
from contracts.messages import Hello, PeerStatus
from kvtransfer import paths, selftest, sender, ucx
from kvtransfer.memory import MemoryLink
from kvtransfer.paths import Paths, make_transports
from kvtransfer.selftest import PIECE_BYTES, fill, make_pattern, make_rounds
from kvtransfer.shm import ShmTransport
from kvtransfer.stream import StreamLink
from kvtransfer.tcp import TcpTransport
from kvtransfer.transport import Link, LinkClosed, Op
from kvtransfer.wires import interface_of, promised_gigabytes_per_s
from tests.kvtransfer.tools import (
    FINGERPRINT,
    HOST,
    LAYOUT,
    SECRET,
    TOKEN,
    WAIT_S,
    Handoff,
    Pair,
    Side,
    connected,
    decode_side,
    make_config,
    make_info,
    until,
)


def names(transport: str, host: str = HOST) -> list[str]:
    return [each.name for each in make_transports(make_config(transport=transport), host)]


def test_each_name_is_its_transport_and_auto_is_the_best_first() -> None:
    assert [names(name) for name in ("memory", "shm", "ucx", "tcp")] == [
        ["memory"],
        ["shm"],
        ["ucx"],
        ["tcp"],
    ]
    assert names("auto") == ["shm", "tcp"]  # nobody but this host can reach a loopback address
    assert names("auto", "192.0.2.1") == ["shm", "ucx", "tcp"]


def test_auto_does_without_ucx_where_it_does_not_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ConfigError("transfer.transport: ucx cannot be loaded (no such library)")

    monkeypatch.setattr(ucx, "load_ucxx", fail)
    paths._has_ucx.cache_clear()
    assert names("auto", "192.0.2.1") == ["shm", "tcp"]
    assert names("auto", "192.0.2.1") == ["shm", "tcp"]
    assert caplog.text.count("no such library") == 1
    paths._has_ucx.cache_clear()


async def test_ucx_that_does_not_load_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    side = Side("d", 1, make_config(transport="ucx"))
    with pytest.raises(ConfigError, match=r"ucx cannot be loaded .*; set transfer.transport to tcp or auto"):
        await side.endpoint.start(HOST)
    await side.endpoint.close()


def test_common_paths_are_in_our_order_and_none_is_told_with_both_sides() -> None:
    ours = Paths([ShmTransport(2, 4096), TcpTransport(HOST)], HOST)
    found = ours.common("tcp=h:1 new=x shm=@baton-kv-1")
    assert [(path.name, path.address) for path in found] == [("shm", "@baton-kv-1"), ("tcp", "h:1")]
    with pytest.raises(LinkClosed, match=r"expected one of our transports \(shm, tcp\) but peer has 'ucx'"):
        ours.common("ucx=h:1")
    with pytest.raises(LinkClosed, match="but peer has 'nonsense'"):
        ours.common("nonsense")


async def test_a_link_is_accepted_whichever_way_it_comes() -> None:
    listener = Paths([ShmTransport(2, 4096), TcpTransport(HOST)], HOST)
    dialler = Paths([ShmTransport(2, 4096), TcpTransport(HOST)], HOST)
    published = await listener.listen()
    for path in dialler.common(published):
        near, far = await asyncio.gather(
            path.transport.connect(path.address, TOKEN, WAIT_S), listener.accept(TOKEN, WAIT_S)
        )
        await near.close()
        await far.close()
    with pytest.raises(LinkClosed, match="no data link came"):
        await listener.accept(TOKEN, 0.01)
    await listener.close()


@pytest.mark.parametrize("num_bytes", [0, 1, 9, PIECE_BYTES - 1, PIECE_BYTES, 5 * PIECE_BYTES + 7])
def test_a_large_probe_takes_a_small_pattern_and_no_two_pieces_of_it_are_equal(num_bytes: int) -> None:
    pattern = make_pattern(num_bytes)
    assert pattern.numel() <= PIECE_BYTES + 8 * 5
    contents = [torch.full((num_bytes,), old, dtype=torch.uint8) for old in (0, 255)]
    for content in contents:
        fill(content, pattern)
    assert torch.equal(*contents)  # all of it was written
    pieces = {bytes(piece.tolist()) for piece in contents[0].split(PIECE_BYTES)}
    assert len(pieces) == max(-(-num_bytes // PIECE_BYTES), 1)


def test_a_self_test_has_small_probes_and_a_bulk_that_is_timed() -> None:
    assert make_rounds(0, 4096) == []
    small, warm, timed = make_rounds(10_000, 4096)
    assert small == [1, 4096]
    assert warm == timed == [4096, 4096, 1808]
    assert make_rounds(1, 1 << 20)[0] == list(selftest.SMALL_SIZES)


# --- a pair -----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def auto_pair(**changes: Any) -> AsyncIterator[Pair]:
    async with connected(make_config(transport="auto", **changes)) as pair:
        yield pair


def status_of(pair: Pair) -> PeerStatus:
    (status,) = pair.prefill.endpoint.peer_statuses()
    return status


async def hand_over(pair: Pair, num_tokens: int = 100) -> Handoff:
    handoff = pair.handoff(num_tokens)
    handoff.expect()
    handoff.open()
    assert (await handoff.result()).error is None
    assert handoff.arrived == num_tokens
    return handoff


async def test_two_processes_of_one_host_take_shared_memory() -> None:
    async with auto_pair() as pair:
        status = status_of(pair)
        assert (status.transport, status.detail, status.is_slow) == ("shm", "", False)
        assert status.gigabytes_per_s > 0
        await hand_over(pair)


async def test_shared_memory_that_cannot_be_had_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refused)
    async with auto_pair(connect_timeout_s=2.0) as pair:
        assert status_of(pair).transport == "tcp"
        assert "shm is not used: " in status_of(pair).detail
        await hand_over(pair)


async def test_a_path_that_cannot_be_dialled_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(_self: ShmTransport, _address: str, _token: bytes, _timeout_s: float) -> Link:
        raise LinkClosed("another network namespace")

    monkeypatch.setattr(ShmTransport, "connect", refused)
    async with auto_pair(connect_timeout_s=1.0) as pair:
        assert status_of(pair).transport == "tcp"
        assert status_of(pair).detail == "shm is not used: another network namespace"
        await hand_over(pair)


async def test_a_path_that_damages_bytes_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = ShmTransport.connect, list[Link]()

    async def connect(self: ShmTransport, address: str, token: bytes, timeout_s: float) -> Link:
        link = await real(self, address, token, timeout_s)
        calls.append(link)
        area = link._area  # type: ignore[attr-defined]
        area.slots = [memoryview(bytearray(len(slot))) for slot in area.slots]  # what is written goes nowhere
        return link

    monkeypatch.setattr(ShmTransport, "connect", connect)
    async with auto_pair() as pair:
        assert len(calls) == 1
        assert status_of(pair).transport == "tcp"
        assert (
            "shm is not used: the transfer self-test failed: bytes arrived damaged" in status_of(pair).detail
        )


async def test_the_way_back_is_tested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StreamLink.send

    def send(self: StreamLink, tag: int, buffer: memoryview) -> Op:
        damaged = bytearray(buffer)
        damaged[-1] ^= 1
        return real(self, tag, memoryview(damaged))

    async with decode_side(make_config(transport="shm")) as (_, port):
        prefill = Side("p", 1, make_config(transport="shm"))
        await prefill.endpoint.start(HOST)
        monkeypatch.setattr(StreamLink, "send", send)  # over shm only the echo goes through the socket
        prefill.endpoint.set_peers([make_info(port)])
        await until(lambda: "bytes came back damaged" in prefill.endpoint.peer_statuses()[0].detail)
        assert not prefill.endpoint.peer_statuses()[0].is_ready
        await prefill.endpoint.close()


async def test_whatever_goes_wrong_at_connecting_the_pair_finds_together_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch says that there is no memory."""
    real, left = sender.SelfTest, [1]

    def make(*arguments: Any) -> selftest.SelfTest:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*arguments)

    monkeypatch.setattr(sender, "SelfTest", make)
    async with auto_pair() as pair:
        assert left == [0]
        assert "can't allocate memory" in status_of(pair).events[0].text
        await hand_over(pair)


async def test_dialling_a_data_link_ends_with_the_control_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for any longer, though its own time is not over, and nothing of it is left."""
    left: list[str] = []
    is_dialling = asyncio.Event()

    async def dial(_transport: TcpTransport, address: str, token: bytes, timeout_s: float) -> Link:
        is_dialling.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            left.append(address)
        raise AssertionError

    monkeypatch.setattr(TcpTransport, "connect", dial)
    config = make_config(transport="tcp", connect_timeout_s=10 * WAIT_S)
    prefill = Side("p", 1, config)
    await prefill.endpoint.start(HOST)
    async with decode_side(config) as (decode, port):
        prefill.endpoint.set_peers([make_info(port)])
        await is_dialling.wait()
        assert prefill.endpoint.peer_statuses()[0].detail == "connecting"
        await decode.endpoint.close()
        await until(lambda: prefill.endpoint.peer_statuses()[0].detail == "connection to d ended")
        assert len(left) == 1
        await prefill.endpoint.close()


async def test_waiting_for_a_data_link_ends_with_the_control_connection() -> None:
    """Also at the other end: a peer that is gone before it has dialled costs nothing."""
    async with decode_side(make_config(transport="tcp", connect_timeout_s=10 * WAIT_S)) as (decode, port):
        server = decode.endpoint._server
        assert server is not None
        channel = await connect(HOST, port, Hello("p", 1, "kv", b"", FINGERPRINT, LAYOUT), SECRET)
        await until(lambda: len(server._tasks) == 1)
        await channel.close()
        await until(lambda: not server._tasks)


async def test_a_path_far_below_its_promise_is_used_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paths, "memcpy_gigabytes_per_s", lambda: 1e6)
    async with auto_pair(probe_bytes=1 << 20, slot_bytes=1 << 20) as pair:
        status = status_of(pair)
        assert status.is_ready
        assert status.is_slow
        assert "expected at least 1e+05 GB/s over shm but measured" in status.detail
        assert status.detail in caplog.text


async def test_memcpy_is_measured_and_a_network_has_a_floor_of_its_own() -> None:
    assert paths.memcpy_gigabytes_per_s() > 0.01
    assert paths.least_gigabytes_per_s("tcp", HOST) == paths.LEAST_GIGABYTES_PER_S


async def test_a_network_path_is_judged_by_what_the_wire_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """12.5 GB/s of hardware that carries one must not pass for a good path."""
    monkeypatch.setattr(paths, "promised_gigabytes_per_s", lambda name, host: 12.5e6)
    async with connected(make_config(transport="tcp", probe_bytes=1 << 20, slot_bytes=1 << 20)) as pair:
        status = status_of(pair)
        assert status.is_ready
        assert status.is_slow
        assert "expected at least 1.2e+06 GB/s over tcp but measured" in status.detail
        assert "slow; expected at least" in status.events[-1].text


def test_what_a_wire_promises_is_read_from_the_kernel(tmp_path: Path) -> None:
    interface = interface_of(HOST)
    assert interface == "lo"
    assert interface_of("203.0.113.1") == interface_of("no address") == ""
    (tmp_path / "net" / interface).mkdir(parents=True)
    speed = tmp_path / "net" / interface / "speed"
    for told, wanted in (("25000\n", 3.125), ("-1\n", 0.0), ("", 0.0)):
        speed.write_text(told)
        assert promised_gigabytes_per_s("tcp", HOST, tmp_path) == wanted
    for number, state in enumerate(("4: ACTIVE", "1: DOWN")):
        port = tmp_path / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text(f"{100 * (number + 1)} Gb/sec (4X EDR)\n")
    assert promised_gigabytes_per_s("ucx", HOST, tmp_path) == 12.5
    assert promised_gigabytes_per_s("tcp", HOST, tmp_path) == 0.0


def test_a_measurement_leaves_no_memory_behind() -> None:
    """It is made for each peer that comes."""
    large = torch.zeros(30 << 20, dtype=torch.uint8)  # as loading a model does:
    del large  # from now on, the heap keeps what it is given back
    before_kib = own_kib(os.getpid())
    paths.memcpy_gigabytes_per_s()
    assert own_kib(os.getpid()) - before_kib < 4 << 10


# --- integrity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "checksum", "host", "is_summed"),
    [
        ("auto", "auto", HOST, False),
        ("tcp", "auto", HOST, False),
        ("tcp", "auto", "localhost", True),  # not our own address: as far as we know another host
        ("tcp", "never", "localhost", False),
        ("shm", "always", HOST, True),
    ],
)
async def test_chunks_carry_checksums_between_hosts(
    transport: str, checksum: str, host: str, is_summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(make_config(transport=transport, checksum=checksum)) as pair:
        (sender,) = pair.prefill.endpoint._senders.values()
        monkeypatch.setattr(sender, "info", replace(sender.info, host=host))
        assert sender._is_summed == is_summed


def damage_sends(monkeypatch: pytest.MonkeyPatch, num_times: int) -> None:
    """The transport itself flips a bit of the next messages."""
    real, left = MemoryLink.send, [num_times]

    def send(self: MemoryLink, tag: int, buffer: memoryview) -> Op:
        content = bytearray(buffer)
        if left[0]:
            left[0] -= 1
            content[len(content) // 2] ^= 16
        return real(self, tag, memoryview(content))

    monkeypatch.setattr(MemoryLink, "send", send)


async def test_bytes_that_a_transport_damages_are_sent_again() -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with connected(make_config(transport="memory", checksum="always")) as pair:
            damage_sends(patch, 3)
            await hand_over(pair)
            assert pair.decode.endpoint.num_damaged_chunks == 3


async def test_bytes_that_stay_damaged_are_an_error_and_never_an_answer() -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with connected(make_config(transport="memory", checksum="always")) as pair:
            damage_sends(patch, 1000)
            before = pair.decode.slab.clone()
            handoff = pair.handoff(16)
            handoff.expect()
            handoff.open()
            assert "arrived damaged 3 times" in str((await handoff.result()).error)
            assert "arrived damaged 3 times" in str(await handoff.outcome())
            assert (pair.decode.slab == before).all()
            assert pair.decode.endpoint.num_damaged_chunks == 3


async def test_a_receiver_that_insists_refuses_what_has_no_checksum() -> None:
    async with decode_side(make_config(checksum="always")) as (decode, port):
        prefill = Side("p", 1, make_config(checksum="never"))
        await prefill.endpoint.start(HOST)
        prefill.endpoint.set_peers([make_info(port)])
        await until(lambda: prefill.endpoint.peer_statuses()[0].is_ready)
        handoff = Handoff(Pair(prefill, decode, port), 20, 0)
        handoff.expect()
        handoff.open()
        assert "expected a checksum" in str((await handoff.result()).error)
        await prefill.endpoint.close()
