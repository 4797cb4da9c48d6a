"""Requests with a grammar: when they may draw, which other requests they delay, and how they end."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from baton.engine.core.grammar import GrammarRefused
from baton.engine.core.messages import EngineRequest, ErrorKind, FinishReason
from baton.engine.core.requests import constraints
from baton.engine.core.sampling import InvalidSamplingParams, SamplingParams, StructuredOutputsParams
from baton.engine.core.step import RowStart, StepPlan

from .core_grammars import FakeGrammars, ImmediateThreads, LateThreads
from .core_harness import VOCAB_SIZE, HandClock, Harness, config, request

ANY = StructuredOutputsParams(regex=".*")
EOS = VOCAB_SIZE - 1


@pytest.fixture
def grammars() -> FakeGrammars:
    return FakeGrammars()


def harness_with(grammars: FakeGrammars, clock: Callable[[], float] = time.monotonic, **changes: object) -> Harness:
    return Harness(config(**{"eos_token_ids": [EOS], **changes}), grammars=grammars, clock=clock)


def constrained(request_id: str, prompt: int, **changes: object) -> EngineRequest:
    return request(request_id, prompt, structured_outputs=ANY, **changes)


class Watch:
    """Records the steps in which each request was planned."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.planned: dict[str, list[int]] = {}  # the steps that each request was in
        self._rows: dict[int, RowStart] = {}
        self._seen = 0

    def run(self) -> None:
        harness = self.harness
        for _ in range(10_000):
            if not harness.core.has_work():
                return
            harness.step()
            for plan in harness.runner.plans[self._seen :]:
                self._look(plan)
            self._seen = len(harness.runner.plans)
        raise AssertionError("the engine goes round in circles")

    def _look(self, plan: StepPlan) -> None:
        self._rows.update((start.row, start) for start in plan.started_rows)
        for chunk in plan.chunks:
            self.planned.setdefault(self._rows[chunk.row].request_id, []).append(plan.step)


