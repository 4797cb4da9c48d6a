"""Probes members that miss heartbeats, without relying on their Python code.

Python sends heartbeats, and a process that parses, compiles or collects garbage may hold Python's lock for seconds.
libzmq's threads need no lock: a listening socket greets each connection before it knows the peer. So the directory
connects to the member and waits for the first byte (`ZMTP` signature, RFC 23/37).

| member | heartbeat | connection | first byte | listed |
|---|---|---|---|---|
| well | arrives | | | yes |
| busy: its event loop, but not Python's lock | arrives, from its own thread | | | yes |
| busy: Python's lock | none | is made | comes | yes, `BUSY_S` at most |
| stopped, or starved | none | is made, by its kernel | none | until `MISSED_AFTER_S` |
| dead | none | is refused | | until Ray reports it, `MISSED_AFTER_S` at most |
| its machine or the link is lost | none | no answer | | until `MISSED_AFTER_S` |

All times count from the last heartbeat. Probes begin after `SUSPECT_AFTER_S`, early enough that a dead member is
dropped no later than without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Sequence
from urllib.parse import urlsplit

import zmq

from baton.engine.net.sockets import bind_to_free_port

SUSPECT_AFTER_S = 3.0  # two heartbeats are missing
MISSED_AFTER_S = 6.0  # a member that was silent for so long and does not answer probes is gone
BUSY_S = 30.0  # a member that answers probes but was silent for so long is gone, too: it cannot serve
PROBE_S = 1.5  # in which a probe must be answered
TRUSTED_S = 3.0  # for which an answer counts; the next one comes before

_SIGNATURE = b"\xff"  # the first byte of each ZMTP connection


class ProcessState(enum.Enum):
    """The state of an unresponsive member's process, as far as a probe can tell."""

    RUNS = "its process runs"
    STOPPED = "its process is stopped"
    DEAD = "its process is gone"
    UNREACHABLE = "its machine does not answer"


class ProbeSocket:
    """A port for probes: libzmq's thread greets each connection, but accepts none, since no peer has the key."""

    def __init__(self, host: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.handshake_ivl = round(2 * PROBE_S * 1000)
        self.public_key, secret = zmq.curve_keypair()
        self._socket.curve_server, self._socket.curve_secretkey = True, secret
        self._socket.zap_domain = b"nobody"
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, this refuses every peer
        try:
            self.address = bind_to_free_port(self._socket, host)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        self._socket.close()
        self._context.term()


async def probe(address: str, timeout_s: float = PROBE_S) -> ProcessState:
    """Return the state of the process that listens at `address`, `tcp://HOST:PORT`, as far as it can be told."""
    where = urlsplit(address)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            return ProcessState.RUNS if await reader.read(1) == _SIGNATURE else ProcessState.DEAD
    except TimeoutError:
        return ProcessState.UNREACHABLE if writer is None else ProcessState.STOPPED
    except (ConnectionRefusedError, ConnectionResetError):
        return ProcessState.DEAD
    except OSError:
        return ProcessState.UNREACHABLE
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def probe_all(addresses: Sequence[str], timeout_s: float = PROBE_S) -> ProcessState:
    """Return `RUNS` if all of a member's processes run, else the state of the first that does not."""
    states = await asyncio.gather(*(probe(address, timeout_s) for address in addresses))
    return next((state for state in states if state is not ProcessState.RUNS), ProcessState.RUNS)
