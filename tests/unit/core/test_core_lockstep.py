"""Ranks that step together: nobody steps alone, nobody is waited for in vain, and silence is reached."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.core.engine import EngineCore, EngineFailed
from baton.engine.core.lockstep import EMPTY_STEP, Lockstep
from baton.engine.core.messages import EngineRequest, FinishReason, KVSource
from baton.engine.core.step import PADDING, Chunk, GroupStep, StepPlan, StepResult, StepSize

from .core_fakes import (
    Answer,
    FakeConnector,
    FakePendingStep,
    FakeRunner,
    expected_answer,
    fetch_from_ticket,
    ticket_for,
)
from .core_harness import config, request


def plan(*lens: int, step: int = 0) -> StepPlan:
    return StepPlan(step, [], [], [Chunk(row, 0, length, True, []) for row, length in enumerate(lens)])


def never(values: Sequence[int]) -> list[int]:
    raise AssertionError("nobody is to be asked")


class TestOneRank:
    def test_without_work_or_wake_it_asks_nobody(self) -> None:
        lockstep = Lockstep(0, 2, never, lambda wave: None)
        assert lockstep.join(None, has_pending=False) is None
        assert not lockstep.is_running

    def test_a_first_plan_wakes_the_others_once_a_wave(self) -> None:
        wakes: list[int] = []
        lockstep = Lockstep(0, 2, list, wakes.append)
        for _ in range(3):
            lockstep.join(plan(1), has_pending=False)
        assert wakes == [0]
        lockstep.join(None, has_pending=False)
        lockstep.join(plan(1), has_pending=False)
        assert wakes == [0, 1]

    def test_all_learn_the_size_of_everyone(self) -> None:
        heard = [0, 0, 0, 0, 0, 9, 2, 1, 1]
        lockstep = Lockstep(0, 2, lambda told: list(map(max, told, heard)), lambda wave: None)
        joined = lockstep.join(plan(5, 1), has_pending=True)
        assert joined is not None
        assert joined.chunks == plan(5, 1).chunks
        assert joined.group == GroupStep([StepSize(6, 2, 2), StepSize(9, 2, 1, True)])

    def test_a_rank_without_a_plan_runs_an_empty_step(self) -> None:
        heard = [0, 0, 0, 0, 0, 9, 2, 1, 0]
        lockstep = Lockstep(0, 2, lambda told: list(map(max, told, heard)), never)  # type: ignore[arg-type]
        lockstep.on_wake(0)
        joined = lockstep.join(None, has_pending=False)
        assert joined == StepPlan(EMPTY_STEP, [], [], [], GroupStep([PADDING, StepSize(9, 2, 1)]))

    def test_a_wake_of_an_older_wave_is_dropped_and_one_of_a_newer_is_kept(self) -> None:
        lockstep = Lockstep(0, 2, list, lambda wave: None)
        lockstep.join(plan(1), has_pending=False)
        lockstep.on_wake(0)
        lockstep.on_wake(1)  # its sender has seen the end of wave 0 already
        lockstep.join(None, has_pending=False)
        assert (lockstep.wave, lockstep.is_running) == (1, True)
        lockstep.join(None, has_pending=False)
        lockstep.on_wake(0)
        assert (lockstep.wave, lockstep.is_running) == (2, False)

    def test_results_on_their_way_keep_the_wave_alive_without_a_step(self) -> None:
        lockstep = Lockstep(0, 2, list, lambda wave: None)
        lockstep.join(plan(1), has_pending=False)
        assert lockstep.join(None, has_pending=True) is None
        assert (lockstep.wave, lockstep.is_running) == (0, True)

    def test_experts_are_reviewed_every_so_many_steps_of_the_group(self) -> None:
        lockstep = Lockstep(0, 1, list, lambda wave: None, review_experts_every=3)
        joined = [lockstep.join(each, has_pending=False) for each in (plan(1), None, plan(1), plan(1), plan(1))]
        reviews = [each.group.reviews_experts for each in joined if each is not None and each.group is not None]
        assert reviews == [False, False, True, False]


@dataclass
class Rank:
    """What an `EngineCore` does with its lockstep, and work that is a number of steps left."""

    lockstep: Lockstep
    depth: int
    steps_left: int = 0
    waits_for_kv: int = 0  # steps of a request that cannot be planned before something happens outside
    in_flight: deque[bool] = field(default_factory=deque)  # of each step: whether it was planned here
    planned: StepPlan | None = None
    turn: int = 0  # agreements taken part in
    in_agreement: bool = False
    launched: list[int] = field(default_factory=list)  # the agreement behind each launched step

    @property
    def has_work(self) -> bool:
        return bool(self.lockstep.is_running or self.in_flight or self.steps_left)

    def begin(self) -> list[int] | None:
        self.planned = plan(1) if self.steps_left else None
        self.steps_left -= self.planned is not None
        told = self.lockstep.propose(self.planned, has_pending=bool(self.in_flight))
        self.in_agreement = told is not None
        if told is None:
            self.settle(None)
        return told

    def end(self, heard: Sequence[int]) -> None:
        joined = self.lockstep.decide(self.planned, heard)
        self.in_agreement = False
        self.turn += 1
        if joined is not None:
            assert (joined.step == EMPTY_STEP) == (self.planned is None)
            self.launched.append(self.turn)
            self.in_flight.append(self.planned is not None)
        else:
            assert self.planned is None, "a plan that was made is launched: the books say so"
        self.settle(joined)

    def settle(self, joined: StepPlan | None) -> None:
        if self.in_flight and (joined is None or len(self.in_flight) >= self.depth):
            self.in_flight.popleft()


class Ranks(RuleBasedStateMachine):
    """Any number of ranks; wakes travel as slowly as they like, each pair's in order."""

    @initialize(num_ranks=st.integers(1, 4), depth=st.integers(1, 2))
    def start(self, num_ranks: int, depth: int) -> None:
        self.on_the_way: dict[tuple[int, int], deque[int]] = {}
        self.told: list[dict[int, list[int]]] = []  # of each agreement, by rank

        def sender(rank: int):  # type: ignore[no-untyped-def]
            def wake_others(wave: int) -> None:
                for other in range(num_ranks):
                    if other != rank:
                        self.on_the_way.setdefault((rank, other), deque()).append(wave)

            return wake_others

        self.ranks = [Rank(Lockstep(rank, num_ranks, never, sender(rank)), depth) for rank in range(num_ranks)]
        self.added = 0

    @rule(rank=st.integers(0, 3), steps=st.integers(1, 4), waits=st.booleans())
    def work_comes(self, rank: int, steps: int, waits: bool) -> None:
        chosen = self.ranks[rank % len(self.ranks)]
        self.added += steps
        if waits:
            chosen.waits_for_kv += steps
        else:
            chosen.steps_left += steps

    @rule(rank=st.integers(0, 3))
    def kv_comes(self, rank: int) -> None:
        chosen = self.ranks[rank % len(self.ranks)]
        chosen.steps_left, chosen.waits_for_kv = chosen.steps_left + chosen.waits_for_kv, 0

    @rule(rank=st.integers(0, 3))
    def a_request_is_aborted(self, rank: int) -> None:
        chosen = self.ranks[rank % len(self.ranks)]
        self.added -= chosen.steps_left
        chosen.steps_left = 0

    @precondition(lambda self: any(self.on_the_way.values()))
    @rule(data=st.data())
    def a_wake_arrives(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(sorted(pair for pair, wakes in self.on_the_way.items() if wakes)))
        self.ranks[pair[1]].lockstep.on_wake(self.on_the_way[pair].popleft())

    @rule(rank=st.integers(0, 3))
    def a_rank_goes_on(self, rank: int) -> None:
        self.go_on(rank % len(self.ranks))

    @rule(rank=st.integers(0, 3), wakes_are_fast=st.booleans())
    def all_go_on_but_one(self, rank: int, wakes_are_fast: bool) -> None:
        """As far as they get without it: it may be a whole wave behind when it goes on."""
        others = [number for number in range(len(self.ranks)) if number != rank % len(self.ranks)]
        while any(self.go_on(number) for number in others):
            pass
        if wakes_are_fast:
            self.deliver_wakes()

    def deliver_wakes(self) -> None:
        for (_, to), wakes in self.on_the_way.items():
            while wakes:
                self.ranks[to].lockstep.on_wake(wakes.popleft())

    def go_on(self, number: int) -> bool:
        """Whether the rank could do anything."""
        rank = self.ranks[number]
        if rank.in_agreement:
            told = self.told[rank.turn]
            if len(told) < len(self.ranks):
                return False
            rank.end([max(values) for values in zip(*told.values(), strict=True)])
            return True
        if not rank.has_work:
            return False
        told_now = rank.begin()
        if told_now is not None:
            while len(self.told) <= rank.turn:
                self.told.append({})
            self.told[rank.turn][number] = told_now
        return True

    @invariant()
    def nobody_steps_alone(self) -> None:
        if not hasattr(self, "ranks"):
            return
        reached = min(rank.turn for rank in self.ranks)
        steps = {tuple(turn for turn in rank.launched if turn <= reached) for rank in self.ranks}
        assert len(steps) == 1

    def teardown(self) -> None:
        """Left alone, everything that can be done gets done, and silence follows."""
        if not hasattr(self, "ranks"):
            return
        for _ in range(10_000):
            moved = [self.go_on(number) for number in range(len(self.ranks))]
            if any(moved):
                continue
            if not any(self.on_the_way.values()):
                break
            self.deliver_wakes()
        else:
            raise AssertionError("the ranks never fall silent")
        assert not any(rank.has_work or rank.in_agreement or rank.in_flight for rank in self.ranks)
        assert len({rank.lockstep.wave for rank in self.ranks}) == 1
        assert len({rank.lockstep.num_steps for rank in self.ranks}) == 1
        self.nobody_steps_alone()


