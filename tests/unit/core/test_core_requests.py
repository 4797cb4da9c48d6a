"""States of a request, its end, and what is refused."""

from __future__ import annotations

import pytest

from baton.engine.core.config import CacheGroupConfig, EngineCoreConfig, InvalidEngineCoreConfig
from baton.engine.core.kv.cache_groups import make_groups
from baton.engine.core.kv.prompt_backlog import PromptBacklog
from baton.engine.core.kv.request_memory import RequestMemory
from baton.engine.core.logprobs import Logprobs
from baton.engine.core.messages import ErrorKind, FinishReason, KVSource
from baton.engine.core.requests.request import (
    TRANSITIONS,
    FinishRule,
    IllegalTransition,
    PromptLogprobs,
    Request,
    RequestStatus,
)
from baton.engine.core.sampling import StructuredOutputsParams
from baton.engine.core.scheduling.queues import WaitingQueue
from baton.engine.core.scheduling.request_table import refusal
from baton.engine.core.stages import Stages

from .core_harness import BLOCK_SIZE, VOCAB_SIZE, config, request
from .core_memory import logprob_of

FINISHED = [status for status in RequestStatus if status.name.startswith("FINISHED")]


def make(request_id: str = "a", sequence: int = 0, **changes: object) -> Request:
    message = request(request_id, 5, **changes)
    return Request(message, FinishRule(message, config()), sequence, Stages())


class TestStatus:
    def test_every_status_has_a_line_in_the_table(self) -> None:
        assert set(TRANSITIONS) == set(RequestStatus)

    @pytest.mark.parametrize("start", RequestStatus)
    @pytest.mark.parametrize("end", RequestStatus)
    def test_exactly_the_moves_of_the_table_are_possible(self, start: RequestStatus, end: RequestStatus) -> None:
        subject = make()
        subject.status = start
        if end in TRANSITIONS[start]:
            subject.move_to(end)
            assert subject.status is end
        else:
            with pytest.raises(IllegalTransition, match=subject.request_id):
                subject.move_to(end)
            assert subject.status is start

    @pytest.mark.parametrize("finished", FINISHED)
    def test_what_is_over_stays_over(self, finished: RequestStatus) -> None:
        assert not TRANSITIONS[finished]

    @pytest.mark.parametrize("live", [status for status in RequestStatus if status not in FINISHED])
    def test_whatever_lives_can_be_aborted_and_can_fail(self, live: RequestStatus) -> None:
        assert {RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR} <= TRANSITIONS[live]


@pytest.fixture
def queue() -> WaitingQueue:
    groups = make_groups([CacheGroupConfig(num_blocks=8)], BLOCK_SIZE)
    memory = RequestMemory(groups, BLOCK_SIZE, enable_prefix_caching=True)
    return WaitingQueue(PromptBacklog(memory, groups[0].pool, BLOCK_SIZE))


