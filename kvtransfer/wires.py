"""What the network of this host promises, as the kernel tells it: an interface's speed, and that of RDMA ports.

/sys/class/net/NAME/speed                  Mbit/s; -1 or unreadable: nobody knows (loopback, virtual ones)
/sys/class/infiniband/NAME/ports/N/rate    "100 Gb/sec (4X EDR)", beside `state`, "4: ACTIVE"
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of a named interface
_CLASSES = Path("/sys/class")


def promised_gigabytes_per_s(name: str, host: str, classes: Path = _CLASSES) -> float:
    """Of the wire behind our address `host`, for transport `name`: UCX takes RDMA where it is. 0: nobody says."""
    found = [_of_interface(interface_of(host), classes)]
    if name == "ucx":
        found += [_of_port(port) for port in classes.glob("infiniband/*/ports/*")]
    return max(found)


def interface_of(host: str) -> str:
    """The interface that has this address, "" if none has."""
    try:
        wanted = socket.inet_aton(host)
    except OSError:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if answer[20:24] == wanted:
                    return name
    return ""


def _of_interface(name: str, classes: Path) -> float:
    try:
        return max(int((classes / "net" / name / "speed").read_text()), 0) / 8e3
    except (OSError, ValueError):
        return 0.0


def _of_port(port: Path) -> float:
    try:
        is_active = "ACTIVE" in (port / "state").read_text()
        return float((port / "rate").read_text().split()[0]) / 8 if is_active else 0.0
    except (OSError, ValueError, IndexError):
        return 0.0
