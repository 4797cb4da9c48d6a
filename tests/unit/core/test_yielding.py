"""Decode steps yield to prompts of another engine on the same GPU.

A GPU on which two engines take turns is simulated: while both have work, each gets half of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.step import PendingStep, StepPlan, StepResult
from baton.engine.core.yielding import LEAST_BACKLOG_S, LEAST_SHARE, Yielding

from .core_harness import HandClock, config, request
from .core_runner import FakeRunner


class Board:
    """A board with one other engine."""

    def __init__(self) -> None:
        self.others_s = 0.0
        self.published: list[float] = []
        self.is_closed = False

    def publish(self, backlog_s: float) -> None:
        self.published.append(backlog_s)

    def others_backlog_s(self) -> float:
        return self.others_s

    def close(self) -> None:
        self.is_closed = True


def test_a_step_waits_from_the_one_before_only_while_others_have_enough_prompts() -> None:
    board, clock = Board(), HandClock()
    yielding = Yielding(board, 0.03, clock)
    board.others_s = 1.0
    assert yielding.wait_s(0.009) == 0.0, "the first step has none before it"
    yielding.launched()
    clock.now_s += 0.01
    yielding.ended()
    assert yielding.wait_s(0.009) == pytest.approx(0.02)
    board.others_s = LEAST_BACKLOG_S / 2
    assert yielding.wait_s(0.009) == 0.0
    board.others_s = 1.0
    clock.now_s += 0.0201
    assert yielding.wait_s(0.009) == 0.0
    yielding.launched()
    assert yielding.waited_s == pytest.approx(0.02)


def test_only_the_time_for_which_a_step_had_to_wait_counts() -> None:
    board, clock = Board(), HandClock()
    yielding = Yielding(board, 0.03, clock)
    board.others_s = 1.0
    yielding.launched()
    clock.now_s += 0.01
    yielding.ended()
    assert yielding.wait_s(0.009) > 0
    clock.now_s += 10.0  # nothing was left to compute
    yielding.launched()
    assert yielding.waited_s == pytest.approx(0.02)
    clock.now_s += 0.01
    assert yielding.wait_s(0.009) > 0
    board.others_s = 0.0
    yielding.launched()  # while a step is in flight
    assert yielding.waited_s == pytest.approx(0.02)


def test_short_steps_wait_for_a_short_time() -> None:
    board, clock = Board(), HandClock()
    yielding = Yielding(board, 0.03, clock)
    board.others_s = 1.0
    yielding.launched()
    assert yielding.wait_s(0.001) == pytest.approx(0.001 / LEAST_SHARE)
    assert yielding.wait_s(0.0) == 0.0, "not measured yet"
    assert yielding.wait_s(1.0) == pytest.approx(0.03)


class SharedGpu:
    """A prefill and a decode engine on one GPU, with clients that send a new request when an answer is complete.

    8b on an H200: 42 000 prompt tokens a second; a decode step takes 3.75 ms, and more for requests and their contexts.
    """

    def __init__(self, prompt_len: int, output_len: int, num_clients: int, interval_s: float) -> None:
        self.prompt_len, self.output_len = prompt_len, output_len
        self.clock, self.board = HandClock(), Board()
        self.yielding = Yielding(self.board, interval_s, self.clock)
        self.waiting, self.num_drawn, self.gaps = [0.0] * num_clients, 0, list[float]()
        self.first_s: list[float] = []
        self.prefill: tuple[float, list[float]] | None = None  # GPU time left, arrivals
        self.decode_s: float | None = None  # GPU time left
        self.step_s, self.launched_s = 0.0, 0.0
        self.rows: list[list[float]] = []  # tokens left, time of the newest one
        self.arrived: list[list[float]] = []

    def run(self, seconds: float) -> None:
        start_s = self.clock.now_s
        self.waiting = [start_s] * len(self.waiting)
        while self.clock.now_s < start_s + seconds:
            wait_s = self._launch()
            working = [left for left in (self.prefill and self.prefill[0], self.decode_s) if left is not None]
            times = [min(working) * len(working)] if working else []
            passed = min(times + ([wait_s] if wait_s else []))
            self.clock.now_s += passed
            if self.prefill is not None:
                self.prefill = self.prefill[0] - passed / len(working), self.prefill[1]
            if self.decode_s is not None:
                self.decode_s -= passed / len(working)
            self._end()

    def _launch(self) -> float:
        """Launch what may be launched. Returns how long the next decode step waits."""
        if self.prefill is None and self.waiting:
            taken, self.waiting = (
                self.waiting[: max(1, 8192 // self.prompt_len)],
                self.waiting[8192 // self.prompt_len :],
            )
            self.prefill = len(taken) * self.prompt_len / 42e3, taken
        left_s = 0.0 if self.prefill is None else self.prefill[0]
        self.board.others_s = left_s + len(self.waiting) * self.prompt_len / 42e3
        if self.decode_s is not None or not (self.rows or self.arrived):
            return 0.0
        if wait_s := self.yielding.wait_s(self.step_s):
            return wait_s
        self.rows, self.arrived = self.rows + self.arrived, []
        self.decode_s = 3.75e-3 + len(self.rows) * (3e-5 + 2.8e-8 * (self.prompt_len + self.output_len / 2))
        self.launched_s = self.clock.now_s
        self.yielding.launched()
        return 0.0

    def _end(self) -> None:
        now_s = self.clock.now_s
        if self.prefill is not None and self.prefill[0] < 1e-9:
            self.first_s += [now_s - arrived_s for arrived_s in self.prefill[1]]
            self.arrived += [[self.output_len - 1, now_s] for _ in self.prefill[1]]
            self.num_drawn += len(self.prefill[1])
            self.prefill = None
        if self.decode_s is not None and self.decode_s < 1e-9:
            self.decode_s, self.step_s = None, now_s - self.launched_s
            self.yielding.ended()
            self.num_drawn += len(self.rows)
            for row in self.rows:
                self.gaps.append(now_s - row[1])
                row[:] = row[0] - 1, now_s
            self.waiting += [now_s for row in self.rows if not row[0]]
            self.rows = [row for row in self.rows if row[0]]


@pytest.mark.parametrize(
    ("prompt_len", "output_len", "num_clients", "gain"),
    [(8192, 64, 8, 1.5), (8192, 64, 64, 1.5), (1024, 128, 64, 1.15), (512, 256, 64, 1.0), (1024, 128, 1, 1.0)],
)
def test_prompts_come_sooner_and_answers_do_not_stutter(
    prompt_len: int, output_len: int, num_clients: int, gain: float
) -> None:
    found = {}
    for interval_s in (0.0, 0.03):
        gpu = SharedGpu(prompt_len, output_len, num_clients, interval_s)
        gpu.run(30)
        gaps, firsts = sorted(gpu.gaps), sorted(gpu.first_s)
        found[interval_s] = gpu.num_drawn, gaps[int(0.99 * len(gaps))], firsts[len(firsts) // 2]
    (before, _, first_before_s), (after, gap_s, first_s) = found.values()
    assert after >= gain * before
    assert gap_s < 0.03 + 0.015, "a step that waited, and takes turns with a prompt"
    assert first_s <= first_before_s * 1.01


class TimedRunner(FakeRunner):
    """A runner whose results take time: 20 ms, and 5 ms more for each token beyond the first."""

    def __init__(self, core_config: EngineCoreConfig, clock: HandClock) -> None:
        super().__init__(core_config)
        self.clock = clock

    def launch(self, plan: StepPlan) -> PendingStep:
        return TimedStep(super().launch(plan), 0.02 + 0.005 * max(0, plan.num_tokens - 1), self.clock)


@dataclass
class TimedStep:
    step: PendingStep
    seconds: float
    clock: HandClock

    def result(self) -> StepResult:
        self.clock.now_s += self.seconds
        return self.step.result()


def engine_beside(board: Board, clock: HandClock, depth: int = 1) -> EngineCore:
    """Return an engine that has a request, and whose decode steps have been measured: they take 20 ms."""
    core_config = config(depth=depth)
    core = EngineCore(
        Scheduler(core_config, clock=clock), TimedRunner(core_config, clock), yielding=Yielding(board, 0.06, clock)
    )
    core.add(request("a", 6, max_tokens=80))
    for _ in range(20):
        core.step()
    return core


@pytest.mark.parametrize("depth", [1, 2])
def test_while_an_engine_yields_it_only_takes_in_what_it_has_launched(depth: int) -> None:
    board, clock = Board(), HandClock()
    core = engine_beside(board, clock, depth)
    num_steps = core.stats().num_steps
    board.others_s = 1.0
    assert core.wait_s() == pytest.approx(0.04)
    assert [len(core.step()) for _ in range(3)] == [depth - 1, 0, 0], "results do not wait"
    left_s = core.wait_s()
    assert left_s == pytest.approx(0.04 - 0.02 * (depth - 1))
    assert core.stats().num_steps == num_steps
    assert core.has_work()
    clock.now_s += left_s + 0.001
    assert core.wait_s() == 0.0
    core.step()
    assert core.stats().num_steps == num_steps + 1
    assert core.stats().yielded_s == pytest.approx(left_s)


def test_an_engine_with_prompts_of_its_own_does_not_yield() -> None:
    board, clock = Board(), HandClock()
    core = engine_beside(board, clock)
    board.others_s = 1.0
    assert core.wait_s() > 0
    core.add(request("b", 60, max_tokens=2))
    assert core.wait_s() == 0.0
    core.step()
    assert core.wait_s() == 0.0, "the prompt is longer than a step"


def test_an_engine_tells_how_long_its_prompts_will_take_until_they_are_computed() -> None:
    board, clock = Board(), HandClock()
    core = engine_beside(board, clock)
    assert not any(board.published)
    for index in range(6):  # so that the speed is known
        core.add(request(f"b{index}", 20 + index, max_tokens=1))
        core.step()
    core.add(request("c", 60, max_tokens=1))
    core.step()
    assert board.published[-1] == pytest.approx(60 * 0.005, rel=0.5), "what is in flight counts"
    while core.has_work():
        core.step()
    assert board.published[-1] == 0.0
