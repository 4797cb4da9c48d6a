"""An engine draws the same tokens on every path, with greedy requests and with every sampling control.

The reference is one engine that runs whole prompts, one at a time, without a prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from baton.engine import LLM, EngineConfig, SamplingParams, build_engine
from baton.engine.core.engine import EngineCore
from baton.engine.core.messages import EngineRequest

from .controls import EVERYTHING, GREEDY, own_seeds, prompts_of
from .copy_connector import Room
from .handing_off import hand_off, run

PARAMS = pytest.mark.parametrize("params", [GREEDY, EVERYTHING], ids=["greedy", "everything"])


PROMPTS = prompts_of(1, 15, 16, 17, 48, 90, 130)


def continue_all(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    results = llm.generate(list(prompts), own_seeds(params, len(prompts)), use_tqdm=False)
    return [result.outputs[0].token_ids for result in results]


def alone(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    return [
        llm.generate(prompt, own, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, own in zip(prompts, own_seeds(params, len(prompts)), strict=True)
    ]


@pytest.mark.slow
@PARAMS
def test_the_reference_says_something(llm: LLM, params: SamplingParams) -> None:
    """A model that repeats one token would make every comparison below meaningless."""
    answers = alone(llm, PROMPTS, params)
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    assert len({token for answer in answers for token in answer}) > 40


@pytest.mark.slow
@PARAMS
def test_batched_equals_alone(llm: LLM, params: SamplingParams) -> None:
    assert continue_all(llm, PROMPTS, params) == alone(llm, PROMPTS, params)


@pytest.mark.slow
@pytest.mark.exhaustive
@PARAMS
@pytest.mark.parametrize("chunk", [8, 16, 50])
def test_chunked_equals_whole(llm: LLM, make_llm: Callable[..., LLM], params: SamplingParams, chunk: int) -> None:
    chunked = make_llm(enable_prefix_caching=False, max_num_batched_tokens=chunk)
    assert continue_all(chunked, PROMPTS, params) == alone(llm, PROMPTS, params)


@pytest.mark.slow
@pytest.mark.exhaustive
@PARAMS
def test_cached_equals_uncached(llm: LLM, make_llm: Callable[..., LLM], params: SamplingParams) -> None:
    cached = make_llm()
    first = continue_all(cached, PROMPTS, params)
    again = cached.generate(PROMPTS, own_seeds(params, len(PROMPTS)), use_tqdm=False)
    assert [result.outputs[0].token_ids for result in again] == first == alone(llm, PROMPTS, params)
    whole_blocks = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]  # the last token always runs: it gives logits
    assert [result.num_cached_tokens for result in again] == whole_blocks


@PARAMS
def test_a_prompt_that_shares_half_its_blocks_with_another_equals_one_that_shares_none(
    llm: LLM, make_llm: Callable[..., LLM], params: SamplingParams
) -> None:
    cached = make_llm()
    continue_all(cached, PROMPTS[-1:], params)
    mixed = [PROMPTS[-1][:70] + PROMPTS[-2][:30]]
    assert continue_all(cached, mixed, params) == alone(llm, mixed, params)
    assert cached.engine.core.stats().prefix_cache_hits == 64


@pytest.mark.slow
@pytest.mark.exhaustive
@PARAMS
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_equals_not(llm: LLM, make_llm: Callable[..., LLM], params: SamplingParams, caching: bool) -> None:
    prompts = prompts_of(60, 61, 62, 63, 64, 65)
    params = msgspec.structs.replace(params, max_tokens=60, stop_token_ids=[])
    tight = make_llm(num_gpu_blocks_override=20, enable_prefix_caching=caching)
    assert continue_all(tight, prompts, params) == alone(llm, prompts, params)
    assert tight.engine.core.stats().num_preemptions > 0


@pytest.mark.exhaustive
@PARAMS
def test_two_steps_in_flight_equal_one(llm: LLM, make_llm: Callable[..., LLM], params: SamplingParams) -> None:
    ahead = make_llm(async_scheduling=True, enable_prefix_caching=False, max_num_batched_tokens=40)
    assert continue_all(ahead, PROMPTS, params) == alone(llm, PROMPTS, params)


@pytest.mark.slow
@pytest.mark.exhaustive
@PARAMS
def test_two_steps_in_flight_under_preemption_equal_one(
    llm: LLM, make_llm: Callable[..., LLM], params: SamplingParams
) -> None:
    prompts = prompts_of(60, 61, 62, 63, 64, 65)
    tight = make_llm(num_gpu_blocks_override=16, async_scheduling=True)
    params = msgspec.structs.replace(params, max_tokens=40)
    assert continue_all(tight, prompts, params) == alone(llm, prompts, params)
    assert tight.engine.core.stats().num_preemptions > 0


@pytest.fixture
def pair(checkpoint: Any) -> Callable[..., tuple[Room, EngineCore, EngineCore]]:
    def make(**engine_args: Any) -> tuple[Room, EngineCore, EngineCore]:
        room = Room()
        args = {"model": str(checkpoint), "dtype": "float32", "max_num_seqs": 8, **engine_args}
        config = EngineConfig.from_args(args)
        return room, build_engine(config, room.connect).core, build_engine(config, room.connect).core

    return make


@pytest.mark.exhaustive
@PARAMS
@pytest.mark.parametrize("depth2", [False, True])
def test_handed_off_equals_unified(llm: LLM, pair: Any, params: SamplingParams, depth2: bool) -> None:
    room, prefill, decode = pair(async_scheduling=depth2, max_num_batched_tokens=40)
    requests = [
        EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=own, seed=own.seed or 0)
        for i, (prompt, own) in enumerate(zip(PROMPTS, own_seeds(params, len(PROMPTS)), strict=True))
    ]
    assert hand_off(prefill, decode, requests) == alone(llm, PROMPTS, params)
    assert room.peers[1].bytes_moved > 0
    for core in (prefill, decode):  # one more poll: the prefill engine hears that its blocks were read
        core.step()
        stats = core.stats()
        assert (stats.num_blocks_free, stats.num_blocks_held, stats.num_blocks_quarantined) == (stats.num_blocks, 0, 0)


@pytest.mark.exhaustive
@PARAMS
def test_a_second_hand_off_fetches_only_what_the_prefix_cache_lacks(
    llm: LLM, pair: Any, params: SamplingParams
) -> None:
    room, prefill, decode = pair()
    (own,) = own_seeds(params, 1)
    request = EngineRequest(request_id="0", prompt_token_ids=PROMPTS[-1], sampling=own, seed=own.seed or 0)
    first = hand_off(prefill, decode, [request])
    moved = room.peers[1].bytes_moved
    again = hand_off(prefill, decode, [msgspec.structs.replace(request, request_id="1")])
    assert first == again == alone(llm, PROMPTS[-1:], params)
    assert 0 < room.peers[1].bytes_moved - moved < moved


@pytest.mark.slow
@pytest.mark.exhaustive
@PARAMS
@pytest.mark.parametrize("produced", [1, 7, 20])
def test_migrated_in_mid_stream_equals_not(llm: LLM, params: SamplingParams, produced: int) -> None:
    """Another engine that gets the tokens so far continues with the same ones."""
    whole = alone(llm, PROMPTS, params)
    requests = [
        EngineRequest(
            request_id=str(i),
            prompt_token_ids=prompt,
            output_token_ids=tokens[:produced],
            sampling=own,
            seed=own.seed or 0,
        )
        for i, (prompt, own, tokens) in enumerate(zip(PROMPTS, own_seeds(params, len(PROMPTS)), whole, strict=True))
        if len(tokens) > produced
    ]
    for request_id, steps in run(llm.engine.core, requests).items():
        assert [token for step in steps for token in step.token_ids] == whole[int(request_id)][produced:]
