"""Plans reach the followers unchanged and in order. If one end is lost, the other one ends."""

from __future__ import annotations

import functools
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from baton.engine import SamplingParams
from baton.engine.core.step import Chunk, RowStart, StepPlan, StepResult
from baton.engine.net.curve import ClusterKey
from baton.engine.parallel import Group, GroupFailed, Member, ParallelGroups, mesh
from baton.engine.parallel.mesh import connect
from baton.engine.parallel.plans import LeadingRunner, PlanReceiver, PlanSender, follow_plans
from baton.engine.parallel.rendezvous import Rendezvous, RendezvousClient

from ...helpers.silent_proxy import SilentProxy
from ...helpers.thread_groups import Closing, run_threads

START = RowStart(
    row=3,
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    output_token_ids=[4],
    sampling=SamplingParams(temperature=0.5, logit_bias={7: 1.5}, bad_words_token_ids=[[1], [2, 3]], logprobs=2),
    seed=2**62 + 1,
    stop_token_ids=[2],
    block_tables=[[9, 8]],
)
PLANS = [
    StepPlan(0, [], [START], [Chunk(3, 0, 4, True, [])]),
    StepPlan(1, [], [], [Chunk(3, 4, 1, True, [[5]])]),
    StepPlan(2, [3], [], []),
]


