"""Members meet, undisturbed by foreign peers. If the rendezvous or a member is lost, others fail instead of waiting."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton.engine.core.step import StepPlan
from baton.engine.net.curve import ClusterKey
from baton.engine.parallel import GroupFailed, Member, rendezvous
from baton.engine.parallel.collectives import connect_groups
from baton.engine.parallel.rank_group import RankGroup
from baton.engine.parallel.rendezvous import Rendezvous, RendezvousClient

from ...helpers.foreign_peers import GARBAGE, ports_of_this_process, say
from ...helpers.ipv6 import needs_ipv6
from ...helpers.silent_proxy import SilentProxy
from ...helpers.thread_groups import run_threads

SOON_S = 30.0
CPU = torch.device("cpu")
KEY = ClusterKey.generate()
SECURE = {"secure_server": KEY.secure_server, "secure_client": KEY.secure_client}


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    """Wait for abandoned threads, which end with their connections, so that torch's warnings belong to this test."""
    yield
    if waiting := [thread for thread in threading.enumerate() if thread.name == "baton-rendezvous"]:
        gc.collect()  # collects rendezvous objects, which closes their connections
    for thread in waiting:
        thread.join(SOON_S)
        assert not thread.is_alive()


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentProxy]:
    """A proxy to a rendezvous, with a limit of one second for answers."""
    monkeypatch.setattr(rendezvous, "ANSWER_S", 1.0)
    place = Rendezvous()
    with SilentProxy(place.address) as proxy:
        yield proxy


def meeting_by(link: SilentProxy, rank: int = 0) -> RendezvousClient:
    return RendezvousClient(link.address.removeprefix("tcp://"), rank, timeout_s=600.0)


@pytest.mark.slow
def test_a_rendezvous_that_never_answers_a_hello_is_an_error(link: SilentProxy) -> None:
    link.silence()
    with pytest.raises(GroupFailed, match=r"rank 0 finds no rendezvous at 127\.0\.0\.1:\d+: "):
        meeting_by(link)


@pytest.mark.slow
def test_a_member_whose_link_is_lost_does_not_wait_for_the_answer(link: SilentProxy) -> None:
    rendezvous_client = meeting_by(link)
    rendezvous_client.put("here/0", "10.0.0.1")
    assert rendezvous_client.get("here/0") == "10.0.0.1"
    link.silence()
    for ask in (
        lambda: rendezvous_client.get("here/0"),
        rendezvous_client.failure,
        lambda: rendezvous_client.put("more", ""),
        rendezvous_client.check,
    ):
        with pytest.raises(GroupFailed, match="rank 0 lost its group's rendezvous: no answer within 1 s"):
            ask()


@pytest.mark.slow
def test_a_member_that_loses_the_rendezvous_while_torch_connects_gives_up(link: SilentProxy) -> None:
    """The other member has joined, so the wait could last as long as a start may take."""
    fellow = meeting_by(link, 1)
    fellow.put("here/1", "127.0.0.1")
    threading.Timer(0.5, link.silence).start()
    with pytest.raises(GroupFailed, match="lost its group's rendezvous"):
        connect_groups(Member(tensor_parallel_size=2), meeting_by(link), CPU)


def test_a_member_that_fails_while_others_connect_to_it_ends_their_waiting() -> None:
    place = Rendezvous()
    meetings = [RendezvousClient(place.address, rank, timeout_s=600.0) for rank in range(2)]
    meetings[1].put("here/1", "127.0.0.1")
    threading.Timer(0.5, lambda: meetings[1].fail("its device is gone")).start()
    with pytest.raises(GroupFailed, match="rank 1 failed: its device is gone"):
        connect_groups(Member(tensor_parallel_size=2), meetings[0], CPU)


@pytest.mark.parametrize("address", ["", "here", "::1:29500", "[::1]", ":80", "host:port"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(GroupFailed, match="is not host:port"):
        RendezvousClient(address, 0, timeout_s=1.0)


def test_a_missing_rendezvous_is_named() -> None:
    with pytest.raises(GroupFailed, match=r"rank 3 finds no rendezvous at 127\.0\.0\.1:1: "):
        RendezvousClient("127.0.0.1:1", 3, timeout_s=1.0)


class Pair:
    """Two tensor-parallel ranks in threads, with all their connections."""

    def __init__(self, host: str) -> None:
        before = ports_of_this_process()
        self._place = Rendezvous(host)
        common: dict[str, Any] = {"rendezvous": self._place.address, "start_timeout_s": SOON_S, **SECURE}
        members = [Member(rank=rank, tensor_parallel_size=2, host=host, **common) for rank in range(2)]
        self.ends = [RankGroup(member, timeout_s=SOON_S) for member in members]
        run_threads([functools.partial(end.join, CPU) for end in self.ends], lambda: None)
        self.ports = ports_of_this_process() - before

    def step(self, late_s: float = 0.0) -> None:
        """Send a plan, and run an all-reduce on both ranks, with the second one late."""
        leader, follower = self.ends
        assert leader.sender is not None
        assert follower.receiver is not None
        leader.sender.send(StepPlan(7, [], [], []))
        assert follower.receiver.receive() == StepPlan(7, [], [], [])

        def add(end: RankGroup) -> list[float]:
            time.sleep(late_s if end is follower else 0.0)
            return list(end.groups.tp.all_reduce(torch.tensor([1.0, 2.0])))

        assert run_threads([functools.partial(add, end) for end in self.ends], lambda: None) == [[2.0, 4.0]] * 2

    def close(self) -> None:
        for end in self.ends:
            end.close()
            end.groups.wait_closed(SOON_S)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_foreign_data_at_any_port_of_a_group_disturbs_no_step(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr("baton.engine.parallel.mesh._MAX_UNIX_PATH", 0)  # forces TCP, as between machines
    pair = Pair(host)
    pair.step()
    assert len(pair.ports) == 5  # one of the rendezvous, and one each of gloo and the meshes per rank
    foreign_peers = [say(port, what) for port in pair.ports for what in GARBAGE.values()]
    pair.step(late_s=1.0)
    pair.step()
    for stranger in foreign_peers:
        stranger.close()
    time.sleep(0.5)  # time for the closed connections to be noticed
    pair.step()
    pair.close()


def test_foreign_data_at_a_rendezvous_disturbs_no_member() -> None:
    place = Rendezvous()
    port = int(place.address.rpartition(":")[2])
    foreign_peers = [say(("127.0.0.1", port), what) for what in GARBAGE.values()]
    first, second = (RendezvousClient(place.address, rank, timeout_s=SOON_S) for rank in range(2))
    first.put("address", "10.0.0.1")
    for stranger in foreign_peers:
        stranger.close()
    assert second.get("address") == "10.0.0.1"


@needs_ipv6
def test_a_rendezvous_has_an_ipv6_address_in_brackets() -> None:
    place = Rendezvous("::1")
    assert place.address.startswith("[::1]:")
    RendezvousClient(place.address, 0, timeout_s=SOON_S).put("address", "fd00::1")
    assert RendezvousClient(place.address, 1, timeout_s=SOON_S).get("address") == "fd00::1"
