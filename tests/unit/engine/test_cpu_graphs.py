"""CPU graphs: steps that repeat recorded calls give what the model's Python gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.engine import LLM, SamplingParams
from baton.engine.core.step import PendingStep, StepPlan
from baton.engine.layers import mlp
from baton.engine.worker.backends import CapturedSteps, cpu
from baton.engine.worker.runner import ModelRunner
from baton.kernels.linear import pack
from baton.kernels.native.cpu_graph import CpuGraph

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 200 + 3 for j in range(4 + 9 * i)]} for i in range(6)]
PARAMS = [
    SamplingParams(max_tokens=4 + 5 * i, temperature=0.0 if i % 2 else 1.0, seed=i, ignore_eos=True, logprobs=i % 3)
    for i in range(6)
]
IN_PANELS = pack(torch.zeros(32, 32, dtype=torch.bfloat16)).in_panels  # else products are torch's, and nothing recorded

Answer = tuple[list[int], list[list[float]]]  # tokens, log probabilities


def answers(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[Answer]:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [
        (list(output.token_ids), [[each.logprob for each in position.values()] for position in output.logprobs or []])
        for output in outputs
    ]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many tokens and sequences each step had that a CPU graph served."""
    made: list[tuple[int, int]] = []
    replayed: list[CpuGraph] = []
    replay, launch = CpuGraph.replay, ModelRunner.launch

    def noted(graph: CpuGraph, *sizes: int) -> None:
        replayed.append(graph)
        replay(graph, *sizes)

    def counted(runner: ModelRunner, plan: StepPlan) -> PendingStep:
        replayed.clear()
        step = launch(runner, plan)
        if replayed:
            made.append((plan.num_tokens, len(plan.chunks)))
        return step

    monkeypatch.setattr(CpuGraph, "replay", noted)
    monkeypatch.setattr(ModelRunner, "launch", counted)
    return made


def without_graphs(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, **args: object) -> list[Answer]:
    with monkeypatch.context() as patch:
        patch.setattr(CapturedSteps, "fitting", lambda *args: None)
        return answers(make_llm(dtype="bfloat16", **args))


def test_batches_that_shrink_and_grow_give_the_answers_of_steps_without_graphs(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, served: list[tuple[int, int]]
) -> None:
    expected = without_graphs(make_llm, monkeypatch)
    llm = make_llm(dtype="bfloat16")
    served.clear()
    monkeypatch.setattr(cpu, "record", None)  # a request records nothing
    assert answers(llm) == expected
    assert answers(llm) == expected
    if IN_PANELS:
        sizes = {seqs for tokens, seqs in served if tokens == seqs}
        assert sizes == {1, 2, 3, 4, 5, 6}, "some that are recorded, and some that are filled up"
        assert (sum(4 + 9 * i for i in range(6)), 6) in served, "all prompts in one step"


@pytest.mark.parametrize("budget", [8, 32, 100])
def test_chunks_of_prompts_beside_decodes_give_the_answers_of_steps_without_graphs(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, served: list[tuple[int, int]], budget: int
) -> None:
    expected = without_graphs(make_llm, monkeypatch, max_num_batched_tokens=budget)
    llm = make_llm(dtype="bfloat16", max_num_batched_tokens=budget)
    served.clear()
    assert answers(llm) == expected
    if IN_PANELS:
        assert any(1 < seqs < tokens for tokens, seqs in served)


def test_a_step_that_wants_more_tokens_than_sequences_can_draw_runs_through_python(
    make_llm: Callable[..., LLM], served: list[tuple[int, int]]
) -> None:
    """As one with prompt log probabilities; its neighbours' answers stay what they are."""
    llm = make_llm(dtype="bfloat16", enable_prefix_caching=False)
    expected = answers(llm)
    assert not IN_PANELS or any(tokens > seqs for tokens, seqs in served)
    served.clear()
    asking = SamplingParams(max_tokens=29, temperature=0.0, seed=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    found = answers(llm, [*PARAMS[:5], asking])
    assert found == expected
    if IN_PANELS:
        assert all(tokens == seqs for tokens, seqs in served), "the prompts, which ran together, ran through Python"


def test_sizes_that_cannot_be_recorded_go_on_without_graphs(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, served: list[tuple[int, int]]
) -> None:
    """As those of more sequences than an MLP takes at once, whose slices are put together by torch."""
    expected = answers(make_llm(dtype="bfloat16"))
    served.clear()
    monkeypatch.setattr(mlp, "CPU_SLICE", 3)
    assert answers(make_llm(dtype="bfloat16")) == expected
    if IN_PANELS:
        assert set(served) == {(1, 1), (2, 2)}


def test_a_model_that_needs_torch_goes_on_without_graphs(
    make_llm: Callable[..., LLM], served: list[tuple[int, int]]
) -> None:
    """In float32, products are torch's."""
    llm = make_llm(dtype="float32")
    assert all(tokens for tokens, _ in answers(llm))
    assert not served
