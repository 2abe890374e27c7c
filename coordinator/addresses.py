"""Which addresses only this machine can reach. One judgment for the launcher, the application and /debug/*."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address


def is_loopback(address: str) -> bool:
    """Of an IP address, also of an IPv4 one that is written as IPv6; a name is none."""
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped.is_loopback
    return ip.is_loopback


def is_loopback_host(host: str) -> bool:
    """Of a host to listen on, which may be the one name that means loopback everywhere."""
    return host == "localhost" or is_loopback(host)
