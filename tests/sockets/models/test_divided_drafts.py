"""Drafts in a model that is divided over ranks, for families with every kind of cache that supports drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.engine import EngineConfig, SamplingParams
from baton.engine.core.messages import EngineRequest
from baton.engine.parallel import ALONE_MEMBER, Member

from ...helpers.checkpoints import write_checkpoint
from ...helpers.draft_layers import with_draft_layer
from ...helpers.drafted_engine import SPECULATIVE, serve_with_drafts
from ...helpers.eagle3 import write_eagle3
from ...helpers.member_pool import MemberPool
from ...helpers.mimo_draft_layers import write_mimo
from ...helpers.paged import random_tokens
from ...helpers.parallel_engine import Served, engine_config, requests_of, serve, serve_alone

pytestmark = pytest.mark.exhaustive

VOCAB_SIZE = 256
PROMPTS = [random_tokens(length, seed=length) for length in (1, 16, 50)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.2, max_tokens=24, ignore_eos=True, repetition_penalty=1.2, logprobs=1),
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3_text", "qwen3_5_text", "kimi_linear", "nemotron_h"],
    ids=["qwen3", "experts", "latents", "windows and sinks", "windows", "delta rule", "latents and states", "mamba"],
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
        served = serve_with_drafts(ALONE_MEMBER, config, batches, answers, VOCAB_SIZE)
    else:
        served, _ = pool.run(serve_with_drafts, config, batches, answers, VOCAB_SIZE, tp=ranks)
    assert served is not None
    assert [answer.token_ids for answer in served.answers] == list(answers.values())
    speculation = served.stats.speculation
    assert speculation is not None
    assert 0.2 < speculation.acceptance_rate < 0.95
    assert speculation.num_accepted_tokens > 10


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "drawn"])
@pytest.mark.parametrize("method", ["mtp", "mtp of three layers", "draft_model", "eagle3"])
def test_answers_with_drafters_on_the_device_are_those_without_drafts(
    pool: MemberPool, tmp_path: Path, method: str, params: SamplingParams, ranks: int
) -> None:
    folder = write_model(tmp_path / "drafting", method)
    batches = [requests_of(PROMPTS, params)]
    plain = serve_alone(engine_config(str(folder)), batches)
    guesses: dict[str, object] = {"method": method.partition(" ")[0], "num_speculative_tokens": 3}
    if method == "draft_model":
        guesses["model"] = str(write_checkpoint(tmp_path / "small", "qwen3", num_hidden_layers=1))
    if method == "eagle3":
        guesses["model"] = str(write_eagle3(tmp_path / "head"))
    config = engine_config(str(folder), tensor_parallel_size=ranks, speculative_config=guesses)
    served = serve(ALONE_MEMBER, config, batches) if ranks == 1 else pool.run(serve, config, batches, tp=ranks)[0]
    assert served is not None
    assert [answer.token_ids for answer in served.answers] == [answer.token_ids for answer in plain.answers]
    assert served.stats.speculation is not None
    assert served.stats.speculation.num_drafts > 0


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "drawn"])
@pytest.mark.parametrize("family", ["qwen3_moe", "nemotron_h"], ids=["experts", "experts and states"])
def test_ranks_that_step_together_may_each_have_drafts_or_none(
    pool: MemberPool, tmp_path: Path, family: str, params: SamplingParams
) -> None:
    """One rank has one request more than the other: it is in prefill while the other decodes, and finishes later."""
    folder = write_checkpoint(tmp_path / family, family)
    requests = requests_of([random_tokens(length, seed=length) for length in (1, 16, 50, 9, 33)], params)
    plain = serve_alone(engine_config(str(folder)), [requests])
    answers = {str(i): answer.token_ids for i, answer in enumerate(plain.answers)}
    config = engine_config(
        str(folder), data_parallel_size=2, enable_expert_parallel=True, speculative_config=SPECULATIVE
    )
    shares = [[requests[:3]], [requests[3:]]]
    served = pool.run(serve_share, config, shares, answers, dp=2)
    assert [answer.token_ids for each in served for answer in each.answers] == list(answers.values())
    for each in served:
        assert each.stats.speculation.num_accepted_tokens > 5


@pytest.mark.parametrize("method", ["mtp", "mtp of three layers", "draft_model", "eagle3"])
def test_ranks_that_step_together_guess_on_the_device(pool: MemberPool, tmp_path: Path, method: str) -> None:
    folder = write_model(tmp_path / "drafting", method)
    guesses: dict[str, object] = {"method": method.partition(" ")[0], "num_speculative_tokens": 3}
    if method == "draft_model":  # an MoE model; each rank has all experts
        guesses["model"] = str(write_checkpoint(tmp_path / "small", "qwen3_moe", num_hidden_layers=1))
    if method == "eagle3":
        guesses["model"] = str(write_eagle3(tmp_path / "head"))
    requests = requests_of([random_tokens(length, seed=length) for length in (1, 16, 50, 9, 33)], PARAMS[1])
    plain = serve_alone(engine_config(str(folder)), [requests])
    config = engine_config(str(folder), data_parallel_size=2, enable_expert_parallel=True, speculative_config=guesses)
    served = pool.run(serve_plain_share, config, [[requests[:4]], [requests[4:]]], dp=2)
    tokens = [answer.token_ids for each in served for answer in each.answers]
    assert tokens == [answer.token_ids for answer in plain.answers]
    assert sum(each.stats.speculation.num_drafts for each in served) > 0


def write_model(folder: Path, method: str) -> Path:
    return write_mimo(folder) if "three" in method else with_draft_layer(folder, "deepseek_v3")


def serve_plain_share(
    member: Member, config: EngineConfig, shares: Sequence[Sequence[Sequence[EngineRequest]]]
) -> Served | None:
    return serve(member, config, shares[member.rank])


def serve_share(
    member: Member,
    config: EngineConfig,
    shares: Sequence[Sequence[Sequence[EngineRequest]]],
    answers: dict[str, list[int]],
) -> Served | None:
    return serve_with_drafts(member, config, shares[member.rank], answers, VOCAB_SIZE)
