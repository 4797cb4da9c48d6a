"""Blocks of answers with drafts are registered in the prefix cache up to their last computed token, and no further.

The demo model writes values, and is asked for them in a later prompt that begins with cached blocks of the answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from tokenizers import Tokenizer

from baton.cluster.recall import SYLLABLES, TOKENS_PER_ANSWER, make_pair, make_question
from baton.engine import EngineConfig, SamplingParams, build_engine
from baton.engine.core.engine import EngineCore
from baton.engine.core.kv.request_memory import RequestMemory
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.messages import EngineRequest
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.requests.request import Request
from baton.engine.offline.bench_drafts import InformedDrafter
from baton.engine.startup import build

from .handing_off import run

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[3] / "configs/demo/model"
ERRORS = 0.4  # share of wrong drafts: their keys and values lie behind the known tokens
LINE = 2 * TOKENS_PER_ANSWER  # a key and its value
MOST = 4  # drafts


class Written(NamedTuple):
    """A list with a value that the model has written, at the end of a block."""

    token_ids: list[int]
    num_prompt: int
    seed: int


def text_ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
WRITING = SamplingParams(temperature=2.0, ignore_eos=True, allowed_token_ids=[text_ids(each)[0] for each in SYLLABLES])


def core_of(**args: object) -> EngineCore:
    sizes = {"max_model_len": 600, "max_num_seqs": 64}
    return build_engine(EngineConfig.from_args({"model": str(MODEL), "dtype": "float32", **sizes, **args})).core


def write(core: EngineCore, prompts: Sequence[tuple[list[int], int]], lengths: Sequence[int]) -> list[list[int]]:
    """Return each prompt, given with a seed, and what the model writes after it: `lengths` tokens in all."""
    requests = [
        EngineRequest(
            request_id=str(seed),
            prompt_token_ids=prompt,
            sampling=msgspec.structs.replace(WRITING, max_tokens=length - len(prompt)),
            seed=seed,
        )
        for (prompt, seed), length in zip(prompts, lengths, strict=True)
    ]
    steps = run(core, requests)
    return [
        each.prompt_token_ids + [token for step in steps[each.request_id] for token in step.token_ids]
        for each in requests
    ]


@pytest.fixture(scope="module")
def written() -> list[Written]:
    """Have an engine without drafts write after lists. Cut each answer where a new key's value ends with a block."""
    rng = random.Random(3)
    prompts = [(text_ids(make_question(rng, 120 + number)[0].rpartition("?")[0]), number) for number in range(40)]
    found = []
    wholes = write(core_of(), prompts, [len(prompt) + 40 for prompt, _ in prompts])
    for (prompt, seed), whole in zip(prompts, wholes, strict=True):
        first = -(-(len(prompt) + 2 * LINE) // BLOCK_SIZE) * BLOCK_SIZE
        for end in range(first, len(whole) + 1, BLOCK_SIZE):
            key = whole[end - LINE : end - TOKENS_PER_ANSWER]
            places = [at for at in range(end - 1) if whole[at : at + len(key)] == key]
            if places == [end - LINE] and len(set(whole[end - LINE : end])) == LINE:
                found.append(Written(whole[:end], len(prompt), seed))
                break
    assert len(found) > 20
    return found


def share_recalled(written: Sequence[Written], monkeypatch: pytest.MonkeyPatch) -> float:
    """Have an engine with drafts write the same, then ask it for the values. Return the share of right answers."""
    known = {str(each.seed): each.token_ids for each in written}
    drafter = InformedDrafter(lambda name, prompt: known.get(name, prompt), 1 - ERRORS, vocab_size=4096)
    monkeypatch.setattr(build, "make_drafting", lambda *_: Drafting(drafter, MOST, adapts=False))
    core = core_of(speculative_config={"method": "ngram", "num_speculative_tokens": MOST})
    prompts = [(each.token_ids[: each.num_prompt], each.seed) for each in written]
    assert write(core, prompts, [len(each.token_ids) for each in written]) == [each.token_ids for each in written]
    speculation = core.stats().speculation
    assert speculation is not None
    assert 0.2 < speculation.acceptance_rate < 0.8
    rng = random.Random(4)
    questions = []
    for each in written:
        key = each.token_ids[-LINE:-TOKENS_PER_ANSWER]
        between = text_ids(
            "\n" + "".join(f"{key}{value}\n" for key, value in (make_pair(rng) for _ in range(10))) + "?"
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS_PER_ANSWER)
        prompt = [*each.token_ids, *between, *key]
        questions.append(
            EngineRequest(request_id=f"of {each.seed}", prompt_token_ids=prompt, sampling=sampling, seed=0)
        )
    answers = run(core, questions)
    assert core.stats().prefix_cache_hits > 100 * len(written)
    right = sum(
        [token for step in answers[f"of {each.seed}"] for token in step.token_ids]
        == each.token_ids[-TOKENS_PER_ANSWER:]
        for each in written
    )
    return right / len(written)


def test_values_that_were_written_with_drafts_are_recalled_out_of_the_cache(
    written: list[Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert share_recalled(written, monkeypatch) > 0.9


def test_a_block_that_is_registered_a_token_too_early_shows(
    written: list[Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    register = RequestMemory.register

    def too_early(self: RequestMemory, request: Request) -> Sequence[bytes]:
        request.num_computed += 1
        try:
            return register(self, request)
        finally:
            request.num_computed -= 1

    monkeypatch.setattr(RequestMemory, "register", too_early)
    assert share_recalled(written, monkeypatch) < 0.6
