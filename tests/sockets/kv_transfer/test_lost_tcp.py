"""UCX closes a TCP connection to a silent peer in time. Each case runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

# Connects two ends over TCP, and prints TCP_USER_TIMEOUT of all their sockets, in milliseconds.
SCRIPT = """
import contextlib, os, socket
import numpy as np
from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.kv_transfer.transports import PeerState
from baton.kv_transfer.transports.nixl import NixlTransport

LAYOUT = KVLayout(model="small", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32")
before = dict(os.environ)
memories = [np.zeros((4, LAYOUT.block_bytes), np.uint8) for _ in "hr"]
regions = [CacheRegion.of(ArenaRegion(memory.ctypes.data, 4, "cpu", LAYOUT, 0, 1)) for memory in memories]
holder, reader = (NixlTransport(region, name) for region, name in zip(regions, ("holder", "reader")))
peer = reader.add_peer(holder.metadata())
while reader.peer_state(peer) is PeerState.CONNECTING:
    holder.progress()
found = set()
for name in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
        if each.type == socket.SOCK_STREAM and each.family in (socket.AF_INET, socket.AF_INET6):
            each.getpeername()
            found.add(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
assert dict(os.environ) == before, "the transport must not change the environment"
print("patience", *sorted(found), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("settings", "patience_ms"),
    [({}, 10_000), ({"UCX_TCP_USER_TIMEOUT": "7s"}, 7_000)],
    ids=["by default", "as the environment says"],
)
def test_tcp_sockets_time_out_in_seconds(settings: dict[str, str], patience_ms: int) -> None:
    """Reads in progress fail then, and their blocks become free."""
    environment = {**os.environ, "UCX_TLS": "tcp", **settings}
    words = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=True)
    word, *found = done.stdout.splitlines()[-1].split()
    assert word == "patience"
    assert [int(each) for each in found] == [pytest.approx(patience_ms, abs=1)], "UCX may round by a millisecond"