Ranks.TestCase.settings = settings(
    max_examples=200, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRanks = Ranks.TestCase


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
    """Also runs empty steps, and counts all."""

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
    """A rank as its server drives it: steps while there is work, sleeps otherwise."""

    def __init__(self, rank: int, group: list[Replica], meeting: RendezvousClient, depth: int) -> None:
        super().__init__(daemon=True)
        engine_config = config(depth=depth, max_num_batched_tokens=16)
        self.runner = GroupRunner(engine_config)
        self.connector = FakeConnector(self.runner, fetch_from_ticket)

        def wake_others(wave: int) -> None:
            for other in group:
                if other is not self:
                    other.lockstep.on_wake(wave)

        self.lockstep = Lockstep(rank, len(group), meeting.agree, wake_others)
        self.core = EngineCore(engine_config, self.runner, self.connector, lockstep=self.lockstep)
        self.meeting = meeting
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
            self.meeting.leave()

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
    """The wave is over for all."""
    until(lambda: not any(replica.core.has_work() for replica in group))


def start_group(num_ranks: int, depth: int) -> list[Replica]:
    meeting = RendezvousClient(num_ranks)
    group: list[Replica] = [None] * num_ranks  # type: ignore[list-item]
    for rank in range(num_ranks):
        group[rank] = Replica(rank, group, meeting, depth)
    for replica in group:
        replica.start()
    return group


def stop_group(group: list[Replica]) -> None:
    for replica in group:
        replica.closing = True
        replica.meeting.leave()
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
        until_idle(group)  # who has no requests may still be about to run the step that brought the last answer
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
