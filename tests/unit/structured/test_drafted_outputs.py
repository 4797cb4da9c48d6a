"""With grammars, speculation changes only the number of steps, and no output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.engine import LLM, EngineConfig, SamplingParams, build_engine
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.messages import EngineRequest
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.speculation.config import SpeculativeConfig, make_drafter
from baton.engine.core.speculation.drafter import Drafter
from baton.engine.core.speculation.stats import SpeculationStats
from baton.engine.offline.bench_drafts import InformedDrafter
from baton.engine.startup import build
from baton.engine.structured import output_grammar

from ...helpers.at_once import make_masks_at_once
from ...helpers.parallel_engine import Answer, logprob_error, run
from ...helpers.structured_cases import WITH_TEXT
from ...helpers.structured_fixtures import VOCAB_SIZE
from ...helpers.structured_requests import MAX_TOKENS, all_requests
from ..engine.copy_connector import Room
from ..engine.handing_off import hand_off

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
KINDS = [
    SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0),
    SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0, presence_penalty=0.5),
    SamplingParams(temperature=1.5, max_tokens=MAX_TOKENS, logprobs=0),
]
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 5}
KNOWING = {"right": 0.0, "often right": 0.3, "wrong": 1.0}  # shares of wrong drafts
DRAFTERS = [*KNOWING, "ngram", "suffix"]
Expected = dict[str, Answer]


@pytest.fixture(scope="module")
def requests(structured_llm: LLM) -> list[EngineRequest]:
    return [*all_requests(structured_llm, KINDS), *requests_with_text(structured_llm)]


def requests_with_text(llm: LLM) -> list[EngineRequest]:
    """Return requests whose outputs begin with any text, up to a marker that a logit bias makes likely."""
    mark = llm.get_tokenizer().encode("<f>", add_special_tokens=False)
    sampling = SamplingParams(
        temperature=1.0, max_tokens=60, logprobs=0, logit_bias=dict.fromkeys(mark, 9.0), frequency_penalty=0.2
    )
    return [
        EngineRequest(
            request_id=f"{name} {seed}",
            prompt_token_ids=[5, 9, 17],
            sampling=msgspec.structs.replace(sampling, structured_outputs=asked),
            seed=seed,
        )
        for name, asked in WITH_TEXT.items()
        for seed in range(6)
    ]


@pytest.fixture(scope="module")
def expected(structured_llm: LLM, requests: list[EngineRequest]) -> Expected:
    """Return the answer to each request, run alone on an engine without drafts."""
    answers = {request.request_id: run(structured_llm.engine.core, [request])[0] for request in requests}
    for name in WITH_TEXT:
        texts = [structured_llm.get_tokenizer().decode(answers[f"{name} {seed}"].token_ids) for seed in range(6)]
        assert any('f>"red"' in text or 'f>"green"' in text for text in texts), texts  # after the marker
    return answers


@pytest.fixture(params=DRAFTERS)
def drafter(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    requests: list[EngineRequest],
    expected: Expected,
) -> str:
    """Make engines that are built with a `speculative_config` use this drafter."""
    name = str(request.param)
    by_id = {each.request_id: each for each in requests}

    def whole(request_id: str, _: Sequence[int]) -> list[int]:
        return [*by_id[request_id].prompt_token_ids, *expected[request_id].token_ids]

    def new() -> Drafter:
        if name in KNOWING:
            return InformedDrafter(whole, 1 - KNOWING[name], VOCAB_SIZE)
        return make_drafter(SpeculativeConfig(method=name, num_speculative_tokens=5))

    def make(core: EngineCoreConfig, device: str) -> Drafting | None:
        config = core.speculation
        return None if config is None else Drafting(new(), config.num_speculative_tokens, adapts=False)

    monkeypatch.setattr(build, "make_drafting", make)
    monkeypatch.setattr(output_grammar, "QUICK_MASK_S", 60.0)  # the number of drafts must not depend on time
    return name


def check(stats: SpeculationStats | None, drafter: str) -> None:
    assert stats is not None
    assert stats.num_draft_tokens > 100
    if drafter == "right":
        assert stats.acceptance_rate > 0.8  # drafts of tokens that a grammar forces may be wrong
    if drafter != "wrong":
        assert stats.num_accepted_tokens > 50


ENGINES: dict[str, dict[str, Any]] = {
    "together": {},
    "two steps at a time": {"async_scheduling": True},
    "prompts in pieces": {"max_num_batched_tokens": 16},
    "too few blocks": {"num_gpu_blocks_override": 14, "max_model_len": 208, "async_scheduling": True},
    "one by one": {"max_num_seqs": 1},
}


@pytest.mark.parametrize("arguments", ENGINES.values(), ids=ENGINES)
def test_outputs_are_those_without_drafts(
    make_structured_llm: Callable[..., LLM],
    requests: list[EngineRequest],
    expected: Expected,
    drafter: str,
    arguments: dict[str, Any],
) -> None:
    with make_structured_llm(speculative_config=SPECULATIVE, **arguments) as llm:
        if "num_gpu_blocks_override" in arguments:
            make_masks_at_once(llm.engine.core)  # the times of masks would decide which requests are preempted
        answers = run(llm.engine.core, requests)
        for request, answer in zip(requests, answers, strict=True):
            plain = expected[request.request_id]
            assert answer.token_ids == plain.token_ids
            assert logprob_error(answer.logprobs, plain.logprobs) < 1e-4
        stats = llm.engine.core.stats()
        check(stats.speculation, drafter)
        assert stats.num_blocks_free == stats.num_blocks
        if "num_gpu_blocks_override" in arguments:
            assert stats.num_preemptions > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_handed_over_and_migrated_outputs_continue_as_without_drafts(
    structured_checkpoint: Path, requests: list[EngineRequest], expected: Expected, drafter: str, ahead: bool
) -> None:
    room = Room()
    args = {"model": str(structured_checkpoint), "dtype": "float32", "max_num_seqs": 8, "async_scheduling": ahead}
    prefill = build_engine(EngineConfig.from_args(args), room.connect)
    decode = build_engine(EngineConfig.from_args(args | {"speculative_config": SPECULATIVE}), room.connect)
    whole = [expected[request.request_id].token_ids for request in requests]
    assert hand_off(prefill.core, decode.core, requests) == whole
    check(decode.core.stats().speculation, drafter)
    half = [
        msgspec.structs.replace(request, output_token_ids=tokens[: len(tokens) // 2])
        for request, tokens in zip(requests, whole, strict=True)
    ]
    for answer, begun, tokens in zip(run(decode.core, half), half, whole, strict=True):
        assert begun.output_token_ids + answer.token_ids == tokens
    for engine in (prefill, decode):
        engine.close()
