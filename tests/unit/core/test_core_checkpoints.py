"""Hits of requests with recurrent states: they begin less than one checkpoint distance behind the cached blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.engine.core.kv.request_memory import PrefixLookup, RequestMemory
from baton.engine.core.requests.request import Request

from .core_harness import BLOCK_SIZE, VOCAB_SIZE, Harness, config, request

SEEDS = st.integers(0, 2**32 - 1)


def engine_of(num_blocks: int, num_slots: int, distance: int, **changes: object) -> Harness:
    drafts = changes.pop("num_drafts", 0)
    made = config(groups=[(num_blocks, None)], states=[(num_slots, distance)], **changes)
    return Harness(made, num_drafts=drafts, draft_errors=0.3)  # type: ignore[arg-type]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


class Hits:
    """The tokens that each request computes although its blocks are cached, as long as `watch` is entered."""

    def __init__(self) -> None:
        self.recomputed: list[int] = []
        self.num_hits = 0

    def watch(self) -> AbstractContextManager[object]:
        reserve = RequestMemory.reserve

        def recording(memory: RequestMemory, asked: Request, *given: object) -> bool:
            prefix: PrefixLookup = memory.lookup(asked)
            reserved = reserve(memory, asked, *given)  # type: ignore[arg-type]
            if reserved:
                self.recomputed.append((prefix.num_seen - prefix.num_blocks) * BLOCK_SIZE)
                self.num_hits += prefix.num_blocks > 0
            return reserved

        return patch.object(RequestMemory, "reserve", recording)


@settings(max_examples=60, deadline=None)
@given(
    SEEDS,
    st.sampled_from([12, 16, 20]),
    st.integers(4, 60),
    st.integers(1, 3),
    st.sampled_from([0, 0, 3]),
    st.sampled_from([40, 60, 200]),
)
@example(seed=85359, distance=20, budget=4, depth=1, num_drafts=0, num_blocks=40)
def test_with_a_slot_for_each_distance_a_hit_recomputes_less_than_one(
    seed: int, distance: int, budget: int, depth: int, num_drafts: int, num_blocks: int
) -> None:
    """Prompts that share beginnings of any length, however they are cut into chunks, and however many run at once."""
    rng = random.Random(seed)
    engine = engine_of(
        num_blocks,
        num_blocks,
        distance,
        max_num_batched_tokens=budget,
        depth=depth,
        num_drafts=num_drafts,
    )
    stems, hits = [tokens(rng, 80) for _ in range(2)], Hits()
    with hits.watch():
        for number in range(12):
            stem = rng.choice(stems)
            prompt = stem[: rng.randint(1, 80)] + tokens(rng, rng.randint(1, 6))
            engine.add(request(f"r{number}", prompt, max_tokens=rng.randint(1, 9), seed=number))
            engine.step(rng.choice([0, 1, 2, 30]))
        engine.run_to_the_end()
        for number in (12, 13):  # those before may share too little for a hit
            engine.add(request(f"r{number}", stems[0], max_tokens=1))
            engine.run_to_the_end()
    assert max(hits.recomputed) < distance
    assert hits.num_hits > 0


@pytest.mark.parametrize("before", range(1, 9))
def test_a_chunk_that_would_end_right_before_a_checkpoint_leaves_one(before: int) -> None:
    engine = engine_of(64, 30, 12, max_num_batched_tokens=48 - before)
    prompt = tokens(random.Random(0), 80)
    engine.add(request("first", prompt, max_tokens=1))
    engine.run()
    assert engine.core.stats().num_steps == 2
    engine.add(request("second", [*prompt[:50], 1, 2, 3], max_tokens=1))
    engine.run()
    assert engine.answer("second").outputs[0].num_cached_tokens == 48
    engine.run_to_the_end()


class TestFewSlots:
    def test_the_newest_prompt_has_all_its_checkpoints_once_blocks_of_old_ones_are_gone(self) -> None:
        rng = random.Random(1)
        engine, hits = engine_of(24, 9, 12, max_num_batched_tokens=96, max_num_seqs=1), Hits()
        for number in range(30):
            prompt = tokens(rng, 80)
            engine.add(request(f"old{number}", prompt, max_tokens=1))
            engine.run()
        with hits.watch():
            engine.add(request("hit", [*prompt[:46], 1, 2, 3], max_tokens=1))
            engine.run()
        assert (hits.num_hits, hits.recomputed) == (1, [8])
        engine.run_to_the_end()

    def test_ends_of_sequences_stay_while_checkpoints_between_them_go(self) -> None:
        """Five prompts of five distances each, and seven slots, one of which a running request needs."""
        rng = random.Random(2)
        prompts = [tokens(rng, 62) for _ in range(5)]
        cached = cached_tokens([*prompts, *([*prompt, 1] for prompt in prompts)], num_slots=7)
        assert cached == [0] * 5 + [60] * 5

    def test_a_checkpoint_that_was_hit_stays_although_its_sequence_has_a_later_one(self) -> None:
        rng = random.Random(3)
        system = tokens(rng, 25)
        prompts = [system, system[:24] + tokens(rng, 50), tokens(rng, 80), system[:24] + tokens(rng, 50)]
        assert cached_tokens(prompts, num_slots=6) == [0, 24, 0, 24]

    def test_a_checkpoint_before_which_two_prompts_diverged_stays(self) -> None:
        rng = random.Random(4)
        system = tokens(rng, 52)
        users = [system + tokens(rng, 30) for _ in range(3)]
        assert cached_tokens([*users[:2], tokens(rng, 80), users[2]], num_slots=5) == [0, 36, 0, 48]


def cached_tokens(prompts: Sequence[list[int]], num_slots: int) -> list[int]:
    """Return how many tokens of each prompt come from the cache, if one follows the other."""
    engine = engine_of(200, num_slots, 12, max_num_batched_tokens=96, max_num_seqs=1)
    for number, prompt in enumerate(prompts):
        engine.add(request(f"r{number}", prompt, max_tokens=1))
        engine.run()
    engine.run_to_the_end()
    return [engine.answer(f"r{number}").outputs[0].num_cached_tokens for number in range(len(prompts))]
