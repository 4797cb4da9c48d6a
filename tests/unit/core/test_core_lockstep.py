"""Ranks in lockstep: no rank steps alone or waits in vain, and at the end all become idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.core.lockstep import EMPTY_STEP, Lockstep
from baton.engine.core.step import PADDING, GroupStep, StepPlan, StepSize

from .lockstep_group import never, plan


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
        heard = [0, *[0] * 7, 9, 2, 1, 1, 4, 3, 2]
        lockstep = Lockstep(0, 2, lambda told: list(map(max, told, heard)), lambda wave: None)
        joined = lockstep.join(plan(5, 1), has_pending=True)
        assert joined is not None
        assert joined.chunks == plan(5, 1).chunks
        assert joined.group == GroupStep([StepSize(6, 2, 2), StepSize(9, 2, 1, True, 4, 3, 2)])
        assert joined.group.num_guesses == 2

    def test_a_rank_without_a_plan_runs_an_empty_step(self) -> None:
        heard = [0, *[0] * 7, 9, 2, 1, 0, 0, 0, 0]
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
    """A rank that uses its lockstep as an `EngineCore` does, with a number of steps left as work."""

    lockstep: Lockstep
    depth: int
    steps_left: int = 0
    waits_for_kv: int = 0  # steps of a request that cannot be planned before an outside event
    in_flight: deque[bool] = field(default_factory=deque)  # for each step: whether it was planned here
    planned: StepPlan | None = None
    turn: int = 0  # agreements that it took part in
    in_agreement: bool = False
    launched: list[int] = field(default_factory=list)  # the agreement for each launched step

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
    """Any number of ranks. Wakes may take any time; those of a pair arrive in order."""

    @initialize(num_ranks=st.integers(1, 4), depth=st.integers(1, 2))
    def start(self, num_ranks: int, depth: int) -> None:
        self.on_the_way: dict[tuple[int, int], deque[int]] = {}
        self.told: list[dict[int, list[int]]] = []  # the ranks' values in each agreement

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
        """Let the other ranks step as far as they can: the one left may be a whole wave behind when it goes on."""
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
        """Let a rank step; return whether it could do anything."""
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
        """Finish all work that can be done without more events, and check that all ranks become idle."""
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
