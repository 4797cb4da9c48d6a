"""Write and read host:port. An IPv6 address stands in brackets, as in URLs (RFC 3986)."""

from __future__ import annotations

import socket


def is_ipv6(host: str) -> bool:
    """Return whether a host is an IPv6 address, rather than one of IPv4 or a name."""
    return ":" in host


def socket_family(host: str) -> socket.AddressFamily:
    """Return the family of a socket that is bound at `host`."""
    return socket.AF_INET6 if is_ipv6(host) else socket.AF_INET


def endpoint(host: str, port: int | str) -> str:
    """Return `10.0.0.1:80` or `[::1]:80`; the port may be a wildcard."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def split_endpoint(given: str) -> tuple[str, int]:
    """Invert `endpoint`. Raises `ValueError`."""
    host, _, port = given.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or not (port.isascii() and port.isdigit()) or host != endpoint(bare, port).rpartition(":")[0]:
        raise ValueError(f"{given!r} is no host:port, such as 10.0.0.1:80 or [fd00::1]:80")
    return bare, int(port)


def is_ipv6_url(url: str) -> bool:
    """Return whether the host of `scheme://host:port` is an IPv6 address."""
    return url.partition("://")[2].startswith("[")
