"""Speculation changes the number of steps only, with greedy requests and with every sampling control.

The drafter knows the answers, and errs in a given share of drafts; the reference has no drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from baton.engine import LLM, EngineConfig, SamplingParams, build_engine
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.messages import EngineRequest
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.speculation.config import make_drafter
from baton.engine.core.speculation.stats import SpeculationStats
from baton.engine.offline.bench_drafts import InformedDrafter
from baton.engine.startup import build

from .controls import EVERYTHING, GREEDY, WAYS, own_seeds, prompts_of
from .copy_connector import Room
from .guessing import close
from .handing_off import hand_off, run

PROMPTS = prompts_of(1, 15, 16, 17, 48, 90)
HOT = SamplingParams(temperature=1.5, seed=77, max_tokens=40, ignore_eos=True, logprobs=2)
KINDS = pytest.mark.parametrize("params", [GREEDY, EVERYTHING, HOT], ids=["greedy", "everything", "hot"])
SPECULATIVE = {"method": "suffix", "num_speculative_tokens": 5}
NOT_FROM_OTHERS = {"suffix_decoding_max_cached_requests": 0}


@pytest.fixture(params=[0.0, 0.4, 1.0], ids=["right", "often right", "wrong"])
def errors(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture
def drafts(errors: float, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """Give engines that are built from now on a drafter that knows the answers registered here by prompt."""
    answers: dict[tuple[int, ...], list[int]] = {}

    def whole(_: str, prompt: Sequence[int]) -> list[int]:
        return [*prompt, *answers[tuple(prompt)]]

    def make(core: EngineCoreConfig, device: str) -> Drafting | None:
        config = core.speculation
        if config is None:
            return None
        drafter = InformedDrafter(whole, 1 - errors, vocab_size=256)
        return Drafting(drafter, config.num_speculative_tokens, adapts=False, edits_on_host=device == "cuda")

    monkeypatch.setattr(build, "make_drafting", make)
    return answers


def undisturbed(llm: LLM, drafts: dict[tuple[int, ...], list[int]], params: SamplingParams) -> list[Any]:
    """Return the answers of an engine without drafts, and register them with the drafter."""
    outputs = [
        llm.generate(prompt, own, use_tqdm=False)[0].outputs[0]
        for prompt, own in zip(PROMPTS, own_seeds(params, len(PROMPTS)), strict=True)
    ]
    drafts.update({tuple(prompt): list(output.token_ids) for prompt, output in zip(PROMPTS, outputs, strict=True)})
    return outputs


def check(stats: SpeculationStats | None, errors: float) -> None:
    """Check that drafts were made, and that the right ones were accepted."""
    assert stats is not None
    assert stats.num_draft_tokens > 100
    if errors in (0.0, 1.0):
        assert stats.acceptance_rate == 1 - errors
    else:
        assert 0.1 < stats.acceptance_rate < 0.9


@pytest.mark.slow
@pytest.mark.exhaustive
@KINDS
@pytest.mark.parametrize("args", WAYS.values(), ids=WAYS)
def test_answers_are_those_without_drafts(
    llm: LLM, make_llm: Callable[..., LLM], drafts: Any, errors: float, params: SamplingParams, args: dict[str, Any]
) -> None:
    expected = undisturbed(llm, drafts, params)
    speculative = make_llm(speculative_config=SPECULATIVE, **args)
    for _ in range(2):  # the second time, prompts are cached
        results = speculative.generate(PROMPTS, own_seeds(params, len(PROMPTS)), use_tqdm=False)
        for result, plain in zip(results, expected, strict=True):
            (output,) = result.outputs
            assert output.token_ids == plain.token_ids
            assert (output.finish_reason, output.stop_reason) == (plain.finish_reason, plain.stop_reason)
            assert close(output.logprobs, plain.logprobs)
    core = speculative.engine.core
    check(core.stats().speculation, errors)
    if "num_gpu_blocks_override" in args:
        assert core.stats().num_preemptions > 0
    assert core.stats().num_blocks_free == core.stats().num_blocks


@pytest.mark.slow
@pytest.mark.exhaustive
@KINDS
@pytest.mark.parametrize("ahead", [False, True])
def test_requests_that_were_handed_over_or_migrated_go_on_as_without_drafts(
    llm: LLM, checkpoint: Any, drafts: Any, errors: float, params: SamplingParams, ahead: bool
) -> None:
    expected = [output.token_ids for output in undisturbed(llm, drafts, params)]
    room = Room()
    args = {"model": str(checkpoint), "dtype": "float32", "max_num_seqs": 8, "async_scheduling": ahead}
    prefill = build_engine(EngineConfig.from_args(args), room.connect).core
    decode = build_engine(EngineConfig.from_args(args | {"speculative_config": SPECULATIVE}), room.connect).core
    requests = [
        EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=own, seed=own.seed or 0)
        for i, (prompt, own) in enumerate(zip(PROMPTS, own_seeds(params, len(PROMPTS)), strict=True))
    ]
    assert hand_off(prefill, decode, requests) == expected
    check(decode.stats().speculation, errors)
    half = [msgspec.structs.replace(each, output_token_ids=expected[i][:9]) for i, each in enumerate(requests)]
    migrated = run(decode, [each for i, each in enumerate(half) if len(expected[i]) > 9])
    for request_id, outputs in migrated.items():
        assert [token for output in outputs for token in output.token_ids] == expected[int(request_id)][9:]


@pytest.mark.slow
def test_right_drafts_save_steps(llm: LLM, make_llm: Callable[..., LLM], drafts: Any) -> None:
    undisturbed(llm, drafts, HOT)
    speculative = make_llm(speculative_config=SPECULATIVE, max_num_seqs=1)
    (prompt, own) = PROMPTS[-1], own_seeds(HOT, len(PROMPTS))[-1]
    speculative.generate(prompt, own, use_tqdm=False)
    stats = speculative.engine.core.stats()
    assert stats.speculation is not None
    assert stats.num_steps == 40 - stats.speculation.num_accepted_tokens


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_predicted_answer_is_accepted_by_engines_that_guess(
    llm: LLM, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def make(core: EngineCoreConfig, device: str) -> Drafting | None:
        config = core.speculation
        return None if config is None else Drafting(make_drafter(config), 5, adapts=False)

    monkeypatch.setattr(build, "make_drafting", make)
    speculative = make_llm(speculative_config={"method": method, "num_speculative_tokens": 5})
    prompt = PROMPTS[-1]
    answer = llm.generate(prompt, HOT, use_tqdm=False)[0].outputs[0].token_ids
    for engine in (llm, speculative):
        predicted = {"prompt_token_ids": prompt, "prediction": answer}
        assert engine.generate(predicted, HOT, use_tqdm=False)[0].outputs[0].token_ids == answer
    stats = speculative.engine.core.stats().speculation
    assert stats is not None
    assert stats.num_accepted_tokens > 10


def test_a_chat_takes_the_answer_that_is_expected(
    text_llm: LLM, make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(core: EngineCoreConfig, device: str) -> Drafting | None:
        config = core.speculation
        return None if config is None else Drafting(make_drafter(config), 5, adapts=False)

    monkeypatch.setattr(build, "make_drafting", make)
    speculative = make_llm(skip_tokenizer_init=False, speculative_config={**SPECULATIVE, **NOT_FROM_OTHERS})
    hot = msgspec.structs.replace(HOT, logprobs=None)
    conversation = [{"role": "user", "content": "Hi"}]
    expected = text_llm.chat(conversation, hot, use_tqdm=False)[0].outputs[0]
    accepted = [0]
    for prediction in (None, expected.text, [None, expected.text]):
        several = [conversation, conversation] if isinstance(prediction, list) else conversation
        for result in speculative.chat(several, hot, use_tqdm=False, prediction=prediction):
            assert result.outputs[0].token_ids == expected.token_ids
        stats = speculative.engine.core.stats().speculation
        accepted.append(stats.num_accepted_tokens if stats else 0)
    assert accepted[2] > accepted[1] + 3
    assert accepted[3] > accepted[2]