class Recorder:
    """A runner that records plans, and how many of its steps have no result yet."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.open = self.most_open = 0

    def launch(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        recorder = self

        class Pending:
            def result(self) -> StepResult:
                recorder.open -= 1
                return StepResult(plan.step, [])

        return Pending()


@contextmanager
def ends(
    ranks: int = 2, follower: dict[str, Any] | None = None, **both: Any
) -> Iterator[tuple[PlanSender, list[PlanReceiver], list[Closing]]]:
    """Yield rank 0's sender, the others' receivers, and all groups. `follower` has arguments of followers only."""
    rendezvous = Rendezvous()
    common = {"tensor_parallel_size": ranks, "rendezvous": rendezvous.address, "start_timeout_s": 30.0, **both}
    members = [Member(**{**common, "rank": rank, **(follower or {} if rank else {})}) for rank in range(ranks)]
    groups = [Closing() for _ in members]

    def make(member: Member, group: Group) -> Any:
        rendezvous_client = RendezvousClient(member.rendezvous, member.rank, timeout_s=30)
        rendezvous_client.put(f"here/{member.rank}", member.host)
        return (PlanSender if member.rank == 0 else PlanReceiver)(member, rendezvous_client, ParallelGroups(group))

    works = [functools.partial(make, member, group) for member, group in zip(members, groups, strict=True)]
    sender, *receivers = run_threads(works, lambda: rendezvous.fail(0, "the test ends"))
    yield sender, receivers, groups
    for end in (sender, *receivers):
        end.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_follower_gets_every_plan_in_order_and_then_the_end(ranks: int) -> None:
    with ends(ranks) as (sender, receivers, _):
        leading, runners = LeadingRunner(Recorder(), sender), [Recorder() for _ in receivers]
        for plan in PLANS:
            assert leading.launch(plan).result().step == plan.step
        sender.close()
        for runner, receiver in zip(runners, receivers, strict=True):
            follow_plans(runner, receiver, depth=2)
            assert runner.plans == PLANS
            assert runner.open == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_follower_launches_no_more_than_its_depth_ahead(depth: int) -> None:
    with ends() as (sender, (receiver,), _):
        for step in range(10):
            sender.send(StepPlan(step, [], [], []))
        sender.close()
        runner = Recorder()
        follow_plans(runner, receiver, depth=depth)
        assert len(runner.plans) == 10
        assert runner.most_open == depth + 1  # the newest step, and `depth` before it


def test_an_orderly_end_of_the_leader_closes_no_groups() -> None:
    with ends() as (sender, (receiver,), (_, group)):
        sender.send(PLANS[0])
        sender.close()
        assert receiver.receive() == PLANS[0]
        assert receiver.receive() is None
        assert not group.closed.wait(1.5)


def test_a_leader_that_ends_unexpectedly_ends_its_followers_and_their_collectives() -> None:
    with ends() as (sender, (receiver,), (_, group)):
        sender.close(orderly=False)
        with pytest.raises(GroupFailed, match="rank 0 has gone"):
            receiver.receive()
        assert group.closed.wait(20)


def test_a_follower_that_ends_makes_its_leaders_collectives_and_steps_fail() -> None:
    with ends(3) as (sender, receivers, (group, *_)):
        leading = LeadingRunner(Recorder(), sender)
        step = leading.launch(PLANS[0])
        receivers[1].close()
        assert group.closed.wait(20)
        with pytest.raises(GroupFailed, match="rank 2 has gone"):
            step.result()
        with pytest.raises(GroupFailed, match="rank 2 has gone"):
            leading.launch(PLANS[1])


def test_a_message_that_is_no_plan_is_reported_with_its_rank() -> None:
    with ends() as (sender, (receiver,), _):
        sender.send("nonsense")  # type: ignore[arg-type]
        with pytest.raises(GroupFailed, match="rank 0 sent a plan that cannot be read"):
            receiver.receive()


FAR = {"host": "127.0.0.2"}  # an address of another machine


def test_plans_are_sent_between_machines_with_the_cluster_key() -> None:
    key = ClusterKey.generate()
    sides = {"secure_server": key.secure_server, "secure_client": key.secure_client}
    with ends(follower=FAR, **sides) as (sender, (receiver,), _):
        sender.send(PLANS[0])
        assert receiver.receive() == PLANS[0]


def test_no_plan_is_delivered_after_a_connection_has_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as proxies:
        found: dict[int, SilentProxy] = {}  # by the rank that connects

        def connect_by_way(socket: Any, address: str, member: Member) -> None:
            found[member.rank] = proxies.enter_context(SilentProxy(address))
            connect(socket, found[member.rank].address, member)

        monkeypatch.setattr(mesh, "connect", connect_by_way)
        with ends(follower=FAR) as (sender, (receiver,), groups):
            sender.send(PLANS[0])
            assert receiver.receive() == PLANS[0]
            found[0].cut()
            assert groups[0].closed.wait(20)
            with pytest.raises(GroupFailed, match="rank 1 has gone"):
                sender.send(PLANS[1])
            sender.close(orderly=False)
            with pytest.raises(GroupFailed, match="rank 0 has gone"):
                receiver.receive()


def test_a_follower_without_the_cluster_key_does_not_connect() -> None:
    key = ClusterKey.generate()
    stranger = {**FAR, "secure_client": None}
    sides = {"secure_server": key.secure_server, "start_timeout_s": 1.0}
    with pytest.raises(GroupFailed, match="did not connect"), ends(follower=stranger, **sides):
        pass


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "ipc:///nowhere/baton"])
def test_a_follower_fails_at_once_if_no_member_answers_at_the_address(address: str) -> None:
    rendezvous = Rendezvous()
    member = Member(rank=1, tensor_parallel_size=2, rendezvous=rendezvous.address, start_timeout_s=600.0)
    rendezvous_client = RendezvousClient(member.rendezvous, member.rank, timeout_s=30)
    rendezvous_client.put("here/0", member.host)
    rendezvous_client.put("plans/0", f"word {address}")
    with pytest.raises(GroupFailed, match=f"rank 0 did not connect: no member of this group answers at {address}"):
        PlanReceiver(member, rendezvous_client, ParallelGroups(Closing()))


def test_a_start_without_one_of_the_followers_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rendezvous = Rendezvous()
    member = Member(tensor_parallel_size=3, rendezvous=rendezvous.address)
    rendezvous_client = RendezvousClient(member.rendezvous, member.rank, timeout_s=30)
    rendezvous_client.put("here/1", member.host)
    threading.Timer(0.2, lambda: rendezvous.fail(2, "it does not fit")).start()
    with pytest.raises(GroupFailed, match="it does not fit"):
        PlanSender(member, rendezvous_client, ParallelGroups(Closing()))
    assert list(tmp_path.iterdir()) == []


def test_unix_sockets_are_for_their_user_only_and_their_paths_are_deleted_once_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed afterwards leaves no files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes: list[int] = []

    def connect_and_look(socket: Any, address: str, member: Member) -> None:
        modes.append(stat.S_IMODE(Path(address.removeprefix("ipc://")).parent.stat().st_mode))
        connect(socket, address, member)

    monkeypatch.setattr(mesh, "connect", connect_and_look)
    with ends(3) as (sender, receivers, _):
        assert modes == [0o700] * 4  # one per direction between the leader and each follower
        assert list(tmp_path.iterdir()) == []
        sender.send(PLANS[0])
        assert [receiver.receive() for receiver in receivers] == [PLANS[0]] * 2


def test_an_interrupted_start_leaves_no_files_and_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    contexts: list[zmq.Context[Any]] = []

    def interrupt(socket: Any, address: str, member: Member) -> None:
        contexts.append(socket.context)
        raise KeyboardInterrupt

    monkeypatch.setattr(mesh, "connect", interrupt)
    with pytest.raises(KeyboardInterrupt), ends():
        pass
    assert contexts
    assert all(context.closed for context in contexts)
    assert list(tmp_path.iterdir()) == []
