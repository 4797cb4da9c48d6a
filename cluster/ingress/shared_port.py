"""How one of several listeners on a port leaves it without breaking a connection that is being made.

The kernel has chosen a listener for a connection before that is accepted, and resets it where the listener is closed.
(Others of the port take it over where `net.ipv4.tcp_migrate_req` is 1, also from a process that was killed.) So a
listener that leaves is first made deaf to those who begin: their kernels ask again after a second, when the port is
another listener's alone. Meanwhile it accepts whoever had begun before.
"""

from __future__ import annotations

import ctypes
import socket
import struct

SETTLE_S = 0.5  # of handshakes that are under way, and less than the second after which a client asks again

SO_ATTACH_FILTER = 26  # linux/asm-generic/socket.h
TCP_FLAGS_BYTE, SYN, ACK = 13, 0x02, 0x10
LOAD_BYTE, AND, JUMP_IF_EQUAL, RETURN = 0x30, 0x54, 0x15, 0x06  # linux/bpf_common.h
DROP, PASS = 0, 0xFFFF_FFFF  # bytes of the packet that are kept

_NO_BEGINNERS = (
    (LOAD_BYTE, 0, 0, TCP_FLAGS_BYTE),
    (AND, 0, 0, SYN | ACK),
    (JUMP_IF_EQUAL, 0, 1, SYN),
    (RETURN, 0, 0, DROP),
    (RETURN, 0, 0, PASS),
)


def is_shared(listener: socket.socket) -> bool:
    return listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) != 0


def take_no_more(listener: socket.socket) -> None:
    """Packets that begin a connection are dropped from now on. Any process may do so to its own sockets.

    Raises `OSError` where the kernel knows no such filters.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _NO_BEGINNERS))
    listener.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HxxxxxxP", len(_NO_BEGINNERS), ctypes.addressof(program))
    )