SHAPES = {
    "one step at a time": {"depth": 1},
    "two steps at a time": {"depth": 2},
    "prompts in pieces": {"depth": 2, "max_num_batched_tokens": 6},
    "too few blocks": {"depth": 2, "num_blocks": 12},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_token_is_drawn_only_when_its_grammar_knows_all_before_it(
    grammars: FakeGrammars, shape: dict[str, object]
) -> None:
    harness = harness_with(grammars, **shape)
    harness.add(*(constrained(f"c{i}", 5 + 3 * i, max_tokens=20, seed=i) for i in range(2)))
    harness.add(*(request(f"free{i}", 4 + i, max_tokens=20, ignore_eos=True) for i in range(2)))
    watch = Watch(harness)
    watch.run()
    for request_id, _ in harness.asked:
        assert harness.answer(request_id).finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    if "num_blocks" in shape:
        assert harness.core.stats().num_preemptions > 0
    harness.check_all_given_back()


def test_others_keep_their_pace_beside_a_grammar(grammars: FakeGrammars) -> None:
    harness = harness_with(grammars, depth=2)
    harness.scheduler.constraints.openers = harness.scheduler.constraints.maskers = ImmediateThreads()
    harness.add(request("free", 4, max_tokens=30, ignore_eos=True), constrained("c", 4, max_tokens=12))
    watch = Watch(harness)
    watch.run()
    free, bound = watch.planned["free"], watch.planned["c"]
    assert free == [*range(free[0], free[0] + 30)], "in every step"
    assert len(bound) > 6
    assert bound == [*range(bound[0], bound[0] + 2 * len(bound), 2)], "in every second"


def test_a_request_waits_for_its_grammar_and_nobody_waits_for_it(grammars: FakeGrammars) -> None:
    harness = harness_with(grammars)
    grammars.may_open.clear()
    harness.add(constrained("c", 5, max_tokens=4), request("late", 5, max_tokens=4, ignore_eos=True))
    while not harness.is_answered("late"):
        harness.step()
    assert harness.core.stats().num_requests_waiting == 1
    assert harness.core.has_work(), "whoever drives the engine must not go to sleep"
    harness.step(3)
    assert not harness.is_answered("c")
    grammars.may_open.set()
    harness.run()
    assert harness.is_answered("c")
    harness.check_all_given_back()


def test_a_request_whose_mask_takes_long_sits_steps_out(grammars: FakeGrammars) -> None:
    harness = harness_with(grammars)
    harness.add(constrained("c", 5, max_tokens=4))
    while ("c", 0) not in harness.answers:
        harness.step()
    grammars.may_advance.clear()
    drawn = len(harness.answer("c").outputs)
    harness.add(request("free", 5, max_tokens=6, ignore_eos=True))
    while not harness.is_answered("free"):
        harness.step()
    assert len(harness.answer("c").outputs) <= drawn + 1
    grammars.may_advance.set()
    harness.run()
    harness.check_all_given_back()


def test_nobody_waits_for_the_mask_of_a_request_that_gave_way(grammars: FakeGrammars) -> None:
    harness = harness_with(grammars, num_blocks=8, depth=2)
    harness.add(request("first", 8, max_tokens=22, ignore_eos=True), constrained("c", 8, max_tokens=12, seed=1))
    while ("c", 0) not in harness.answers:
        harness.step()
    grammars.may_advance.clear()
    while not harness.is_answered("first"):
        harness.step()
    assert harness.core.stats().num_preemptions == 1
    harness.add(request("late", 3, max_tokens=2, ignore_eos=True))
    harness.step(6)
    assert harness.is_answered("late")
    assert harness.core.stats().num_requests_waiting == 1
    grammars.may_advance.set()
    harness.run()
    assert harness.answer("c").finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    harness.check_all_given_back()


@pytest.mark.parametrize("phase", ["may_open", "may_advance"])
def test_an_abort_needs_not_wait_for_the_grammar(grammars: FakeGrammars, phase: str) -> None:
    harness = harness_with(grammars)
    getattr(grammars, phase).clear()
    harness.add(constrained("c", 5))
    harness.step(3)
    harness.core.abort("c")
    harness.step()
    assert harness.answer("c").finish_reason is FinishReason.ABORT
    assert not harness.core.has_work()
    getattr(grammars, phase).set()
    harness.step(2)
    harness.check_all_given_back()


@pytest.mark.parametrize(
    ("error", "kind"),
    [(GrammarRefused("an unclosed bracket"), ErrorKind.INVALID), (OSError("no such file"), ErrorKind.INTERNAL)],
    ids=["refused", "broken"],
)
def test_a_grammar_that_does_not_open_ends_its_request_alone(
    grammars: FakeGrammars, error: Exception, kind: ErrorKind
) -> None:
    harness = harness_with(grammars)
    grammars.fail = error
    harness.add(constrained("c", 5), request("free", 5, max_tokens=4))
    harness.run()
    said = harness.answer("c").outputs[-1].error
    assert said is not None
    assert said.kind is kind
    assert str(error) in said.message
    assert harness.answer("free").finish_reason is not FinishReason.ERROR
    harness.check_all_given_back()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_token_that_does_not_fit_ends_its_request(grammars: FakeGrammars, depth: int) -> None:
    harness = harness_with(grammars, depth=depth)
    grammars.refuse_at = 3
    harness.add(constrained("c", 5, max_tokens=9), request("free", 5, max_tokens=4))
    harness.run()
    said = harness.answer("c").outputs[-1].error
    assert said is not None
    assert said.kind is ErrorKind.INVALID
    assert said.field.startswith("structured_outputs.")
    assert len(harness.answer("c").token_ids) == 3
    harness.check_all_given_back()


def test_a_row_that_had_nothing_to_draw_is_told(grammars: FakeGrammars) -> None:
    harness = harness_with(grammars)
    grammars.allows_0 = False
    harness.runner.draws_nothing = True
    harness.core.add(constrained("c", 5, max_tokens=9, allowed_token_ids=[0]))
    (output,) = [output for _ in range(5) for output in harness.core.step()]
    assert output.error is not None
    assert output.error.kind is ErrorKind.INVALID
    assert output.error.field == "allowed_token_ids"
    assert output.token_ids == []
    harness.check_all_given_back()


@pytest.mark.parametrize(
    ("phase", "limit", "kind"),
    [("may_open", "OPENING_LIMIT_S", ErrorKind.OVERLOADED), ("may_advance", "MASK_LIMIT_S", ErrorKind.INVALID)],
)
def test_what_takes_too_long_is_given_up(
    grammars: FakeGrammars, monkeypatch: pytest.MonkeyPatch, phase: str, limit: str, kind: ErrorKind
) -> None:
    harness = harness_with(grammars)
    monkeypatch.setattr(constraints, limit, 0.05)
    if phase == "may_open":
        grammars.may_open.clear()
    harness.add(constrained("c", 5, max_tokens=9))
    while phase == "may_advance" and ("c", 0) not in harness.answers:
        grammars.may_advance.set()
        harness.step()
        grammars.may_advance.clear()
    harness.run()
    said = harness.answer("c").outputs[-1].error
    assert said is not None
    assert said.kind is kind
    getattr(grammars, phase).set()
    harness.check_all_given_back()


def test_who_waits_behind_slow_grammars_is_not_told_that_its_own_is(grammars: FakeGrammars) -> None:
    clock = HandClock()
    harness = harness_with(grammars, clock)
    harness.think_late()
    harness.add(constrained("first", 5, max_tokens=9), constrained("second", 6, max_tokens=9))
    while len(harness.answers) < 2:
        while harness.threads.waiting:
            harness.threads.work()
        harness.step()
    harness.threads.begin()
    clock.now_s += constraints.MASK_LIMIT_S
    harness.step(2)
    told = {request_id: harness.answer(request_id).last.error for request_id in ("first", "second")}
    kinds = {request_id: None if error is None else error.kind for request_id, error in told.items()}
    assert kinds == {"first": ErrorKind.INVALID, "second": ErrorKind.OVERLOADED}
    harness.run()
    harness.check_all_given_back()


def test_a_grammar_that_is_known_waits_for_no_compiler(grammars: FakeGrammars) -> None:
    harness = harness_with(grammars)
    openers = LateThreads()
    harness.scheduler.constraints.openers = openers
    harness.add(*(constrained(f"new{i}", 5, max_tokens=2) for i in range(8)))
    grammars.known.append(ANY)
    harness.add(constrained("known", 6, max_tokens=2))
    while not harness.is_answered("known"):
        harness.step()
    assert len(openers.waiting) == 8
    while openers.waiting:
        openers.work()
    harness.run()
    harness.check_all_given_back()


@pytest.mark.parametrize("end", ["abort", "limit"])
def test_who_compiles_is_told_when_nobody_waits_any_more(grammars: FakeGrammars, end: str) -> None:
    clock = HandClock()
    harness = harness_with(grammars, clock)
    grammars.may_open.clear()
    harness.add(constrained("c", 5, max_tokens=2))
    assert grammars.asked.acquire(timeout=30.0)
    (is_wanted,) = grammars.wanted
    assert is_wanted()
    if end == "abort":
        harness.core.abort("c")
    else:
        clock.now_s += constraints.OPENING_LIMIT_S
    harness.step()
    assert not is_wanted()
    grammars.may_open.set()
    harness.run()
    harness.check_all_given_back()


def test_tokens_drawn_elsewhere_are_taken_in_first(grammars: FakeGrammars) -> None:
    harness = harness_with(grammars)
    harness.add(constrained("c", 5, output_token_ids=[7, 8, 9], max_tokens=6))
    Watch(harness).run()
    (grammar,) = grammars.opened
    assert grammar.tokens[:3] == [7, 8, 9]
    assert grammar.tokens[3:] == harness.answer("c").token_ids[:-1], "the last one needs no mask after it"


def test_an_engine_without_text_or_an_end_refuses_grammars() -> None:
    harness = Harness(config(eos_token_ids=[EOS]))
    harness.add(constrained("c", 5))
    harness.step()
    said = harness.answer("c").outputs[-1].error
    assert said is not None
    assert "no tokenizer" in said.message
    harness = harness_with(FakeGrammars(), eos_token_ids=[])
    harness.add(constrained("c", 5))
    harness.step()
    said = harness.answer("c").outputs[-1].error
    assert said is not None
    assert "end-of-sequence" in said.message


WRONG = {
    "": {},
    "regex": {"regex": ""},
    "choice": {"choice": []},
    "json": {"json": "x" * 200_000},
    "whitespace_pattern": {"json": "{}", "whitespace_pattern": " "},
    "disable_additional_properties": {"json": "{}", "disable_additional_properties": True},
}


@pytest.mark.parametrize(("field", "given"), WRONG.items())
def test_what_makes_no_sense_is_refused_by_name(field: str, given: dict[str, object]) -> None:
    with pytest.raises(InvalidSamplingParams) as refused:
        StructuredOutputsParams(**given)  # type: ignore[arg-type]
    assert refused.value.field == f"structured_outputs.{field}".rstrip(".")


def test_exactly_one_kind_is_asked_for() -> None:
    with pytest.raises(InvalidSamplingParams, match="given: json, regex"):
        StructuredOutputsParams(json={"type": "object"}, regex="a")
    assert StructuredOutputsParams(json_object=False, regex="a").kind == "regex"
    assert StructuredOutputsParams(json={"b": 1, "a": "é"}).json == '{"b": 1, "a": "é"}'


@pytest.mark.parametrize("other", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_what_would_keep_a_complete_answer_from_ending_is_refused(other: dict[str, object]) -> None:
    with pytest.raises(InvalidSamplingParams, match="structured_outputs"):
        SamplingParams(structured_outputs=ANY, **other)  # type: ignore[arg-type]