class TestQueue:
    def test_lower_priority_numbers_come_first_then_earlier_arrivals_then_the_order_of_adding(
        self, queue: WaitingQueue
    ) -> None:
        late, early = make("late", 0, arrival_s=2.0), make("early", 1, arrival_s=1.0)
        tie, urgent = make("tie", 2, arrival_s=1.0), make("urgent", 3, arrival_s=9.0, priority=-1)
        order = []
        for each in (late, early, tie, urgent):
            queue.push(each)
        while (head := queue.peek()) is not None:
            order.append(head.request_id)
            queue.remove(head)
        assert order == ["urgent", "early", "tie", "late"]

    def test_who_leaves_from_the_middle_is_not_served(self, queue: WaitingQueue) -> None:
        requests = [make(str(index), index) for index in range(3)]
        for each in requests:
            queue.push(each)
        queue.remove(requests[1])
        assert len(queue) == 2
        queue.remove(requests[0])
        assert queue.peek() is requests[2]

    def test_a_request_that_comes_back_is_there_once(self, queue: WaitingQueue) -> None:
        """It left from the middle, and was preempted, or was not restored."""
        requests = [make(str(index), index) for index in range(3)]
        for each in requests:
            queue.push(each)
        for _ in range(3):
            queue.remove(requests[1])
            queue.push(requests[1])
        assert queue.behind_head() == requests[1:]
        order = []
        while (head := queue.peek()) is not None:
            order.append(head)
            queue.remove(head)
        assert order == requests

    def test_a_request_that_comes_back_before_its_mask_is_known_is_kept_aside(self, queue: WaitingQueue) -> None:
        constrained = make("constrained", 1, structured_outputs=StructuredOutputsParams(regex="a"))
        requests = [make("head", 0), constrained, make("last", 2)]
        constrained.allow(b"\xff")
        for each in requests:
            queue.push(each)
        queue.remove(constrained)
        constrained.take_masks(1)
        queue.push(constrained)
        assert queue.behind_head() == [requests[2]]
        queue.remove(requests[0])
        assert queue.peek() is requests[2]
        constrained.allow(b"\xff")
        queue.mask_known(constrained)
        assert queue.peek() is constrained


class TestFinishRule:
    def test_the_models_end_token_stops(self) -> None:
        rule = FinishRule(request("a", 5, max_tokens=10), config(eos_token_ids=[7]))
        assert rule.reason(7, 6) is FinishReason.STOP
        assert rule.reason(8, 6) is None

    def test_ignore_eos_leaves_the_requests_own_stop_tokens(self) -> None:
        message = request("a", 5, max_tokens=10, ignore_eos=True, stop_token_ids=[9])
        rule = FinishRule(message, config(eos_token_ids=[7]))
        assert rule.reason(7, 6) is None
        assert rule.reason(9, 6) is FinishReason.STOP

    def test_stop_tokens_count_once_min_tokens_outputs_exist_before_them(self) -> None:
        rule = FinishRule(request("a", 5, max_tokens=10, min_tokens=2, stop_token_ids=[9]), config())
        assert [rule.reason(9, 5 + outputs) for outputs in (1, 2, 3)] == [None, None, FinishReason.STOP]

    def test_max_tokens_counts_outputs_generated_elsewhere(self) -> None:
        rule = FinishRule(request("a", 5, max_tokens=3, output_token_ids=[1]), config())
        assert [rule.reason(8, 5 + outputs) for outputs in (2, 3)] == [None, FinishReason.LENGTH]

    def test_the_models_length_ends_what_max_tokens_does_not(self) -> None:
        rule = FinishRule(request("a", 5, max_tokens=None), config(max_model_len=8))
        assert [rule.reason(8, length) for length in (6, 7, 8)] == [None, None, FinishReason.LENGTH]

    def test_a_stop_token_in_the_last_place_is_a_stop(self) -> None:
        rule = FinishRule(request("a", 5, max_tokens=1, stop_token_ids=[9]), config())
        assert rule.reason(9, 6) is FinishReason.STOP

    def test_keep_kv_hands_off_after_the_first_token_unless_that_one_ends_it(self) -> None:
        rule = FinishRule(request("a", 5, max_tokens=3, keep_kv=True, stop_token_ids=[9]), config())
        assert rule.reason(8, 6) is FinishReason.HANDOFF
        assert rule.reason(9, 6) is FinishReason.STOP
        assert FinishRule(request("a", 5, max_tokens=1, keep_kv=True), config()).reason(8, 6) is FinishReason.LENGTH


