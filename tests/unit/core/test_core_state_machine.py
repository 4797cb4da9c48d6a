"""One engine whose layers keep the same, under everything that may happen to it (`core_machine`)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from baton.engine.core.messages import FinishReason

from .core_grammars import FakeGrammars
from .core_harness import Harness, config
from .core_machine import EngineMachine
from .core_prompts import crowd


class OneGroupMachine(EngineMachine):
    """An engine of any size, with tiers or without."""

    @initialize(
        depth=st.sampled_from([1, 2, 2, 3]),
        lazy=st.booleans(),
        num_blocks=st.integers(4, 24),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 24),
        caching=st.sampled_from([True, True, False]),
        min_restored=st.sampled_from([None, 1, 1, 12]),
        offers_early=st.booleans(),
    )
    def start(
        self,
        depth: int,
        lazy: bool,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
        min_restored: int | None,
        offers_early: bool,
    ) -> None:
        sizes = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
        self.engine = Harness(
            config(depth=depth, enable_prefix_caching=caching, eos_token_ids=[1, 2], max_model_len=70, **sizes),
            lazy=lazy,
            min_restored_tokens=min_restored,
            offers_early=offers_early,
            grammars=FakeGrammars(),
            clock=self.clock,
        )
        self.engine.think_late()


TestEngine = OneGroupMachine.TestCase
TestEngine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_on_few_blocks_gets_the_answers_that_each_gets_alone(depth: int, lazy: bool) -> None:
    engine = Harness(config(depth=depth, num_blocks=14, max_num_batched_tokens=12), lazy=lazy)
    engine.add(*crowd())
    engine.run_to_the_end()
    assert engine.core.stats().num_preemptions > 0
    assert engine.core.stats().prefix_cache_hits > 0
    assert {answer.finish_reason for answer in engine.answers.values()} == {FinishReason.LENGTH}
