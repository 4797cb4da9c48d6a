"""MoE models whose experts are spread over ranks answer as on one device, independent of other ranks' requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.core.lockstep import EMPTY_STEP
from baton.engine.core.messages import EngineRequest
from baton.engine.layers.step_context import GroupCache
from baton.engine.models import load_config, stub_model
from baton.engine.parallel.groups import ALL2ALL_BACKENDS, ExpertSpread
from baton.engine.worker.expert_balance import spread_experts
from baton.kernels.attention import AttentionBatch

from ...helpers.checkpoints import make_model, write_checkpoint
from ...helpers.thread_groups import thread_groups
from .thread_engines import REQUESTS, ThreadEngines, prompt, request

pytestmark = pytest.mark.exhaustive

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3},
    "deepseek_v2": {"n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 4, "first_k_dense_replace": 1},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "mimo_v2_flash": {"n_routed_experts": 8, "layer_types": ["sliding_attention"] * 2},
    "gemma4_text": {
        **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 40},
        **{"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 0},
    },
}
SPREADS = {backend: ExpertSpread(0, backend) for backend in ALL2ALL_BACKENDS}
SPREADS["copies"] = ExpertSpread(8, "allgather_reducescatter")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(architecture: str) -> Path:
        return write_checkpoint(
            tmp_path_factory.mktemp(architecture), architecture, num_hidden_layers=2, **SHAPES[architecture]
        )

    return make


@pytest.fixture(scope="module")
def alone(folder: Callable[[str], Path]) -> Callable[[str], dict[str, list[int]]]:
    """Return a function that computes the tokens of all requests on one device."""

    @functools.cache
    def answer(architecture: str) -> dict[str, list[int]]:
        with ThreadEngines(folder(architecture)) as engines:
            engines.submit(0, *REQUESTS)
            return {each.request_id: engines.wait(each.request_id) for each in REQUESTS}

    return answer


@pytest.mark.parametrize("architecture", SHAPES)
def test_one_device_answers_as_transformers(architecture: str, alone: Callable[[str], dict[str, list[int]]]) -> None:
    reference = make_model(architecture, num_hidden_layers=2, **SHAPES[architecture])
    for each in REQUESTS:
        if each.sampling.temperature == 0:
            tokens = torch.tensor([each.prompt_token_ids])
            new = reference.generate(
                tokens, max_new_tokens=each.sampling.max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            assert new[0, tokens.shape[1] :].tolist() == alone(architecture)[each.request_id]


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("architecture", SHAPES)
def test_tokens_are_those_of_one_device(
    architecture: str, tp: int, dp: int, spread: str, folder: Callable[[str], Path], alone: Any
) -> None:
    with ThreadEngines(folder(architecture), tp=tp, dp=dp, spread=SPREADS[spread], depth=dp) as engines:
        for index, each in enumerate(REQUESTS):
            engines.submit(index % dp, each)
        assert {each.request_id: engines.wait(each.request_id) for each in REQUESTS} == alone(architecture)


@pytest.mark.parametrize("captured", [0, 24], ids=["eager", "captured"])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_gpu_runners_pad_their_steps_to_one_size_or_exchange_sizes(
    tp: int, dp: int, spread: str, captured: int, folder: Callable[[str], Path], alone: Any
) -> None:
    scored = request("scored", prompt(19, 9), 8, logprobs=0, prompt_logprobs=0)
    with ThreadEngines(
        folder("qwen3_moe"), tp=tp, dp=dp, spread=SPREADS[spread], depth=2, captured_tokens=captured
    ) as engines:
        engines.submit(dp - 1, scored)
        for index, each in enumerate(REQUESTS):
            engines.submit(index % dp, each)
        assert {each.request_id: engines.wait(each.request_id) for each in REQUESTS} == alone("qwen3_moe")
        assert len(engines.outputs("scored")[0].prompt_logprobs or []) == 18
        assert [runner.captured.num_replays for runner in engines.device_runners] == [
            runner.captured.num_replays for runner in engines.device_runners[:1]
        ] * len(engines.device_runners)
        for runner in engines.device_runners:
            assert runner.captured.num_replays > 0
            assert runner.captured.num_eager > 0


@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_a_stub_of_a_rank_runs_its_kernels_without_waiting_for_others(
    tp: int, dp: int, folder: Callable[[str], Path]
) -> None:
    config = load_config(folder("deepseek_v2"))
    for groups in thread_groups(tp, dp, ExpertSpread(8))[0].stubs():
        model = stub_model(config, device="cpu", groups=groups)
        (spread, *_) = spread_experts(model)
        assert spread.placement.num_ranks == tp * dp
        tokens = 7
        batch = AttentionBatch.plan([tokens], [tokens], torch.zeros(1, 1, dtype=torch.int32), 16)
        layout = config.caches.of_rank(groups.tp.rank, tp).only.blocks
        caches = [GroupCache(batch, torch.zeros(layout.shape(1)))]
        assert model(torch.zeros(tokens, dtype=torch.int32), caches).shape == (tokens, config.hidden_size)


def test_a_rank_without_requests_serves_the_others_and_starts_when_it_gets_some(
    folder: Callable[[str], Path], alone: Any
) -> None:
    first, *later = REQUESTS
    with ThreadEngines(folder("qwen3_moe"), dp=3, spread=ExpertSpread(1)) as engines:
        engines.submit(0, first)
        answers = {"a": engines.wait("a")}
        assert [len(runner.plans) for runner in engines.runners] == [len(engines.runners[0].plans)] * 3
        assert all(plan.step == EMPTY_STEP for runner in engines.runners[1:] for plan in runner.plans)
        for index, each in enumerate(later):
            engines.submit(1 + index % 2, each)
        answers |= {each.request_id: engines.wait(each.request_id) for each in later}
    assert answers == alone("qwen3_moe")
    assert len({len(runner.plans) for runner in engines.runners}) == 1, "every rank must run every step"


@pytest.mark.parametrize("backend", ALL2ALL_BACKENDS)
def test_ranks_short_of_blocks_preempt_and_prompts_are_scored_as_on_one_device(
    backend: str, folder: Callable[[str], Path]
) -> None:
    asked = [request(f"r{i}", prompt(20 + i, i), 24, logprobs=1, prompt_logprobs=1) for i in range(6)]

    def outputs(engines: ThreadEngines, each: EngineRequest) -> tuple[list[int], list[float]]:
        found = engines.outputs(each.request_id)
        prompt_entries = list(found[0].prompt_logprobs or [])
        entries = prompt_entries + [entry for output in found for entry in output.logprobs or []]
        return [token for output in found for token in output.token_ids], [entry.logprobs[0] for entry in entries]

    with ThreadEngines(folder("qwen3_moe")) as engines:
        engines.submit(0, *asked)
        expected = [outputs(engines, each) for each in asked]
    with ThreadEngines(folder("qwen3_moe"), dp=2, spread=SPREADS[backend], num_blocks=8) as engines:
        for index, each in enumerate(asked):
            engines.submit(index % 2, each)
        for each, (tokens, logprobs) in zip(asked, expected, strict=True):
            ours = outputs(engines, each)
            assert ours[0] == tokens
            assert ours[1] == pytest.approx(logprobs, abs=1e-4)
        assert sum(core.stats().num_preemptions for core in engines.cores) > 0


@pytest.mark.parametrize(("tp", "dp", "redundant"), [(2, 1, 0), (1, 2, 2), (2, 2, 4)])
def test_experts_move_while_serving_and_no_token_changes(
    tp: int, dp: int, redundant: int, folder: Callable[[str], Path], alone: Any
) -> None:
    with ThreadEngines(
        folder("qwen3_moe"),
        tp=tp,
        dp=dp,
        spread=ExpertSpread(redundant),
        review_experts_every=3,
        moves_experts=True,
    ) as engines:
        for index, each in enumerate(REQUESTS):
            engines.submit(index % dp, each)
        assert {each.request_id: engines.wait(each.request_id) for each in REQUESTS} == alone("qwen3_moe")
    reviews = {balancer.last for balancer in engines.balancers if balancer is not None}
    assert len(reviews) == 1, "all ranks must have had the same loads and moves"
    assert reviews.pop().num_moves > 0


def test_loads_of_one_kind_of_traffic_are_balanced_better_after_a_review(folder: Callable[[str], Path]) -> None:
    def traffic(first: int) -> list[EngineRequest]:
        return [request(f"r{first + i}", [7] * 16, 16) for i in range(4)]

    imbalances = []
    with ThreadEngines(
        folder("qwen3_moe"), dp=2, spread=ExpertSpread(4), review_experts_every=16, moves_experts=True
    ) as engines:
        for turn in range(4):
            for index, each in enumerate(traffic(4 * turn)):
                engines.submit(index % 2, each)
            for each in traffic(4 * turn):
                engines.wait(each.request_id)
            assert engines.balancers[0] is not None
            imbalances.append(engines.balancers[0].last.imbalance)
    seen = [imbalance for imbalance in imbalances if imbalance]
    assert seen[0] > 1.2
    assert seen[-1] < 1 + (seen[0] - 1) / 2