class TestRefusal:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"prompt": []}, "prompt is empty"),
            ({"prompt": [1, VOCAB_SIZE]}, f"token id {VOCAB_SIZE} in the prompt is not in the vocabulary"),
            ({"prompt": [1, -1]}, "token id -1 in the prompt"),
            ({"output_token_ids": [VOCAB_SIZE]}, "in the output"),
            ({"prediction_token_ids": [5, VOCAB_SIZE]}, "in the prediction"),
            ({"prediction_token_ids": [5] * 201}, "the prediction has 201 tokens, it may have"),
            ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
            ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
            ({"kv_source": KVSource(b"", 0)}, "must be from 1 to 4"),
            ({"kv_source": KVSource(b"", 5)}, "must be from 1 to 4"),
            ({"seed": 2**63}, "seed is 9223372036854775808"),
            ({"seed": -1}, "seed is -1"),
        ],
    )
    def test_what_can_never_be_served_is_invalid_and_says_why(self, changes: dict[str, object], words: str) -> None:
        message = request("a", changes.pop("prompt", 5), **changes)  # type: ignore[arg-type]
        error = refusal(message, config(), can_transfer=True)
        assert error is not None
        assert error.kind is ErrorKind.INVALID
        assert words in error.text

    def test_more_alternatives_than_tokens_are_invalid(self) -> None:
        error = refusal(request("a", 5, logprobs=5), config(vocab_size=4, eos_token_ids=[]), can_transfer=True)
        assert error is not None
        assert error.kind is ErrorKind.INVALID

    @pytest.mark.parametrize("changes", [{"keep_kv": True}, {"kv_source": KVSource(b"", 4)}])
    def test_a_handoff_needs_a_connector(self, changes: dict[str, object]) -> None:
        assert refusal(request("a", 5, **changes), config(), can_transfer=True) is None
        error = refusal(request("a", 5, **changes), config(), can_transfer=False)
        assert error is not None
        assert "no KV connector" in error.message

    def test_a_prompt_must_leave_room_for_one_token(self) -> None:
        limits = config(max_model_len=20)
        assert refusal(request("a", 19), limits, can_transfer=False) is None
        error = refusal(request("a", 20), limits, can_transfer=False)
        assert error is not None
        assert error.kind is ErrorKind.TOO_LONG
        assert "20 tokens" in error.message
        assert "max_model_len is 20" in error.message

    def test_a_prompt_must_fit_into_the_pool(self) -> None:
        error = refusal(request("a", 20), config(num_blocks=5), can_transfer=False)
        assert error is not None
        assert error.kind is ErrorKind.TOO_LONG
        assert f"5 KV blocks of this engine hold {5 * BLOCK_SIZE} tokens" in error.message


class TestPromptLogprobs:
    def test_positions_that_come_twice_are_taken_once(self) -> None:
        entries = Logprobs.pack([logprob_of(0, token) for token in range(6)])
        collected = PromptLogprobs()
        collected.collect(0, entries.part(0, 3))
        collected.collect(0, entries.part(0, 5))
        collected.collect(5, entries.part(5, 6))
        assert collected.joined() == entries

    def test_a_gap_is_a_bug(self) -> None:
        with pytest.raises(ValueError, match="missing"):
            PromptLogprobs().collect(2, Logprobs.pack([logprob_of(0, 0)]))


class TestConfig:
    @pytest.mark.parametrize("name", ["num_blocks", "max_num_seqs", "vocab_size", "block_size", "depth"])
    def test_sizes_must_be_positive(self, name: str) -> None:
        with pytest.raises(InvalidEngineCoreConfig, match=name):
            config(**{name: 0})

    def test_each_running_request_must_get_a_token_a_step(self) -> None:
        with pytest.raises(InvalidEngineCoreConfig, match="max_num_batched_tokens"):
            config(max_num_seqs=8, max_num_batched_tokens=7)

    def test_a_model_needs_room_for_a_prompt_and_an_answer(self) -> None:
        with pytest.raises(InvalidEngineCoreConfig, match="max_model_len"):
            config(max_model_len=1)

    def test_the_longest_request_is_what_model_and_pool_both_hold(self) -> None:
        limits: EngineCoreConfig = config(num_blocks=3, max_model_len=50)
        assert limits.max_length == 3 * BLOCK_SIZE
        assert config(num_blocks=30, max_model_len=50).max_length == 50
