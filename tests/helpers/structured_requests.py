"""Requests for each of `structured_cases`, greedy and sampled, mixed with requests without a grammar."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.engine import LLM, SamplingParams
from baton.engine.core.messages import EngineRequest

from .structured_cases import CASES, Case

PROMPTS = [[5, 9, 17], list(range(40, 90))]
MAX_TOKENS = 150
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
DRAWN = SamplingParams(temperature=1.2, top_p=0.95, presence_penalty=0.5, seed=77, max_tokens=MAX_TOKENS, logprobs=1)
EMPTY = "{}"  # one token: a model with random weights would never end an object's text


def asking(case: Case, params: SamplingParams, llm: LLM) -> SamplingParams:
    (empty,) = llm.get_tokenizer().encode(EMPTY, add_special_tokens=False)
    bias = {empty: 9.0} if case.asked.json_object else {}
    return msgspec.structs.replace(params, structured_outputs=case.asked, logit_bias=bias)


def all_requests(llm: LLM, kinds: Sequence[SamplingParams] = (GREEDY, DRAWN)) -> list[EngineRequest]:
    """Return every case with every prompt and each kind of sampling, mixed with requests without a grammar."""
    found: list[EngineRequest] = []
    for prompt in PROMPTS:
        for params in kinds:
            free = msgspec.structs.replace(params, max_tokens=20, ignore_eos=True)
            for each in (free, *(asking(case, params, llm) for case in CASES.values())):
                request_id = str(len(found))
                found.append(
                    EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=each, seed=len(found))
                )
    return found
