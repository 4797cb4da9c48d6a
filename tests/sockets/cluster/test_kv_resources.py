"""A rank closes its KV transfers and tiers in order, also if its engine could not be built."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.cluster.contracts import Role
from baton.cluster.engines.kv_resources import KVResources
from baton.cluster.engines.launch import EngineLaunch
from baton.cluster.spec import load_spec
from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import split_endpoint
from baton.kv_transfer.group.read_member import join_tp_read_group
from baton.kv_transfer.group.rpc import GroupRank
from baton.kv_transfer.settings import LocalEngine
from baton.kv_transfer.threads import OwnerThread
from baton.kv_transfer.tiers.disk_files import TierRefused

pytestmark = pytest.mark.timeout(60)

LAYOUT = KVLayout(model="small", num_layers=1, num_kv_heads=2, head_dim=16, dtype="bfloat16")
NUM_BLOCKS = 4


def share(rank: int) -> tuple[ArenaRegion, np.ndarray]:
    memory = np.zeros((NUM_BLOCKS, LAYOUT.head_bytes), dtype=np.uint8)
    return ArenaRegion(memory.ctypes.data, NUM_BLOCKS, "cpu", LAYOUT, rank, 1), memory


@contextlib.contextmanager
def two_ranks(folder: Path, fleets: dict[str, Any]) -> Iterator[tuple[KVResources, str, CacheRegion]]:
    """Yield the resources of a prefill rank that a second one has joined, the address that it joined, and a region."""
    (folder / "config.json").write_text("{}")
    spec = load_spec({"model": str(folder), "engine": {"tensor_parallel_size": 2}, "fleets": fleets})
    launch = EngineLaunch(spec, Role.PREFILL, "prefill-0", "app", ClusterKey.generate())
    resources = KVResources(launch, LocalEngine("prefill-0", 1, "127.0.0.1", launch.key))
    reads = resources.open_sockets().reads
    (own, _own_memory), (other, _other_memory) = share(0), share(1)
    rank = GroupRank(1, 2, launch.key)
    member = join_tp_read_group(CacheRegion.of(other), rank, leader=reads, engine_id="prefill-0")
    try:
        yield resources, reads, CacheRegion.of(own)
    finally:
        member.close()


def test_tiers_that_are_refused_end_the_hand_offs_that_were_open_already(tmp_path: Path) -> None:
    """The transfers' thread uses the socket to which the other rank connected, and must end before that is closed."""
    (tmp_path / "a file").touch()
    tiers = {"disk_path": str(tmp_path / "a file"), "disk_bytes": 1 << 20}
    with two_ranks(tmp_path, {"prefill": {"kv_tiers": tiers}, "decode": {}}) as (resources, _, own):
        resources.connect(own)
        with pytest.raises(TierRefused, match=r"kv_tiers\.disk_path: .*a file"):
            resources.open_tiers(own)
        resources.abandon()
    assert "baton-transfer" not in {thread.name for thread in threading.enumerate()}


def test_sockets_stay_open_while_a_thread_that_hangs_may_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(tmp_path, {"prefill": {}, "decode": {}}) as (resources, reads, own):
        resources.connect(own)
        with monkeypatch.context() as hanging:
            hanging.setattr(OwnerThread, "ends_within", lambda thread, timeout_s: False)
            assert not resources.close()
            resources.abandon()
            socket.create_connection(split_endpoint(reads.removeprefix("tcp://"))).close()
        assert resources.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(split_endpoint(reads.removeprefix("tcp://")))
    assert "baton-transfer" not in {thread.name for thread in threading.enumerate()}
