"""Structured outputs of whole engines: every kind fits its grammar, and tokens of other requests do not change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from baton.engine import LLM, InvalidPrompt, SamplingParams, StructuredOutputsParams
from baton.engine.core.messages import EngineRequest

from ...helpers.drafted_engine import SPECULATIVE, serve_with_drafts
from ...helpers.member_pool import MemberPool
from ...helpers.parallel_engine import engine_config, run, serve
from ...helpers.structured_cases import CASES, Case
from ...helpers.structured_fixtures import VOCAB_SIZE
from ...helpers.structured_requests import DRAWN, GREEDY, PROMPTS, all_requests, asking

pytestmark = pytest.mark.slow

PARAMS = pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])


@pytest.fixture(scope="module")
def alone(structured_llm: LLM) -> dict[str, list[int]]:
    """Return the answer to each of `all_requests`, run alone on the engine."""
    return {
        request.request_id: run(structured_llm.engine.core, [request])[0].token_ids
        for request in all_requests(structured_llm)
    }


@pytest.mark.exhaustive
@PARAMS
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_kind_of_output_fits(structured_llm: LLM, case: Case, params: SamplingParams) -> None:
    for answer in structured_llm.generate(PROMPTS, asking(case, params, structured_llm), use_tqdm=False):
        (output,) = answer.outputs
        assert output.finish_reason == "stop", output.text
        assert case.check(output.text), output.text
        assert output.token_ids[-1] == 0


ENGINES = {
    "together": {},
    "two steps at a time": {"async_scheduling": True},
    "prompts in pieces": {"max_num_batched_tokens": 16},
    "too few blocks": {"num_gpu_blocks_override": 14, "max_model_len": 208, "async_scheduling": True},
}


OTHERS = [pytest.param(args, id=name, marks=pytest.mark.exhaustive) for name, args in list(ENGINES.items())[1:]]


@pytest.mark.parametrize("arguments", [pytest.param(ENGINES["together"], id="together"), *OTHERS])
def test_tokens_are_those_of_a_request_alone(
    make_structured_llm: Callable[..., LLM], alone: dict[str, list[int]], arguments: dict[str, int]
) -> None:
    lacks_blocks = "num_gpu_blocks_override" in arguments
    with make_structured_llm(**arguments) as llm:
        for _ in range(10 if lacks_blocks else 1):  # the times of masks decide which requests are preempted
            requests = all_requests(llm)
            answers = run(llm.engine.core, requests)
            tokens = {request.request_id: answer.token_ids for request, answer in zip(requests, answers, strict=True)}
            assert tokens == alone
            if llm.engine.core.stats().num_preemptions:
                break
        assert bool(llm.engine.core.stats().num_preemptions) == lacks_blocks


@PARAMS
def test_an_output_can_be_resumed_from_any_token_without_a_change(structured_llm: LLM, params: SamplingParams) -> None:
    sampling = asking(CASES["json"], params, structured_llm)
    request = EngineRequest(request_id="whole", prompt_token_ids=PROMPTS[1], sampling=sampling, seed=5)
    (whole,) = run(structured_llm.engine.core, [request])
    cuts = range(len(whole.token_ids))
    rest = [
        msgspec.structs.replace(request, request_id=str(cut), output_token_ids=whole.token_ids[:cut]) for cut in cuts
    ]
    for cut, answer in zip(cuts, run(structured_llm.engine.core, rest), strict=True):
        assert answer.token_ids == whole.token_ids[cut:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("with_drafts", [False, True])
def test_two_ranks_give_the_output_of_one(
    pool: MemberPool,
    structured_checkpoint: Path,
    structured_llm: LLM,
    alone: dict[str, list[int]],
    *,
    with_drafts: bool,
) -> None:
    requests = all_requests(structured_llm)[3:11]  # greedy and sampled, some without a grammar
    speculative = {"speculative_config": SPECULATIVE} if with_drafts else {}
    config = engine_config(str(structured_checkpoint), tensor_parallel_size=2, **speculative)
    if with_drafts:
        served, nothing = pool.run(serve_with_drafts, config, [requests], alone, VOCAB_SIZE, tp=2)
        assert served.stats.speculation.num_accepted_tokens > 30
    else:
        served, nothing = pool.run(serve, config, [requests], tp=2)
    assert nothing is None
    assert [answer.token_ids for answer in served.answers] == [alone[request.request_id] for request in requests]


def test_an_output_may_end_at_max_tokens(structured_llm: LLM) -> None:
    params = msgspec.structs.replace(asking(CASES["json"], GREEDY, structured_llm), max_tokens=3)
    ((output,),) = (answer.outputs for answer in structured_llm.generate([PROMPTS[0]], params, use_tqdm=False))
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 3


def test_the_model_chooses_whitespace_unless_it_is_disabled(structured_llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    newline = structured_llm.get_tokenizer().encode("\n", add_special_tokens=False)[0]
    texts = {}
    for fixed in (True, False):
        asked = StructuredOutputsParams(json=schema, disable_any_whitespace=fixed)
        params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=asked, logit_bias={newline: 20.0})
        texts[fixed] = structured_llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].text
    assert isinstance(json.loads(texts[True])["a"], bool)
    assert "\n" in texts[False]


def test_a_grammar_that_allows_no_token_is_an_error(structured_llm: LLM) -> None:
    asked = StructuredOutputsParams(choice=["yes"])
    params = SamplingParams(structured_outputs=asked, allowed_token_ids=[390])
    with pytest.raises(InvalidPrompt, match="allowed_token_ids"):
        structured_llm.generate([PROMPTS[0]], params, use_tqdm=False)


def test_a_wrong_grammar_is_refused_with_the_compilers_message(structured_llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a)"))
    with pytest.raises(InvalidPrompt, match=r"regex cannot be compiled: .*position 2"):
        structured_llm.generate([PROMPTS[0]], params, use_tqdm=False)


def test_the_compilers_message_has_nothing_of_its_source(structured_llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag="{}"))
    with pytest.raises(InvalidPrompt, match="structural_tag cannot be compiled: Invalid structural tag"):
        structured_llm.generate([PROMPTS[0]], params, use_tqdm=False)


def test_without_a_tokenizer_there_are_no_grammars(make_structured_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with make_structured_llm(skip_tokenizer_init=True) as llm, pytest.raises(InvalidPrompt, match="no tokenizer"):
        llm.generate([PROMPTS[0]], params, use_tqdm=False)
