"""A model that is divided over ranks gives the tokens of one rank: every architecture, in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine import EngineConfig, SamplingParams
from baton.engine.core.step import StepPlan
from baton.engine.parallel import Member
from baton.engine.worker.runner import ModelRunner

from ...helpers.checkpoints import make_model, write_checkpoint
from ...helpers.member_pool import MemberPool
from ...helpers.paged import random_tokens, reference_greedy
from ...helpers.parallel_engine import Served, engine_config, logprob_error, requests_of, serve, serve_alone

pytestmark = pytest.mark.exhaustive

TOLERANCE = 1e-4  # error of a logprob by other orders of sums
PROMPTS = [random_tokens(length, seed=length) for length in (1, 16, 17, 50, 90)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3, prompt_logprobs=1)
DRAWN = SamplingParams(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=1.5,
    logit_bias={5: 2.0, 9: -3.0},
    bad_words_token_ids=[[11], [12, 13]],
    max_tokens=16,
    ignore_eos=True,
    logprobs=3,
)

# name: (architecture, config keys, ranks)
DIVISIONS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {}, 2),
    "mistral": ("mistral", {}, 2),
    "qwen2": ("qwen2", {}, 2),
    "qwen3": ("qwen3", {}, 2),
    "qwen3_moe": ("qwen3_moe", {}, 2),
    "mixtral": ("mixtral", {}, 2),
    "deepseek_v2": ("deepseek_v2", {}, 2),
    "deepseek_v3": ("deepseek_v3", {}, 2),
    "gpt_oss": ("gpt_oss", {}, 2),
    "mimo_v2_flash": ("mimo_v2_flash", {}, 2),
    "gemma4": ("gemma4_text", {}, 2),
    "gemma4-experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40},
        2,
    ),
    "olmo2": ("olmo2", {}, 2),
    "gemma2": ("gemma2", {}, 2),
    "gemma3_text": ("gemma3_text", {}, 2),
    "qwen3_5_text": ("qwen3_5_text", {}, 2),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {}, 2),
    "qwen3_next": ("qwen3_next", {}, 2),
    "olmo_hybrid": ("olmo_hybrid", {}, 2),
    "kimi_linear": ("kimi_linear", {}, 2),
    "granitemoehybrid": ("granitemoehybrid", {}, 2),
    "falcon_h1": ("falcon_h1", {}, 2),
    "bamba": ("bamba", {}, 2),
    "nemotron_h": ("nemotron_h", {}, 2),
    "nemotron_h-more-ranks-than-groups": ("nemotron_h", {"n_groups": 1}, 2),
    "glm4_moe": ("glm4_moe", {}, 2),
    "glm4": ("glm4", {}, 2),  # merged projections, reordered queries and keys
    "phi3": ("phi3", {}, 2),
    "minimax_m2": ("minimax_m2", {}, 2),
    "exaone4": ("exaone4", {}, 2),
    "ministral3": ("ministral3", {}, 2),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, 2),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}, 2),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, 2),
    "qwen3_moe-dense-layer": ("qwen3_moe", {"mlp_only_layers": [1]}, 2),
    "deepseek_v2-low-rank-queries": ("deepseek_v2", {"q_lora_rank": 24, "attention_bias": True}, 2),
    "qwen3-more-ranks-than-kv-heads": ("qwen3", {"num_attention_heads": 8}, 4),
    "qwen2-more-ranks-than-kv-heads": ("qwen2", {"num_key_value_heads": 1}, 4),
    "olmo2-more-ranks-than-kv-heads": ("olmo2", {}, 4),
    "gemma2-four": ("gemma2", {}, 4),
    "deepseek_v2-four": ("deepseek_v2", {}, 4),
    "gpt_oss-four": ("gpt_oss", {}, 4),
    "qwen3_moe-odd-vocabulary": ("qwen3_moe", {"vocab_size": 251}, 4),
    "qwen3-ranks-without-a-vocabulary": ("qwen3", {"vocab_size": 33, "tie_word_embeddings": True}, 4),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def write(name: str) -> Path:
        architecture, keys, _ = DIVISIONS[name]
        return write_checkpoint(tmp_path_factory.mktemp(name), architecture, **keys)

    return write


def prompts_of(name: str) -> list[list[int]]:
    vocab_size = DIVISIONS[name][1].get("vocab_size", 256)
    return [[token % vocab_size for token in prompt] for prompt in PROMPTS]


def divided(pool: MemberPool, folder: Path, batches: Any, ranks: int, **args: Any) -> Served:
    first, *others = pool.run(serve, engine_config(str(folder), tensor_parallel_size=ranks, **args), batches, tp=ranks)
    assert others == [None] * (ranks - 1)
    assert isinstance(first, Served)
    return first


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVISIONS)
def test_a_divided_model_gives_the_tokens_and_logprobs_of_the_whole(
    pool: MemberPool, folder_of: Callable[[str], Path], name: str
) -> None:
    ranks = DIVISIONS[name][2]
    batches = [requests_of(prompts_of(name), params) for params in (GREEDY, DRAWN)]
    whole = serve_alone(engine_config(str(folder_of(name))), batches)
    ours = divided(pool, folder_of(name), batches, ranks)
    assert len({tuple(answer.token_ids) for answer in whole.answers}) == len(whole.answers)  # answers differ
    assert [answer.token_ids for answer in ours.answers] == [answer.token_ids for answer in whole.answers]
    for our, their in zip(ours.answers, whole.answers, strict=True):
        assert logprob_error(our.logprobs, their.logprobs) < TOLERANCE
        if their.prompt_logprobs is not None and len(their.prompt_logprobs) > 1:
            assert our.prompt_logprobs is not None
            assert logprob_error(our.prompt_logprobs, their.prompt_logprobs) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3",
        "qwen3_moe",
        "mixtral",
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
        "olmo2",
        "gemma2",
        "gemma3_text",
    ],
)
def test_a_divided_model_gives_the_tokens_of_transformers(
    pool: MemberPool, folder_of: Callable[[str], Path], name: str
) -> None:
    architecture, keys, ranks = DIVISIONS[name]
    reference = make_model(architecture, **keys)
    ours = divided(pool, folder_of(name), [requests_of(PROMPTS, GREEDY)], ranks)
    assert [answer.token_ids for answer in ours.answers] == [reference_greedy(reference, p, 16) for p in PROMPTS]


@pytest.mark.slow
def test_chunks_cached_prefixes_preemption_and_steps_in_flight_change_nothing(
    pool: MemberPool, folder_of: Callable[[str], Path]
) -> None:
    prompts = [random_tokens(length, seed=length) for length in (60, 61, 62, 63, 64, 65)]
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True)
    everything = requests_of(prompts, params)
    batches = [everything, everything[-1:], everything[-1:]]  # the last one is in the prefix cache
    whole = serve_alone(engine_config(str(folder_of("qwen3")), enable_prefix_caching=False), batches)
    ours = divided(
        pool,
        folder_of("qwen3"),
        batches,
        2,
        num_gpu_blocks_override=20,
        max_num_batched_tokens=24,
        async_scheduling=True,
    )
    assert [answer.token_ids for answer in ours.answers] == [answer.token_ids for answer in whole.answers]
    assert ours.stats.num_preemptions > 0
    assert ours.stats.prefix_cache_hits > 0
    assert ours.stats.num_blocks_free == ours.stats.num_blocks


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v2"])
def test_dummy_weights_are_those_of_the_whole_model(
    pool: MemberPool, folder_of: Callable[[str], Path], name: str
) -> None:
    prompts = PROMPTS[1:]  # prompts of one token have no prompt logprobs
    batches = [requests_of(prompts, GREEDY)]
    whole = serve_alone(engine_config(str(folder_of(name)), load_format="dummy"), batches)
    ours = divided(pool, folder_of(name), batches, 2, load_format="dummy")
    for our, their in zip(ours.answers, whole.answers, strict=True):
        assert our.prompt_logprobs is not None
        assert their.prompt_logprobs is not None
        assert logprob_error(our.prompt_logprobs, their.prompt_logprobs) < TOLERANCE


HEAD_BYTES = 3 * 2 * 16 * 32 * 4  # bytes of one KV head in a block of the tiny qwen3


def serve_with_own_memory(member: Member, folder: str, memory_bytes: list[int]) -> Served | None:
    ranks = member.tensor_parallel_size
    args = {"kv_cache_memory_bytes": memory_bytes[member.rank], "tensor_parallel_size": ranks, "max_num_seqs": 48}
    return serve(member, engine_config(folder, **args), [])


def test_all_ranks_have_as_many_blocks_as_fit_the_rank_with_the_least_memory(
    pool: MemberPool, folder_of: Callable[[str], Path]
) -> None:
    memory = [100 * HEAD_BYTES, 40 * HEAD_BYTES]
    served, _ = pool.run(serve_with_own_memory, str(folder_of("qwen3")), memory, tp=2)
    assert served.stats.num_blocks == 40
    whole = serve_alone(engine_config(str(folder_of("qwen3")), kv_cache_memory_bytes=memory[1], max_num_seqs=48), [])
    assert whole.stats.num_blocks == 20


WAYS_OVER_RANKS = {
    "dp2": {"data_parallel_size": 2},
    "dp2-ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "tp2-ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS_OVER_RANKS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_moe_models_over_ranks_give_the_tokens_of_transformers(
    pool: MemberPool, folder_of: Callable[[str], Path], name: str, way: str
) -> None:
    """Data-parallel ranks have different prompts, and one of them fewer, so it finishes first."""
    config = engine_config(str(folder_of(name)), **WAYS_OVER_RANKS[way])
    tp, dp = config.tensor_parallel_size, config.data_parallel_size
    prompts_of_ranks = [PROMPTS[dp_rank::dp] for dp_rank in range(dp)]
    batches_of_ranks = [[requests_of(prompts, GREEDY)] for prompts in prompts_of_ranks]
    served = [each for each in pool.run(serve_own, config, batches_of_ranks, tp=tp, dp=dp) if each is not None]
    reference = make_model(DIVISIONS[name][0], **DIVISIONS[name][1])
    expected = [[reference_greedy(reference, prompt, 16) for prompt in prompts] for prompts in prompts_of_ranks]
    assert [[answer.token_ids for answer in each.answers] for each in served] == expected


def serve_own(member: Member, config: EngineConfig, batches_of_ranks: Any) -> Served | None:
    return serve(member, config, batches_of_ranks[member.dp_rank])


@pytest.mark.slow
def test_data_parallel_ranks_of_a_dense_model_are_independent(
    pool: MemberPool, folder_of: Callable[[str], Path]
) -> None:
    batches = [requests_of(PROMPTS, DRAWN)]
    whole = serve_alone(engine_config(str(folder_of("llama"))), batches)
    config = engine_config(str(folder_of("llama")), tensor_parallel_size=2, data_parallel_size=2)
    first, _, second, _ = pool.run(serve, config, batches, tp=2, dp=2)
    for served in (first, second):
        assert [answer.token_ids for answer in served.answers] == [answer.token_ids for answer in whole.answers]


def drawn_by(member: Member, config: EngineConfig, batches: Any) -> list[list[list[int]]]:
    """Return the tokens that this rank has drawn in each step."""
    drawn: list[list[list[int]]] = []
    launch = ModelRunner.launch

    def noting(self: ModelRunner, plan: StepPlan) -> Any:
        step = launch(self, plan)
        drawn.append([chunk.token_ids for chunk in step.result().chunks])
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "launch", noting)
        serve(member, config, batches)
    return drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v2"])
def test_every_rank_draws_the_same_tokens_also_in_bfloat16(
    pool: MemberPool, folder_of: Callable[[str], Path], name: str
) -> None:
    """With random weights and a high temperature, tokens depend on the last bits."""
    params = SamplingParams(temperature=2.0, max_tokens=32, ignore_eos=True)
    config = engine_config(str(folder_of(name)), tensor_parallel_size=2, dtype="bfloat16", load_format="dummy")
    first, second = pool.run(drawn_by, config, [requests_of(PROMPTS, params)], tp=2)
    assert first == second
    assert sum(len(tokens) for step in first for tokens in step) > 32 * len(PROMPTS)
