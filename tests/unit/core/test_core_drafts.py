"""Engines whose requests get drafts answer what they would have answered without, whatever is guessed."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from baton.engine.core.messages import FinishReason
from baton.engine.core.requests.drafting import MOST_STARTED_TOKENS, Drafting
from baton.engine.core.requests.request import FinishRule, Request
from baton.engine.core.sampling import StructuredOutputsParams
from baton.engine.core.scheduling import running_requests
from baton.engine.core.speculation.drafter import Drafter
from baton.engine.core.speculation.length import DraftLengths
from baton.engine.core.speculation.ngram import NgramDrafter
from baton.engine.core.speculation.stats import NO_DRAFTS
from baton.engine.core.stages import Stages
from baton.engine.core.step import Chunk, StepPlan

from . import core_harness
from .core_grammars import FakeGrammars
from .core_harness import VOCAB_SIZE, Harness, config, request
from .core_machine import EngineMachine
from .core_prompts import crowd

ANY = StructuredOutputsParams(regex=".*")


class DraftingMachine(EngineMachine):
    """An engine of any size whose requests get drafts; with windows, states or without, with tiers or without."""

    @initialize(
        depth=st.sampled_from([1, 2, 2, 3]),
        lazy=st.booleans(),
        num_drafts=st.integers(1, 6),
        errors=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
        on_device=st.booleans(),
        most_read=st.sampled_from([None, 1, 9, 100]),
        edits_on_host=st.booleans(),
        adapts=st.booleans(),
        num_blocks=st.integers(4, 24),
        window=st.sampled_from([None, None, 3, 9]),
        states=st.lists(st.tuples(st.integers(2, 9), st.sampled_from([4, 8, 12, 16])), max_size=2),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 24),
        caching=st.sampled_from([True, True, False]),
        min_restored=st.sampled_from([None, 1, 12]),
    )
    def start(
        self,
        depth: int,
        lazy: bool,
        num_drafts: int,
        errors: float,
        on_device: bool,
        most_read: int | None,
        edits_on_host: bool,
        adapts: bool,
        num_blocks: int,
        window: int | None,
        states: list[tuple[int, int]],
        max_num_seqs: int,
        budget: int,
        caching: bool,
        min_restored: int | None,
    ) -> None:
        groups = [(num_blocks, None), (num_blocks, window)] if window is not None else [(num_blocks, None)]
        sizes = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
        changes = {"enable_prefix_caching": caching, "eos_token_ids": [1, 2], "max_model_len": 70}
        self.engine = Harness(
            config(depth=depth, groups=groups if window or states else None, states=states, **changes, **sizes),
            lazy=lazy,
            min_restored_tokens=min_restored,
            grammars=FakeGrammars(),
            clock=self.clock,
            num_drafts=num_drafts,
            draft_errors=errors,
            guesses_on_device=on_device,
            most_read=most_read,
            edits_on_host=edits_on_host,
            adapts=adapts,
        )
        self.clock.tick_s = 1e-4 if adapts else 0.0
        self.engine.think_late()


TestDrafts = pytest.mark.slow(DraftingMachine.TestCase)
TestDrafts.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("errors", [0.0, 0.4, 1.0])
def test_a_crowd_on_few_blocks_gets_the_answers_that_each_gets_alone(
    depth: int, errors: float, on_device: bool
) -> None:
    few_blocks = config(depth=depth, num_blocks=14, max_num_batched_tokens=12)
    engine = Harness(few_blocks, num_drafts=3, draft_errors=errors, guesses_on_device=on_device)
    engine.add(*crowd())
    engine.run_to_the_end()
    assert engine.core.stats().num_preemptions > 0
    assert {answer.finish_reason for answer in engine.answers.values()} == {FinishReason.LENGTH}


@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("errors", [0.0, 0.3, 1.0])
def test_states_follow_what_was_accepted_and_checkpoints_hold_no_draft(depth: int, errors: float) -> None:
    few = {"max_num_batched_tokens": 12, "max_model_len": 200}
    hybrid = config(depth=depth, groups=[(30, None)], states=[(5, 8)], **few)
    engine = Harness(hybrid, lazy=False, num_drafts=3, draft_errors=errors)
    engine.add(*crowd())
    engine.run_to_the_end()
    stats = engine.core.stats()
    assert stats.speculation is not None
    assert stats.speculation.num_drafts > 20
    again = [msgspec.structs.replace(each, request_id=f"again {each.request_id}") for each in crowd()]
    engine.add(*again)
    engine.run_to_the_end()


def num_steps(depth: int, errors: float | None, *, on_device: bool) -> int:
    engine = Harness(
        config(depth=depth),
        num_drafts=0 if errors is None else 3,
        draft_errors=errors or 0.0,
        guesses_on_device=on_device and errors is not None,
    )
    engine.add(request("a", 10, max_tokens=40, seed=1))
    engine.run_to_the_end()
    assert len(engine.answer("a").token_ids) == 40
    return len(engine.runner.plans)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(depth: int, on_device: bool) -> None:
    alone, right, half, wrong = (num_steps(depth, errors, on_device=on_device) for errors in (None, 0.0, 0.5, 1.0))
    assert right <= alone / 4 + 2
    assert alone / 4 < half < alone
    assert wrong <= alone + depth  # an unneeded step may be in flight


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("errors", [0.0, 0.4, 1.0])
def test_requests_whose_logits_are_edited_on_the_host_are_in_no_step_before_their_drafts_are_settled(
    depth: int, errors: float
) -> None:
    """The runner checks that; other requests go on."""
    engine = Harness(config(depth=depth), num_drafts=3, draft_errors=errors, edits_on_host=True)
    engine.add(
        request("edited", 10, max_tokens=40, min_tokens=40, stop_token_ids=[49]), request("plain", 10, max_tokens=40)
    )
    engine.run_to_the_end()
    edited, plain = ([_chunk_of(plan, row) for plan in engine.runner.plans[1:]] for row in range(2))
    assert all(chunk.num_drafts for chunk in edited[: -depth - 1] if chunk is not None), "it has drafts all the same"
    last = max(number for number, chunk in enumerate(plain) if chunk is not None)
    assert None not in plain[: last - depth], "the other one is in every step until it ends"
    assert (None in edited[: last - depth]) == (depth > 1)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_with_min_tokens_are_in_every_step_once_they_have_these(depth: int) -> None:
    engine = Harness(config(depth=depth), num_drafts=3, edits_on_host=True)
    stops = [49]
    engine.add(
        request("bound", 10, max_tokens=40, min_tokens=8, stop_token_ids=stops), request("plain", 10, max_tokens=60)
    )
    engine.run_to_the_end()
    chunks = [_chunk_of(plan, 0) for plan in engine.runner.plans[1:]]
    first, last = 2 * depth + 2, max(number for number, chunk in enumerate(chunks) if chunk is not None)
    assert (None in chunks[:first]) == (depth > 1)
    assert None not in chunks[first:last]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_with_min_tokens_but_no_stop_tokens_are_in_every_step(depth: int) -> None:
    """Benchmarks send such requests, with `ignore_eos`."""
    engine = Harness(config(depth=depth, eos_token_ids=[49]), num_drafts=3, edits_on_host=True)
    engine.add(request("bound", 10, max_tokens=40, min_tokens=40, ignore_eos=True), request("plain", 10, max_tokens=60))
    engine.run_to_the_end()
    chunks = [_chunk_of(plan, 0) for plan in engine.runner.plans[1:]]
    assert None not in chunks[: max(number for number, chunk in enumerate(chunks) if chunk is not None)]


def _chunk_of(plan: StepPlan, row: int) -> Chunk | None:
    return next((chunk for chunk in plan.chunks if chunk.row == row), None)


@pytest.mark.parametrize("errors", [0.0, 0.4])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_with_drafts_draws_no_more_than_there_is_memory_for(
    depth: int, errors: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 6
    monkeypatch.setattr(running_requests, "MAX_DRAFTED_TOKENS", most)
    engine = Harness(config(depth=depth, max_num_seqs=5), num_drafts=3, draft_errors=errors)
    engine.add(*crowd())
    engine.run_to_the_end()
    sizes = [plan.size for plan in engine.runner.plans]
    with_drafts = [size for size in sizes if size.num_drafts]
    assert max(size.num_draws for size in with_drafts) == most
    assert any(not size.only_decodes for size in with_drafts), "some read prompts, too"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_guesses_for_those_that_go_on_and_drafts_are_what_it_has_guessed(depth: int) -> None:
    engine = Harness(config(depth=depth), num_drafts=3, guesses_on_device=True)
    engine.add(request("one", 10, max_tokens=1), request("more", 10, max_tokens=20))
    engine.run_to_the_end()
    plans = engine.runner.plans
    assert all(plan.num_guesses in (0, 3) for plan in plans)
    for before, plan in itertools.pairwise(plans):
        assert all(not chunk.drafts and chunk.num_drafts <= before.num_guesses for chunk in plan.chunks)
    alone = Harness(config(depth=depth), num_drafts=3, guesses_on_device=True)
    alone.add(request("one", 10, max_tokens=1))
    alone.run_to_the_end()
    assert not any(plan.num_guesses for plan in alone.runner.plans)


def test_an_answer_ends_at_a_stop_token_within_a_draft_and_nothing_behind_it_is_put_out() -> None:
    engine = Harness(config(), num_drafts=6)
    engine.add(request("a", 10, max_tokens=40, seed=1))
    engine.run_to_the_end()
    whole = engine.answer("a").token_ids
    stop = next(token for token in whole[8:] if whole.index(token) >= 8)
    engine.add(request("b", 10, max_tokens=40, seed=1, stop_token_ids=[stop]))
    engine.run_to_the_end()
    assert engine.answer("b").token_ids == whole[: whole.index(stop) + 1]
    assert engine.answer("b").finish_reason is FinishReason.STOP


@pytest.mark.parametrize("errors", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_tell_of_the_drafts_of_their_step(depth: int, errors: float) -> None:
    engine = Harness(config(depth=depth, num_blocks=14), num_drafts=3, draft_errors=errors)
    engine.add(*(request(f"r{index}", 10 + index, max_tokens=20 + index, seed=index) for index in range(6)))
    engine.run_to_the_end()
    outputs = [output for answer in engine.answers.values() for output in answer.outputs]
    told = [output.drafts for output in outputs if output.drafts is not None]
    total, stats = sum(told, NO_DRAFTS), engine.core.stats().speculation
    assert stats is not None
    assert (total.num_drafts, total.num_draft_tokens) == (stats.num_drafts, stats.num_draft_tokens)
    assert total.num_accepted_tokens == stats.num_accepted_tokens
    assert all(each.num_drafts == 1 for each in told)
    for output in outputs:
        accepted = 0 if output.drafts is None else output.drafts.num_accepted_tokens
        assert len(output.token_ids) == accepted + 1


def test_drafts_behind_a_stop_token_are_not_told_as_accepted() -> None:
    engine = Harness(config(), num_drafts=6)
    engine.add(request("a", 10, max_tokens=40, seed=1))
    engine.run_to_the_end()
    whole = engine.answer("a").token_ids
    for number in (9, 10, 11, 12):
        stop = whole[number]
        name = f"stop {number}"
        engine.add(request(name, 10, max_tokens=40, seed=1, stop_token_ids=[stop]))
        engine.run_to_the_end()
        *before, last = engine.answer(name).outputs
        assert last.drafts is None or last.drafts.num_accepted_tokens <= len(last.token_ids)
        accepted = sum((each.drafts for each in [*before, last] if each.drafts is not None), NO_DRAFTS)
        assert accepted.num_accepted_tokens < len(engine.answer(name).token_ids)


def num_constrained_steps(depth: int, errors: float | None) -> int:
    """Return the steps that a request with a grammar takes if a share `errors` of its drafts is wrong."""
    engine = Harness(
        config(depth=depth, eos_token_ids=[VOCAB_SIZE - 1]),
        grammars=FakeGrammars(),
        num_drafts=0 if errors is None else 3,
        draft_errors=errors or 0.0,
    )
    engine.add(request("a", 10, max_tokens=40, seed=4, structured_outputs=ANY))
    engine.run_to_the_end()
    assert len(engine.answer("a").token_ids) == 40
    stats = engine.core.stats().speculation
    assert errors != 0 or (stats is not None and stats.acceptance_rate == 1)
    return len(engine.runner.plans)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_with_a_grammar_get_drafts_which_it_has_looked_at(depth: int) -> None:
    alone = num_constrained_steps(depth, None)
    assert num_constrained_steps(depth, errors=0.0) <= alone / 4 + 4
    assert alone / 4 < num_constrained_steps(depth, errors=0.5) < alone


def test_tokens_that_a_grammar_forces_are_drafts_without_a_drafter() -> None:
    alone, wrong = num_constrained_steps(1, None), num_constrained_steps(1, errors=1.0)
    assert wrong < alone, "every guess is wrong, and every fifth token is the only one that may come"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("errors", [0.0, 0.4, 1.0])
def test_drafts_are_right_beside_a_grammar_whose_masks_come_late(depth: int, errors: float) -> None:
    few_blocks = config(depth=depth, num_blocks=14, max_num_batched_tokens=12, eos_token_ids=[1])
    engine = Harness(few_blocks, grammars=FakeGrammars(), num_drafts=4, draft_errors=errors)
    engine.think_late()
    for index in range(8):
        asked = ANY if index % 2 else None
        engine.add(request(f"r{index}", 6 + index, max_tokens=25, seed=index, structured_outputs=asked))
    engine.run_to_the_end()
    assert engine.core.stats().num_preemptions > 0
    assert any(len({mask.row for mask in plan.masks}) < len(plan.masks) for plan in engine.runner.plans)


@pytest.mark.parametrize("depth", [1, 2])
def test_guesses_behind_drafts_get_no_block_after_the_longest_sequence(depth: int) -> None:
    engine = Harness(config(depth=depth, max_model_len=32), num_drafts=5, guesses_on_device=True, draft_errors=0.7)
    engine.add(*(request(f"r{index}", 6, max_tokens=None, seed=index) for index in range(4)))
    engine.run_to_the_end()


@pytest.mark.parametrize("on_device", [False, True])
def test_drafts_leave_budget_to_prompts_that_are_read_or_wait(on_device: bool) -> None:
    few_tokens = config(max_num_batched_tokens=8, max_num_seqs=4)
    engine = Harness(few_tokens, num_drafts=3, draft_errors=1.0, guesses_on_device=on_device)
    engine.add(*(request(name, 4, max_tokens=60, seed=seed) for seed, name in enumerate(["a", "b"])))
    engine.step(4)
    engine.add(request("being read", [1] * 20, max_tokens=1), request("waiting", [2] * 4, max_tokens=1))
    engine.step(20)
    assert engine.is_answered("being read")
    assert engine.is_answered("waiting")
    assert not engine.is_answered("a")
    engine.run_to_the_end()


def test_drafts_are_left_out_where_the_length_leaves_no_room_for_them() -> None:
    engine = Harness(config(), num_drafts=6)
    engine.add(request("a", 10, max_tokens=2, seed=1))
    engine.run_to_the_end()
    assert not any(chunk.num_drafts for plan in engine.runner.plans for chunk in plan.chunks)


def test_drafts_are_tried_soon_after_a_request_with_a_prediction_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def adapting(drafter: Drafter, most: int, *, adapts: bool, edits_on_host: bool) -> Drafting:
        return Drafting(drafter, most, edits_on_host=edits_on_host)

    calls: list[DraftLengths] = []
    monkeypatch.setattr(core_harness, "Drafting", adapting)
    monkeypatch.setattr(DraftLengths, "try_soon", lambda lengths: calls.append(lengths))
    engine = Harness(config(), num_drafts=3)
    engine.add(request("a", 5, max_tokens=3))
    assert not calls
    engine.add(request("b", 6, max_tokens=3, prediction_token_ids=[7, 8]))
    assert len(calls) == 1


def test_long_prompts_are_indexed_in_several_steps_so_that_no_step_waits_for_all_of_them() -> None:
    limits = config(num_blocks=MOST_STARTED_TOKENS, max_model_len=4 * MOST_STARTED_TOKENS)

    def decoding(request_id: str, num_tokens: int) -> Request:
        message = request(request_id, [3, 4] * (num_tokens // 2), max_tokens=9)
        made = Request(message, FinishRule(message, limits), 0, Stages())
        made.advance(0, num_tokens, samples=True)
        return made

    drafting, half = Drafting(NgramDrafter(2, 2), 3, adapts=False), MOST_STARTED_TOKENS // 2
    requests = [decoding("a", half), decoding("b", half), decoding("c", 6), decoding("d", 3 * MOST_STARTED_TOKENS)]

    def drafted() -> list[int]:
        drafting.begin_step(len(requests), 0)
        return [drafting.propose(each, 3).num_drafts for each in requests]

    assert drafted() == [3, 3, 0, 0]
    assert drafted() == [3, 3, 3, 0], "a request that has been indexed costs nothing more"
    drafting.begin_step(4, 0)
    assert drafting.guess_for_grammar(requests[3]) == (3, [3, 4, 3]), "any length is possible, alone"
    assert drafting.guess_for_grammar(decoding("e", 2)) == (3, ()), "its grammar looks ahead all the same"
    assert drafted() == [3, 3, 3, 3]
