"""Engines of several ranks that step together, each with a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from baton.engine.core.engine import EngineCore, EngineFailed
from baton.engine.core.lockstep import EMPTY_STEP, Lockstep
from baton.engine.core.messages import EngineRequest, FinishReason, KVSource
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.step import StepPlan, StepResult

from .core_connector import FakeConnector, fetch_from_ticket, ticket_for
from .core_harness import Answer, config, request
from .core_memory import expected_answer
from .core_runner import FakePendingStep, FakeRunner


class RendezvousClient:
    """The agreement of ranks that are threads. A rank that leaves ends it for all."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._told: list[Sequence[int]] = []

    def agree(self, values: Sequence[int]) -> list[int]:
        if self._barrier.wait(30) == 0:
            self._told = []
        self._barrier.wait(30)
        self._told.append(values)
        self._barrier.wait(30)
        return [max(column) for column in zip(*self._told, strict=True)]

    def leave(self) -> None:
        self._barrier.abort()


class GroupRunner(FakeRunner):
    """A runner that also runs empty steps, and counts all steps."""

    num_steps = num_empty = 0

    def launch(self, plan: StepPlan) -> FakePendingStep:
        assert plan.group is not None, "a step that the others know nothing of"
        self.num_steps += 1
        if plan.step != EMPTY_STEP:
            return super().launch(plan)
        self.num_empty += 1
        assert not plan.chunks
        assert not plan.started_rows
        assert not plan.freed_rows
        pending = FakePendingStep(self, plan)
        pending.answer = StepResult(plan.step, [])
        return pending


class Replica(threading.Thread):
    """A rank with its server's loop: it steps while there is work, and sleeps otherwise."""

    def __init__(self, rank: int, group: list[Replica], rendezvous_client: RendezvousClient, depth: int) -> None:
        super().__init__(daemon=True)
        engine_config = config(depth=depth, max_num_batched_tokens=16)
        self.runner = GroupRunner(engine_config)
        self.connector = FakeConnector(self.runner, fetch_from_ticket)

        def wake_others(wave: int) -> None:
            for other in group:
                if other is not self:
                    other.lockstep.on_wake(wave)

        self.lockstep = Lockstep(rank, len(group), rendezvous_client.agree, wake_others)
        self.core = EngineCore(Scheduler(engine_config, self.connector), self.runner, lockstep=self.lockstep)
        self.rendezvous_client = rendezvous_client
        self.bell = threading.Event()
        self.core.when_woken(self.bell.set)
        self.inbox: deque[EngineRequest | str] = deque()
        self.answers: dict[str, Answer] = {}
        self.failure: EngineFailed | None = None
        self.num_turns = 0
        self.closing = False

    def run(self) -> None:
        try:
            while not self.closing:
                self.turn()
        except EngineFailed as failure:
            self.failure = failure
            self.rendezvous_client.leave()

    def turn(self) -> None:
        while self.inbox:
            asked = self.inbox.popleft()
            if isinstance(asked, str):
                self.core.abort(asked)
            else:
                self.core.add(asked)
        self.num_turns += 1
        for output in self.core.step():
            self.answers.setdefault(output.request_id, Answer()).outputs.append(output)
        if not self.core.has_work() and not self.inbox:
            self.bell.wait(5)
            self.bell.clear()

    def submit(self, *requests: EngineRequest) -> None:
        self.inbox.extend(requests)
        self.bell.set()

    def abort(self, request_id: str) -> None:
        self.inbox.append(request_id)
        self.bell.set()

    def wait_for(self, request_id: str) -> Answer:
        until(lambda: request_id in self.answers and self.answers[request_id].finish_reason is not None)
        return self.answers[request_id]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.002)


def until_idle(group: list[Replica]) -> None:
    """Wait until the wave is over for all ranks."""
    until(lambda: not any(replica.core.has_work() for replica in group))


def start_group(num_ranks: int, depth: int) -> list[Replica]:
    rendezvous_client = RendezvousClient(num_ranks)
    group: list[Replica] = [None] * num_ranks  # type: ignore[list-item]
    for rank in range(num_ranks):
        group[rank] = Replica(rank, group, rendezvous_client, depth)
    for replica in group:
        replica.start()
    return group


