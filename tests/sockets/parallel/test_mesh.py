"""A mesh delivers the messages of ranks, undisturbed by foreign peers at its ports, over IPv4 and IPv6."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import zmq

from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import split_endpoint
from baton.engine.parallel import GroupFailed, Member, ParallelGroups, mesh
from baton.engine.parallel.mesh import Mesh, connect
from baton.engine.parallel.rank_group import RankGroup
from baton.engine.parallel.rendezvous import Rendezvous, RendezvousClient

from ...helpers.foreign_peers import GARBAGE, say
from ...helpers.ipv6 import needs_ipv6
from ...helpers.silent_proxy import SilentProxy
from ...helpers.thread_groups import Closing, run_threads

pytestmark = pytest.mark.slow

SOON_S = 30.0
KEY = ClusterKey.generate()
SECURE = {"secure_server": KEY.secure_server, "secure_client": KEY.secure_client}
SECURITY = pytest.mark.parametrize("member", [{}, SECURE], ids=["clear", "curve"])
BEFORE_OR_AFTER = pytest.mark.parametrize("when", ["before", "after"])


class Ends:
    """The meshes of some ranks, with addresses of different machines."""

    def __init__(self, found: list[Mesh], groups: list[Closing]) -> None:
        self.links, self.groups = found, groups

    def ports(self) -> list[tuple[str, int]]:
        return [split_endpoint(end.address.removeprefix("tcp://")) for end in self.links]

    def talk(self) -> None:
        """Check that messages of each rank reach all others, and nothing else does."""
        for rank, end in enumerate(self.links):
            for number in range(3):
                end.send(f"{rank}.{number}".encode())
        for rank, end in enumerate(self.links):
            said = [
                f"{other}.{number}".encode() for other in range(len(self.links)) if other != rank for number in range(3)
            ]
            assert sorted(end.receive() or b"" for _ in said) == said
        assert not any(group.closed.is_set() for group in self.groups)


@contextmanager
def ends(size: int = 2, hosts: list[str] | None = None, **member: Any) -> Iterator[Ends]:
    hosts = hosts or [f"127.0.0.{1 + rank}" for rank in range(size)]
    rendezvous = Rendezvous(hosts[0])
    groups = [Closing() for _ in hosts]
    made: list[Mesh] = []

    def make(rank: int) -> Mesh:
        sizes = {"tensor_parallel_size": size, "rendezvous": rendezvous.address, "start_timeout_s": SOON_S}
        own = Member(rank=rank, host=hosts[rank], **{**sizes, **member})
        rendezvous_client = RendezvousClient(own.rendezvous, rank, timeout_s=SOON_S)
        rendezvous_client.put(f"here/{rank}", own.host)
        others = [other for other in range(size) if other != rank]
        made.append(end := Mesh("talk", own, rendezvous_client, ParallelGroups(groups[rank]), others))
        return end

    works = [functools.partial(make, rank) for rank in range(size)]
    try:
        yield Ends(run_threads(works, lambda: rendezvous.fail(0, "the test ends")), groups)
    finally:
        for end in made:
            end.close(orderly=True)


@SECURITY
@BEFORE_OR_AFTER
@pytest.mark.parametrize("stays", [False, True], ids=["goes", "stays"])
def test_data_from_foreign_peers_is_ignored_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, member: dict[str, Any], when: str, stays: bool
) -> None:
    foreign_peers: list[socket.socket] = []

    def poke(where: tuple[str, int]) -> None:
        foreign_peers.extend(said := [say(where, what) for what in GARBAGE.values()])
        time.sleep(0.3)  # time for the data to be read
        for stranger in () if stays else said:
            stranger.close()

    def connect_late(end: zmq.Socket[bytes], address: str, own: Member) -> None:
        poke(split_endpoint(address.removeprefix("tcp://")))
        connect(end, address, own)

    if when == "before":
        monkeypatch.setattr(mesh, "connect", connect_late)
    with ends(**member) as found:
        found.talk()
        if when == "after":
            for where in found.ports():
                poke(where)
            found.talk()
            for stranger in foreign_peers:
                stranger.close()
            time.sleep(0.5)  # time for the closed connections to be noticed
        found.talk()
        found.links[1].close(orderly=False)  # the end of a member is still noticed
        assert found.groups[0].closed.wait(SOON_S)
        with pytest.raises(GroupFailed, match="rank 1 has gone"):
            found.links[0].send(b"")
    for stranger in foreign_peers:
        stranger.close()


def test_foreign_messages_at_a_port_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with ends(3) as found:
        stranger = zmq.Context.instance().socket(zmq.PUSH)
        stranger.connect(found.links[0].address)
        for message in ([b""], [b"word", b"plan"], [b"a", b"b", b"c"]):
            stranger.send_multipart(message)
        stranger.close(linger=5_000)
        time.sleep(0.3)
        found.talk()
    assert caplog.text.count("messages to the port for talk from outside of the group are ignored") == 1


def test_a_group_with_another_key_is_refused_at_once() -> None:
    other = ClusterKey.generate()
    rendezvous = Rendezvous()

    def make(rank: int, key: ClusterKey) -> Mesh:
        rendezvous_client = RendezvousClient(rendezvous.address, rank, timeout_s=SOON_S)
        rendezvous_client.put(f"here/{rank}", host := f"127.0.0.{1 + rank}")
        own = Member(rank=rank, host=host, secure_server=key.secure_server, secure_client=key.secure_client)
        return Mesh("talk", own, rendezvous_client, ParallelGroups(), [1 - rank])  # the timeout is that of a start

    works = [functools.partial(make, rank, key) for rank, key in enumerate((KEY, other))]
    with pytest.raises(GroupFailed, match="all need the same cluster key"):
        run_threads(works, lambda: None)


@SECURITY
def test_a_rank_whose_hello_is_never_answered_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, member: dict[str, Any]
) -> None:
    """The connection breaks after the rank's hello, so the other rank may count it as connected."""
    monkeypatch.setattr("baton.engine.parallel.mesh._CONNECT_MS", 1_000)
    with ExitStack() as proxies:

        def connect_by_way(end: zmq.Socket[bytes], address: str, own: Member) -> None:
            way = proxies.enter_context(OneWay(address)).address if own.rank == 1 else address
            connect(end, way, own)

        monkeypatch.setattr(mesh, "connect", connect_by_way)
        said = r"rank 0 did not connect: no member of this group answers at tcp://"
        with pytest.raises(GroupFailed, match=said), ends(start_timeout_s=600.0, **member):
            pass


