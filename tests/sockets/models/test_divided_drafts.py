"""Drafts in a model that is divided over ranks, of families with every kind of cache that takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.engine import EngineConfig, SamplingParams
from baton.engine.core.messages import EngineRequest
from baton.engine.core.scheduling.drafting import Drafting
from baton.engine.core.speculation.config import SpeculativeConfig
from baton.engine.parallel import ALONE_MEMBER, Member
from baton.engine.startup import build

from ...helpers.checkpoints import write_checkpoint
from ...helpers.drafters import KnowingDrafter
from ...helpers.member_pool import MemberPool
from ...helpers.paged import random_tokens
from ...helpers.parallel_engine import Served, engine_config, requests_of, serve, serve_alone

pytestmark = pytest.mark.exhaustive

PROMPTS = [random_tokens(length, seed=length) for length in (1, 16, 50)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, max_tokens=24, ignore_eos=True, repetition_penalty=1.2, logprobs=1),
]
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4}
ERRORS = 0.3


def serve_with_drafts(
    member: Member, config: EngineConfig, batches: Sequence[Sequence[EngineRequest]], answers: dict[str, list[int]]
) -> Served | None:
    """Serve requests with drafts of these answers, by request, some of which are wrong."""

    def make(speculation: SpeculativeConfig | None, device: str) -> Drafting | None:
        drafter = KnowingDrafter(lambda name, prompt: [*prompt, *answers[name]], ERRORS, vocab_size=256)
        return Drafting(drafter, 4, adapts=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_drafting", make)
        return serve(member, config, batches)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3_text"],
    ids=["qwen3", "experts", "latents", "windows and sinks", "windows"],
)
def test_answers_are_those_without_drafts(
    pool: MemberPool, tmp_path: Path, family: str, params: SamplingParams, ranks: int
) -> None:
    folder = write_checkpoint(tmp_path / family, family)
    batches = [requests_of(PROMPTS, params)]
    plain = serve_alone(engine_config(str(folder)), batches)
    answers = {str(i): answer.token_ids for i, answer in enumerate(plain.answers)}
    config = engine_config(str(folder), tensor_parallel_size=ranks, speculative_config=SPECULATIVE)
    if ranks == 1:
        served = serve_with_drafts(ALONE_MEMBER, config, batches, answers)
    else:
        served, _ = pool.run(serve_with_drafts, config, batches, answers, tp=ranks)
    assert served is not None
    assert [answer.token_ids for answer in served.answers] == list(answers.values())
    speculation = served.stats.speculation
    assert speculation is not None
    assert 0.2 < speculation.acceptance_rate < 0.95
    assert speculation.num_accepted_tokens > 10
