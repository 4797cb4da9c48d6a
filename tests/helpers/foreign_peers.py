"""Bytes that reach an open port from outside: health checks, scanners, members of other systems."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_LISTENS = "0A"  # linux/tcp_states.h, as /proc/net/tcp writes it
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # ZMTP 3.0
NULL, CURVE = (name.ljust(20, b"\0") + bytes(32) for name in (b"NULL", b"CURVE"))
STORE = b"\x09" + (0x3C85F7CE).to_bytes(4, "little")  # how a client of torch's store begins
GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: 10.0.0.1\r\nUser-Agent: probe/1.0\r\nAccept: */*\r\n\r\n" * 4,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "half a greeting": GREETING[:5],
    "a greeting": GREETING + CURVE,
    "a greeting without a key": GREETING + NULL + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH" + b"\0\4word",
    "an old greeting": b"\x01\x00" + b"\x04\x00abc" * 20,
    "an end in an old form": b"\x01\x00\x01\x00\x01\x00",
    "a length without end": GREETING + CURVE + b"\x06" + b"\x7f" + b"\xff" * 7 + b"x" * 100,
    "a long message in an old form": b"\x01\x00\xff" + b"\x7f" + b"\xff" * 7 + b"\x00" + b"x" * 100,
    "half of a store's greeting": STORE[:3],
    "a long name for a store": STORE + b"\x00" + b"\xff" * 7 + b"\x7f" + b"x" * 100,
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
}


def say(where: tuple[str, int], what: bytes) -> socket.socket:
    """Connect, send these bytes and nothing more, and return the open connection."""
    stranger = socket.create_connection(where, timeout=30)
    stranger.sendall(what)
    return stranger


def ports_of_this_process() -> set[tuple[str, int]]:
    """Return the addresses at which this process listens."""
    links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    own = {os.readlink(link) for link in links if link.is_symlink()}
    return {
        _place(fields[1])
        for table in ("tcp", "tcp6")
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]
        if (fields := line.split())[3] == _LISTENS and f"socket:[{fields[9]}]" in own
    }


def _place(written: str) -> tuple[str, int]:
    """Parse an address of /proc/net/tcp: 32-bit words in this machine's byte order. Any-addresses become loopback."""
    host, _, port = written.partition(":")
    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
    address = b"".join(words)
    family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, address) if any(address) else "127.0.0.1", int(port, 16)