class OneWay(SilentProxy):
    """A proxy that forwards data in one direction only."""

    async def _pump(self, source: Any, sink: Any) -> None:
        if any(sink is near for near, _ in self._pairs):
            while await source.read(2**16):
                pass
        else:
            await super()._pump(source, sink)


@needs_ipv6
@SECURITY
def test_ranks_at_ipv6_addresses_are_linked(monkeypatch: pytest.MonkeyPatch, member: dict[str, Any]) -> None:
    monkeypatch.setattr("baton.engine.parallel.mesh._MAX_UNIX_PATH", 0)  # forces TCP between equal addresses
    with ends(hosts=["::1", "::1"], **member) as found:
        assert [host for host, _ in found.ports()] == ["::1", "::1"]
        found.talk()


@pytest.mark.parametrize("error", [GroupFailed("its device is gone"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_all_ranks_get_the_error_of_one_that_fails_while_others_connect(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The reason must not be that the rank has gone or does not answer, although others may report that first."""
    place = Rendezvous()

    def fail_late(end: zmq.Socket[bytes], address: str, own: Member) -> None:
        connect(end, address, own)
        if own.rank == 1:
            time.sleep(0.5)  # time for rank 0 to connect
            raise error

    def join(rank: int) -> None:
        own = Member(rank=rank, tensor_parallel_size=2, rendezvous=place.address, host=f"127.0.0.{1 + rank}")
        end = RankGroup(own, timeout_s=SOON_S)
        with end.reporting_failure():
            end.join(torch.device("cpu"))

    monkeypatch.setattr(mesh, "connect", fail_late)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(join, rank).exception for rank in range(2))
    assert repr(second()) == repr(error)
    assert isinstance(first(), GroupFailed)
    assert str(first()) == f"rank 1 failed: {str(error) or repr(error)}"


def test_an_address_where_a_rank_cannot_listen_is_named() -> None:
    rendezvous = Rendezvous()
    rendezvous_client = RendezvousClient(rendezvous.address, 0, timeout_s=SOON_S)
    rendezvous_client.put("here/1", "127.0.0.1")
    with pytest.raises(GroupFailed, match=r"rank 0 cannot listen at 192\.0\.2\.7"):
        Mesh("talk", Member(host="192.0.2.7"), rendezvous_client, ParallelGroups(), [1])