def stop_group(group: list[Replica]) -> None:
    for replica in group:
        replica.closing = True
        replica.rendezvous_client.leave()
        replica.bell.set()
    for replica in group:
        replica.join(30)
        assert not replica.is_alive()


@pytest.mark.parametrize("depth", [1, 2])
class TestEngines:
    def test_requests_of_any_rank_are_answered_as_if_alone_and_all_ranks_run_every_step(self, depth: int) -> None:
        group = start_group(3, depth)
        asked = [request(f"r{i}", 5 + 7 * i, max_tokens=4 + 3 * i) for i in range(5)]
        group[0].submit(asked[0], asked[1])
        group[1].submit(asked[2])
        answers = [group[0].wait_for("r0"), group[0].wait_for("r1"), group[1].wait_for("r2")]
        group[1].submit(asked[3])  # in a wave that another rank may begin or have begun
        group[0].submit(asked[4])
        answers += [group[1].wait_for("r3"), group[0].wait_for("r4")]
        until_idle(group)  # a rank without requests may still run the step that brought the last answer
        stop_group(group)
        for each, answer in zip(asked, answers, strict=True):
            assert answer.token_ids == expected_answer(each, group[0].core.config)[0]
        assert len({replica.runner.num_steps for replica in group}) == 1
        assert group[2].runner.num_empty == group[2].runner.num_steps > 0

    def test_a_rank_that_waits_for_kv_or_whose_requests_are_gone_keeps_nobody_running(self, depth: int) -> None:
        group = start_group(2, depth)
        prompt = [7] * 12
        source = KVSource(ticket_for(prompt), len(prompt))
        asked = request("a", prompt, max_tokens=4, output_token_ids=[5], kv_source=source)
        group[1].submit(asked, request("b", prompt, max_tokens=9, output_token_ids=[5], kv_source=source))
        until(lambda: len(group[1].connector.pulls) == 2 and not group[1].core.has_work())
        assert group[0].runner.num_steps == 0
        first, second = group[1].connector.pulls
        group[1].connector.complete(first)
        group[1].bell.set()
        assert group[1].wait_for("a").token_ids == expected_answer(asked, group[1].core.config)[0]
        until(lambda: not group[0].core.has_work() and not group[1].core.has_work())
        num_steps = group[0].runner.num_steps
        group[1].abort("b")
        assert group[1].wait_for("b").finish_reason is FinishReason.ABORT
        group[1].connector.fail(second)
        group[1].connector.release(second)
        group[1].bell.set()
        until(lambda: group[1].core.stats().num_blocks_free == group[1].core.config.num_blocks)
        stop_group(group)
        assert group[0].runner.num_steps == group[1].runner.num_steps == num_steps > 0

    def test_an_abort_in_the_middle_ends_the_wave(self, depth: int) -> None:
        group = start_group(2, depth)
        group[0].submit(request("a", 5, max_tokens=80))
        until(lambda: "a" in group[0].answers)
        group[0].abort("a")
        assert group[0].wait_for("a").finish_reason is FinishReason.ABORT
        until_idle(group)
        stop_group(group)
        assert len({replica.lockstep.wave for replica in group}) == 1

    def test_without_work_nobody_turns(self, depth: int) -> None:
        group = start_group(2, depth)
        group[0].submit(request("a", 5, max_tokens=3))
        group[0].wait_for("a")
        until_idle(group)
        turns = [replica.num_turns for replica in group]
        time.sleep(0.3)
        more = [replica.num_turns - before for replica, before in zip(group, turns, strict=True)]
        assert max(more) <= 2, "the turn that was under way, and one for the bell of the last wave"
        assert not any(replica.core.has_work() for replica in group)
        stop_group(group)

    def test_a_rank_that_fails_ends_the_others(self, depth: int) -> None:
        group = start_group(2, depth)
        group[1].runner.fail_at_launch = RuntimeError("the device is gone")
        group[0].submit(request("a", 5, max_tokens=30))
        group[1].submit(request("b", 5, max_tokens=30))
        for replica in group:
            replica.join(30)
            assert replica.failure is not None
        assert "the device is gone" in str(group[1].failure)
